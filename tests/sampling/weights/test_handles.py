"""Handles of memory in other processes, and the mapping of parameter pieces to the rows of ranks."""

import os

import hypothesis
import pytest
import torch
from hypothesis import strategies
from kit.forks import fork, kill

from vectorlm.errors import StaleHandle, WeightMismatch
from vectorlm.sampling.weights.arena import path_of
from vectorlm.sampling.weights.copy_list import CopyList, as_in_block, cut_to_box
from vectorlm.sampling.weights.exports import Export, FileHandle
from vectorlm.sampling.weights.plan import Layout, Slot, TensorSpec
from vectorlm.sampling.weights.record import LoadPlan, View


def handle_of(tensor):
    handle = FileHandle.of(tensor)
    assert torch.equal(handle.open(), tensor)
    return handle


def test_a_handle_leads_to_the_tensor_itself_in_place():
    whole = torch.arange(24.0).reshape(6, 4)
    view, rows = whole.t(), whole[2:5]
    handle = handle_of(rows)
    seen = handle.open()
    whole[3, 1] = -1.0
    assert seen[1, 1] == view[1, 3] == -1.0
    assert rows.data_ptr() == whole.data_ptr() + 2 * 4 * 4, "views moved with their storage"
    # A storage has one descriptor, even if it is exported several times.
    assert FileHandle.of(whole).path == handle.path
    half = torch.arange(8, dtype=torch.bfloat16)[3:]
    assert handle_of(half).open().tolist() == [3, 4, 5, 6, 7]


def test_a_handle_whose_tensor_is_gone_is_refused():
    tensor = torch.ones(8)
    handle = handle_of(tensor)
    del tensor
    for call in (handle.check, handle.open):
        with pytest.raises(StaleHandle):
            call()


def test_a_handle_whose_descriptor_became_another_file_is_refused():
    tensor = torch.ones(8)
    handle = handle_of(tensor)
    number = int(handle.path.rpartition("/")[2])
    other = os.memfd_create("other")
    os.truncate(other, 1 << 12)
    del tensor
    try:
        os.dup2(other, number)
        assert path_of(number) == handle.path
        for call in (handle.check, handle.open):
            with pytest.raises(StaleHandle):
                call()
    finally:
        os.close(number)
        os.close(other)


def test_the_memory_of_a_killed_rank_is_refused():
    kept = []

    def export():
        kept.append(torch.arange(6.0))
        return FileHandle.of(kept[0])

    rank, handle = fork(export)
    whole = torch.zeros(6)
    plan = LoadPlan.whole([TensorSpec("w", (6,))], lambda name: "float32")
    layout = Layout("", 64, (Slot("w", (6,), "float32", 0),))
    copies = CopyList(layout, [Export("w", (0,), handle)], plan, {"w": whole}, may_alias=True)
    copies.copy_round()
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]
    kill(rank)
    for call in (copies.copy_round, handle.open):
        with pytest.raises(StaleHandle):
            call()


def test_rows_that_no_rank_exports_are_missed():
    rows = torch.ones(2, 3)
    layout = Layout("", 64, (Slot("w", (4, 3), "float32", 0),))
    plan = LoadPlan.whole([TensorSpec("w", (4, 3))], lambda name: "float32")
    with pytest.raises(WeightMismatch, match="'w'"):
        CopyList(
            layout, [Export("w", (2, 0), handle_of(rows))], plan, {"w": torch.zeros(4, 3)}, may_alias=False
        )


@strategies.composite
def pieces(draw):
    """Return the shape of a tensor, and a view that a loader may take."""
    shape = draw(strategies.lists(strategies.integers(1, 5), min_size=1, max_size=4))
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    view = whole
    for dim, size in enumerate(shape):
        start = draw(strategies.integers(0, size - 1))
        view = view.narrow(dim, start, draw(strategies.integers(1, size - start)))
    if draw(strategies.booleans()):
        view = view[:: draw(strategies.integers(1, 3))]
    if draw(strategies.booleans()) and view.ndim > 1 and view.is_contiguous():
        view = view.flatten(0, 1)
    return shape, view.permute(draw(strategies.permutations(range(view.ndim))))


BOUNDS = strategies.lists(strategies.tuples(strategies.integers(0, 5), strategies.integers(0, 5)), min_size=4)


@hypothesis.given(pieces(), BOUNDS, strategies.booleans())
def test_a_piece_is_cut_where_a_rank_s_block_begins_and_ends(piece, bounds, are_rows):
    """A list of all elements shows the elements of a view in the block, and their places."""
    shape, view = piece
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    block, place = whole, []
    for dim, (size, (start, length)) in enumerate(zip(shape, bounds, strict=False)):
        is_cut = dim == 0 or not are_rows
        place.append(min(start, size) if is_cut else 0)
        block = block.narrow(dim, place[-1], min(length, size - place[-1]) if is_cut else size)
    held, target, count = block.clone(memory_format=torch.contiguous_format), torch.full(view.shape, -1), 0
    source = View.of(view, view.storage_offset())
    for part, inside in cut_to_box(target, source, tuple(shape), tuple(place), tuple(block.shape)):
        assert (part == -1).all(), "an element is copied twice"
        part.copy_(as_in_block(inside, tuple(shape), tuple(place), held))
        count += inside.count
    is_within = torch.isin(view, block)
    assert torch.equal(target, torch.where(is_within, view, -1))
    assert count == is_within.sum()


def test_whole_rows_are_cut_into_as_few_boxes_as_there_are_ranks():
    target, view = torch.zeros(10, 3), View((10, 3), (3, 1), 0)
    assert [part.shape[0] for part, _ in cut_to_box(target, view, (10, 3), (3, 0), (4, 3))] == [4]
    transposed, shape = View((3, 10), (1, 3), 0), (10, 3)
    parts = [part.shape for part, _ in cut_to_box(target.view(3, 10), transposed, shape, (0, 0), (3, 3))]
    assert parts == [(3, 3)]


def test_columns_of_a_run_of_whole_rows_are_one_box():
    for num_columns in (1, 2):
        lengths = (1000, num_columns)
        view = View((3000,), (1,), 0)
        parts = [part.shape for part, _ in cut_to_box(torch.zeros(3000), view, (1000, 3), (0, 1), lengths)]
        assert parts == [lengths]
