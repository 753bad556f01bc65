"""Records and protocols shared by several packages."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A prompt: text, token ids, or chat messages (``{"role", "content"}``)."""

SamplingRequest = tuple[Sequence[Prompt] | str, Any]
"""Prompts, and their sampling parameters: the arguments of `Engine.sample` and `Engine.submit`."""


InFlight = Literal["refuse", "keep", "recompute", "drain"]
"""How an update treats requests in flight: raise an error; keep their KV cache of the old weights; recompute the cache
with the new weights; or wait until they end."""


@dataclass(frozen=True)
class Completion:
    """One sampled continuation of one prompt."""

    prompt_token_ids: tuple[int, ...]
    """The prompt as the engine saw it."""
    token_ids: tuple[int, ...]
    """The sampled tokens, without the prompt."""
    sampler_logprobs: tuple[float, ...]
    """The log-probability of each sampled token under what it was drawn from, after penalties, temperature, `top_k`,
    `top_p` and `min_p`; at temperature 0 only after penalties. Empty unless requested (``logprobs=0``)."""
    versions: tuple[int, ...]
    """The weight version that sampled each token."""
    text: str
    """The sampled tokens as text."""
    finish_reason: str | None
    """``stop`` (end token or stop string), ``length`` (token limit) or ``abort``."""


@dataclass(frozen=True)
class UpdateReport:
    """Result of one hot swap, with the times of its parts."""

    version: int
    """The training step whose weights the engine now holds."""
    skipped: bool
    """Whether the engine already held this step's weights, so that nothing moved."""
    num_bytes: int
    """Bytes of engine weights that the update replaced."""
    publish_s: float
    """Seconds until every rank had written its shard."""
    load_s: float
    """Seconds that the engine took to load the weights, checks included."""
    total_s: float
    """Seconds of the whole update, without waiting for an engine that is still starting."""
    stall_s: float = 0.0
    """Seconds that requests in flight stood still; 0 without any."""
    transport: str = ""
    """How the weights crossed: `push`, `bucketed` or `pull`; empty if none did."""
    busy: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    """When the engine computed since its last update, from and to, by ``time.perf_counter``; empty where unknown."""


class Handle(Protocol):
    """Requests in flight, as `Engine.submit` returns them; all ranks make each call."""

    def done(self) -> bool:
        """Return whether `result` would not wait."""

    def result(self, timeout_s: float | None = None) -> list[list[Completion]]:
        """Wait for the completions of each prompt, in the order of the prompts; a second call returns the same.

        Raises:
            EngineTimeout: They were not finished within `timeout_s`; they go on, and `result` may be called again.
        """

    def cancel(self) -> None:
        """Take the requests back; `result` then raises. Does nothing to those that have finished."""


class Engine(Protocol):
    """The methods of an engine that training loops call.

    Every call but `close` is collective: all ranks make it, in the same order, with the same arguments (except those of
    `sample_sharded`), and get the same result. `vectorlm.sampling.testing` holds the checks that an implementation
    must pass.
    """

    @property
    def version(self) -> int:
        """The training step whose weights the engine holds; -1 before the first update."""

    def sample(self, prompts: Sequence[Prompt] | str, sampling_params: Any = None) -> list[list[Completion]]:
        """Return the completions of each prompt, in the order of the prompts."""

    def sample_sharded(
        self, local_prompts: Sequence[Prompt], sampling_params: Any = None
    ) -> list[list[Completion]]:
        """Return the completions of this rank's prompts, sampled by its own parameters; a rank may have none."""

    def generate_text(self, prompts: Sequence[Prompt] | str, sampling_params: Any = None) -> list[str]:
        """Return the first completion of each prompt as text."""

    def submit(self, prompts: Sequence[Prompt] | str, sampling_params: Any = None) -> Handle:
        """Start sampling and return at once."""

    def submit_many(self, requests: Sequence[SamplingRequest]) -> Sequence[Handle]:
        """Submit several requests at once."""

    def poll(self, timeout_s: float = 0.0) -> Sequence[Handle]:
        """Return the handles that have finished, each once, in the order of their submission.

        Handles that were cancelled or whose result was read are left out. If none has finished, it may wait for
        `timeout_s` seconds.
        """

    def update(self, model: torch.nn.Module, train_step: int, in_flight: InFlight = "refuse") -> UpdateReport:
        """Hot-swap the weights of `model` into the engine as version `train_step`; skipped if it holds that version.

        `in_flight` says what happens to requests in flight; each token records the version that sampled it. An engine
        may refuse `keep` and `recompute` with `EngineError`, before anything has changed.
        """

    def sleep(self, *, weights: bool = True, kv_cache: bool = True) -> None:
        """Give device memory back to the trainer; until `wake_up` the engine samples nothing."""

    def wake_up(self, *, weights: bool = True, kv_cache: bool = True) -> None:
        """Take back what `sleep` gave away; weights that slept are garbage until the next `update`."""

    def close(self) -> None:
        """End the engine; safe to call twice, and not a collective."""


@dataclass(frozen=True)
class PromptRecord:
    """One prompt with the columns that its rewards read."""

    prompt: Prompt
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of its row in the dataset, passed to the reward by name."""
    source: str = ""
    """Name of the source; empty if there is only one."""


ENVIRONMENT = "environment"
"""Metric name for the sum of the rewards of environments."""
MAX_REWARD = 3.4e38
"""The largest number in float32, about."""


@dataclass(frozen=True)
class RewardResult:
    """What one reward function returned for one completion."""

    reward: float
    """NaN where the completion could not be scored: the function returned None, raised or ran out of time."""
    error: str | None = None
    is_counted: bool = True
    """Whether the error stands for the call: one call with lists may fail for many completions."""
    logged: Mapping[str, Any] = field(default_factory=dict)
    """What the function logged of the completion."""

    @property
    def is_right(self) -> bool:
        """Whether the answer counts as right: `acc` where it is logged, as verl's functions do, else a reward of 1."""
        value = self.logged.get("acc", self.reward)
        # In float32, as training has rewards: 0.6 + 0.3 + 0.1 are 1. Workers do without numpy.
        return isinstance(value, int | float) and ctypes.c_float(value).value == 1


@dataclass(frozen=True)
class Batch:
    """One micro-batch of text to fine-tune on: B sequences, T tokens."""

    input_ids: torch.Tensor
    """int64 [B, T]."""
    attention_mask: torch.Tensor
    """int64 [B, T], 0 at padding, 1 elsewhere."""
    labels: torch.Tensor
    """int64 [B, T], the tokens of `input_ids` that count in the loss, the ignore index elsewhere; not shifted."""
    ids: torch.Tensor
    """int64 [B], the index of each sequence in the dataset, -1 for a sequence that only fills up the batch."""
    text_ids: torch.Tensor
    """int64 [B, T], which text of its sequence a token belongs to, from 0."""
    values: torch.Tensor | None = None
    """float32 [B], of preference data the margin of each pair, or whether a completion is a good one."""
    references: torch.Tensor | None = None
    """float32 [B, 2], the reference's log-probabilities of both texts of a row, where a loss reads them."""


@dataclass(frozen=True)
class TrainedModel:
    """A sharded model of a run, with the optimizer that trains it."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    """None for a model that is not trained: its checkpoint includes its frozen weights."""


class MetricSink(Protocol):
    """Receives the metrics of logged steps."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the `values` of training step `step`."""


class Evaluation(Protocol):
    """Evaluates the weights that are being trained; all ranks call it."""

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics after training step `step`."""
