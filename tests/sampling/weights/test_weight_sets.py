"""Checks before weights are sent, and the bytes that are sent; the engine is a stand-in that checks every byte."""

import pytest
import torch
from kit.module_trainer import ModuleTrainer
from kit.rank_processes import on_ranks
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard

from vectorlm.errors import ChecksumMismatch, NonFiniteWeights, RankMismatch, WeightMismatch
from vectorlm.ranks.collectives import Collectives
from vectorlm.ranks.engine_ranks import EngineRanks
from vectorlm.ranks.topology import Topology
from vectorlm.sampling import messages
from vectorlm.sampling.hot_swap import HotSwap
from vectorlm.sampling.settings import EngineSettings
from vectorlm.sampling.weights.arena import Arena, plain_slots
from vectorlm.sampling.weights.inspection import checksum
from vectorlm.sampling.weights.lora_source import Fingerprint
from vectorlm.sampling.weights.plan import Layout, TensorSpec

BASE_BYTES, ADAPTER_BYTES = 2 * 9 * 4, 2 * 3 * 4


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

    def forward(self, x):
        return self.second(self.first(x))


def adapted(targets=("first",)):
    return get_peft_model(Two(), LoraConfig(r=1, target_modules=list(targets), init_lora_weights=False))


class Engine:
    """An engine that answers the commands of an update and records their results."""

    def __init__(self):
        self.arenas, self.loaded, self.begun = {}, [], 0

    def call(self, command, silence_s):
        if isinstance(command, messages.Connect):
            num_bytes, slots = plain_slots(command.manifest, lambda name: "float32")
            arena = Arena.create(num_bytes)
            self.arenas[command.weight_set] = arena, slots
            return Layout(arena.path, num_bytes, slots)
        if isinstance(command, messages.BeginUpdate):
            self.begun += 1
            return None
        if isinstance(command, messages.RequireWhole):
            return None
        sums = [
            checksum(self.arenas[name][0].view(slot))
            for name in command.weight_sets
            for slot in self.arenas[name][1]
        ]
        if command.checksums is not None and sums != list(command.checksums):
            raise ChecksumMismatch("not what was sent")
        self.loaded.append((command.version, command.weight_sets))
        return messages.Updated(0.0, 0.0, ())


def swap_of(topology, lora_mode, **more):
    engine_ranks = EngineRanks(topology, Collectives(topology, 60.0))
    engine = Engine() if engine_ranks.owns_an_engine else None
    swap = HotSwap(engine_ranks, engine, EngineSettings(lora_mode=lora_mode, timeout_s=60.0, **more))
    return swap, engine


def test_adapters_cross_alone_until_the_base_was_written_to_or_an_update_failed():
    swap, engine = swap_of(Topology(), "adapter")
    model = adapted()
    assert swap.update(model, 0, "refuse").num_bytes == BASE_BYTES + ADAPTER_BYTES
    assert swap.update(model, 1, "refuse").num_bytes == ADAPTER_BYTES
    with torch.no_grad():
        model.base_model.model.second.weight.mul_(2)
    assert swap.update(model, 2, "refuse").num_bytes == BASE_BYTES + ADAPTER_BYTES
    swap.forget()
    assert swap.update(model, 2, "refuse").num_bytes == BASE_BYTES + ADAPTER_BYTES
    assert swap.update(model, 2, "refuse").skipped
    with model.disable_adapter():
        assert swap.update(model, 3, "refuse").num_bytes == 0
    assert [sets for _, sets in engine.loaded] == [
        ("base", "adapter"),
        ("adapter",),
        ("base", "adapter"),
        ("base", "adapter"),
        (),
    ]


