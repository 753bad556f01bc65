"""Messages between a rank and its engine, and the channel that carries them.

Commands are numbered, and an answer has the number of its command. Therefore the late answer to an interrupted command
is never taken for the answer to a later one. While the engine works, it sends an empty message with the number -1 about
once a second.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import cloudpickle
import numpy as np

from vectorlm.data.images import Picture
from vectorlm.errors import EngineError
from vectorlm.ranks.engine_ranks import CallResult
from vectorlm.sampling.contract import RequestOutput
from vectorlm.sampling.weights.plan import TensorSpec
from vectorlm.types import POLICY, Completion, InFlight

if TYPE_CHECKING:
    from vectorlm.sampling.weights.exports import Export


@dataclass(frozen=True)
class Start:
    """Build the engine; this is the first message. The answer is `Ready`."""

    model: str
    engine_args: Mapping[str, Any]
    receiver: str
    inference: str = "vllm"
    """A name of `vectorlm.sampling.contract.BACKENDS`, or a class as ``module:Class`` or ``file.py:Class``."""


@dataclass(frozen=True)
class Ready:
    """The answer to `Start`: the engine was built in `load_s` seconds, and holds weights `live` or `packed`."""

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
    keeps_base: bool = False
    """Whether its base cannot be replaced; updates must then send adapters alone."""

    def __getstate__(self) -> dict[str, Any]:
        # By value, because other processes cannot import the file of a backend.
        return {**vars(self), "tokenizer": cloudpickle.dumps(self.tokenizer)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, tokenizer=pickle.loads(state["tokenizer"]))


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
    adapter: str = POLICY
    """The adapter to sample with."""


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
class LendBase:
    """Give the ranks of this node handles of the connected base. The answer is `Lent`.

    The engine must hold the trainer's tensors, which have these checksums.
    """

    checksums: Sequence[int]


@dataclass(frozen=True)
class BeginUpdate:
    """Stop sampling until `FinishUpdate`, because the ranks write weights. The answer is a list, as for `WakeUp`."""

    in_flight: InFlight = "refuse"
    new_slot_for: str | None = None
    """Name of the adapter that the update sends, if it may need a new slot; else None."""


@dataclass(frozen=True)
class RemoveAdapter:
    """Free the slot of an adapter. The answer is False while requests still use it; new ones are refused."""

    adapter: str


@dataclass(frozen=True)
class TakeAccepted:
    """Count proposed tokens. The answer holds two numbers since the last command of this type: accepted tokens, and
    steps of sequences."""


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
    adapter: str = POLICY
    """The adapter that the update replaces or adds."""


@dataclass(frozen=True)
class Updated:
    """The answer to `FinishUpdate`; `vectorlm.types.UpdateReport` describes its numbers."""

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

    The answer lists the tensors that a sleep lost and that the engine has restored since its last list.
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
"""A function that receives the number of a command, and a part of its answer or its result."""


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
        command continues), or the engine's error.
        """

    def call(self, command: Any, silence_s: float) -> Any:
        """Send a command and return its answer; raises as `answer` does."""

    def cancel(self, number: int) -> None:
        """Abort the `Generate` with this number, and drop its answer."""

    def close(self) -> None:
        """End the engine; safe to call twice."""


def read_answer(received: bytes) -> tuple[int, CallResult | Part]:
    """Return the number and the content of a message from the sampler; unreadable content becomes an `EngineError`."""
    stream = io.BytesIO(received)
    number: int = pickle.load(stream)
    try:
        content: CallResult | Part = pickle.load(stream)
    except Exception as error:
        text = (
            f"this rank cannot read the engine's answer: {type(error).__name__}: {error}. A backend must answer with "
            "types that every process can import."
        )
        content = None, EngineError(text)
    return number, content


def pack(outputs: Sequence[RequestOutput], as_request_outputs: bool) -> np.ndarray:
    """Return the completions of each prompt, or vLLM's own objects, as uint8.

    Each prompt has a separate pickle, because a rank unpickles its own prompts only. Tokens, log-probabilities and
    versions become bytes, for all types of numbers that a backend uses.

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


Pickled = tuple[dict[bytes, bytes], bytes]
"""The pictures of a command by the hash of their content, and the pickled command without them."""
Encoded = bytes | tuple[list[tuple[bytes, bytes | None]], bytes]
"""A pickled command, with the hashes and contents of its pictures if it has any."""
KEPT_PICTURE_BYTES = 256 << 20
"""Largest sum of the pictures that both ends of a connection keep."""


def pickled(command: Any) -> Pickled:
    """Pickle a command; raises what pickle raises."""
    buffer, shown = io.BytesIO(), dict[bytes, bytes]()
    _Pickler(buffer, shown).dump(command)
    return shown, buffer.getvalue()


class KeptPictures:
    """A record of the pictures that have crossed a connection; each picture crosses it once.

    Both ends note the same pictures in the same order, and therefore drop the same ones. Only the receiving end keeps
    their contents.
    """

    def __init__(self) -> None:
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._contents: dict[bytes, bytes] = {}
        self._num_bytes = 0

    def encode(self, pickled: Pickled) -> Encoded:
        """Return the message of a pickled command, which must then be sent; note its pictures.

        If the other end keeps a picture, only the hash is sent.
        """
        shown, data = pickled
        sent = [(digest, None if digest in self._sizes else content) for digest, content in shown.items()]
        self._note(shown)
        return (sent, data) if sent else data

    def decode(self, message: Encoded) -> Any:
        """Return the command that was encoded; note its pictures even if it cannot be read."""
        if isinstance(message, bytes):
            return pickle.loads(message)
        sent, pickled = message
        shown = {digest: self._contents[digest] if data is None else data for digest, data in sent}
        self._contents |= shown
        self._note(shown)
        return _Unpickler(pickled, shown).load()

    def _note(self, shown: Mapping[bytes, bytes]) -> None:
        for digest, data in shown.items():
            self._num_bytes += 0 if digest in self._sizes else len(data)
            self._sizes[digest] = len(data)
            self._sizes.move_to_end(digest)
        while self._num_bytes > KEPT_PICTURE_BYTES:
            digest, size = self._sizes.popitem(last=False)
            self._contents.pop(digest, None)
            self._num_bytes -= size


class _Pickler(pickle.Pickler):
    """A pickler that moves the content of pictures to `shown`, by its hash."""

    def __init__(self, buffer: io.BytesIO, shown: dict[bytes, bytes]) -> None:
        super().__init__(buffer)
        self._shown = shown

    def reducer_override(self, value: Any) -> Any:
        """Reduce pictures with content to their name and hash; pickle does not call this for numbers and texts."""
        if not isinstance(value, Picture) or not value.is_held:
            return NotImplemented
        digest = hashlib.sha256(value.data).digest()
        self._shown[digest] = value.data
        return shown_picture, (str(value), digest)


class _Unpickler(pickle.Unpickler):
    """An unpickler that reads pictures from `shown`."""

    def __init__(self, pickled: bytes, shown: Mapping[bytes, bytes]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._shown = shown

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function of this name; for `shown_picture`, one that returns the picture."""
        if (module, name) == (shown_picture.__module__, shown_picture.__name__):
            return lambda text, digest: Picture(text).holding(self._shown[digest])
        return super().find_class(module, name)


def shown_picture(name: str, digest: bytes) -> Picture:
    """Stand in for a picture in an encoded command; raise, because only `KeptPictures.decode` has the content."""
    raise pickle.UnpicklingError(f"the content of the picture {name!r} is missing")
