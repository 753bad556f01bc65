import os
import random
import shutil

import numpy as np
import pytest
import torch
from kit.rank_processes import on_ranks
from kit.tensors import full

from vectorlm.errors import CheckpointError
from vectorlm.train.checkpoint.folder import newest
from vectorlm.train.checkpoint.state import CheckpointStore, capture_rng, restore_rng, set_state, state_of
from vectorlm.train.load import load_model
from vectorlm.train.lora import add_lora
from vectorlm.train.shard import shard_model
from vectorlm.types import TrainedModel

TINY_LLAMA = {"tied": True}


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_restored_generators_draw_the_same_numbers_again():
    torch.randn(3)
    state = capture_rng()
    first = draw()
    assert draw() != first
    restore_rng(state)
    assert draw() == first


def first_step(saves):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if saves:
        state_of(TrainedModel(model, optimizer))
        assert not optimizer.state
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    assert all(state["step"] == 1 for state in optimizer.state.values())
    return model.weight.detach()


def test_a_run_that_is_saved_before_its_first_step_makes_the_step_of_one_that_was_never_saved():
    assert torch.equal(first_step(saves=True), first_step(saves=False))


def build(topology, folder, lora, spare=False):
    torch.manual_seed(5)
    model = load_model(folder)
    if spare:
        # A vision tower during training on text is like this: trained, but without a gradient.
        model.model.layers[0].spare = torch.nn.Linear(2, 2)
    if lora:
        model = add_lora(model, {"r": 2, "target_modules": ["q_proj"]})
    shard_model(model, topology)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trainable, lr=1e-2)


def make_step(model, optimizer):
    model(input_ids=torch.arange(8)[None], use_cache=False).logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model):
    return {name: full(parameter).clone() for name, parameter in model.named_parameters()}


def save_and_load(topology, folder, path, *kind):
    model, optimizer = build(topology, folder, *kind)
    torch.manual_seed(100 + topology.rank)
    make_step(model, optimizer)
    store = CheckpointStore(path, {"seed": 1})
    store.save(1, {"policy": TrainedModel(model, optimizer)}, {"rank": topology.rank, "learning_rate": 0.1})
    expected_draw = draw()[2]
    make_step(model, optimizer)
    expected = weights(model)

    with_state = len(optimizer.state)
    model, optimizer = build(topology, folder, *kind)
    loop = store.load(1, {"policy": TrainedModel(model, optimizer)})
    assert len(optimizer.state) == with_state
    found_draw = draw()[2]
    make_step(model, optimizer)
    found = weights(model)
    return loop, expected_draw, found_draw, all(torch.equal(found[name], expected[name]) for name in expected)


def test_neither_saving_nor_loading_touches_frozen_weights_that_are_tied(folder):
    model = add_lora(load_model(folder), {"r": 2, "target_modules": ["q_proj"]})
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    make_step(model, optimizer)
    head = model.get_output_embeddings().weight
    assert head is model.get_input_embeddings().weight
    num_writes = head._version
    state = state_of(TrainedModel(model, optimizer))
    assert state["model"]
    assert all("lora_" in name for name in state["model"])
    set_state(TrainedModel(model, optimizer), state)
    assert head._version == num_writes


def save_and_load_every_kind(topology, folder, path):
    kinds = [(False, False), (True, False), (False, True)]
    return [save_and_load(topology, folder, path / str(index), *kind) for index, kind in enumerate(kinds)]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_after_loading_equals_the_step_after_saving_bit_for_bit(tmp_path, folder, world_size):
    for results in zip(*on_ranks(world_size, save_and_load_every_kind, folder, tmp_path), strict=True):
        for rank, (loop, expected_draw, found_draw, same) in enumerate(results):
            assert loop == {"rank": rank, "learning_rate": 0.1}
            assert found_draw == expected_draw
            assert same
        assert len({expected_draw for _, expected_draw, _, _ in results}) == world_size


