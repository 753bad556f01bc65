import os
from itertools import product

import pytest
import torch
from kit.rank_processes import on_ranks, save_tiny_llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from vectorlm.errors import WeightMismatch
from vectorlm.ranks.topology import Topology
from vectorlm.sampling.weights.arena import Arena, MappedArenas
from vectorlm.sampling.weights.inspection import checksum
from vectorlm.sampling.weights.module_source import ModuleSource, manifest_of
from vectorlm.sampling.weights.plan import Layout, Slot


def layout_for(model, arena_path, dtype="float32"):
    slots, end = [], 0
    for spec in manifest_of(model):
        slots.append(Slot(spec.name, spec.shape, dtype, end))
        end += -(-slots[-1].num_bytes // 64) * 64
    return Layout(arena_path, end, tuple(slots))


def publish(topology, folder, mesh_shape, path, num_bytes, dtype):
    """Shard the model, gather its root by a forward pass, and publish; return this rank's checksums."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layout = layout_for(model, path, dtype)
    assert layout.num_bytes <= num_bytes
    if mesh_shape is not None:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicas", "shards")[-len(mesh_shape) :])
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with torch.no_grad():
            model(torch.tensor([[1, 2, 3]]))
    source = ModuleSource(model, topology)
    assert source.publish(layout, False) == []
    return source.publish(layout, True)


MESHES = {"shards": (2,), "replicas": (2, 1), "both": (1, 2), "plain": None}
DTYPES = ("float32", "bfloat16")


def publish_all(topology, folder, paths, num_bytes):
    return [
        publish(topology, folder, mesh_shape, path, num_bytes, dtype)
        for (mesh_shape, dtype), path in zip(product(MESHES.values(), DTYPES), paths, strict=True)
    ]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return the model, and by mesh and dtype the arena that two ranks filled and their checksums."""
    # 47 rows do not divide by two, which makes the last shard shorter.
    folder = save_tiny_llama(tmp_path_factory.mktemp("published") / "model", vocab_size=47)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    num_bytes = layout_for(model, "").num_bytes
    cases = list(product(MESHES, DTYPES))
    arenas = [Arena.create(num_bytes) for _ in cases]
    sums = on_ranks(2, publish_all, str(folder), [arena.path for arena in arenas], num_bytes)
    by_case = zip(cases, arenas, zip(*sums, strict=True), strict=True)
    return model, {case: (arena, parts) for case, arena, parts in by_case}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mesh", MESHES)
def test_two_ranks_fill_the_arena_exactly_whatever_the_sharding(published, mesh, dtype):
    model, found = published
    arena, sums = found[mesh, dtype]
    slots = layout_for(model, "", dtype).slots
    for slot, tensor, parts in zip(slots, model.parameters(), zip(*sums, strict=True), strict=True):
        expected = tensor.detach().to(getattr(torch, dtype))
        assert torch.equal(arena.view(slot), expected), slot.name
        assert sum(parts) % 2**64 == checksum(expected), slot.name


def publish_on_nodes(topology, folder, mesh_shape, paths, num_bytes):
    try:
        return publish(topology, folder, mesh_shape, paths[topology.node], num_bytes, "float32")
    except WeightMismatch as error:
        return str(error)


def test_the_ranks_of_each_node_fill_its_own_arena(tmp_path):
    folder = save_tiny_llama(tmp_path / "model", vocab_size=47)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layout = layout_for(model, "")
    arenas = [Arena.create(layout.num_bytes) for _ in range(2)]
    paths = [arena.path for arena in arenas]
    sums = on_ranks(4, publish_on_nodes, str(folder), (2, 2), paths, layout.num_bytes, num_nodes=2)
    for node, arena in enumerate(arenas):
        for index, (slot, tensor) in enumerate(zip(layout.slots, model.parameters(), strict=True)):
            assert torch.equal(arena.view(slot), tensor), slot.name
            parts = [sums[rank][index] for rank in (2 * node, 2 * node + 1)]
            assert sum(parts) % 2**64 == checksum(tensor), slot.name


def test_shards_that_span_nodes_are_refused_with_the_strategy_that_works(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    arenas = [Arena.create(layout_for(model, "").num_bytes) for _ in range(2)]
    paths = [arena.path for arena in arenas]
    size = len(arenas[0].bytes)
    for rank, text in enumerate(on_ranks(2, publish_on_nodes, str(folder), (2,), paths, size, num_nodes=2)):
        assert text.startswith(f"node {rank} holds 1 of the 2 shards")
        assert "sharding_strategy=HYBRID_SHARD" in text
    assert not any(arena.bytes.any() for arena in arenas)


@pytest.mark.parametrize("word_bytes", [1, 2])
def test_sums_are_of_the_words_that_the_layout_wants_scalars_included(word_bytes):
    tensors = {"scale": torch.tensor(1.5), "table": torch.randn(3, 4)}
    arena = Arena.create(128)
    slots = (Slot("scale", (), "float32", 0, word_bytes), Slot("table", (3, 4), "float32", 64, word_bytes))
    source = ModuleSource(torch.nn.Module(), Topology(), tensors=tensors)
    sums = source.publish(Layout(arena.path, 128, slots), True)
    assert sums == [checksum(tensor, word_bytes=word_bytes) for tensor in tensors.values()]
    assert all(torch.equal(arena.view(slot), tensors[slot.name]) for slot in slots)


def test_only_the_first_rank_of_a_node_sends_a_scalar():
    arena, tensors = Arena.create(64), {"scale": torch.tensor(1.5)}
    layout = Layout(arena.path, 64, (Slot("scale", (), "float32", 0),))
    sums = [
        ModuleSource(torch.nn.Module(), Topology(rank, rank, 2, 2), tensors=tensors).publish(layout, True)
        for rank in range(2)
    ]
    assert sums == [[checksum(tensors["scale"])], [0]]
    assert arena.view(layout.slots[0]) == 1.5


def test_rows_that_are_computed_may_be_wider_than_what_is_held():
    # Rows of a base in 4 bits are like this.
    packed = torch.arange(10, dtype=torch.uint8).reshape(5, 2)
    expected = torch.cat([packed, packed + 10], dim=1).float()
    arena = Arena.create(expected.nbytes)
    layout = Layout(arena.path, expected.nbytes, (Slot("packed", (5, 4), "float32", 0),))
    changes = {"packed": lambda rows: torch.cat([rows, rows + 10], dim=1)}
    parts = []
    for rank in range(2):
        topology = Topology(rank, rank, 2, 2)
        source = ModuleSource(torch.nn.Module(), topology, tensors={"packed": packed}, changes=changes)
        parts += source.publish(layout, True)
    assert torch.equal(arena.view(layout.slots[0]), expected)
    assert sum(parts) % 2**64 == checksum(expected)


def test_what_an_update_maps_is_closed_with_the_callers_arenas():
    arena, arenas, tensors = Arena.create(64), MappedArenas(), {"scale": torch.tensor(1.5)}
    layout = Layout(arena.path, 64, (Slot("scale", (), "float32", 0),))
    before = set(os.listdir("/proc/self/fd"))
    ModuleSource(torch.nn.Module(), Topology(), arenas, tensors=tensors).publish(layout, False)
    arenas.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_manifest_follows_a_model_that_changes(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = manifest_of(model)
    assert manifest_of(model) is before, "running a model's conversion at each update would take long"
    del model.model.layers[2]
    assert set(before) - set(manifest_of(model)) == {spec for spec in before if "layers.2" in spec.name}


def test_wrappers_leave_no_trace_in_the_names(folder):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = manifest_of(model)
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    wrapped = torch.nn.Module()
    wrapped.module = torch.compile(model)
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    assert manifest_of(wrapped) == plain
