"""Records and protocols that several packages of vectorlm share."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A prompt for `Engine.sample`: text, token ids, or chat messages (``{"role", "content"}``)."""

SamplingRequest = tuple[Sequence[Prompt] | str, Any]
"""Prompts, and their sampling parameters: the arguments of `Engine.sample` and `Engine.submit`."""


POLICY = "policy"
"""The name of the adapter that is trained, and of a model without adapters."""

InFlight = Literal["refuse", "keep", "recompute", "drain"]
"""How an update treats requests in flight. `refuse` raises; `keep` continues with the KV cache of the old weights;
`recompute` computes the cache again with the new weights; `drain` waits until the requests end."""


class Numbers:
    """Base class of dataclasses with fields of one number per token (`CODES`), which are pickled as bytes.

    A field becomes a tuple when it is first read; `numbers` returns it as an array, without a Python object per number.
    """

    CODES: ClassVar[Mapping[str, str]]
    """Type codes of Python's `array` by field: ``q`` for int64, ``d`` for float64, ``b`` for bool."""

    @classmethod
    def from_bytes(cls, data: Mapping[str, bytes], **fields: Any) -> Any:
        """Return an object with the fields of `CODES` from `data`, and its other fields from `fields`."""
        found = cls.__new__(cls)
        vars(found).update(fields, _data=dict(data))
        return found

    def __getattr__(self, name: str) -> Any:
        # Only called for attributes that are missing.
        data = vars(self).get("_data", {})
        if name not in data:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}.")
        value = vars(self)[name] = tuple(self.numbers(name).tolist())
        return value

    def data_of(self, name: str) -> bytes:
        """Return the numbers of a field of `CODES` as bytes."""
        data: dict[str, bytes] = vars(self).setdefault("_data", {})
        if name not in data:
            data[name] = array(self.CODES[name], getattr(self, name)).tobytes()
        return data[name]

    def numbers(self, name: str) -> np.ndarray:
        """Return a field of `CODES` as a read-only array, int64, float64 or bool [N]."""
        import numpy as np

        dtypes: dict[str, type[np.generic]] = {"q": np.int64, "d": np.float64, "b": np.bool_}
        return np.frombuffer(self.data_of(name), dtypes[self.CODES[name]])

    def __getstate__(self) -> dict[str, Any]:
        data = {name: self.data_of(name) for name in self.CODES}
        return {name: value for name, value in vars(self).items() if name not in data} | {"_data": data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@dataclass(frozen=True)
class Completion(Numbers):
    """A sampled continuation of a prompt."""

    CODES: ClassVar[Mapping[str, str]] = {
        "prompt_token_ids": "q",
        "token_ids": "q",
        "sampler_logprobs": "d",
        "versions": "q",
    }

    prompt_token_ids: tuple[int, ...]
    """The prompt's tokens, as the engine received them."""
    token_ids: tuple[int, ...]
    """The sampled tokens, without the prompt."""
    sampler_logprobs: tuple[float, ...]
    """The log-probability of each sampled token in the distribution that it was sampled from: after penalties,
    temperature, `top_k`, `top_p` and `min_p`; at temperature 0 only after penalties. Empty unless requested
    (``logprobs=0``)."""
    versions: tuple[int, ...]
    """The weight version that sampled each token."""
    text: str
    """The sampled tokens as text."""
    finish_reason: str | None
    """``stop`` (end token or stop string), ``length`` (token limit) or ``abort``."""
    routes: np.ndarray | None = field(default=None, compare=False, repr=False)
    """The K experts of each of T tokens in each of L layers with experts, uint8 or uint16 [T, L, K]. The tokens are the
    prompt, with all tokens of its pictures, and the completion except its last token. None unless the engine was built
    with ``enable_return_routed_experts=True``."""


def route_dtype(num_experts: int) -> str:
    """Return the type of an expert's number in `Completion.routes`."""
    return "uint8" if num_experts <= 256 else "uint16"


@dataclass(frozen=True)
class UpdateReport:
    """The result and the durations of a weight update."""

    version: int
    """The training step whose weights the engine now holds."""
    skipped: bool
    """Whether nothing was sent, because the engine already had the weights of this step."""
    num_bytes: int
    """Bytes of engine weights that the update replaced."""
    publish_s: float
    """Seconds until every rank had written its shard."""
    load_s: float
    """Seconds that the engine took to load the weights, checks included."""
    total_s: float
    """Seconds that the whole update took, without the wait for an engine that was still starting."""
    stall_s: float = 0.0
    """Seconds for which requests in flight were paused; 0 if there were none."""
    transport: str = ""
    """Transport of the weights: `push`, `bucketed` or `pull`; empty if nothing was sent."""
    busy: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    """Periods (start, end; ``time.perf_counter``) in which the engine computed since its last update; may be empty."""
    verified: bool = False
    """Whether checksums have proven that the engine holds these weights."""


class Handle(Protocol):
    """A batch of requests in flight, as `Engine.submit` returns it. Its methods are collective."""

    def done(self) -> bool:
        """Return whether `result` would return without waiting."""

    def result(self, timeout_s: float | None = None) -> list[list[Completion]]:
        """Wait for the completions of each prompt, in the order of the prompts; a second call returns the same.

        Raises:
            EngineTimeout: The requests did not finish within `timeout_s`. They continue; `result` may be called again.
        """

    def cancel(self) -> None:
        """Cancel the requests that have not finished; `result` then raises."""


class Engine(Protocol):
    """The interface of an engine, as training loops use it.

    Every call except `close` is collective: all ranks make it, in the same order, with the same arguments (except for
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
        """Start sampling and return without waiting."""

    def submit_many(self, requests: Sequence[SamplingRequest]) -> Sequence[Handle]:
        """Submit several requests in one call."""

    def poll(self, timeout_s: float = 0.0) -> Sequence[Handle]:
        """Return the handles that have finished, each once, in the order of their submission.

        Handles that were cancelled or whose result was read are left out. If none has finished, the call may wait for
        `timeout_s` seconds.
        """

    def update(self, model: torch.nn.Module, train_step: int, in_flight: InFlight = "refuse") -> UpdateReport:
        """Hot-swap the weights of `model` into the engine as version `train_step`; skipped if it holds that version.

        `in_flight` decides about requests in flight; each token records the version that sampled it. An engine may
        refuse `keep` and `recompute` with `EngineError`, before anything has changed.
        """

    def sleep(self, *, weights: bool = True, kv_cache: bool = True) -> None:
        """Free device memory for the trainer; the engine samples nothing until `wake_up`."""

    def wake_up(self, *, weights: bool = True, kv_cache: bool = True) -> None:
        """Take back the memory that `sleep` freed; freed weights are garbage until the next `update`."""

    def close(self) -> None:
        """End the engine; safe to call twice, and not a collective call."""


@dataclass(frozen=True)
class PromptRecord:
    """A prompt with the columns that its reward functions read."""

    prompt: Prompt
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of its row in the dataset, passed to the reward by name."""
    source: str = ""
    """Name of the prompt's source, if there are several."""
    token_ids: tuple[int, ...] | None = None
    """The tokens that the engine gets if the beginning of `prompt` was cut off; None for the whole prompt."""


ENVIRONMENT = "environment"
"""Name in metrics for the sum of the rewards of environments."""
MAX_REWARD = 3.4e38
"""Largest reward that is allowed; about the largest float32."""


@dataclass(frozen=True)
class RewardResult:
    """The result of a reward function for one completion."""

    reward: float
    """The reward; NaN if the function returned None, raised an error or timed out."""
    error: str | None = None
    is_counted: bool = True
    """Whether to count the error: a call that fails for a list of completions counts once."""
    logged: Mapping[str, Any] = field(default_factory=dict)
    """Values that the function logged for the completion."""
    right_from: float | None = None
    """The lowest reward of a correct answer; None means a reward of exactly 1."""

    @property
    def is_right(self) -> bool:
        """Whether the answer is correct: by the logged `acc`, as in verl's functions, else by its reward."""
        value = self.logged.get("acc", self.reward)
        if not isinstance(value, int | float):
            return False
        # Rounded to float32 like the rewards of training: 0.6 + 0.3 + 0.1 is 1. Workers have no numpy.
        rounded = ctypes.c_float(value).value
        if self.right_from is None or "acc" in self.logged:
            return rounded == 1
        return rounded >= ctypes.c_float(self.right_from).value


@dataclass(frozen=True)
class Batch:
    """A micro-batch of text for fine-tuning: B sequences, T tokens."""

    input_ids: torch.Tensor
    """int64 [B, T]."""
    attention_mask: torch.Tensor
    """int64 [B, T], 0 for padding, else 1."""
    labels: torch.Tensor
    """int64 [B, T], the tokens of `input_ids` that count in the loss, else the ignore index; not shifted."""
    ids: torch.Tensor
    """int64 [B], index of every sequence in the dataset; -1 for padding sequences."""
    text_ids: torch.Tensor
    """int64 [B, T], index of the text that a token belongs to, within its sequence."""
    values: torch.Tensor | None = None
    """float32 [B], for preference data: the margin of a pair, or 1 for a desirable completion and 0 for others."""
    references: torch.Tensor | None = None
    """float32 [B, 2], the reference's log-probabilities of the two texts of a row; None if the loss needs none."""
    images: Sequence[Sequence[Any]] | None = None
    """The pictures of each row with their places (`vectorlm.data.images.PlacedPicture`); None without images."""


@dataclass(frozen=True)
class TrainedModel:
    """A sharded model of a run, with the optimizer that trains it."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    """The optimizer; None for a frozen model, whose weights its checkpoint includes."""


class MetricSink(Protocol):
    """A receiver of the metrics of each logged step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the `values` of training step `step`."""


class Evaluation(Protocol):
    """An evaluation of the weights that are being trained; all ranks call it."""

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics after training step `step`."""

    def begin(self, step: int) -> Callable[[], dict[str, float]]:
        """Begin an evaluation of `step`; the function waits for it and returns the metrics."""