def save_often(topology, folder, path):
    model, optimizer = build(topology, folder, False)
    store = CheckpointStore(path, {"settings": {}})
    found = [newest(path)]
    for step in (2, 4, 10):
        store.save(step, {"policy": TrainedModel(model, optimizer)}, {})
        found.append(newest(path).step)
    (path / ".step-00000012.unfinished").mkdir()
    (path / ".step-00000004.retired").mkdir()
    found.append(newest(path).step)
    store.save(12, {"policy": TrainedModel(model, optimizer)}, {})
    return found


def test_the_last_two_checkpoints_stay_and_half_written_ones_are_never_seen(tmp_path, folder):
    assert on_ranks(1, save_often, folder, tmp_path) == [[None, 2, 4, 10, 10]]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000010", "step-00000012"]


def save_once(topology, folder, path):
    model, optimizer = build(topology, folder, False)
    torch.manual_seed(100 + topology.rank)
    make_step(model, optimizer)
    CheckpointStore(path, {}).save(1, {"policy": TrainedModel(model, optimizer)}, {"rank": topology.rank})
    make_step(model, optimizer)
    return weights(model)


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory):
    """Return checkpoints of a step by one rank and by two, with the weights after the next step."""
    paths = {world_size: tmp_path_factory.mktemp(f"by-{world_size}") for world_size in (1, 2)}
    return {
        one_item: (path, on_ranks(one_item, save_once, folder, path)[0]) for one_item, path in paths.items()
    }


def load_once(topology, folder, path):
    model, optimizer = build(topology, folder, False)
    for group in optimizer.param_groups:
        group |= {"weight_decay": 0.5, "lr": 7.0}
    loop = CheckpointStore(path, {}).load(1, {"policy": TrainedModel(model, optimizer)})
    (group,) = optimizer.param_groups
    found = group["weight_decay"], group["lr"]
    group["weight_decay"] = 0.01
    make_step(model, optimizer)
    return loop, found, weights(model)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_another_number_of_ranks_loads_the_checkpoint(saved, folder, before, after):
    """Each rank computes the same loss, and the same step follows on any number of ranks."""
    path, expected = saved[before]
    for rank, (loop, _, found) in enumerate(on_ranks(after, load_once, folder, path)):
        assert loop == {"rank": rank if rank < before else 0}
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-7)


def test_of_the_optimizers_arguments_the_learning_rate_alone_comes_from_the_checkpoint(saved, folder):
    ((_, found, _),) = on_ranks(1, load_once, folder, saved[1][0])
    assert found == (0.5, 1e-2)


def truncate(path):
    assert path.stat().st_size > 20
    path.write_bytes(path.read_bytes()[:20])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


TRUNCATED = [(truncate, name) for name in ("rank-0.pt", "shards/.metadata", "files.json")]
BROKEN = {
    1: [*TRUNCATED, (flip_a_bit, "identity.json"), (lambda path: path.write_text("{}"), "files.json")],
    2: [(os.remove, "shards/__1_0.distcp"), (flip_a_bit, "shards/__0_0.distcp"), (flip_a_bit, "rank-1.pt")],
}
"""By number of ranks: the damage, and the damaged file."""


def load_broken(topology, folder, saved, path):
    """Return the error of each damage."""
    said = []
    for index, (spoil, broken) in enumerate(BROKEN[topology.world_size]):
        if topology.is_main:
            shutil.copytree(saved, path / str(index))
            spoil(path / str(index) / "step-00000001" / broken)
        if topology.world_size > 1:
            torch.distributed.barrier()
        with pytest.raises(CheckpointError) as caught:
            load_once(topology, folder, path / str(index))
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("world_size", BROKEN)
def test_a_checkpoint_that_is_not_as_it_was_written_is_named(saved, tmp_path, folder, world_size):
    for said in on_ranks(world_size, load_broken, folder, saved[world_size][0], tmp_path):
        for text, (_, broken) in zip(said, BROKEN[world_size], strict=True):
            assert "step-00000001 cannot be read" in text
            assert broken == "files.json" or f"{broken} has changed" in text


def test_a_checkpoint_without_its_notes_is_named(tmp_path):
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(CheckpointError, match="step-00000001"):
        newest(tmp_path)