def test_other_adapters_are_laid_out_again_and_another_base_is_refused_before_the_engine_pauses():
    swap, engine = swap_of(Topology(), "adapter")
    swap.update(adapted(), 0, "refuse")
    model = adapted(["first", "second"])
    assert swap.update(model, 1, "refuse").num_bytes == BASE_BYTES + 2 * ADAPTER_BYTES
    wider = Two()
    wider.second = nn.Linear(3, 4, bias=False)
    with pytest.raises(WeightMismatch, match=r"other shapes: \['second.weight \(4, 3\) for \(3, 3\)'\]"):
        swap.update(wider, 2, "refuse")
    assert engine.begun == 2
    assert swap.update(model, 2, "refuse").num_bytes == 2 * ADAPTER_BYTES


def cross_on_two_ranks(topology):
    """Rewrite the base on rank 1 with the same numbers; then enable adapters on rank 0 only."""
    swap, engine = swap_of(topology, "adapter")
    model = adapted()
    sent = [swap.update(model, step, "refuse").num_bytes for step in range(2)]
    with torch.no_grad():
        if topology.rank == 1:
            model.base_model.model.second.weight.mul_(1)
    sent.append(swap.update(model, 2, "refuse").num_bytes)
    if topology.rank == 1:
        model.base_model.disable_adapter_layers()
    try:
        swap.update(model, 3, "refuse")
    except WeightMismatch as error:
        return sent, str(error), engine and engine.begun
    return sent, "", engine and engine.begun


def test_a_set_crosses_from_all_ranks_if_it_changed_on_one_and_all_ranks_must_bring_the_same_sets():
    for sent, text, begun in on_ranks(2, cross_on_two_ranks):
        assert sent == [BASE_BYTES + ADAPTER_BYTES, ADAPTER_BYTES, BASE_BYTES + ADAPTER_BYTES]
        assert text == "the model has active adapters on some ranks and none on others."
        assert begun in (3, None)


def test_merged_weights_are_one_set_that_always_crosses():
    swap, engine = swap_of(Topology(), "merged")
    model = adapted()
    for step in range(2):
        assert swap.update(model, step, "refuse").num_bytes == BASE_BYTES
    arena, slots = engine.arenas["base"]
    assert torch.allclose(arena.view(slots[0]), model.merge_and_unload().first.weight)


class WithBuffer(Two):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def frozen():
    model = Two()
    model.second.requires_grad_(False)
    return model


MODELS = {
    "plain": (Two, "merged", "second.weight"),
    "frozen": (frozen, "merged", "second.weight"),
    "buffer": (WithBuffer, "merged", "shift"),
    "adapter alone": (adapted, "adapter", "first.lora_B"),
    "adapter merged": (adapted, "merged", "first.lora_B"),
    "trainer": (Two, "merged", "second.weight"),
}


def part_ways(topology, kind):
    """Update with equal weights, with other ones on the last rank, and with equal ones again; return the error."""
    make, lora_mode, name = MODELS[kind]
    torch.manual_seed(3)
    swap, engine = swap_of(topology, lora_mode)
    model = make() if kind != "trainer" else ModuleTrainer(Two(), None, None, topology)
    inner = getattr(model, "_model", model)
    tensors = dict(inner.named_parameters()) | dict(inner.named_buffers())
    (tensor,) = (
        candidate
        for path, candidate in tensors.items()
        if name.rpartition(".")[0] in path and _last(name) in path
    )
    swap.update(model, 0, "refuse")
    begun = engine and engine.begun
    before = tensor.detach().clone()
    if topology.rank == topology.world_size - 1:
        tensor.data.view(-1)[0] += 1
    with pytest.raises(RankMismatch) as caught:
        swap.update(model, 1, "refuse")
    assert (engine and engine.begun) == begun, "the engine has been told"
    assert swap.version == 0
    tensor.data.copy_(before)
    assert swap.update(model, 1, "refuse").version == 1
    return str(caught.value)


def _last(name):
    return name.rpartition(".")[2]


def part_ways_in_all(topology):
    return {kind: part_ways(topology, kind) for kind in MODELS}


