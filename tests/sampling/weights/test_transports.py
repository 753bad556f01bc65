"""The conformance suite of transports: with each of them the same bits arrive, and faults are noticed."""

import gc
import os
import re
import sys
import weakref
from pathlib import Path

import pytest
import torch
from kit.module_trainer import ModuleTrainer
from kit.rank_processes import on_ranks
from peft import LoraConfig, get_peft_model
from swaps_here import SMALL_BUCKET, TRANSPORTS, Model, move, swap_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from vectorlm.errors import ChecksumMismatch, ConfigError, RankMismatch, StaleHandle, WeightMismatch
from vectorlm.ranks.topology import Topology
from vectorlm.sampling import transport as transports
from vectorlm.sampling.contract import WeightSet
from vectorlm.sampling.transport import Pull, Push, open_transport, pull_obstacle
from vectorlm.sampling.weights.arena import MappedArenas, in_rounds
from vectorlm.sampling.weights.copy_list import CopyList
from vectorlm.sampling.weights.exports import ExportedRows
from vectorlm.sampling.weights.module_source import ModuleSource
from vectorlm.sampling.weights.plan import Layout, Slot

NUM_UPDATES, WARM_UP = 60, 20


@pytest.fixture(params=TRANSPORTS)
def transport(request, monkeypatch):
    monkeypatch.setattr(transports, "BUCKET_BYTES", SMALL_BUCKET)
    return request.param


def update(swap, model, step):
    return swap.update(model, step, "refuse", TRANSPORTS)


TENSOR_PARALLEL = {
    "table.weight": (Shard(0), Shard(1)),
    "up.weight": (_StridedShard(0, split_factor=2), Shard(0)),
    "up.bias": (_StridedShard(0, split_factor=2), Shard(0)),
    "gate.weight": (Shard(1), _StridedShard(0, split_factor=3)),
    "down.weight": (Shard(0), Shard(1)),
    "head.weight": (Shard(0), Shard(1)),
}
"""Placement of the tensors that a pair of ranks splits: rows, columns, and rows of three parts."""


