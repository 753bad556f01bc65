from types import SimpleNamespace

import pytest
import torch
from receivers_here import receivers_of, send

from vectorlm.errors import ChecksumMismatch, WeightMismatch
from vectorlm.sampling.weights.arena import find_aliases, place_slots
from vectorlm.sampling.weights.plan import Piece, Slot, TensorSpec
from vectorlm.sampling.weights.receive import PieceMap, WorkerReceiver
from vectorlm.sampling.weights.record import Copy, LoadPlan, View, join_copies, record_loading

HIDDEN, Q, KV = 4, 6, 2


def fused_model():
    """Return parameters as in an engine: fused q, k, v, and a vocabulary padded from 5 rows to 8."""
    return {
        "qkv": torch.zeros(Q + 2 * KV, HIDDEN),
        "embed": torch.zeros(8, HIDDEN),
        "columns": torch.zeros(3, HIDDEN // 2),
    }


def loader_of(parameters):
    starts = {"q": (0, Q), "k": (Q, KV), "v": (Q + KV, KV)}

    def load(weights):
        for name, tensor in weights:
            if name in starts:
                start, rows = starts[name]
                assert tensor.shape == (rows, HIDDEN)
                parameters["qkv"].narrow(0, start, rows).copy_(tensor)
            elif name == "embed":
                parameters["embed"][: len(tensor)].data.copy_(tensor)
                parameters["embed"][len(tensor) :].data.fill_(0)
            elif name == "columns":
                parameters["columns"].copy_(tensor.narrow(1, 2, 2))
            else:
                raise KeyError(name)

    return load


MANIFEST = [
    TensorSpec("k", (KV, HIDDEN)),
    TensorSpec("q", (Q, HIDDEN)),
    TensorSpec("embed", (5, HIDDEN)),
    TensorSpec("v", (KV, HIDDEN)),
]


def test_the_loaders_own_slices_are_recorded_and_no_weight_changes():
    parameters = fused_model()
    copies = record_loading(loader_of(parameters), parameters, MANIFEST).copies
    assert copies[0] == Copy(
        "k", View((KV, HIDDEN), (HIDDEN, 1), 0), "qkv", View((KV, HIDDEN), (HIDDEN, 1), Q * HIDDEN)
    )
    assert [copy.source for copy in copies] == ["k", "q", "embed", "v"]
    assert all(bool((parameter == 0).all()) for parameter in parameters.values())


def test_recorded_copies_do_what_the_loader_does():
    loaded, replayed = fused_model(), fused_model()
    sources = {spec.name: torch.randn(spec.shape) for spec in MANIFEST}
    loader_of(loaded)(sources.items())
    for copy in record_loading(loader_of(replayed), replayed, MANIFEST).copies:
        copy.parameter_view.on(replayed[copy.parameter]).copy_(copy.source_view.on(sources[copy.source]))
    assert all(torch.equal(loaded[name], replayed[name]) for name in loaded)


def load_plan_of(parameters, manifest):
    copies = record_loading(loader_of(parameters), parameters, manifest).copies
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    return LoadPlan(tuple(copies), dict.fromkeys(parameters, "float32"), sizes)


def test_a_fused_parameter_becomes_one_block_of_the_arena():
    load_plan = load_plan_of(fused_model(), MANIFEST)
    num_bytes, slots = place_slots(MANIFEST, load_plan)
    offsets = {slot.name: slot.offset_bytes for slot in slots}
    assert offsets["k"] - offsets["q"] == Q * HIDDEN * 4
    assert offsets["v"] - offsets["k"] == KV * HIDDEN * 4
    assert find_aliases(load_plan, slots, num_bytes) == {"qkv": offsets["q"], "embed": offsets["embed"]}


def test_a_tensor_that_only_a_later_worker_holds_is_refused():
    stages = [load_plan_of(fused_model(), half) for half in (MANIFEST[:2], MANIFEST[2:])]
    PieceMap(MANIFEST, stages)
    with pytest.raises(WeightMismatch, match="'embed'"):
        place_slots(MANIFEST, stages[0])


def test_rows_that_round_a_table_up_never_become_a_view_of_the_next_tensor():
    # The second of two workers has rows 4 to 6 of the table and two padding rows.
    rows, rounded = View((2, HIDDEN), (HIDDEN, 1), 4 * HIDDEN), View((2, HIDDEN), (HIDDEN, 1), 0)
    load_plan = LoadPlan(
        (Copy("embed", rows, "embed", rounded),), {"embed": "float32"}, {"embed": 4 * HIDDEN}
    )
    table, neighbour = Slot("embed", (6, HIDDEN), "float32", 0), Slot("next", (6, HIDDEN), "float32", 96)
    assert find_aliases(load_plan, [table, neighbour], 192) == {}
    assert find_aliases(load_plan, [table], 192) == {"embed": 64}
    assert find_aliases(load_plan, [table], 96) == {}


def test_a_tensor_that_is_used_in_part_is_refused():
    columns = [TensorSpec("columns", (3, HIDDEN))]
    # The loader keeps two of four columns, and no worker takes the others.
    with pytest.raises(WeightMismatch, match=r"columns \(3, 4\)"):
        PieceMap(columns, [load_plan_of(fused_model(), columns)])


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (TensorSpec("nobody", (1,)), r"'nobody'.*KeyError"),
        (TensorSpec("q", (5, HIDDEN)), r"'q' .*\(5, 4\)"),
    ],
    ids=["unknown name", "wrong shape"],
)
def test_a_tensor_that_the_loader_cannot_copy_is_refused_by_name(spec, text):
    parameters = fused_model()
    with pytest.raises(WeightMismatch, match=text):
        record_loading(loader_of(parameters), parameters, [spec])


