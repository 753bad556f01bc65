"""Messages between a rank and its engine, and the channel that carries them.

Commands are numbered, and an answer has the number of its command, so the late answer to an interrupted command is
never taken for the answer to a later one. While the engine works it sends an empty message without a number about once
a second.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vectorlm.errors import EngineError
from vectorlm.ranks.engine_ranks import CallResult
from vectorlm.sampling.contract import RequestOutput
from vectorlm.sampling.weights.plan import TensorSpec
from vectorlm.types import Completion, InFlight

if TYPE_CHECKING:
    from vectorlm.sampling.weights.exports import Export


@dataclass(frozen=True)
class Start:
    """Build the engine. The first message; the answer is `Ready`."""

    model: str
    engine_args: Mapping[str, Any]
    receiver: str
    inference: str = "vllm"
    """A name of `vectorlm.sampling.contract.BACKENDS`, or a class as ``module:Class`` or ``file.py:Class``."""


@dataclass(frozen=True)
class Ready:
    """The engine is built, in `load_s` seconds; it holds weights `live` or `packed`."""

    receiver: str
    load_s: float
    max_num_seqs: int
    transports: Sequence[str] = ("push",)
    """The transports that it supports."""
    tokenizer: Any = None
    """The tokenizer for its prompts; None uses the tokenizer in the model's folder."""
    warning: str = ""
    """A warning about the weights before the first update; empty if there is none."""
    runner: str = ""
    """The inference library with its version, and the part of it that runs the model; empty if unknown."""


@dataclass(frozen=True)
class Generate:
    """Sample completions of these prompts; the answer is the result of `pack`."""

    prompts: Sequence[Sequence[int]]
    sampling_params: Any
    """A mapping, a ``vllm.SamplingParams``, or one of these per prompt."""
    as_request_outputs: bool
    """Whether to answer with vLLM's own objects instead of Completions."""
    is_streamed: bool = False
    """Whether to send a `Part` whenever tokens were sampled, if the backend supports it."""


@dataclass(frozen=True)
class Abort:
    """Cancel the `Generate` with this number; neither command gets an answer."""

    generate: int


@dataclass(frozen=True)
class Connect:
    """Match these trainer tensors with the engine's; the answer is the `Layout`."""

    manifest: Sequence[TensorSpec]
    arena_path: str | None
    """The arena of another engine of this node, to be shared; None creates one."""
    weight_set: str = "base"
    arena_bytes: int | None = None
    """Largest size of the arena; None for the size of the set, 0 for no arena (`OpenHandles` follows)."""


@dataclass(frozen=True)
class OpenHandles:
    """Open the exports of this node's ranks, from which each update pulls its weights. The answer is None."""

    weight_set: str
    exports: Sequence[Export]


@dataclass(frozen=True)
class BeginUpdate:
    """Stop sampling until `FinishUpdate`, because the ranks write weights. The answer is as for `WakeUp`."""

    in_flight: InFlight = "refuse"


@dataclass(frozen=True)
class TakeAccepted:
    """Count proposed tokens. The answer is the number accepted since the last such command, and the steps of sequences
    in that time."""


@dataclass(frozen=True)
class RequireWhole:
    """Fail if the engine failed in an earlier step. The answer is None."""


@dataclass(frozen=True)
class CopyRound:
    """Copy these rounds, by weight set, which every rank has written. The answer is None."""

    rounds: Mapping[str, int]


@dataclass(frozen=True)
class FinishUpdate:
    """Load the new weights, of which every rank has written the last round. The answer is `Updated`."""

    version: int
    checksums: Sequence[int] | None
    """Checksums of all written tensors, one weight set after the other; None skips the proof."""
    weight_sets: tuple[str, ...] = ("base",)
    """The written sets, `base` before `adapter`."""
    may_hold_nan: bool = False
    """Whether the weights were not checked for NaN and infinity."""


