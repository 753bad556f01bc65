"""The records that travel between rooms, and the protocols that they are exchanged through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""What a caller may ask to be continued: text, token ids, or chat messages (``{"role", "content"}``)."""


@dataclass(frozen=True)
class Completion:
    """One sampled continuation of one prompt."""

    prompt_token_ids: tuple[int, ...]
    """The prompt as the engine saw it."""
    token_ids: tuple[int, ...]
    """The sampled tokens, without the prompt."""
    sampler_logprobs: tuple[float, ...]
    """The engine's log-probability of each sampled token; empty where none were asked for."""
    versions: tuple[int, ...]
    """The weight version that sampled each token."""
    text: str
    """The sampled tokens as text."""
    finish_reason: str | None
    """``stop`` (end token or stop string), ``length`` (token limit) or ``abort``."""


@dataclass(frozen=True)
class UpdateReport:
    """What one hot swap did, and how long each part took."""

    version: int
    """The training step whose weights the engine now holds."""
    skipped: bool
    """True when the engine already held this step's weights, so nothing moved."""
    num_bytes: int
    """Bytes of engine weights that the update replaced."""
    publish_s: float
    """Seconds from the first rank starting to write its shard to the last one having written."""
    load_s: float
    """Seconds that the engine spent taking the weights over, checks included."""
    total_s: float
    """Seconds that the caller waited for the whole update, not counting an engine that was still loading."""


class Engine(Protocol):
    """What a training loop needs of an engine; every call is made on all ranks."""

    @property
    def version(self) -> int:
        """The training step whose weights the engine holds."""
        ...

    def sample(self, prompts: Sequence[Prompt], sampling_params: Any = None) -> list[list[Completion]]:
        """Return the completions of each prompt, in the order of the prompts."""
        ...

    def update(self, model: torch.nn.Module, train_step: int) -> UpdateReport:
        """Hot-swap the weights of `model` into the engine as version `train_step`."""
        ...