def split(model, topology):
    """Split the weights over pairs of ranks and shard them over the pairs; each pair has the whole norm."""
    mesh = init_device_mesh("cpu", (topology.world_size // 2, 2), mesh_dim_names=("shard", "tensor"))
    for name, weight in list(model.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        place = (mesh, TENSOR_PARALLEL[name]) if name in TENSOR_PARALLEL else (mesh["shard"], (Shard(0),))
        setattr(
            model.get_submodule(owner),
            attribute,
            nn.Parameter(distribute_tensor(weight, *place, src_data_rank=None)),
        )


def follow(topology, transport, is_sharded, tied, is_split=False, **engine_args):
    """Make three updates; return the parameters of this rank's engine that were wrong after an update."""
    transports.BUCKET_BYTES = SMALL_BUCKET
    torch.manual_seed(0)
    model, reference = Model(tied), Model(tied)
    if is_sharded:
        fully_shard(model)
    if is_split:
        split(model, topology)
    swap, engine = swap_of(topology, transport, tied=tied, **engine_args)
    wrong = []
    for step in range(3):
        move(model, reference, seed=step)
        report = update(swap, model, step)
        assert (report.skipped, report.transport) == (False, transport)
        wrong += engine.differs_from(reference) if engine is not None else []
    if engine is not None:
        assert engine.commands.count("Connect") == 1
        assert engine.commands.count("OpenHandles") == (transport == "pull")
        assert ("CopyRound" in engine.commands) == (transport == "bucketed")
    swap.close()
    return wrong


CASES = {
    "one rank": (1, {}),
    "one rank, tied, two workers": (1, {"tied": True, "num_workers": 2}),
    "one rank, bf16 engine": (1, {"dtype": torch.bfloat16}),
    "two ranks, sharded, bf16 engine of two workers": (
        2,
        {"is_sharded": True, "dtype": torch.bfloat16, "num_workers": 2},
    ),
    "two ranks, sharded, tied": (2, {"is_sharded": True, "tied": True}),
    "two ranks that hold the same, two engines": (2, {"engines_per_node": 2}),
    "two ranks, sharded, two engines of two workers": (
        2,
        {"is_sharded": True, "engines_per_node": 2, "num_workers": 2},
    ),
    "two ranks, split": (2, {"is_split": True}),
    "two ranks, split, bf16 engine of two workers": (
        2,
        {"is_split": True, "dtype": torch.bfloat16, "num_workers": 2},
    ),
    "four ranks, split and sharded": (4, {"is_split": True, "num_workers": 2}),
}


def follow_all(topology, transport):
    cases = {name: case for name, (size, case) in CASES.items() if size == topology.world_size}
    return {
        name: follow(topology, transport, **{"is_sharded": False, "tied": False, **case})
        for name, case in cases.items()
    }


def test_the_same_bits_arrive_from_one_rank(transport):
    assert set(map(len, follow_all(Topology(), transport).values())) == {0}


def follow_merged(topology, transport):
    """Move a sharded PEFT model and its adapters; return the wrong parameters after each update."""
    transports.BUCKET_BYTES = SMALL_BUCKET
    torch.manual_seed(0)
    options = LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(get_peft_model(Model(), options))
    model, reference = models
    fully_shard(model)
    swap, engine = swap_of(topology, transport)
    wrong = []
    for step in range(3):
        move(model, reference, seed=step)
        update(swap, model, step)
        if engine is not None:
            merged = get_peft_model(Model(), options)
            merged.load_state_dict(reference.state_dict())
            # The two sides sum the same float32 products in different orders.
            wrong += engine.differs_from(merged.merge_and_unload(), tolerance=1e-5)
    return wrong


def follow_on_two_ranks(topology):
    """Return, by transport, the wrong parameters of each case and with merged adapters."""
    return {
        transport: (follow_all(topology, transport), follow_merged(topology, transport))
        for transport in TRANSPORTS
    }


@pytest.mark.slow
def test_the_same_bits_and_merged_adapters_arrive_from_two_ranks():
    right = {name: [] for name, (size, _) in CASES.items() if size == 2}, []
    assert on_ranks(2, follow_on_two_ranks) == [dict.fromkeys(TRANSPORTS, right)] * 2


def follow_on_four_ranks(topology):
    return {transport: follow_all(topology, transport) for transport in TRANSPORTS}


@pytest.mark.slow
def test_the_same_bits_arrive_from_four_ranks_that_split_and_shard_a_model():
    right = {transport: {"four ranks, split and sharded": []} for transport in TRANSPORTS}
    assert on_ranks(4, follow_on_four_ranks) == [right] * 4


def spoil_split(topology):
    """Spoil a word of a column in the engine, then a weight that both ranks hold on one of them; return both errors."""
    model, reference = Model(), Model()
    split(model, topology)
    swap, engine = swap_of(topology, "pull")
    move(model, reference, seed=0)
    update(swap, model, 0)
    copy = CopyList.copy_round

    def copy_and_spoil(copies, number=None):
        copy(copies, number)
        engine.workers[0].down.view(torch.int32)[4, 2] ^= 1

    CopyList.copy_round = copy_and_spoil
    move(model, reference, seed=1)
    with pytest.raises(ChecksumMismatch) as spoiled:
        update(swap, model, 1)
    CopyList.copy_round = copy
    if topology.rank == 1:
        with torch.no_grad():
            model.norm.bias.to_local()[2] += 1
    with pytest.raises(RankMismatch) as differing:
        update(swap, model, 2)
    return str(spoiled.value), str(differing.value)


def test_a_spoiled_word_of_a_split_model_is_named_and_so_is_a_weight_that_ranks_hold_differently():
    for spoiled, differing in on_ranks(2, spoil_split):
        assert re.search(r"1 of 10 tensors .*\['down.weight'\]", spoiled)
        assert re.search(r"ranks 0 and 1 .* 1 tensors.*\['norm.bias'\]", differing)


def num_shared_maps():
    return len(re.findall("memfd:|/dev/shm/", Path("/proc/self/maps").read_text()))


@pytest.mark.slow
def test_many_updates_leave_nothing_behind(transport):
    model, reference = Model(), Model()
    swap, engine = swap_of(Topology(), transport)
    gc.collect()
    held = []
    for step in range(NUM_UPDATES):
        move(model, reference, seed=step)
        update(swap, model, step)
        if step >= WARM_UP:
            held.append((len(os.listdir("/proc/self/fd")), num_shared_maps()))
    assert engine.differs_from(reference) == []
    assert held[0] == held[-1]
    assert engine.commands.count("Connect") == 1


def test_weights_of_another_place_and_another_model_follow_too(transport):
    """Replacing a storage between two updates makes its export stale, and the next update exports it again."""
    model, reference = Model(), Model()
    swap, engine = swap_of(Topology(), transport)
    for step in range(4):
        move(model, reference, seed=step)
        if step in (1, 3):
            model.up.weight.data = model.up.weight.data.clone()
        if step == 2:
            model = Model()
            model.load_state_dict(reference.state_dict())
        update(swap, model, step)
        assert engine.differs_from(reference) == []
    assert engine.commands.count("OpenHandles") == (4 if transport == "pull" else 0)


def replace_on_one_rank(topology):
    """Replace a tensor's storage on rank 1 only; return the engine's wrong parameters and its number of OpenHandles."""
    model, reference = Model(), Model()
    swap, engine = swap_of(topology, "pull")
    for step in range(3):
        move(model, reference, seed=step)
        if topology.rank == 1 and step == 1:
            model.up.weight.data = model.up.weight.data.clone()
        update(swap, model, step)
    return engine and (engine.differs_from(reference), engine.commands.count("OpenHandles"))


def test_what_moved_on_one_rank_is_opened_again():
    assert on_ranks(2, replace_on_one_rank) == [([], 2), None]


def test_a_changed_bit_in_the_engine_is_caught(transport, monkeypatch):
    model = Model()
    swap, engine = swap_of(Topology(), transport)
    update(swap, model, 0)
    copy = CopyList.copy_round

    def copy_and_spoil(copies, number=None):
        copy(copies, number)
        if number is None:
            engine.workers[0].gate_up.view(torch.int32)[1, 2] ^= 1

    monkeypatch.setattr(CopyList, "copy_round", copy_and_spoil)
    with pytest.raises(ChecksumMismatch, match=r"1 of 10 tensors .*\['gate.weight'\]"):
        update(swap, model, 1)
    monkeypatch.undo()
    monkeypatch.setattr(transports, "BUCKET_BYTES", SMALL_BUCKET)
    assert not update(swap, model, 1).skipped
    assert engine.differs_from(model) == []


def test_a_weight_that_changes_after_it_was_summed_is_caught(monkeypatch):
    """Nobody may write to weights during a pull, and the checksums show if somebody does."""
    publish = ExportedRows.publish

    def publish_and_write(exported, writes, layout, with_checksums):
        sums = publish(exported, writes, layout, with_checksums)
        with torch.no_grad():
            model.down.weight[0, 0] += 1
        return sums

    model = Model()
    swap, _ = swap_of(Topology(), "pull")
    update(swap, model, 0)
    monkeypatch.setattr(ExportedRows, "publish", publish_and_write)
    with pytest.raises(ChecksumMismatch, match=r"1 of 10 tensors .*\['down.weight'\]"):
        update(swap, model, 1)


def test_a_model_that_does_not_fit_is_refused_before_anything_moves(transport):
    swap, engine = swap_of(Topology(), transport)
    model = Model()
    model.up = torch.nn.Linear(4, 8)
    with pytest.raises(WeightMismatch, match=r"up\.weight \(8, 4\)"):
        update(swap, model, 0)
    assert "BeginUpdate" not in engine.commands


@pytest.mark.parametrize("transport", ["push", "bucketed"], indirect=True)
def test_a_source_of_ones_own_is_pushed(transport):
    model = Model()
    trainer = ModuleTrainer(
        model, torch.optim.SGD(model.parameters(), 0.1), lambda model, ids: model(ids).sum()
    )
    swap, engine = swap_of(Topology(), transport)
    for step in range(2):
        trainer.step(torch.tensor([[step, 2, 5]]))
        update(swap, trainer, step)
        assert engine.differs_from(model) == []


class Stack(nn.Module):
    """A stack of small layers, for both sides of a swap."""

    def __init__(self, num_layers, dtype=torch.float32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=dtype) for _ in range(num_layers))

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


class Operations(TorchDispatchMode):
    """A mode that counts operations other than views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def count(topology, transport, dtype, num_layers):
    """Return the operations and the Python and C calls of one update, on this rank and its engine."""
    model, counts = Stack(num_layers), []
    if topology.world_size > 1:
        fully_shard(model)
    swap, _ = swap_of(topology, transport, make=lambda: [Stack(num_layers, dtype)])
    for step in range(2):
        update(swap, model, step)
    with Operations() as operations:
        update(swap, model, 2)

    def tally(frame, event, argument):
        counts[-1] += event in ("call", "c_call")

    # A rank that waits for the other counts its own polls, and the minimum over updates excludes them.
    for step in range(3, 13):
        counts.append(0)
        sys.setprofile(tally)
        update(swap, model, step)
        sys.setprofile(None)
    return operations.names, min(counts)


def count_all(topology):
    return {
        (transport, dtype): [count(topology, transport, dtype, num_layers) for num_layers in (5, 25)]
        for transport in ("push", "pull")
        for dtype in (torch.float32, torch.bfloat16)
    }


def require_few(counts):
    for case, ((few, calls), (many, more_calls)) in counts.items():
        assert len(many) == len(few) <= 8, (case, many)
        # The only difference is 40 more tensors. Before each pull, the engine checks every exported file.
        assert (more_calls - calls) / 40 < 40, (case, calls, more_calls)


def test_the_number_of_operations_does_not_grow_with_the_number_of_tensors():
    require_few(count_all(Topology()))


@pytest.mark.slow
def test_the_number_of_operations_does_not_grow_on_two_ranks():
    for counts in on_ranks(2, count_all):
        require_few(counts)


def test_what_was_replaced_is_sent_though_descriptions_are_kept():
    torch.manual_seed(0)
    model = Model()
    swap, engine = swap_of(Topology(), "push")
    update(swap, model, 0)
    kept = swap._kept
    update(swap, model, 1)
    assert swap._kept is kept
    changes = [
        lambda: setattr(model.up, "weight", nn.Parameter(torch.randn(6, 4))),
        lambda: setattr(model, "gate", nn.Linear(4, 6, bias=False)),
        lambda: setattr(model, "scale", torch.tensor(3.0)),
        lambda: setattr(model.norm.bias, "data", torch.randn(8)[::2]),
    ]
    for step, change in enumerate(changes):
        change()
        update(swap, model, step + 2)
        assert engine.differs_from(model) == []
    model.head.weight = model.table.weight
    with pytest.raises(WeightMismatch, match=r"head\.weight"):
        update(swap, model, 9)


def test_a_swap_keeps_no_model_alive():
    model = Model()
    swap, _ = swap_of(Topology(), "push")
    update(swap, model, 0)
    numbers = model.up.weight.detach().numpy().copy()
    model.up.weight.data = torch.from_numpy(numbers)
    update(swap, model, 1)
    parameter, memory = weakref.ref(model.up.weight), weakref.ref(numbers)
    del model, numbers
    gc.collect()
    assert parameter() is None
    assert memory() is None


# Faults that only pull can have.


def train(topology, pulled):
    """Train a sharded model for a few steps, with updates in between if `pulled`; return its weights."""
    torch.manual_seed(0)
    model = Model(tied=True)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    swap, _ = swap_of(topology, "pull", tied=True)
    for step in range(4):
        model(torch.tensor([[step, topology.rank, 6]])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if pulled:
            before = [parameter.to_local().clone() for parameter in model.parameters()]
            update(swap, model, step)
            assert all(map(torch.equal, before, [parameter.to_local() for parameter in model.parameters()]))
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def train_both_ways(topology):
    return [train(topology, pulled) for pulled in (True, False)]


def test_training_goes_on_as_if_nothing_had_been_exported():
    (pulled, alone), _ = on_ranks(2, train_both_ways)
    assert all(map(torch.equal, pulled, alone))


def test_an_engine_that_finds_a_handle_stale_says_so_and_the_next_update_exports_again(monkeypatch):
    model = Model()
    swap, engine = swap_of(Topology(), "pull")
    update(swap, model, 0)
    # The rank forgets its exports and does not check whether they are current.
    swap._transport._exported["base"]._kept.clear()
    monkeypatch.setattr(ExportedRows, "are_current", lambda exported, writes: True)
    model.up.weight.data = model.up.weight.data.clone()
    with pytest.raises(StaleHandle):
        update(swap, model, 1)
    monkeypatch.undo()
    update(swap, model, 1)
    assert engine.differs_from(model) == []


# Rounds, and the choice of a transport.


def test_slots_share_an_arena_in_rounds_and_a_tensor_larger_than_it_has_one_of_its_own():
    slots = [Slot(name, (size,), "uint8", 0) for name, size in zip("abcd", (60, 100, 300, 10), strict=True)]
    num_bytes, placed = in_rounds(slots, 200)
    assert num_bytes == 320, "of the largest, rounded up"
    assert [(slot.round, slot.offset_bytes) for slot in placed] == [(0, 0), (0, 64), (1, 0), (2, 0)]
    rounds = Layout("", num_bytes, placed).rounds
    assert [[slot.name for slot in layout.slots] for layout in rounds] == [["a", "b"], ["c"], ["d"]]
    two = Layout("", num_bytes, placed[:3]).rounds
    assert [[slot.name for slot in layout.slots] for layout in two] == [["a", "b"], ["c"]]


def test_the_arena_of_rounds_is_as_small_as_it_says(monkeypatch):
    monkeypatch.setattr(transports, "BUCKET_BYTES", SMALL_BUCKET)
    swap, _ = swap_of(Topology(), "bucketed")
    update(swap, Model(), 0)
    assert Path(swap._layouts["base"].path).stat().st_size == SMALL_BUCKET


CPU, CUDA = Topology(), Topology(device="cuda:0")


@pytest.mark.parametrize(
    ("setting", "offered", "obstacle", "topology", "expected"),
    [
        ("auto", TRANSPORTS, None, CPU, "push"),
        ("auto", TRANSPORTS, None, CUDA, "pull"),
        ("auto", TRANSPORTS, "why", CUDA, "bucketed"),
        ("auto", ("push",), "why", CUDA, "push"),
        ("push", TRANSPORTS, None, CUDA, "push"),
        ("bucketed", TRANSPORTS, None, CPU, "bucketed"),
        ("pull", TRANSPORTS, None, CPU, "pull"),
    ],
)
def test_auto_pulls_on_cuda_where_nothing_speaks_against_it(setting, offered, obstacle, topology, expected):
    chosen = open_transport(setting, offered, [None, obstacle], topology, MappedArenas())
    assert chosen.name == expected
    assert isinstance(chosen, Pull if expected == "pull" else Push)


def test_a_transport_that_is_impossible_is_refused_and_the_error_says_why():
    with pytest.raises(ConfigError, match="transport='pull'"):
        open_transport("pull", TRANSPORTS, [None, "why"], CPU, MappedArenas())
    with pytest.raises(ConfigError, match="transport='bucketed'"):
        open_transport("bucketed", ("push",), [None], CPU, MappedArenas())
    swap, _ = swap_of(Topology(), "pull")
    with pytest.raises(ConfigError, match="transport='pull'"):
        swap.update(Model(), 0, "refuse", ("push", "bucketed"))
    model = Model()
    trainer = ModuleTrainer(model, None, None)
    with pytest.raises(ConfigError, match="your own WeightSource"):
        update(swap, trainer, 0)
    update(swap, model, 0)
    with pytest.raises(ConfigError, match="transport='push'"):
        update(swap, trainer, 1)


def test_what_speaks_against_pulling_on_cuda(monkeypatch):
    """CUDA's answers are patched; no test uses a device."""

    def obstacle(sets=()):
        return pull_obstacle(sets, TRANSPORTS, topology)

    topology = Topology(0, 0, 3, 3, "cuda:0")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: device < 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert obstacle() == "device 2 cannot reach device 0"
    # Ranks with their own CUDA_VISIBLE_DEVICES see only one device.
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(
            torch.cuda, "can_device_access_peer", lambda device, peer: pytest.fail("no such device")
        )
        assert obstacle() is None
    # The process sees a third device that belongs to no rank.
    topology = Topology(0, 0, 2, 2, "cuda:0")
    assert obstacle() is None
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: True)
    assert obstacle() is None
    on_host = WeightSet("base", ModuleSource(Model(), CUDA))
    assert obstacle([on_host]) == "the trainer keeps weights on the host (CPUOffloadPolicy)"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    assert "expandable_segments" in obstacle()