def negative_exponential_in_place(model, tensor):
    model.weight.data.copy_(tensor)
    model.weight.data.copy_(-torch.exp(model.weight.data))


def scaled_in_place(model, tensor):
    model.weight.data.copy_(tensor)
    model.weight.data[1:].mul_(2)


def computed_into_its_own_memory(model, tensor):
    model.weight.data.copy_(tensor)
    torch.exp(model.weight.data, out=model.weight.data)


def computed_before_it_is_copied(model, tensor):
    model.weight.data.copy_(-torch.exp(tensor))


def spoils_what_it_is_given(model, tensor):
    model.weight.data.copy_(tensor)
    model.weight.data.add_(1)
    tensor.zero_()


def computed_into_a_number(model, tensor):
    model.weight.data.copy_(tensor)
    model.norm = model.weight.data.norm().item()


def computed_into_an_attribute(model, tensor):
    model.weight.data.copy_(tensor)
    model.inverse = 1 / model.weight.data


def computed_into_a_buffer(model, tensor):
    model.weight.data.copy_(tensor)
    model.largest.fill_(model.weight.max())


def copied_on(model, tensor):
    model.weight.data.copy_(tensor)
    model.second.data.copy_(model.weight.data)


class LoadsOddly(torch.nn.Module):
    def __init__(self, load):
        super().__init__()
        self.weight, self.second = (torch.nn.Parameter(torch.arange(6.0).view(2, 3)) for _ in range(2))
        self.register_buffer("largest", torch.zeros(()), persistent=False)
        self._load = load

    def load_weights(self, weights):
        for _, tensor in weights:
            self._load(self, tensor)


COMPUTING = [
    negative_exponential_in_place,
    scaled_in_place,
    computed_into_its_own_memory,
    computed_before_it_is_copied,
    copied_on,
    spoils_what_it_is_given,
]
KEEPING = [computed_into_an_attribute, computed_into_a_buffer, computed_into_a_number]


