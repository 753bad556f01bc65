"""The list of copies that one worker makes at each update: which piece of a tensor comes from where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from vectorlm.errors import WeightMismatch
from vectorlm.sampling.weights.arena import Arena
from vectorlm.sampling.weights.exports import Export, Handle
from vectorlm.sampling.weights.layout import find_aliases
from vectorlm.sampling.weights.plan import Layout
from vectorlm.sampling.weights.record import Copy, LoadPlan, View


class CopyList:
    """Brings what the ranks send into the tensors of one worker, out of the arena or out of the ranks' own memory."""

    def __init__(
        self,
        layout: Layout,
        exports: Sequence[Export],
        load_plan: LoadPlan,
        tensors: Mapping[str, torch.Tensor],
        may_alias: bool,
        earlier: CopyList | None = None,
    ) -> None:
        """Map the arena of `layout`, or the `exports` if it has none, and pair pieces with their sources.

        With `may_alias`, a tensor on CPU that lies in an arena of the whole set as in `tensors` becomes a view of the
        arena and keeps its values, if nothing else uses its memory. `earlier` is the list that this one replaces.

        Raises:
            StaleHandle: What a rank exported is not there any more.
            WeightMismatch: The ranks of this node do not export the whole of a tensor.
        """
        self._arena = Arena.open(layout.path, layout.num_bytes) if layout.path else None
        self._exports = exports
        self._opened: list[tuple[Handle, torch.Tensor]] = []
        self._pairs: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        self._last_round = max((slot.round for slot in layout.slots), default=0)
        try:
            self._pair(layout, load_plan, tensors, may_alias, earlier)
        except BaseException:
            self.close()
            raise
        self._num_users = num_users(self._arena.bytes) if self._arena else 0
        self.num_bytes: int = sum(target.nbytes for pairs in self._pairs.values() for target, _ in pairs)
        """Bytes that each update copies."""

    def _pair(
        self,
        layout: Layout,
        load_plan: LoadPlan,
        tensors: Mapping[str, torch.Tensor],
        may_alias: bool,
        earlier: CopyList | None,
    ) -> None:
        slots = {slot.name: slot for slot in layout.slots}
        views = set()
        own = earlier and earlier.unseen_storage()
        if self._arena is not None and may_alias and len(layout.rounds()) == 1:
            for name, start in find_aliases(load_plan, layout.slots, layout.num_bytes).items():
                tensor = tensors[name]
                is_alone = num_users(tensor) == 1 or tensor.untyped_storage()._cdata == own
                if tensor.device.type == "cpu" and tensor.is_contiguous() and is_alone:
                    block = self._arena.bytes[start : start + tensor.nbytes].view(tensor.dtype)
                    tensor.data = block.view(tensor.shape).copy_(tensor)
                    views.add(name)
        rows: dict[str, list[tuple[int, torch.Tensor]]] = defaultdict(list)
        for export in self._exports:
            opened = export.handle.open()
            self._opened.append((export.handle, opened))
            rows[export.name].append((export.first_row, opened))
        for copy in load_plan.copies:
            if copy.parameter not in views:
                slot = slots[copy.source]
                target = copy.parameter_view.on(tensors[copy.parameter].data)
                if self._arena is not None:
                    pairs = [(target, copy.source_view.on(self._arena.view(slot)))]
                else:
                    pairs = _pull(copy, target, slot.row_size, rows[copy.source])
                self._pairs[slot.round] += pairs

    def unseen_storage(self) -> int | None:
        """Return the storage of this arena, or None if anything has taken a view of it since it was laid out."""
        if self._arena is None or num_users(self._arena.bytes) != self._num_users:
            return None
        return self._arena.bytes.untyped_storage()._cdata

    def copy_round(self, number: int | None = None) -> None:
        """Copy what crosses in one round, the last one when omitted; raises `StaleHandle`."""
        for export in self._exports:
            export.handle.check()
        for target, source in self._pairs.get(self._last_round if number is None else number, ()):
            target.copy_(source, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def close(self) -> None:
        """Let go of the arena and of the ranks' memory; what is a view of the arena keeps that."""
        self._pairs.clear()
        while self._opened:
            handle, opened = self._opened.pop()
            handle.close(opened)
        if self._arena is not None:
            self._arena.close()


def num_users(tensor: torch.Tensor) -> int:
    """Return how many tensors of this process lie in the memory of `tensor`, itself included.

    A buffer, an attribute or a kernel that holds a view of a parameter would keep the old memory if the parameter got
    other memory, as the convolution of Mamba-2 does. torch counts the users, so nobody has to know where they are.
    """
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # `storage` is one more


def _pull(
    copy: Copy, target: torch.Tensor, row_size: int, held: Sequence[tuple[int, torch.Tensor]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair the pieces of `target` with their places in the rows that the ranks hold, each after its first row."""
    pairs = []
    count = 0
    for first_row, rows in held:
        own = range(first_row, first_row + len(rows))
        for part, view in cut_to_rows(target, copy.source_view, own, row_size):
            count += view.count
            pairs.append((part, replace(view, offset=view.offset - first_row * row_size).on(rows)))
    if count != copy.source_view.count:
        raise WeightMismatch(
            f"the ranks of this node export {count} of the {copy.source_view.count} numbers of {copy.source!r} "
            "that this engine takes."
        )
    return pairs


def cut_to_rows(
    target: torch.Tensor, view: View, rows: range, row_size: int
) -> Iterator[tuple[torch.Tensor, View]]:
    """Yield the parts of a copy from `view` to `target`, shaped alike, that lie in `rows` of the view's tensor.

    Rows have `row_size` elements. A part is a box: the view is cut in two along the dimension with the largest steps,
    where a boundary of `rows` falls, until each part lies on one side.
    """
    first_row, last_row = view.offset // row_size, (view.span.stop - 1) // row_size
    if not view.count or last_row < rows.start or first_row >= rows.stop:
        return
    if rows.start <= first_row and last_row < rows.stop:
        yield target, view
        return
    boundary = rows.start if first_row < rows.start else rows.stop
    dim = max(range(len(view.shape)), key=lambda each: view.stride[each] if view.shape[each] > 1 else -1)
    # Where the inner dimensions reach over the boundary, the last step before it is cut further.
    length = view.shape[dim]
    at = min(-((view.offset - boundary * row_size) // view.stride[dim]), length - 1)
    for start, end in ((0, at), (at, length)):
        part = target.narrow(dim, start, end - start)
        yield from cut_to_rows(part, view.narrow(dim, start, end - start), rows, row_size)
