"""The records that travel between rooms, and the protocols that they are exchanged through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""What a caller may ask to be continued: text, token ids, or chat messages (``{"role", "content"}``)."""

InFlight = Literal["refuse", "keep", "recompute", "drain"]
"""What an update does about requests under way: it raises; they go on with their KV cache of the old weights; their
cache is computed anew with the new weights; or it waits for their end first."""


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
    stall_s: float = 0.0
    """Seconds that requests under way stood still for it; 0 without any."""
    busy: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    """When the engine computed since its last update, in seconds of ``time.perf_counter``; empty where unknown."""


class Handle(Protocol):
    """Requests under way in an engine, as `Engine.submit` returned them; its calls are made on all ranks."""

    def done(self) -> bool:
        """Return whether every completion is finished, so that `result` would not wait."""
        ...

    def result(self, timeout_s: float | None = None) -> list[list[Completion]]:
        """Wait for the completions of each prompt, in the order of the prompts; a second call returns the same.

        Raises:
            EngineTimeout: They were not finished within `timeout_s`; they go on, and `result` may be called again.
        """
        ...

    def cancel(self) -> None:
        """Take the requests back; `result` then raises. Does nothing to those that have finished."""
        ...


class Engine(Protocol):
    """What a training loop needs of an engine.

    Every call but `close` is collective: all ranks make it, in the same order, with the same arguments (but for those
    of `sample_sharded`), and get the same result. `vectorlm.testing` holds the suite that an implementation must pass.
    """

    @property
    def version(self) -> int:
        """The training step whose weights the engine holds; -1 before the first update."""
        ...

    def sample(self, prompts: Sequence[Prompt] | str, sampling_params: Any = None) -> list[list[Completion]]:
        """Return the completions of each prompt, in the order of the prompts."""
        ...

    def sample_sharded(
        self, local_prompts: Sequence[Prompt], sampling_params: Any = None
    ) -> list[list[Completion]]:
        """Return the completions of this rank's own prompts, sampled by its own parameters; ranks may have none."""
        ...

    def generate_text(self, prompts: Sequence[Prompt] | str, sampling_params: Any = None) -> list[str]:
        """Return the first completion of each prompt as text."""
        ...

    def submit(self, prompts: Sequence[Prompt] | str, sampling_params: Any = None) -> Handle:
        """Start sampling and return at once."""
        ...

    def poll(self) -> Sequence[Handle]:
        """Return the handles that have finished, in the order of their submission, each of them once.

        Those that were cancelled or asked for their result are not among them.
        """
        ...

    def update(self, model: torch.nn.Module, train_step: int, in_flight: InFlight = "refuse") -> UpdateReport:
        """Hot-swap the weights of `model` into the engine as version `train_step`; nothing moves if it holds that.

        Requests under way are treated as `in_flight` says; each of their tokens bears the version that sampled it. An
        engine may refuse `keep` and `recompute` with `EngineError`, before anything has changed.
        """
        ...

    def sleep(self, *, weights: bool = True, kv_cache: bool = True) -> None:
        """Give device memory back to the trainer; until `wake_up` the engine samples nothing."""
        ...

    def wake_up(self, *, weights: bool = True, kv_cache: bool = True) -> None:
        """Take back what `sleep` gave away; weights that slept hold nothing until the next `update`."""
        ...

    def close(self) -> None:
        """End the engine; safe to call twice, and not a collective."""
        ...
