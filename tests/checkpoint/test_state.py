import random

import numpy as np
import pytest
import torch
from rank_processes import on_ranks, save_tiny_llama

from vectorlm.checkpoint.rng import capture_rng, restore_rng
from vectorlm.checkpoint.state import CheckpointStore, Part
from vectorlm.errors import CheckpointError
from vectorlm.model.load import load_model
from vectorlm.model.lora import add_lora
from vectorlm.model.shard import shard_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("llama"), tied=True)


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_restored_generators_draw_the_same_numbers_again():
    torch.randn(3)
    state = capture_rng()
    first = draw()
    assert draw() != first
    restore_rng(state)
    assert draw() == first


def build(topology, model_dir, lora):
    torch.manual_seed(5)
    model = load_model(model_dir)
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


def save_and_load(topology, model_dir, path, lora):
    model, optimizer = build(topology, model_dir, lora)
    torch.manual_seed(100 + topology.rank)
    make_step(model, optimizer)
    store = CheckpointStore(path, {"seed": 1})
    store.save(1, {"policy": Part(model, optimizer)}, {"rank": topology.rank, "learning_rate": 0.1})
    expected_draw = draw()[2]
    make_step(model, optimizer)
    expected = weights(model)

    model, optimizer = build(topology, model_dir, lora)
    loop = store.load(1, {"policy": Part(model, optimizer)})
    found_draw = draw()[2]
    make_step(model, optimizer)
    found = weights(model)
    return loop, expected_draw, found_draw, all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("world_size", "lora"), [(1, False), (2, False), (2, True)])
def test_a_step_after_loading_equals_the_step_after_saving_bit_for_bit(tmp_path, model_dir, world_size, lora):
    results = on_ranks(world_size, save_and_load, model_dir, tmp_path, lora)
    for rank, (loop, expected_draw, found_draw, same) in enumerate(results):
        assert loop == {"rank": rank, "learning_rate": 0.1}
        assert found_draw == expected_draw
        assert same
    assert len({expected_draw for _, expected_draw, _, _ in results}) == world_size


def save_often(topology, model_dir, path):
    model, optimizer = build(topology, model_dir, False)
    store = CheckpointStore(path, {"seed": 1, "world_size": 1})
    found = [store.latest_step()]
    for step in (2, 4, 10):
        store.save(step, {"policy": Part(model, optimizer)}, {})
        found.append(store.latest_step())
    (path / ".step-00000012.unfinished").mkdir()
    (path / ".step-00000004.retired").mkdir()
    found.append(store.latest_step())
    store.save(12, {"policy": Part(model, optimizer)}, {})
    return found


def test_the_last_two_checkpoints_stay_and_half_written_ones_are_never_seen(tmp_path, model_dir):
    assert on_ranks(1, save_often, model_dir, tmp_path) == [[None, 2, 4, 10, 10]]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000010", "step-00000012"]
    with pytest.raises(CheckpointError) as raised:
        CheckpointStore(tmp_path, {"seed": 2, "world_size": 1, "epochs": 3}).latest_step()
    assert str(raised.value) == (
        f"cannot resume from {tmp_path}/step-00000012: epochs was None and is 3; seed was 1 and is 2. A run "
        "resumes only with the settings it was started with. Restore them, choose another output_dir, or "
        f"delete {tmp_path}."
    )