@pytest.fixture(scope="module", params=[1, 2], ids=["one node", "two nodes"])
def refusals(request):
    """Return the errors of two ranks, by the kind of the model."""
    return on_ranks(2, part_ways_in_all, num_nodes=request.param)


@pytest.mark.parametrize("kind", MODELS)
def test_ranks_that_hold_different_numbers_are_named_with_the_tensor(refusals, kind):
    for texts in refusals:
        assert texts[kind].startswith("ranks 0 and 1 have")
        assert f"{_last(MODELS[kind][2])}" in texts[kind]


def differ_where_they_may(topology):
    swap, _ = swap_of(topology, "merged")
    model = WithBuffer()
    model.scratch += topology.rank
    return swap.update(model, 0, "refuse").version


def spoil_a_shard(topology):
    swap, engine = swap_of(topology, "merged")
    model = fully_shard(Two())
    swap.update(model, 0, "refuse")
    if topology.rank == 1:
        model.second.weight.detach().to_local()[0, 0] = float("nan")
    with pytest.raises(NonFiniteWeights, match=r"\['second.weight'\] \(rank 1\)"):
        swap.update(model, 1, "refuse")
    return engine and engine.begun


def change_a_shard(topology):
    swap, _ = swap_of(topology, "merged")
    model = fully_shard(Two())
    swap.update(model, 0, "refuse")
    if topology.rank == 1:
        model.second.weight.detach().to_local()[0, 0] += 1
    again = swap.update(model, 0, "refuse").skipped
    return again, swap.update(model, 0, "refuse").skipped


def meet(topology):
    return [call(topology) for call in (differ_where_they_may, spoil_a_shard, change_a_shard)]


@pytest.fixture(scope="module")
def met():
    """Return the results of the three functions, by rank."""
    return list(zip(*on_ranks(2, meet), strict=True))


def test_buffers_that_no_checkpoint_holds_may_differ(met):
    assert met[0] == (0, 0)


def test_a_number_that_is_not_finite_is_refused_on_all_ranks_before_the_engine_pauses(met):
    assert met[1] == (1, None)


def test_under_one_step_weights_that_changed_on_one_rank_are_sent_by_all(met):
    assert met[2] == ((False, True),) * 2


@pytest.mark.parametrize("lora_mode", ["adapter", "merged"])
def test_an_adapter_that_is_not_finite_is_refused(lora_mode):
    swap, engine = swap_of(Topology(), lora_mode)
    model = adapted()
    swap.update(model, 0, "refuse")
    with torch.no_grad():
        model.base_model.model.first.lora_A["default"].weight[0, 0] = float("inf")
    with pytest.raises(NonFiniteWeights, match=r"first\.lora_A"):
        swap.update(model, 1, "refuse")
    assert engine.begun == 1


class Written:
    """A user's weight source that can only publish."""

    def __init__(self, value):
        self.value = value

    def manifest(self):
        return [TensorSpec("weight", (2, 2))]

    def publish(self, layout, with_checksums):
        from vectorlm.sampling.weights.arena import Arena
        from vectorlm.sampling.weights.inspection import checksum

        arena = Arena.open(layout.path, layout.num_bytes)
        place = arena.view(layout.slots[0]).fill_(self.value)
        sums = [checksum(place)] if with_checksums else []
        arena.close()
        return sums


def test_what_a_source_of_ones_own_writes_is_looked_at_before_the_engine_loads_it():
    swap, engine = swap_of(Topology(), "merged")
    swap.update(Written(1.0), 0, "refuse")
    with pytest.raises(NonFiniteWeights, match="'weight'"):
        swap.update(Written(float("nan")), 1, "refuse")
    assert [version for version, _ in engine.loaded] == [0]
    swap.update(Written(2.0), 1, "refuse")
    assert [version for version, _ in engine.loaded] == [0, 1]