@pytest.mark.parametrize("load", COMPUTING)
def test_a_loader_that_computes_runs_at_every_update_and_again_for_the_proof(load):
    manifest = [TensorSpec("weight", (2, 3))]
    engine, fresh = LoadsOddly(load), LoadsOddly(load)
    if load is not copied_on:
        del engine.second, fresh.second
    before = {name: parameter.clone() for name, parameter in engine.named_parameters()}
    receiver = receivers_of(engine)
    layout = receiver.connect(manifest, None, "base")
    assert all(torch.equal(parameter, before[name]) for name, parameter in engine.named_parameters())
    for number in range(2):
        sent, sums = send(layout)
        fresh.load_weights([("weight", sent["weight"].clone())])
        receiver.load(number, sums, ["base"])
        assert all(
            torch.equal(ours, theirs)
            for ours, theirs in zip(engine.parameters(), fresh.parameters(), strict=True)
        )
    with pytest.raises(ChecksumMismatch, match="weight"):
        receiver.load(2, [sums[0] + 1], ["base"])


def test_a_source_that_this_worker_changes_and_does_not_take_is_no_part_of_its_plan():
    parameters = {"weight": torch.zeros(2)}
    found = record_loading(
        lambda weights: [tensor.mul_(2) for _, tensor in weights], parameters, [TensorSpec("weight", (2,))]
    )
    assert (found.copies, found.computed) == ([], {})


def test_a_parameter_that_is_laid_down_in_another_order_is_compared_too():
    engine = LoadsOddly(negative_exponential_in_place)
    del engine.second
    engine.weight.data = torch.zeros(3, 2).t()
    receiver = receivers_of(engine)
    layout = receiver.connect([TensorSpec("weight", (2, 3))], None, "base")
    sent, sums = send(layout)
    receiver.load(0, sums, ["base"])
    assert torch.equal(engine.weight, -torch.exp(sent["weight"]))


def test_a_result_that_changes_after_the_loader_made_it_is_named():
    engine = LoadsOddly(negative_exponential_in_place)
    del engine.second
    owner_of_arena = receivers_of(engine)
    layout = owner_of_arena.connect([TensorSpec("weight", (2, 3))], None, "base")
    receiver = WorkerReceiver(engine)
    receiver.describe([TensorSpec("weight", (2, 3))])
    receiver.attach(layout)
    receiver.load()
    receiver.require_computed()
    engine.weight.data[1, 2] += 1e-3
    with pytest.raises(ChecksumMismatch, match="weight"):
        receiver.require_computed()


@pytest.mark.parametrize("load", KEEPING)
def test_a_loader_that_keeps_what_it_computes_elsewhere_is_refused_and_changes_no_parameter(load):
    model = LoadsOddly(load)
    with pytest.raises(WeightMismatch, match="'weight'"):
        record_loading(model.load_weights, dict(model.named_parameters()), [TensorSpec("weight", (2, 3))])
    assert torch.equal(model.weight, torch.arange(6.0).view(2, 3))
    assert model.largest == 0


def test_a_loader_that_computes_with_two_sources_is_refused():
    parameters = {name: torch.zeros(2) for name in ("first", "second", "sum")}

    def load(weights):
        for name, tensor in weights:
            parameters[name].copy_(tensor)
            parameters["sum"].copy_(parameters["first"] + parameters["second"])

    with pytest.raises(WeightMismatch, match="one tensor at a time"):
        record_loading(load, parameters, [TensorSpec("first", (2,)), TensorSpec("second", (2,))])


def test_a_piece_that_is_laid_down_in_another_order_first_is_one_copy():
    parameters = {"weight": torch.zeros(3, 2)}

    def load(weights):
        for _, tensor in weights:
            parameters["weight"].copy_(tensor[:, :].permute(1, 0).contiguous())

    found = record_loading(load, parameters, [TensorSpec("weight", (2, 3))])
    assert found.copies == [Copy("weight", View((3, 2), (1, 3), 0), "weight", View((3, 2), (2, 1), 0))]
    assert found.computed == {}


def test_what_a_loader_writes_before_it_copies_changes_nothing():
    def load(model, tensor):
        model.weight.data.zero_()
        model.weight.data.copy_(tensor)
        torch.empty_like(model.weight), model.weight.new_zeros(2), model.weight.data.t()

    model = LoadsOddly(load)
    (copy,) = record_loading(
        model.load_weights, dict(model.named_parameters()), [TensorSpec("weight", (2, 3))]
    ).copies
    assert copy.parameter == "weight"
    assert torch.equal(model.weight, torch.arange(6.0).view(2, 3))


