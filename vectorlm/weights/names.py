"""The checkpoint tensors that a trainer's parameters stand for, where transformers names or joins them otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vectorlm.errors import WeightMismatch
from vectorlm.weights.plan import Piece


def checkpoint_pieces(
    model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[Piece, ...]]:
    """Find out which checkpoint tensors each parameter of `model` holds.

    A transformers model may hold under one name what its checkpoint holds under another, or in many tensors: the
    experts of a layer are one parameter with three dimensions, and one tensor each in the file. The model's own
    conversion, the one that ``save_pretrained`` uses, is run on tensors without data to see which piece goes where.

    Args:
        model: The trainer's model, wrapped or not; one that is not from transformers has no other names.
        shapes: The full shape of each parameter, by its name without wrappers.

    Returns:
        For each parameter that the checkpoint does not hold whole under the same name, its pieces.

    Raises:
        WeightMismatch: The checkpoint joins several parameters to one tensor, or computes with them.
    """
    inner: Any = next((each for each in model.modules() if hasattr(each, "base_model_prefix")), None)
    if inner is None:
        return {}
    from transformers.core_model_loading import revert_weight_conversion

    wholes = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owners = {whole.untyped_storage()._cdata: name for name, whole in wholes.items()}
    with _ViewsInsteadOfCopies():
        converted: Any = revert_weight_conversion(inner, dict(wholes))
    found: dict[str, list[Piece]] = {name: [] for name in shapes}
    for name, tensor in converted.items():
        owner = owners.get(tensor.untyped_storage()._cdata)
        if owner is None:
            raise WeightMismatch(
                f"the checkpoint's {name!r} is made from several of the trainer's parameters, or computed from "
                "one: it cannot be swapped directly. Train a model whose parameters are those of its checkpoint."
            )
        found[owner].append(
            Piece(name, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))
        )
    return {name: tuple(pieces) for name, pieces in found.items() if [each.name for each in pieces] != [name]}


class _ViewsInsteadOfCopies(TorchDispatchMode):
    """Makes ``contiguous()`` a no-op, so that a piece still says where in its parameter it lies."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))
