"""The models of a run: the policy, the reference that a KL penalty compares it with, the critic, and the teacher."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vectorlm.algorithms.logprobs import align
from vectorlm.errors import ConfigError
from vectorlm.rl.teacher import ServerTeacher, Teacher, beside
from vectorlm.train.attention import PACKED
from vectorlm.train.language_model import LanguageModel, inner_model, require_packed
from vectorlm.train.load import load_pretrained
from vectorlm.train.optimizer_step import OptimizerStep, Schedule
from vectorlm.train.packing import Rows, pack
from vectorlm.types import TrainedModel
from vectorlm.weights.plan import reshard

LoadSharded = Callable[[Callable[[bool], nn.Module]], nn.Module]
"""Shards a model over the ranks, in place."""


class Reference:
    """The frozen policy that the KL penalty compares with: another model, or the policy with its first adapters."""

    def __init__(
        self,
        policy: LanguageModel,
        model: nn.Module | None,
        first_adapters: Callable[[Any], AbstractContextManager[None]] = lambda model: model.disable_adapter(),
    ) -> None:
        """Take a sharded copy of the policy's starting point; None goes back to the policy's first LoRA adapters.

        `first_adapters` does so to the policy's model for a block; by default they were zeros.
        """
        self._policy, self.model, self._first_adapters = policy, model, first_adapters
        # Of all tokens: the reference has another support than the policy.
        self._frozen = policy.untruncated() if model is None else beside(policy, model)
        self.why_padded = self._frozen.why_padded
        """Why its rows are padded; None where they are not."""

    def __call__(self, rows: Rows) -> torch.Tensor:
        """Return float32 [B, T] as `LanguageModel.logprobs` does, without gradient."""
        with torch.no_grad(), self._with_first_adapters():
            return self._frozen.logprobs(rows)

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the weights of the policy, shard by shard."""
        assert self.model is not None, "with LoRA the reference does not move"
        reshard(self._policy.model)
        reshard(self.model)
        for mine, theirs in zip(self.model.parameters(), self._policy.model.parameters(), strict=True):
            mine.copy_(theirs)

    @contextmanager
    def _with_first_adapters(self) -> Iterator[None]:
        if self.model is not None:
            yield
            return
        # PEFT writes `requires_grad` of the parameters that it finds: they must be the same, the shards, both times.
        reshard(self._policy.model)
        with self._first_adapters(self._policy.model):
            yield
            reshard(self._policy.model)


class Critic:
    """A model with a value head: the expected reward of the rest of a completion, at each token."""

    def __init__(self, model: nn.Module, policy: LanguageModel) -> None:
        """Take a sharded token-classification model with one label; rows are packed as the policy's, if it is alike."""
        self.model, self._device, self._context = model, policy.device, policy.context
        inner = inner_model(model)
        is_alike = type(inner.base_model) is type(inner_model(policy.model).base_model)
        self.why_padded = policy.why_padded if is_alike else "it is of another family than the policy"
        """Why its rows are padded; None where they are not."""
        require_packed(self._context, self.why_padded)
        if self.why_padded is None:
            inner.set_attn_implementation(PACKED)

    def __call__(self, rows: Rows) -> torch.Tensor:
        """Return float32 [B, T]: the value of the state in which each token that is asked for was chosen."""
        device = self._device
        is_asked = rows.is_asked.to(device)
        if self.why_padded is None:
            packing = pack(rows, self._context)
            logits = self.model(**packing.arguments(device)).logits[0, packing.places.to(device)]
            found = packing.gather(logits[:, 0].float())
            return torch.zeros(is_asked.shape, device=device).masked_scatter(is_asked, found)
        inputs = {"input_ids": rows.input_ids.to(device), "attention_mask": rows.attention_mask.to(device)}
        values = align(self.model(**inputs, use_cache=False).logits[..., 0].float())
        return torch.where(is_asked, values, 0.0)


@dataclass(frozen=True)
class RLModels:
    """The models of a run, and the optimizer steps of those that are trained."""

    policy: LanguageModel
    policy_step: OptimizerStep
    reference: Reference | None = None
    critic: Critic | None = None
    critic_step: OptimizerStep | None = None
    teacher: Teacher | ServerTeacher | None = None

    @property
    def why_padded(self) -> str | None:
        """Why rows are padded; None where all models, which share their micro-batches, compute rows laid end to end."""
        roles = zip(("policy", "reference", "critic", "teacher"), self._roles, strict=True)
        reasons = ((name, role.why_padded) for name, role in roles if role is not None)
        return next((f"{name}: {reason}" for name, reason in reasons if reason is not None), None)

    @property
    def _roles(self) -> tuple[Any, ...]:
        return self.policy, self.reference, self.critic, self.teacher

    @property
    def schedules(self) -> list[Schedule]:
        """The learning rate schedules, of the policy first."""
        steps = (self.policy_step, self.critic_step)
        return [each.schedule for each in steps if each is not None and each.schedule is not None]

    def reshard(self) -> None:
        """Free what forward passes gathered, so that whoever reads the parameters next sees shards."""
        for role in self._roles:
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
    read: Callable[..., Any], load_sharded: LoadSharded, num_tokens: int | None = None
) -> nn.Module:
    """Load a frozen copy of the policy's starting point, or a teacher, whose logits beyond `num_tokens` are dropped.

    ``read(is_empty=…)`` is as `load_model` of one folder.
    """

    def load(is_empty: bool) -> nn.Module:
        model = read(is_empty=is_empty)
        if num_tokens is not None and num_logits(model) > num_tokens:
            model.resize_token_embeddings(num_tokens, mean_resizing=False)
        return disable_dropout(model).requires_grad_(False)

    return load_sharded(load)


def num_logits(model: Any) -> int:
    """Return the size of a model's vocabulary, padding included."""
    return inner_model(model).config.get_text_config().vocab_size


def load_critic(path: str, load_sharded: LoadSharded, dtype: str = "float32") -> nn.Module:
    """Load a model with a value head of zeros, so that the first advantages are the rewards.

    Raises:
        ConfigError: transformers has no token classification for this architecture.
    """
    from transformers import AutoModelForTokenClassification

    def load(is_empty: bool) -> nn.Module:
        try:
            # transformers calls the output layer by either name.
            new = ("score.", "classifier.")
            model = load_pretrained(AutoModelForTokenClassification, path, dtype, is_empty, new, num_labels=1)
            head = model.score if hasattr(model, "score") else model.classifier
        except (ValueError, AttributeError) as error:
            raise ConfigError(
                f"rl.critic.model={path!r} cannot be a critic: transformers has no token classification for it "
                f"({str(error)[:120]}). Choose an algorithm without a critic, or another model for it."
            ) from error
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.zero_()
        return disable_dropout(model.train())

    return load_sharded(load)


def disable_dropout(model: Any) -> Any:
    """Turn off all dropout, so that two forward passes agree; the model stays in training mode."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout_p", "dropout"):
            if isinstance(inspect.getattr_static(module, name, None), float):
                setattr(module, name, 0.0)
    return model
