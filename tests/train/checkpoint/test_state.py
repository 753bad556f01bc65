import os
import random
import shutil

import numpy as np
import pytest
import torch
from kit.rank_processes import on_ranks

from vectorlm.errors import CheckpointError
from vectorlm.ranks import wait
from vectorlm.train.checkpoint.export import export_model
from vectorlm.train.checkpoint.folder import newest
from vectorlm.train.checkpoint.state import CheckpointStore, capture_rng, restore_rng, state_of
from vectorlm.train.load import load_model, load_tokenizer
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
        # As a vision tower beside text: trained, and without a gradient.
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
    return {name: parameter.full_tensor().clone() for name, parameter in model.named_parameters()}


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


@pytest.mark.parametrize(
    ("world_size", "lora", "spare"),
    [(1, False, False), (2, False, False), (2, True, False), (1, False, True), (2, False, True)],
)
def test_a_step_after_loading_equals_the_step_after_saving_bit_for_bit(
    tmp_path, folder, world_size, lora, spare
):
    results = on_ranks(world_size, save_and_load, folder, tmp_path, lora, spare)
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
    """Checkpoints of a step by one rank and by two, each with the weights after the next step."""
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
    """Each rank computes the same loss here, so the same step follows on any number of ranks."""
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


NAMED = r"the checkpoint \S+step-00000001 cannot be read"


@pytest.mark.parametrize(
    ("spoil", "broken", "world_size"),
    [
        (truncate, "rank-0.pt", 1),
        (truncate, "shards/.metadata", 1),
        (truncate, "files.json", 1),
        (os.remove, "shards/__1_0.distcp", 2),
        (flip_a_bit, "shards/__0_0.distcp", 2),
        (flip_a_bit, "rank-1.pt", 2),
        (flip_a_bit, "identity.json", 1),
    ],
)
def test_a_checkpoint_that_is_not_as_it_was_written_is_named(
    saved, tmp_path, folder, spoil, broken, world_size
):
    shutil.copytree(saved[world_size][0], tmp_path, dirs_exist_ok=True)
    spoil(tmp_path / "step-00000001" / broken)
    with pytest.raises(Exception, match=f"CheckpointError: {NAMED}") as caught:
        on_ranks(world_size, load_once, folder, tmp_path)
    assert broken == "files.json" or f"{broken} has changed" in str(caught.value)


def test_a_file_that_has_no_digest_is_named(saved, tmp_path, folder):
    shutil.copytree(saved[1][0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "step-00000001/files.json").write_text("{}")
    with pytest.raises(Exception, match=r"rank-0\.pt.* has changed"):
        on_ranks(1, load_once, folder, tmp_path)


def test_a_checkpoint_without_its_notes_is_named(tmp_path):
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(CheckpointError, match=NAMED):
        newest(tmp_path)


def say_all(topology, folder, path):
    said = []
    wait.AFTER_S, wait.say = 0.0, said.append
    model, optimizer = build(topology, folder, lora=False)
    store, models = CheckpointStore(path / "checkpoints", {}), {"policy": TrainedModel(model, optimizer)}
    store.save(1, models, {})
    store.load(1, models)
    export_model(model, load_tokenizer(folder), path / "final-model")
    return [line.partition(": done after")[0] for line in said if "done after" in line]


def test_rank_0_says_that_a_checkpoint_or_a_model_takes_long(tmp_path, folder):
    said, of_other = on_ranks(2, say_all, folder, tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step-00000001"
    assert said == [
        f"writing the checkpoint {checkpoint}",
        f"reading the checkpoint {checkpoint}",
        f"writing the model {tmp_path / 'final-model'}",
    ]
    assert of_other == []
