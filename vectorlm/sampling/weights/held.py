"""What a running engine holds of a model's tensors, by checksums, whoever loaded them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vectorlm.errors import ChecksumMismatch
from vectorlm.sampling.weights.inspection import checksum
from vectorlm.sampling.weights.plan import Slot, TensorSpec, dtype_of, shortened
from vectorlm.sampling.weights.receive import HeldPieces, loaded_tensors, match_tensors, piece_sums
from vectorlm.sampling.weights.record import LoadPlan


@dataclass(frozen=True)
class Held:
    """What one worker of an engine holds of the tensors that it was asked about."""

    load_plan: LoadPlan
    """Where its loader puts them."""
    sums: tuple[int, ...]
    """For each copy of the plan, the checksum of what lies there now, in words of one number."""
    others: tuple[str, ...]
    """The parameters that none of them fills, but for a head that is tied to the embedding table and equal to it."""


def held_by(model: Any, manifest: Sequence[TensorSpec]) -> Held:
    """Sum what the worker's `model` holds of the tensors in `manifest`; nothing changes.

    Raises:
        WeightMismatch: It is another model: its loader rejects a name or a shape.
    """
    parameters = loaded_tensors(model)
    load_plan, unfilled = match_tensors(model, manifest)
    shapes, slots = {spec.name: spec.shape for spec in manifest}, {}
    for copy in load_plan.copies:
        dtype = load_plan.dtypes[copy.parameter]
        slots[copy.source] = Slot(copy.source, shapes[copy.source], dtype, 0, dtype_of(dtype).itemsize)
    sums = piece_sums(load_plan.copies, parameters, slots)
    others = [name for name in unfilled if not _is_tied(model, parameters, load_plan, name)]
    return Held(load_plan, tuple(sums), tuple(others))


def _is_tied(model: Any, parameters: Mapping[str, torch.Tensor], load_plan: LoadPlan, name: str) -> bool:
    """Whether a parameter that no tensor fills is a head with the numbers of the embedding table, as it must have."""
    config = getattr(model, "config", None)
    if not (name.endswith("lm_head.weight") and getattr(config, "tie_word_embeddings", False)):
        return False
    head = parameters[name]
    tables = {copy.parameter for copy in load_plan.copies if copy.parameter.endswith("embed_tokens.weight")}
    return any(torch.equal(parameters[table], head) for table in tables)


def require_held(
    manifest: Sequence[TensorSpec], expected: Callable[[str, str], int | None], held: Sequence[Held]
) -> dict[str, str]:
    """Compare a model's tensors with what the workers of an engine hold; return the dtype of each tensor there.

    Args:
        manifest: The tensors that the workers were asked about.
        expected: Returns the checksum of the whole tensor of a name in a dtype, in words of one number.
        held: Each worker's answer.

    Raises:
        WeightMismatch: No worker uses a tensor, or a part of one.
        ChecksumMismatch: The engine computes with other numbers; the text names the tensors.
    """
    dtypes = {
        copy.source: each.load_plan.dtypes[copy.parameter] for each in held for copy in each.load_plan.copies
    }
    manifest = [spec for spec in manifest if not spec.is_buffer or spec.name in dtypes]
    pieces = HeldPieces(manifest, [each.load_plan for each in held])
    totals = [expected(spec.name, dtypes[spec.name]) for spec in manifest]
    wrong = pieces.wrong(totals, [each.sums for each in held])
    if wrong or any(each.others for each in held):
        others = sorted({name for each in held for name in each.others})
        found = []
        if wrong:
            found.append(
                f"{len(wrong)} of {len(manifest)} tensors have other numbers there: {shortened(wrong)}"
            )
        if others:
            found.append(f"it computes with parameters that none of them fills: {shortened(others)}")
        raise ChecksumMismatch(f"the engine does not hold these weights: {'; '.join(found)}.")
    return dtypes


def sum_of(tensor: torch.Tensor, dtype: str) -> int:
    """Return the checksum of a whole tensor as an engine holds it in `dtype`, in words of one number."""
    there = tensor.detach().to(dtype_of(dtype))
    return checksum(there, word_bytes=there.element_size())
