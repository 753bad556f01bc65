"""One worker's side of a hot swap: take its weights over from the arena, and sum up what it holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from vectorlm.errors import WeightMismatch
from vectorlm.weights.arena import Arena
from vectorlm.weights.checksum import checksum
from vectorlm.weights.layout import find_aliases
from vectorlm.weights.plan import Layout, TensorSpec, dtype_name
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
    """Holds the running model of one worker and swaps its weights in place.

    On CPU, parameters that lie in the arena as in the model become views of it; all others are copied at each update.
    """

    def __init__(self, model: Any, packing: Packing | None = None) -> None:
        self._model = model
        self._packing = packing
        self._load_plan: LoadPlan | None = None

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

    def attach(self, layout: Layout) -> int:
        """Map the arena, and make the parameters that can be views of it views that hold the values they had.

        Returns:
            Bytes that each update will copy out of the arena; the engine computes with the rest where it lies.
        """
        assert self._load_plan is not None, "describe comes before attach"
        arena = Arena.open(layout.path, layout.num_bytes)
        parameters = dict(self._model.named_parameters())
        views = set()
        for name, offset_bytes in find_aliases(self._load_plan, layout.slots, layout.num_bytes).items():
            parameter = parameters[name]
            if parameter.device.type == "cpu" and parameter.is_contiguous():
                size = parameter.numel() * parameter.element_size()
                block = arena.bytes[offset_bytes : offset_bytes + size].view(parameter.dtype)
                parameter.data = block.view(parameter.shape).copy_(parameter)
                views.add(name)
        self._remaining = [copy for copy in self._load_plan.copies if copy.parameter not in views]
        self._sources = {slot.name: arena.view(slot) for slot in layout.slots}
        self._word_bytes = {slot.name: slot.word_bytes for slot in layout.slots}
        return sum(
            copy.source_view.count * parameters[copy.parameter].element_size() for copy in self._remaining
        )

    def load(self, version: int, with_checksums: bool) -> list[int]:
        """Make the engine compute with what the arena holds now.

        Returns:
            The checksum of the piece that each copy of the load plan filled, if asked for; else nothing.
        """
        parameters = dict(self._model.named_parameters())
        for copy in self._remaining:
            target = copy.parameter_view.on(parameters[copy.parameter].data)
            target.copy_(copy.source_view.on(self._sources[copy.source]), non_blocking=True)
        if self._packing is not None:
            self._packing.pack()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
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
            piece = parameters[copy.parameter].data
            rows, first_row = _as_source_rows(copy, piece, self._sources[copy.source])
            sums.append(checksum(rows, first_row, self._word_bytes[copy.source]))
        return sums


def _as_source_rows(copy: Copy, parameter: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the piece of the parameter that `copy` filled as rows of its source, and the first row's index.

    A loader may transpose (GPT-2's Conv1D): the piece's dimensions are put back into the source's order.
    """
    piece, strides = copy.parameter_view.on(parameter), copy.source_view.stride
    order = sorted(range(piece.ndim), key=lambda dim: -strides[dim])
    piece = piece.permute(order)
    if source.ndim == 0:
        return piece, 0
    first_row = copy.source_view.offset // source.stride(0)
    # One expert of several is a table within a single row of its source.
    lies_within_a_row = piece.ndim == 0 or strides[order[0]] < source.stride(0)
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
