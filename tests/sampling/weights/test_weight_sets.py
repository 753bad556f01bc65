"""What crosses at an update, seen from the ranks: the engine is a stand-in that checks every byte that it was sent."""

import pytest
import torch
from kit.rank_processes import on_ranks
from peft import LoraConfig, get_peft_model
from torch import nn

from vectorlm.errors import ChecksumMismatch, WeightMismatch
from vectorlm.ranks.collectives import Collectives
from vectorlm.ranks.engine_ranks import EngineRanks
from vectorlm.ranks.topology import Topology
from vectorlm.sampling import messages
from vectorlm.sampling.hot_swap import HotSwap
from vectorlm.sampling.settings import EngineSettings
from vectorlm.sampling.weights.arena import Arena, plain_slots
from vectorlm.sampling.weights.inspection import checksum
from vectorlm.sampling.weights.plan import Layout

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
    """Answers the commands of an update; remembers what became of each."""

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
    """Write to the base on rank 1 alone, the numbers that it held; then let adapters be active on rank 0 alone."""
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
