"""Copy weights out of the arena, or out of the ranks' memory, into the tensors of an engine."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from vectorlm.errors import ChecksumMismatch, EngineError, WeightMismatch
from vectorlm.sampling.weights.arena import Arena, find_aliases, plain_slots
from vectorlm.sampling.weights.exports import Export, FileHandle, Handle
from vectorlm.sampling.weights.inspection import checksum
from vectorlm.sampling.weights.plan import Layout, Slot, TensorSpec, dtype_name, shortened
from vectorlm.sampling.weights.record import Copy, LoadPlan, View


class CopyList:
    """The copies that one worker makes at each update."""

    def __init__(
        self,
        layout: Layout,
        exports: Sequence[Export],
        load_plan: LoadPlan,
        tensors: Mapping[str, torch.Tensor],
        may_alias: bool,
        earlier: CopyList | None = None,
    ) -> None:
        """Map the arena of `layout`, or the `exports` if it has none, and pair target pieces with their sources.

        With `may_alias`, a CPU tensor becomes a view of the arena and keeps its values. This needs a tensor that is one
        block there, an arena of one round, and no other user of the tensor's memory. `earlier` is the list that this
        one replaces.

        Raises:
            StaleHandle: The memory that a rank exported is gone.
            WeightMismatch: The ranks of this node do not export the whole of a tensor.
        """
        self._arena = Arena.open(layout.path, layout.num_bytes) if layout.path else None
        self._exports = exports
        self._opened: list[tuple[Handle, torch.Tensor]] = []
        self._batches: dict[int, list[tuple[list[torch.Tensor], list[torch.Tensor]]]] = {}
        """By round: targets and their sources, in batches that torch copies with few kernels."""
        self._last_round = max((slot.round for slot in layout.slots), default=0)
        try:
            # A separate method, because its local views must be gone before `num_users` counts.
            pairs_by_round = self._pair(layout, load_plan, tensors, may_alias, earlier)
        except BaseException:
            self.close()
            raise
        self._batches = {number: _in_batches(pairs) for number, pairs in pairs_by_round.items()}
        self._num_users = num_users(self._arena.bytes) if self._arena else 0
        self.num_bytes: int = sum(target.nbytes for pairs in pairs_by_round.values() for target, _ in pairs)
        """Bytes that each update copies."""

    def _pair(
        self,
        layout: Layout,
        load_plan: LoadPlan,
        tensors: Mapping[str, torch.Tensor],
        may_alias: bool,
        earlier: CopyList | None,
    ) -> Mapping[int, Sequence[tuple[torch.Tensor, torch.Tensor]]]:
        """Return targets and sources by round."""
        by_round: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        slots = {slot.name: slot for slot in layout.slots}
        views = set()
        own = earlier and earlier.unseen_storage()
        if self._arena is not None and may_alias and len(layout.rounds) == 1:
            for name, start in find_aliases(load_plan, layout.slots, layout.num_bytes).items():
                tensor = tensors[name]
                is_alone = num_users(tensor) == 1 or tensor.untyped_storage()._cdata == own
                if tensor.device.type == "cpu" and tensor.is_contiguous() and is_alone:
                    block = self._arena.bytes[start : start + tensor.nbytes].view(tensor.dtype)
                    tensor.data = block.view(tensor.shape).copy_(tensor)
                    views.add(name)
        exported: dict[str, list[tuple[tuple[int, ...], torch.Tensor]]] = defaultdict(list)
        for export in self._exports:
            opened = export.handle.open()
            self._opened.append((export.handle, opened))
            exported[export.name].append((export.place, opened))
        for copy in load_plan.copies:
            if copy.parameter not in views:
                slot = slots[copy.source]
                target = copy.parameter_view.on(tensors[copy.parameter].data)
                if self._arena is not None:
                    pairs = [(target, copy.source_view.on(self._arena.view(slot)))]
                else:
                    pairs = _pull(copy, target, slot.shape or (1,), exported[copy.source])
                by_round[slot.round] += pairs
        return by_round

    def unseen_storage(self) -> int | None:
        """Return the storage of this arena; None if anything else has taken a view of it since the constructor."""
        if self._arena is None or num_users(self._arena.bytes) != self._num_users:
            return None
        return self._arena.bytes.untyped_storage()._cdata

    def handle_of(self, tensor: torch.Tensor) -> FileHandle | None:
        """Return the handle of a view of the arena; None for other tensors."""
        arena = self._arena
        if arena is None or tensor.untyped_storage()._cdata != arena.bytes.untyped_storage()._cdata:
            return None
        return FileHandle.in_arena(arena, tensor)

    def copy_round(self, number: int | None = None) -> None:
        """Copy the tensors of one round, of the last round if omitted; raises `StaleHandle`."""
        for export in self._exports:
            export.handle.check()
        for targets, sources in self._batches.get(self._last_round if number is None else number, ()):
            torch._foreach_copy_(targets, sources, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def close(self) -> None:
        """Close the arena and the ranks' memory; views of the arena stay valid."""
        self._batches.clear()
        while self._opened:
            handle, opened = self._opened.pop()
            handle.close(opened)
        if self._arena is not None:
            self._arena.close()