@pytest.mark.parametrize("verifies", [True, False])
def test_under_one_step_a_source_whose_changes_nobody_sees_is_sent_again(verifies):
    swap, engine = swap_of(Topology(), "merged", verify_updates=verifies)
    trainer = Written(1.0) if verifies else ModuleTrainer(Two(), None, None, Topology())
    swap.update(trainer, 5, "refuse")
    assert not swap.update(trainer, 5, "refuse").skipped
    assert [version for version, _ in engine.loaded] == [5, 5]


def test_under_one_step_a_model_is_sent_again_with_other_adapters_or_another_scaling():
    swap, engine = swap_of(Topology(), "adapter")
    model = adapted()
    layer = model.base_model.model.first
    swap.update(model, 5, "refuse")
    assert swap.update(model, 5, "refuse").skipped
    with model.disable_adapter():
        assert not swap.update(model, 5, "refuse").skipped
        assert swap.update(model, 5, "refuse").skipped
    assert not swap.update(model, 5, "refuse").skipped
    layer.scaling["default"] *= 2
    with pytest.warns(UserWarning, match="sent too"):
        assert not swap.update(model, 5, "refuse").skipped
    model.base_model.model.second.weight.data.mul_(2)
    with pytest.warns(UserWarning, match="sent too"):
        report = swap.update(model, 5, "refuse")
    assert report.num_bytes == BASE_BYTES + ADAPTER_BYTES
    assert swap.update(model, 5, "refuse").skipped
    assert engine.loaded[-1] == (5, ("base", "adapter"))


def test_a_buffer_may_hold_infinities():
    swap, _ = swap_of(Topology(), "merged")
    model = WithBuffer()
    model.shift.fill_(-torch.inf)
    assert swap.update(model, 0, "refuse").version == 0


def train(model):
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1
    )
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def what_fits(topology):
    """Train, evaluate and change a sharded model; return whether its base counted as unchanged after each."""
    model = adapted()
    fully_shard(model.base_model.model.first)
    fully_shard(model)
    mark = Fingerprint(model)
    train(model)
    after_training = mark == Fingerprint(model)
    with torch.no_grad():
        model(torch.ones(2, 3))
    after_evaluation = mark == Fingerprint(model)
    weight = model.base_model.model.second.weight
    fits = []
    for tensor in (weight, weight.to_local()):
        with torch.no_grad():
            tensor.mul_(2.0)
        fits.append(mark == Fingerprint(model))
        mark = Fingerprint(model)
    return after_training, after_evaluation, *fits


def test_training_the_adapters_leaves_the_base_alone_and_a_write_to_it_shows_sharded_or_not():
    model = adapted()
    mark = Fingerprint(model)
    train(model)
    assert mark == Fingerprint(model)
    with torch.no_grad():
        model.base_model.model.second.weight.mul_(2.0)
    assert mark != Fingerprint(model)
    assert on_ranks(2, what_fits) == [(True, True, False, False)] * 2


def test_another_model_at_the_same_addresses_is_another_model():
    weight = torch.zeros(3, 3)
    model = Two().requires_grad_(False)
    model.first.weight.data = weight
    mark = Fingerprint(model)
    assert mark == Fingerprint(model)
    model.first.weight = nn.Parameter(weight, requires_grad=False)
    assert model.first.weight.data_ptr() == weight.data_ptr()
    assert mark != Fingerprint(model)


def test_a_tensor_whose_memory_was_exchanged_is_another_tensor():
    model = Two().requires_grad_(False)
    mark = Fingerprint(model)
    assert mark == Fingerprint(model)
    model.first.weight.data = torch.zeros(3, 3)
    assert mark != Fingerprint(model)


def test_a_base_that_is_trained_is_taken_for_changed():
    # An optimizer's step does not always count as a change: fused optimizers bypass torch's counters.
    model = adapted()
    model.base_model.model.second.weight.requires_grad_(True)
    assert Fingerprint(model) != Fingerprint(model)
