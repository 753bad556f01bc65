"""One worker's side of a hot swap: take its weights over from the ranks, and sum up what it holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from vectorlm.errors import WeightMismatch
from vectorlm.weights.checksum import checksums, row_sums
from vectorlm.weights.exports import Export
from vectorlm.weights.inlet import Inlet
from vectorlm.weights.plan import Layout, Slot, TensorSpec, dtype_name
from vectorlm.weights.record import Copy, LoadPlan, join_copies, record_loading


class Packing(Protocol):
    """A second copy of a model's weights, in the order that an engine's kernels compute with."""

    def pack(self) -> None:
        """Make the copy again from the plain weights."""
        ...

    def check(self, seed: int) -> None:
        """Raise `ChecksumMismatch` if the copy differs from the plain weights; `seed` chooses what is probed."""
        ...


class Receiver:
    """Holds the running model of one worker and swaps its weights in place."""

    def __init__(self, model: Any, packing: Packing | None = None) -> None:
        self._model = model
        self._packing = packing
        self._load_plan: LoadPlan | None = None
        self.inlet: Inlet | None = None
        """Copies what the ranks send, since `attach`."""

    def describe(self, manifest: Sequence[TensorSpec]) -> LoadPlan:
        """Match the trainer's tensors with this worker's parameters; say what it takes of them."""
        parameters = dict(self._model.named_parameters())
        recorded = record_loading(self._model.load_weights, parameters, manifest)
        copies = join_copies(recorded, manifest, parameters)
        _require_all_filled(self._model, copies)
        self._load_plan = LoadPlan(
            tuple(copies),
            {name: dtype_name(parameter.dtype) for name, parameter in parameters.items()},
            {name: parameter.numel() for name, parameter in parameters.items()},
        )
        return self._load_plan

    def attach(self, layout: Layout, exports: Sequence[Export] = ()) -> int:
        """Open the arena, or what the ranks export, for the parameters; no value changes.

        Returns:
            Bytes that each update will copy; the engine computes with the rest where it lies.
        """
        assert self._load_plan is not None, "describe comes before attach"
        earlier, parameters = self.inlet, dict(self._model.named_parameters())
        self.inlet = Inlet(layout, exports, self._load_plan, parameters, may_alias=True)
        self._slots = {slot.name: slot for slot in layout.slots}
        if earlier is not None:
            earlier.close()
        return self.inlet.num_bytes

    def load(self, version: int, with_checksums: bool) -> list[int]:
        """Copy the last round, and make the engine compute with what it holds then.

        Returns:
            The checksum of the piece that each copy of the load plan filled, if asked for; else nothing.
        """
        assert self.inlet is not None, "attach comes before load"
        self.inlet.copy_round()
        if self._packing is not None:
            self._packing.pack()
        if not with_checksums:
            return []
        sums = self._checksums()
        if self._packing is not None:
            self._packing.check(seed=version)
        return sums

    def _checksums(self) -> list[int]:
        """Sum the parameters themselves, not the arena: a parameter that lost its alias must not pass."""
        assert self._load_plan is not None
        parameters = dict(self._model.named_parameters())
        sums = []
        for copy in self._load_plan.copies:
            slot = self._slots[copy.source]
            rows, first_row = _as_source_rows(copy, parameters[copy.parameter].data, slot)
            sums.append((row_sums(rows, slot.word_bytes), first_row))
        return checksums(sums)


def _as_source_rows(copy: Copy, parameter: torch.Tensor, source: Slot) -> tuple[torch.Tensor, int]:
    """Return the piece of the parameter that `copy` filled as rows of its source, and the first row's index.

    A loader may transpose (GPT-2's Conv1D): the piece's dimensions are put back into the source's order.
    """
    piece, strides = copy.parameter_view.on(parameter), copy.source_view.stride
    order = sorted(range(piece.ndim), key=lambda dim: -strides[dim])
    piece = piece.permute(order)
    if not source.shape:
        return piece, 0
    first_row = copy.source_view.offset // source.row_size
    # One expert of several is a table within a single row of its source.
    lies_within_a_row = piece.ndim == 0 or strides[order[0]] < source.row_size
    return piece.unsqueeze(0) if lies_within_a_row else piece, first_row


def _require_all_filled(model: torch.nn.Module, copies: Sequence[Copy]) -> None:
    filled: dict[str, int] = defaultdict(int)
    for copy in copies:
        filled[copy.parameter] += copy.parameter_view.count
    parameters = dict(model.named_parameters())
    missing = [
        name
        for name, parameter in parameters.items()
        if filled[name] < parameter.numel() - _padding(model, name, parameter)
    ]
    if missing:
        raise WeightMismatch(
            f"the engine expects {len(parameters)} parameters, but the trainer's tensors leave {len(missing)} of them "
            f"unfilled, whole or in part: {missing}."
        )


def _padding(model: torch.nn.Module, name: str, parameter: torch.Tensor) -> int:
    """Count the elements that an engine adds to a vocabulary table to round its size up; no checkpoint fills them."""
    owner: Any = model.get_submodule(name.rpartition(".")[0])
    if not hasattr(owner, "shard_indices"):
        return 0
    rows: int = owner.shard_indices.org_vocab_end_index - owner.shard_indices.org_vocab_start_index
    return (parameter.shape[0] - rows) * parameter[0].numel()
