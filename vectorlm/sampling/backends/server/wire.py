"""Calls of a worker's receiver as plain JSON values, for engines that are reached over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vectorlm import errors
from vectorlm.errors import EngineError, VectorLMError
from vectorlm.ranks.engine_ranks import CallResult
from vectorlm.sampling.weights.held import Held
from vectorlm.sampling.weights.plan import Layout, TensorSpec
from vectorlm.sampling.weights.record import LoadPlan

CALLS: Mapping[str, tuple[tuple[Any, ...], Any]] = {
    "vectorlm_prepare": ((str,), str),
    "vectorlm_describe": ((str, tuple[TensorSpec, ...]), LoadPlan),
    "vectorlm_attach": ((str, Layout), int),
    "vectorlm_load": ((str, int, bool), list[int]),
    "vectorlm_empty_kv_cache": ((), None),
    "vectorlm_held": ((tuple[TensorSpec, ...],), Held),
}
"""By method of `WeightExtension`: the types of its arguments, and of its answer."""


def to_wire(value: Any) -> Any:
    """Return `value` as what JSON has; `from_wire` brings it back."""
    return msgspec.to_builtins(value)


def arguments_from_wire(method: str, values: Sequence[Any]) -> list[Any]:
    """Rebuild the arguments of a call; raise `EngineError` where there is no such call or they have other types."""
    if method not in CALLS:
        raise EngineError(
            f"{method!r} is not a call of the weight channel: it must be one of {sorted(CALLS)}."
        )
    types, _ = CALLS[method]
    try:
        return [msgspec.convert(value, kind) for value, kind in zip(values, types, strict=True)]
    except (ValueError, TypeError) as error:
        raise EngineError(f"the arguments of {method} cannot be read: {error}") from error


def result_to_wire(result: CallResult) -> dict[str, Any]:
    """Return what a call gave: its answer, or its error by name and text."""
    answer, error = result
    if error is not None:
        return {"error": type(error).__name__, "text": str(error)}
    return {"answer": to_wire(answer)}


def result_from_wire(method: str, value: Mapping[str, Any]) -> CallResult:
    """Rebuild what a call gave; errors that are not this library's become `EngineError`."""
    if "error" not in value:
        return msgspec.convert(value["answer"], CALLS[method][1]), None
    kind = getattr(errors, value["error"], None)
    is_ours = isinstance(kind, type) and issubclass(kind, VectorLMError)
    return None, (kind if is_ours else EngineError)(value["text"])  # type: ignore[misc]
