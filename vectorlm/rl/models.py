"""The models of a run: the policy, the reference that a KL penalty compares it with, and the critic."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vectorlm.algorithms.logprobs import align, entropy, token_logprobs
from vectorlm.errors import ConfigError
from vectorlm.train.load import load_model, load_pretrained
from vectorlm.train.optimizer_step import OptimizerStep, Schedule
from vectorlm.types import TrainedModel
from vectorlm.weights.plan import reshard

LoadSharded = Callable[[Callable[[bool], nn.Module]], nn.Module]
"""Shards a model over the ranks, in place."""


class Policy:
    """The model that is trained, as a function from tokens to their log-probabilities."""

    def __init__(self, model: nn.Module, temperature: float) -> None:
        """Take the sharded causal language model, without dropout, and the temperature that divides its logits."""
        self.model, self.temperature = model, temperature
        inner: Any = model
        if hasattr(inner, "get_base_model"):  # a PEFT model
            inner = inner.get_base_model()
        self._can_skip_logits = "logits_to_keep" in inspect.signature(inner.forward).parameters

    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        first: int = 1,
        entropy_has_gradient: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probability of each token, and the entropy of the distribution it was drawn from.

        Args:
            input_ids: int64 [B, T], padded on the right.
            attention_mask: int64 [B, T].
            first: The first token that matters to any row; tokens before it get 0, and no logits are computed for them.
            entropy_has_gradient: Whether the entropy is part of a loss.

        Returns:
            float32 [B, T] each.
        """
        logits, targets, skipped = self._logits(input_ids, attention_mask, first)
        logprobs = token_logprobs(logits, targets, self.temperature)
        with nullcontext() if entropy_has_gradient else torch.no_grad():
            entropies = entropy(logits, self.temperature)
        return _pad_left(logprobs, skipped), _pad_left(entropies, skipped)

    def logprobs(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, first: int = 1) -> torch.Tensor:
        """Return the log-probabilities alone, float32 [B, T]."""
        logits, targets, skipped = self._logits(input_ids, attention_mask, first)
        return _pad_left(token_logprobs(logits, targets, self.temperature), skipped)

    def _logits(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return logits from the position that predicts `first`, the tokens from there, and how many are skipped."""
        skipped = max(first - 1, 0) if self._can_skip_logits else 0
        options = {"logits_to_keep": input_ids.shape[1] - skipped} if skipped else {}
        answer = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **options)
        return answer.logits, input_ids[:, skipped:], skipped


class Reference:
    """The frozen policy that the KL penalty compares with: another model, or the policy with its adapters off."""

    def __init__(self, policy: Policy, model: nn.Module | None) -> None:
        """Take a sharded copy of the policy's starting point; None switches the policy's LoRA adapters off instead."""
        self._policy = policy
        self.model = model
        self._frozen = policy if model is None else Policy(model, policy.temperature)

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, first: int = 1) -> torch.Tensor:
        """Return float32 [B, T] as `Policy.logprobs` does, without gradient."""
        with torch.no_grad(), self._without_adapters():
            return self._frozen.logprobs(input_ids, attention_mask, first)

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the weights of the policy, shard by shard."""
        assert self.model is not None, "with LoRA the reference is the base, which does not move"
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
    """A model with a value head: the expected reward of the rest of a completion, at each token."""

    def __init__(self, model: nn.Module) -> None:
        """Take a sharded token-classification model with one label."""
        self.model = model

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, first: int = 1) -> torch.Tensor:
        """Return float32 [B, T]: the value of the state in which each token was chosen."""
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return align(logits[..., 0].float())


@dataclass(frozen=True)
class RLModels:
    """The models of a run, and the optimizer steps of those that are trained."""

    policy: Policy
    policy_step: OptimizerStep
    reference: Reference | None = None
    critic: Critic | None = None
    critic_step: OptimizerStep | None = None

    @property
    def schedules(self) -> list[Schedule]:
        """The learning rate schedules, of the policy first."""
        steps = (self.policy_step, self.critic_step)
        return [each.schedule for each in steps if each is not None and each.schedule is not None]

    def reshard(self) -> None:
        """Free what forward passes gathered, so that whoever reads the parameters next sees shards."""
        for role in (self.policy, self.reference, self.critic):
            if role is not None and role.model is not None:
                reshard(role.model)

    def trained(self, *, with_reference: bool) -> dict[str, TrainedModel]:
        """Return what a checkpoint holds; the reference where it moves."""
        found = {"policy": TrainedModel(self.policy.model, self.policy_step.optimizer)}
        if self.critic is not None and self.critic_step is not None:
            found["critic"] = TrainedModel(self.critic.model, self.critic_step.optimizer)
        if with_reference and self.reference is not None and self.reference.model is not None:
            found["reference"] = TrainedModel(self.reference.model, None)
        return found


def load_reference(
    path: str, load_sharded: LoadSharded, flash_attention: bool = False, dtype: str = "float32"
) -> nn.Module:
    """Load a frozen copy of the policy's starting point."""

    def load(is_empty: bool) -> nn.Module:
        model = load_model(path, flash_attention=flash_attention, dtype=dtype, is_empty=is_empty)
        return disable_dropout(model).requires_grad_(False)

    return load_sharded(load)


def load_critic(path: str, load_sharded: LoadSharded, dtype: str = "float32") -> nn.Module:
    """Load a model with a value head of zeros, so that the first advantages are the rewards.

    Raises:
        ConfigError: transformers has no token classification for this architecture.
    """
    return load_sharded(lambda is_empty: _load_critic(path, dtype, is_empty))


def _load_critic(path: str, dtype: str, is_empty: bool) -> nn.Module:
    from transformers import AutoModelForTokenClassification

    try:
        model = load_pretrained(AutoModelForTokenClassification, path, dtype, is_empty, num_labels=1)
    except ValueError as error:
        raise ConfigError(
            f"rl.critic.model={path!r} cannot be a critic: transformers has no token classification for it "
            f"({str(error)[:120]}). Choose an algorithm without a critic, or another model for it."
        ) from error
    # transformers calls the output layer by either name.
    heads = [getattr(model, name, None) for name in ("score", "classifier")]
    head = next((each for each in heads if isinstance(each, nn.Module)), None)
    if head is None:
        raise ConfigError(
            f"rl.critic.model={path!r} cannot be a critic: {type(model).__name__} has no layer called score or "
            "classifier. Choose an algorithm without a critic, or another model for it."
        )
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    return disable_dropout(model.train())


def disable_dropout(model: Any) -> Any:
    """Turn off all dropout, so that two forward passes agree; the model stays in training mode."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout_p", "dropout"):
            if isinstance(inspect.getattr_static(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def _pad_left(values: torch.Tensor, skipped: int) -> torch.Tensor:
    """Put zeros before each row of [B, T - skipped]."""
    return torch.nn.functional.pad(values, (skipped, 0))
