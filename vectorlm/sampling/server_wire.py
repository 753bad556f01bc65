"""Calls of a worker's receiver as plain JSON values, for engines that are reached over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vectorlm import errors
from vectorlm.errors import EngineError
from vectorlm.weights.extension import Outcome
from vectorlm.weights.layout import Intake
from vectorlm.weights.plan import Layout, TensorSpec

CALLS: Mapping[str, tuple[tuple[Any, ...], Any]] = {
    "vectorlm_prepare": ((str,), str),
    "vectorlm_describe": ((tuple[TensorSpec, ...],), Intake),
    "vectorlm_attach": ((Layout,), int),
    "vectorlm_load": ((int, bool), list[int]),
}
"""By method of `WeightExtension`: the types of its arguments, and of its answer."""


def to_wire(value: Any) -> Any:
    """Return `value` as what JSON has; `from_wire` brings it back."""
    return msgspec.to_builtins(value)


def arguments_from_wire(method: str, values: Sequence[Any]) -> list[Any]:
    """Rebuild the arguments of a call.

    Raises:
        EngineError: There is no such call, or its arguments are of other types.
    """
    if method not in CALLS:
        raise EngineError(f"{method!r} is no call of the weight channel: it must be one of {sorted(CALLS)}.")
    types, _ = CALLS[method]
    try:
        return [msgspec.convert(value, kind) for value, kind in zip(values, types, strict=True)]
    except (ValueError, TypeError) as error:
        raise EngineError(f"the arguments of {method} cannot be read: {error}") from error


def outcome_to_wire(outcome: Outcome) -> dict[str, Any]:
    """Return what a call gave: its answer, or its error by name and text."""
    answer, error = outcome
    if error is not None:
        return {"error": type(error).__name__, "text": str(error)}
    return {"answer": to_wire(answer)}


def outcome_from_wire(method: str, value: Mapping[str, Any]) -> Outcome:
    """Rebuild what a call gave; errors that are not this library's become `EngineError`."""
    if "error" not in value:
        return msgspec.convert(value["answer"], CALLS[method][1]), None
    kind = getattr(errors, value["error"], EngineError)
    return None, kind(value["text"])