def test_a_loader_is_given_the_checkpoints_tensors_in_place_of_a_parameter_that_holds_several():
    parameters = {name: torch.zeros(2, 3) for name in ("first", "second")}
    pieces = tuple(Piece(name, (2, 3), (3, 1), 6 * index) for index, name in enumerate(parameters))

    def load(weights):
        for name, tensor in weights:
            parameters[name].copy_(tensor)

    copies = record_loading(load, parameters, [TensorSpec("both", (2, 2, 3), pieces)]).copies
    assert [(copied.source, copied.source_view.offset, copied.parameter) for copied in copies] == [
        ("both", 0, "first"),
        ("both", 6, "second"),
    ]


def test_other_copies_happen_while_a_loader_is_watched():
    parameters, scratch = {"weight": torch.zeros(2)}, torch.zeros(2)

    def load(weights):
        for _, tensor in weights:
            scratch.copy_(torch.ones(2))
            torch.empty_like(tensor).copy_(tensor)
            parameters["weight"].copy_(tensor)

    (copy,) = record_loading(load, parameters, [TensorSpec("weight", (2,))]).copies
    assert copy.parameter == "weight"
    assert scratch.tolist() == [1.0, 1.0]


class RoundedUp(torch.nn.Module):
    """The second of two workers, with rows 4 to 6 of the vocabulary and two padding rows."""

    def __init__(self, num_rows):
        super().__init__()
        self.embed = torch.nn.Embedding(4, HIDDEN)
        self.embed.shard_indices = SimpleNamespace(org_vocab_start_index=4, org_vocab_end_index=6)
        self._num_rows = num_rows

    def load_weights(self, weights):
        for _, tensor in weights:
            self.embed.weight.data[: self._num_rows].copy_(tensor.narrow(0, 4, self._num_rows))


def test_rows_that_round_a_vocabulary_up_need_no_weights_and_the_others_do():
    manifest = [TensorSpec("embed", (6, HIDDEN))]
    (copy,) = WorkerReceiver(RoundedUp(2)).describe(manifest).copies
    assert copy.parameter_view.count == 2 * HIDDEN
    with pytest.raises(WeightMismatch, match=r"'embed\.weight'"):
        WorkerReceiver(RoundedUp(1)).describe(manifest)


def test_a_layer_that_the_engine_rearranges_is_refused():
    class Fp8LinearMethod:
        pass

    model = torch.nn.Linear(2, 2)
    model.quant_method = Fp8LinearMethod()
    with pytest.raises(WeightMismatch, match="Fp8LinearMethod"):
        receivers_of(model)


EXPERTS, COLUMNS, WIDTH = 3, 4, 2
SHAPE = (EXPERTS, 2 * COLUMNS, WIDTH)
HALF = COLUMNS * WIDTH


def run(rows, offset):
    return View((rows, WIDTH), (WIDTH, 1), offset)


def parts(order, shift=0):
    """Return copies of halves of experts, from source half `place` to the parameter's half `order[place]`."""
    return [
        Copy("up", run(COLUMNS, place * HALF), "w13", run(COLUMNS, order[place] * HALF + shift))
        for place in (1, 0, 2, 3, 5, 4)
    ]


def test_experts_copied_one_by_one_into_their_own_order_become_one_copy_and_a_view():
    parameters = {"w13": torch.zeros(SHAPE)}
    manifest = [TensorSpec("up", SHAPE)]
    whole = View(SHAPE, (2 * HALF, WIDTH, 1), 0)
    joined = join_copies(parts(range(6)), manifest, parameters)
    assert joined == [Copy("up", whole, "w13", whole)]
    load_plan = LoadPlan(tuple(joined), {"w13": "float32"}, {"w13": parameters["w13"].numel()})
    num_bytes, slots = place_slots(manifest, load_plan)
    assert list(find_aliases(load_plan, slots, num_bytes)) == ["w13"]


def test_a_source_may_be_a_part_of_the_parameter():
    parameters = {"w13": torch.zeros(2 * EXPERTS, 2 * COLUMNS, WIDTH)}
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