def _in_batches(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Sort pairs of target and source; on CUDA torch copies pairs of equal dtypes and dense layout together."""
    batches: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in pairs:
        is_dense = target.is_contiguous() and source.is_contiguous()
        targets, sources = batches[target.device, source.device, target.dtype, source.dtype, is_dense]
        targets.append(target)
        sources.append(source)
    return [*batches.values()]


def num_users(tensor: torch.Tensor) -> int:
    """Count the tensors of this process that share the memory of `tensor`, itself included.

    A buffer, attribute or kernel with a view of a parameter would keep the old memory if the parameter got new memory;
    the convolution of Mamba-2 does. torch counts all of them.
    """
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # without `storage` itself


def _pull(
    copy: Copy,
    target: torch.Tensor,
    shape: tuple[int, ...],
    exported: Sequence[tuple[tuple[int, ...], torch.Tensor]],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair the pieces of `target` with their sources in the `exported` blocks (place, block) of a tensor."""
    pairs = []
    count = 0
    for place, block in exported:
        for part, view in cut_to_box(target, copy.source_view, shape, place, tuple(block.shape)):
            count += view.count
            pairs.append((part, as_in_block(view, shape, place, block)))
    if count != copy.source_view.count:
        raise WeightMismatch(
            f"the ranks of this node export {count} of the {copy.source_view.count} elements of {copy.source!r} that "
            "this engine takes."
        )
    return pairs


def as_in_block(
    view: View, shape: tuple[int, ...], place: tuple[int, ...], block: torch.Tensor
) -> torch.Tensor:
    """Return a view of a whole tensor, all of whose elements are in a block of it, as a view of the block."""

    def moved(distance: int, start: tuple[int, ...]) -> int:
        total = 0
        for dim, first in enumerate(start):
            steps, distance = divmod(distance, math.prod(shape[dim + 1 :]))
            total += (steps - first) * block.stride(dim)
        return total

    at_start = (0,) * len(shape)
    stride = tuple(moved(step, at_start) for step in view.stride)
    return block.as_strided(view.shape, stride, int(block.storage_offset()) + moved(view.offset, place))


def cut_to_box(
    target: torch.Tensor,
    view: View,
    shape: tuple[int, ...],
    place: tuple[int, ...],
    lengths: tuple[int, ...],
) -> Iterator[tuple[torch.Tensor, View]]:
    """Yield the parts of a copy from `view` to `target`, of equal shape, that are in a box of the view's tensor.

    The tensor has the shape `shape`, and the box begins at `place` and has `lengths`.
    """
    parts = [(target, view)]
    for dim, (start, length) in enumerate(zip(place, lengths, strict=True)):
        if length < shape[dim]:
            wanted, step = range(start, start + length), math.prod(shape[dim + 1 :])
            parts = [found for part in parts for found in _cut_along(*part, wanted, step, step * shape[dim])]
    yield from parts


def _cut_along(
    target: torch.Tensor, view: View, wanted: range, step: int, period: int
) -> Iterator[tuple[torch.Tensor, View]]:
    """Yield the parts of a copy whose indices along one dimension of the tensor are in `wanted`.

    That dimension has a stride of `step` elements, and begins again after `period` elements. The view is cut in two at
    a boundary, along its dimension with the largest stride, until every part is on one side.
    """
    inner = [dim for dim, stride in enumerate(view.stride) if stride % period and view.shape[dim] > 1]
    start = view.offset % period
    end = start + sum((view.shape[dim] - 1) * view.stride[dim] for dim in inner)
    boundary = period
    if not view.count:
        return
    if end < period:
        if end // step < wanted.start or start // step >= wanted.stop:
            return
        if wanted.start <= start // step and end // step < wanted.stop:
            yield target, view
            return
        boundary = step * (wanted.start if start // step < wanted.start else wanted.stop)
    dim = max(inner, key=lambda dim: view.stride[dim])
    length, stride = view.shape[dim], view.stride[dim]
    per_period = period // stride
    if end >= period and start < stride and period % stride == 0 and length > per_period:
        # The view continues in the next period: give it a dimension for the periods.
        rest = length % per_period
        at = length - rest
        folded = View(
            (*view.shape[:dim], at // per_period, per_period, *view.shape[dim + 1 :]),
            (*view.stride[:dim], period, stride, *view.stride[dim + 1 :]),
            view.offset,
        )
        part = target.narrow(dim, 0, at).unflatten(dim, (at // per_period, per_period))
        yield from _cut_along(part, folded, wanted, step, period)
        ends = [(at, length)] if rest else []
    else:
        # If the inner dimensions cross the boundary, the last step before it is cut again.
        at = min(-((start - boundary) // stride), length - 1)
        ends = [(0, at), (at, length)]
    for first, last in ends:
        part = target.narrow(dim, first, last - first)
        yield from _cut_along(part, view.narrow(dim, first, last - first), wanted, step, period)


class PlainWeights:
    """The `connect` and `load` of a `vectorlm.sampling.contract.Backend` of plain torch: every tensor is copied."""

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._slots: tuple[Slot, ...] = ()

    def connect(
        self,
        manifest: Sequence[TensorSpec],
        arena_path: str | None,
        weight_set: str,
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> Layout:
        """Give every tensor of `manifest` a slot, in the dtype of the tensor of that name in `tensors`, or float32."""
        if weight_set != "base":
            raise EngineError("lora_mode='adapter' does not work with this backend. Use lora_mode='merged'.")
        dtypes = (
            {} if tensors is None else {name: dtype_name(tensor.dtype) for name, tensor in tensors.items()}
        )
        num_bytes, slots = plain_slots(manifest, lambda name: dtypes.get(name, "float32"))
        self.close()
        self._arena = Arena.open(arena_path, num_bytes) if arena_path else Arena.create(num_bytes)
        self._slots = slots
        return Layout(arena_path or self._arena.path, num_bytes, slots, num_bytes)

    def load(
        self, checksums: Sequence[int] | None, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> float:
        """Copy the arena into `tensors`, compare with `checksums` if given, and return the seconds it took."""
        assert self._arena is not None, "connect comes before load"
        start = time.perf_counter()
        loaded = {slot.name: self._arena.view(slot) for slot in self._slots}
        if tensors is not None:
            for name, sent in loaded.items():
                tensors[name].data.copy_(sent)
            loaded = {name: tensors[name].data for name in loaded}
        if checksums is not None:
            wrong = [
                slot.name
                for slot, expected in zip(self._slots, checksums, strict=True)
                if checksum(loaded[slot.name], word_bytes=slot.word_bytes) != expected
            ]
            if wrong:
                raise ChecksumMismatch(
                    f"after the update {len(wrong)} of {len(loaded)} tensors differ from what the trainer sent: "
                    f"{shortened(wrong)}."
                )
        return time.perf_counter() - start

    def close(self) -> None:
        """Close the arena."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None
