"""Calls of a trainer to the weight receivers in an engine's workers, as JSON, and the file with their answers."""

from __future__ import annotations

import fcntl
import json
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from vectorlm import errors
from vectorlm.errors import EngineError, VectorLMError
from vectorlm.ranks.engine_ranks import CallResult
from vectorlm.sampling.weights.arena import path_of
from vectorlm.sampling.weights.exports import DeviceHandle
from vectorlm.sampling.weights.plan import Layout, TensorSpec
from vectorlm.sampling.weights.receive import WorkerSums
from vectorlm.sampling.weights.record import LoadPlan

MEMFD_NAME = "vectorlm-answers"
OPEN_FILE = re.compile(r"/proc/\d+/fd/\d+")
"""A file that a process has open, as other processes of the same user can open it."""


@dataclass(frozen=True)
class DeviceExport:
    """An `Export` on a CUDA device. Handles of host memory do not cross: a client could name any file."""

    name: str
    place: tuple[int, ...]
    handle: DeviceHandle


CALLS: Mapping[str, tuple[tuple[Any, ...], Any]] = {
    "vectorlm_settings": ((), dict[str, Any]),
    "vectorlm_claim": ((), None),
    "vectorlm_release": ((), None),
    "vectorlm_begin": ((), bool),
    "vectorlm_prepare": ((str,), str),
    "vectorlm_describe": ((str, tuple[TensorSpec, ...]), LoadPlan),
    "vectorlm_attach": ((str, Layout, tuple[DeviceExport, ...]), int),
    "vectorlm_copy": ((str, int), None),
    "vectorlm_load": ((str, int, bool), list[int]),
    "vectorlm_empty_kv_cache": ((), None),
    "vectorlm_parameter_sums": ((tuple[TensorSpec, ...],), WorkerSums),
}
"""By method: the types of its arguments, of which the last ones may be missing, and of its answer."""
UPDATE_CALLS = frozenset({"vectorlm_copy", "vectorlm_load", "vectorlm_empty_kv_cache"})
"""The calls within an update."""


def to_wire(value: Any) -> Any:
    """Return `value` as JSON types."""
    return msgspec.to_builtins(value)


def arguments_from_wire(method: str, values: Sequence[Any]) -> list[Any]:
    """Decode the arguments of a call; raise `EngineError` for an unknown method, wrong types or a foreign file."""
    if method not in CALLS:
        raise EngineError(
            f"{method!r} is not a call of the weight channel. It must be one of {sorted(CALLS)}."
        )
    types, _ = CALLS[method]
    try:
        pairs = zip(values, types[: len(values)], strict=True)
        arguments = [msgspec.convert(value, kind) for value, kind in pairs]
    except (ValueError, TypeError) as error:
        raise EngineError(f"the arguments of {method} cannot be read: {error}") from error
    for argument in arguments:
        # The client names the path, and a worker must not map other files than arenas.
        is_arena = not isinstance(argument, Layout) or not argument.path or OPEN_FILE.fullmatch(argument.path)
        if not is_arena:
            raise EngineError(f"path={argument.path!r}: an arena must be at /proc/<process>/fd/<number>.")
    return arguments


def result_to_wire(result: CallResult) -> dict[str, Any]:
    """Encode the answer of a call, or the name and text of its error."""
    answer, error = result
    if error is not None:
        return {"error": type(error).__name__, "text": str(error)}
    return {"answer": to_wire(answer)}


def result_from_wire(method: str, value: Mapping[str, Any]) -> CallResult:
    """Decode the answer or error of a call; an error of another library becomes an `EngineError`."""
    if "error" not in value:
        return msgspec.convert(value["answer"], CALLS[method][1]), None
    kind = getattr(errors, value["error"], None)
    is_ours = isinstance(kind, type) and issubclass(kind, VectorLMError)
    return None, (kind if is_ours else EngineError)(value["text"])  # type: ignore[misc]


class Answers:
    """A file without a name to which the workers of an engine append their answers: vLLM's calls return nothing.

    It vanishes with this process. A worker opens it through this process's entry in ``/proc``.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create(MEMFD_NAME)
        self.path = path_of(self._descriptor)
        """The path at which a worker can open it."""
        self.close = weakref.finalize(self, os.close, self._descriptor)
        """Close the file."""

    def read(self, number: int) -> list[Any]:
        """Return the answers to call `number`, one per worker in an order that stays, and empty the file."""
        size = os.fstat(self._descriptor).st_size
        lines = os.pread(self._descriptor, size, 0).splitlines()
        os.truncate(self._descriptor, 0)
        # An answer to an earlier call may come late.
        of_call = [answer for answer in map(json.loads, lines) if answer[0] == number]
        return [result for _, _, result in sorted(of_call, key=lambda answer: answer[1])]


def append_answer(path: str, number: int, result: CallResult) -> None:
    """Append this worker's answer to call `number` to the trainer's file.

    Raises:
        EngineError: `path` cannot be opened here, or is not the file of an `Answers`.
    """
    line = msgspec.json.encode([number, os.getpid(), result_to_wire(result)]) + b"\n"
    try:
        if not OPEN_FILE.fullmatch(path):
            raise OSError("it must be at /proc/<process>/fd/<number>")
        with open(path, "ab", buffering=0) as file:
            if not os.readlink(f"/proc/self/fd/{file.fileno()}").startswith(f"/memfd:{MEMFD_NAME}"):
                raise OSError("it is another file")
            fcntl.flock(file, fcntl.LOCK_EX)
            while line:
                line = line[file.write(line) :]
    except OSError as error:
        raise EngineError(
            f"the trainer's file {path!r} cannot be written to ({error}). Trainer and engine must run on one "
            "machine, as one user, and in one container."
        ) from error
