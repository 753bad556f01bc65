import torch

from vectorlm.sampling.weights.arena import find_aliases, place_slots
from vectorlm.sampling.weights.plan import TensorSpec
from vectorlm.sampling.weights.record import Copy, LoadPlan, View, join_copies

EXPERTS, COLUMNS, HIDDEN = 3, 4, 2
SHAPE = (EXPERTS, 2 * COLUMNS, HIDDEN)
HALF = COLUMNS * HIDDEN


def run(rows, offset):
    return View((rows, HIDDEN), (HIDDEN, 1), offset)


def parts(order, shift=0):
    """Copy halves of experts, source half `index` to the parameter's half `order[index]`."""
    return [
        Copy("up", run(COLUMNS, place * HALF), "w13", run(COLUMNS, order[place] * HALF + shift))
        for place in (1, 0, 2, 3, 5, 4)
    ]


def test_experts_copied_one_by_one_into_their_own_order_become_one_copy_and_a_view():
    parameters = {"w13": torch.zeros(SHAPE)}
    manifest = [TensorSpec("up", SHAPE)]
    whole = View(SHAPE, (2 * HALF, HIDDEN, 1), 0)
    joined = join_copies(parts(range(6)), manifest, parameters)
    assert joined == [Copy("up", whole, "w13", whole)]
    load_plan = LoadPlan(tuple(joined), {"w13": "float32"}, {"w13": parameters["w13"].numel()})
    num_bytes, slots = place_slots(manifest, load_plan)
    assert list(find_aliases(load_plan, slots, num_bytes)) == ["w13"]


def test_a_source_may_be_a_part_of_the_parameter():
    parameters = {"w13": torch.zeros(2 * EXPERTS, 2 * COLUMNS, HIDDEN)}
    (joined,) = join_copies(parts(range(6), shift=6 * HALF), [TensorSpec("up", SHAPE)], parameters)
    assert joined.parameter_view.offset == 6 * HALF


def test_copies_that_change_the_order_stay_as_they_are():
    swapped = parts([1, 0, 3, 2, 5, 4])
    assert join_copies(swapped, [TensorSpec("up", SHAPE)], {"w13": torch.zeros(SHAPE)}) == swapped


def test_copies_that_leave_a_gap_or_reach_two_parameters_stay_as_they_are():
    parameters = {"w13": torch.zeros(SHAPE), "other": torch.zeros(SHAPE)}
    gap = parts(range(6))[1:]
    assert join_copies(gap, [TensorSpec("up", SHAPE)], parameters) == gap
    twice = [*gap, gap[-1]]
    assert join_copies(twice, [TensorSpec("up", SHAPE)], parameters) == twice, (
        "as many elements as the source"
    )
    two = [*gap, Copy("up", run(COLUMNS, HALF), "other", run(COLUMNS, HALF))]
    assert join_copies(two, [TensorSpec("up", SHAPE)], parameters) == two


def test_transposed_copies_stay_as_they_are():
    turned = [Copy("up", View((2, 3), (1, 2), 0), "w", View((2, 3), (3, 1), 0))]
    assert join_copies(turned, [TensorSpec("up", (3, 2))], {"w": torch.zeros(2, 3)}) == turned
