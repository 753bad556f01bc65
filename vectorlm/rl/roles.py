"""The models of a run: the policy, the reference it is kept near to, and the critic."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vectorlm.algorithms import align, entropy, token_logprobs
from vectorlm.weights.plan import reshard


@dataclass(frozen=True)
class TokenScores:
    """What the policy says of the tokens of some rows."""

    logprobs: torch.Tensor
    """float32 [B, T]."""
    entropy: torch.Tensor
    """float32 [B, T]; without gradient unless it was asked for."""


class Policy:
    """The model that is trained, as a function from tokens to their log-probabilities."""

    def __init__(self, model: nn.Module, temperature: float) -> None:
        """Take the model.

        Args:
            model: The sharded causal language model, without dropout (`disable_dropout`).
            temperature: That of sampling: it divides the logits here too.
        """
        self.model, self.temperature = model, temperature
        inner: Any = model
        if hasattr(inner, "get_base_model"):  # of adapters
            inner = inner.get_base_model()
        self._can_skip_logits = "logits_to_keep" in inspect.signature(inner.forward).parameters

    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        first: int = 1,
        entropy_has_gradient: bool = False,
    ) -> TokenScores:
        """Score each token given those before it.

        Args:
            input_ids: int64 [B, T], padded on the right.
            attention_mask: int64 [B, T].
            first: The first token that matters to any row; those before it get 0, and no logits are made for them.
            entropy_has_gradient: Whether the entropy is part of a loss.
        """
        logits, targets, skipped = self._logits(input_ids, attention_mask, first)
        logprobs = token_logprobs(logits, targets, self.temperature)
        with nullcontext() if entropy_has_gradient else torch.no_grad():
            spread = entropy(logits, self.temperature)
        return TokenScores(_behind(logprobs, skipped), _behind(spread, skipped))

    def logprobs(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, first: int = 1) -> torch.Tensor:
        """Return the log-probabilities alone, float32 [B, T]."""
        logits, targets, skipped = self._logits(input_ids, attention_mask, first)
        return _behind(token_logprobs(logits, targets, self.temperature), skipped)

    def _logits(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return logits from the position that predicts `first`, the tokens from there, and how many are before."""
        skipped = max(first - 1, 0) if self._can_skip_logits else 0
        options = {"logits_to_keep": input_ids.shape[1] - skipped} if skipped else {}
        answer = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **options)
        return answer.logits, input_ids[:, skipped:], skipped


class Reference:
    """The policy as it was, frozen: a model of its own, or the policy with its adapters off."""

    def __init__(self, policy: Policy, model: nn.Module | None) -> None:
        """Take the frozen model.

        Args:
            policy: The policy; its base is the reference where it trains LoRA adapters.
            model: A sharded copy of the policy's starting point; None switches the policy's adapters off instead.
        """
        self._policy = policy
        self.model = model
        self._frozen = policy if model is None else Policy(model, policy.temperature)

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, first: int = 1) -> torch.Tensor:
        """Return float32 [B, T] as `Policy.logprobs` does, without gradient."""
        with torch.no_grad(), self._without_adapters():
            return self._frozen.logprobs(input_ids, attention_mask, first)

    @torch.no_grad()
    def follow(self) -> None:
        """Become the policy as it is now; shards are copied in place."""
        assert self.model is not None, "adapters cannot be followed: the reference is their base"
        reshard(self._policy.model)
        reshard(self.model)
        for mine, theirs in zip(self.model.parameters(), self._policy.model.parameters(), strict=True):
            mine.copy_(theirs)

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        if self.model is not None:
            yield
            return
        with self._policy.model.disable_adapter():  # type: ignore[operator]
            yield


class Critic:
    """A model with a value head: what the rest of a completion will be worth, at each token."""

    def __init__(self, model: nn.Module) -> None:
        """Take a sharded token-classification model with one label."""
        self.model = model

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return float32 [B, T]: the value of the state in which each token was chosen."""
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return align(logits[..., 0].float())


def _behind(values: torch.Tensor, skipped: int) -> torch.Tensor:
    """Put zeros before each row of [B, T - skipped]."""
    return torch.nn.functional.pad(values, (skipped, 0))


def disable_dropout(model: Any) -> Any:
    """Turn all dropout of a model off, so that two forward passes over the same tokens agree.

    The model stays in training mode, which activation checkpointing needs.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout_p", "dropout"):
            if isinstance(inspect.getattr_static(module, name, None), float):
                setattr(module, name, 0.0)
    return model