@dataclass(frozen=True)
class Updated:
    """The engine holds the new weights; its numbers are described in `vectorlm.types.UpdateReport`."""

    load_s: float
    stall_s: float
    busy: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Sleep:
    """Free the memory of the parts that are True. The answer is None."""

    weights: bool
    kv_cache: bool


@dataclass(frozen=True)
class WakeUp:
    """Take back the memory of the parts that are True.

    The answer is the names of the tensors that a sleep lost and that were restored since the last such answer.
    """

    weights: bool
    kv_cache: bool


@dataclass(frozen=True)
class Stop:
    """End the process."""


@dataclass(frozen=True)
class Part:
    """The tokens since the last part, without the prompt; the answer that follows holds the whole completion."""

    completion: Completion


TakeAnswer = Callable[[int, CallResult | Part], None]
"""Receives the number of a command and a part of its answer, or its result."""


class Channel(Protocol):
    """A rank's connection to the engine that it owns: `ProcessChannel` or `InlineChannel`."""

    def send(self, command: Any) -> int:
        """Send a command and return its number, under which `answer` waits; raises `EngineDied`."""

    def ask(self, commands: Sequence[Generate], tell: TakeAnswer) -> list[int]:
        """Send commands that the engine starts together; return their numbers.

        `tell` receives the parts and the answers, in another thread or, for an inline engine, inside `advance`. Raises
        `EngineDied`.
        """

    def advance(self, until: Callable[[], bool] = lambda: True, timeout_s: float = 0.0) -> None:
        """Wait until `until()` holds, at most `timeout_s`; an inline engine samples meanwhile, at least one step."""

    def has_answer(self, number: int, silence_s: float) -> bool:
        """Return whether the answer is there; raise as `answer` does if it will not come."""

    def answer(self, number: int, silence_s: float, waiting_for: str, deadline_s: float | None = None) -> Any:
        """Wait for the answer to command `number` and return its value, once.

        `deadline_s` is the time of ``time.monotonic`` at which to stop waiting for a working engine; `waiting_for`
        describes the engine's work in errors. Raises `EngineDied`, `EngineTimeout` after one of the two limits (the
        command goes on), or the engine's error.
        """

    def call(self, command: Any, silence_s: float) -> Any:
        """Send a command and return its answer; raises as `answer` does."""

    def cancel(self, number: int) -> None:
        """Abort the `Generate` with this number, and drop its answer."""

    def close(self) -> None:
        """End the engine; safe to call twice."""


def pack(outputs: Sequence[RequestOutput], as_request_outputs: bool) -> np.ndarray:
    """Return the completions of each prompt, or vLLM's own objects, as uint8.

    Each prompt has a separate pickle, so that a rank unpickles its own prompts only. Tokens, log-probabilities and
    versions cross as bytes, of any kind of number from a backend.

    Raises:
        EngineError: The caller wants vLLM's objects, but another backend has answered.
    """
    if as_request_outputs and any(output.raw is None for output in outputs):
        raise EngineError(
            "generate() needs vLLM, because it returns vllm.RequestOutput objects: call sample() instead."
        )
    rows = [output.raw if as_request_outputs else _plain(output.completions) for output in outputs]
    return np.frombuffer(pickle.dumps([pickle.dumps(row) for row in rows]), np.uint8)


def unpack(outputs: np.ndarray, first: int = 0, last: int | None = None) -> list[Any]:
    """Return the outputs of the prompts `first` to `last` (exclusive)."""
    return [pickle.loads(row) for row in pickle.loads(outputs.tobytes())[first:last]]


def _plain(completions: Sequence[Completion]) -> list[Completion]:
    """Return completions of one prompt that share the prompt's bytes."""
    prompt = completions[0].data_of("prompt_token_ids") if completions else b""
    fields = ("token_ids", "sampler_logprobs", "versions")
    return [
        Completion.from_bytes(
            {"prompt_token_ids": prompt, **{name: completion.data_of(name) for name in fields}},
            text=completion.text,
            finish_reason=completion.finish_reason,
            routes=completion.routes,
        )
        for completion in completions
    ]
