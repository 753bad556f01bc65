"""What a rank and its engine say to each other, and the channel they say it through.

Commands are numbered, and an answer has the number of its command: the answer to a command that was interrupted is
never taken for the answer to a later one. An empty message without a number, about once a second while the engine
works, is a sign of life.
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
    """The ways in which it takes weights."""
    tokenizer: Any = None
    """What encodes its prompts, if that is not the tokenizer of the model's folder."""
    warning: str = ""
    """What the user must know of the weights that it samples from before the first update."""


@dataclass(frozen=True)
class Generate:
    """Sample completions of these prompts; the answer is what `packed` unpacks."""

    prompts: Sequence[Sequence[int]]
    sampling_params: Any
    """A mapping, a ``vllm.SamplingParams``, or one of these per prompt."""
    as_request_outputs: bool
    """Whether to answer with vLLM's own objects instead of Completions."""
    is_streamed: bool = False
    """Whether a `Part` comes before the answer whenever tokens were sampled, from backends that can."""


@dataclass(frozen=True)
class Abort:
    """Forget the `Generate` with this number; neither command is answered."""

    generate: int


@dataclass(frozen=True)
class Connect:
    """Match these trainer tensors with the engine's; the answer is the `Layout`."""

    manifest: Sequence[TensorSpec]
    arena_path: str | None
    """The arena of another engine of this node, to be shared; None creates one."""
    weight_set: str = "base"
    arena_bytes: int | None = None
    """The most that the arena may take; None for all that the set needs, 0 for none: `OpenHandles` follows."""


@dataclass(frozen=True)
class OpenHandles:
    """Open what the ranks of this node export: each update pulls its weights out of there. The answer is None."""

    weight_set: str
    exports: Sequence[Export]


@dataclass(frozen=True)
class BeginUpdate:
    """Sample nothing until `FinishUpdate`: the ranks are about to write weights. The answer is None."""

    in_flight: InFlight = "refuse"


@dataclass(frozen=True)
class RequireWhole:
    """Fail if the engine has failed in an earlier step. The answer is None."""


@dataclass(frozen=True)
class CopyRound:
    """Every rank has written these rounds, by weight set; copy them before the next ones. The answer is None."""

    rounds: Mapping[str, int]


@dataclass(frozen=True)
class FinishUpdate:
    """Every rank has written the last round: load the new weights. The answer is `Updated`."""

    version: int
    checksums: Sequence[int] | None
    """Of all written tensors, one weight set after the other; None to skip the proof."""
    weight_sets: tuple[str, ...] = ("base",)
    """What was written, `base` before `adapter`."""
    may_hold_nan: bool = False
    """Whether nobody has looked for numbers that are not finite."""


@dataclass(frozen=True)
class Updated:
    """The engine holds the new weights; its numbers are those of `vectorlm.types.UpdateReport`."""

    load_s: float
    stall_s: float
    busy: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Sleep:
    """Free the memory of what is True. The answer is None."""

    weights: bool
    kv_cache: bool


@dataclass(frozen=True)
class WakeUp:
    """Take back the memory of what is True. The answer is None."""

    weights: bool
    kv_cache: bool


@dataclass(frozen=True)
class Stop:
    """End the process."""


@dataclass(frozen=True)
class Part:
    """What was sampled since the last part, without the prompt; the answer, which follows, is the whole."""

    completion: Completion


TakeAnswer = Callable[[int, CallResult | Part], None]
"""Gets the parts of the answer to the command with this number, and then the answer."""


class Channel(Protocol):
    """A rank's connection to the engine that it owns: `ProcessChannel` or `InlineChannel`."""

    def send(self, command: Any) -> int:
        """Send a command and return its number, under which `answer` waits; raises `EngineDied`."""

    def ask(self, commands: Sequence[Generate], tell: TakeAnswer) -> list[int]:
        """Send commands of which the engine begins none before it has all; return their numbers.

        `tell` gets each answer and its parts: from another thread, or of an inline engine inside `advance`. Raises
        `EngineDied`.
        """

    def advance(self, until: Callable[[], bool] = lambda: True, timeout_s: float = 0.0) -> None:
        """Wait until `until()` holds, `timeout_s` at most; an inline engine samples meanwhile, a slice at least."""

    def has_answer(self, number: int, silence_s: float) -> bool:
        """Return whether `answer` would not wait; raises as `answer` does where the answer will not come."""

    def answer(self, number: int, silence_s: float, waiting_for: str, deadline_s: float | None = None) -> Any:
        """Wait for the answer to command `number` and return its value, once.

        `deadline_s` is when to stop waiting although the engine works, as ``time.monotonic`` counts; `waiting_for` is
        what the engine does, for the error text. Raises `EngineDied`; `EngineTimeout` when one of the two limits has
        passed (the command goes on); or what the engine raised.
        """

    def call(self, command: Any, silence_s: float) -> Any:
        """Send a command and return the value of its answer; raises as `answer` does."""

    def cancel(self, number: int) -> None:
        """Abort the `Generate` with this number, and drop its answer."""

    def close(self) -> None:
        """End the engine; safe to call twice."""


def pack(outputs: Sequence[RequestOutput], as_request_outputs: bool) -> np.ndarray:
    """Return the completions of each prompt, or vLLM's own objects, as uint8.

    Each prompt is a pickle of its own, so that a rank reads those of its prompts alone. The completions are tuples of
    Python's numbers: as fast as arrays, and a backend may answer with numbers of any kind.

    Raises:
        EngineError: vLLM's objects are asked for, and another backend has answered.
    """
    if as_request_outputs and any(output.raw is None for output in outputs):
        raise EngineError(
            "this inference engine has no vllm.RequestOutput objects: call sample instead of generate."
        )
    rows = [output.raw if as_request_outputs else _plain(output.completions) for output in outputs]
    return np.frombuffer(pickle.dumps([pickle.dumps(row) for row in rows]), np.uint8)


def unpack(packed: np.ndarray, first: int = 0, last: int | None = None) -> list[Any]:
    """Return what `pack` was given for prompts `first` to `last` (exclusive)."""
    rows = [pickle.loads(row) for row in pickle.loads(packed.tobytes())[first:last]]
    return [[Completion(*each) for each in row] if isinstance(row, list) else row for row in rows]


def _plain(completions: Sequence[Completion]) -> list[tuple[Any, ...]]:
    prompt = tuple(map(int, completions[0].prompt_token_ids)) if completions else ()
    return [
        (
            prompt,
            tuple(map(int, each.token_ids)),
            tuple(map(float, each.sampler_logprobs)),
            tuple(map(int, each.versions)),
            each.text,
            each.finish_reason,
        )
        for each in completions
    ]
