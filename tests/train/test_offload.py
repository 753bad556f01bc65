import pytest
import torch
from kit.rank_processes import on_ranks, save_tiny_llama
from kit.tiny_runs import build_loop
from torch.distributed.tensor import DTensor

from vectorlm.train import handover
from vectorlm.train.handover import Offload


def trained_layer(optimizer_class, **settings):
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 3)
    optimizer = optimizer_class(layer.parameters(), **settings)
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
    return layer, optimizer


def tensors_of(optimizer):
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


def test_state_and_gradients_leave_and_return_as_the_same_objects_with_the_same_bits():
    layer, optimizer = trained_layer(torch.optim.AdamW, lr=0.1)
    held = [*tensors_of(optimizer), layer.weight.grad, layer.bias.grad]
    before = [tensor.clone() for tensor in held]
    offload = Offload(optimizer, "cpu")
    offload.move_out()
    # 15 weights and 3 biases, each with two averages and a gradient, and one count of steps per tensor.
    assert offload.num_bytes == (18 * 3 + 2) * 4
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in held)
    assert layer.weight.untyped_storage().nbytes() == 60
    offload.move_out()
    offload.move_back()
    assert offload.num_bytes == 0
    assert all(torch.equal(now, then) for now, then in zip(held, before, strict=True))
    assert [id(tensor) for tensor in tensors_of(optimizer)] == [id(tensor) for tensor in held[:-2]]
    offload.move_back()


def test_all_goes_into_one_block_that_is_kept_for_the_next_time(monkeypatch):
    blocks = []
    make = handover._host_block
    monkeypatch.setattr(handover, "_host_block", lambda *size: blocks.append(make(*size)) or blocks[-1])
    _, optimizer = trained_layer(torch.optim.AdamW, lr=0.1)
    offload = Offload(optimizer, "cpu")
    for _ in range(2):
        offload.move_out()
        offload.move_back()
    assert [block.numel() for block in blocks] == [(18 * 3 + 2) * 4]


def test_what_comes_later_goes_into_a_block_of_its_own():
    layer, optimizer = trained_layer(torch.optim.SGD, lr=0.1, momentum=0.9)
    offload = Offload(optimizer, "cpu")
    offload.move_out()
    layer.bias.grad = torch.tensor([5.0, 6.0, 7.0])
    offload.move_out()
    offload.move_back()
    assert layer.bias.grad.tolist() == [5.0, 6.0, 7.0]
    assert all(item.isfinite().all() and item.any() for item in tensors_of(optimizer))


def test_views_of_one_buffer_are_moved_once_and_state_that_is_the_weight_itself_stays():
    layer, optimizer = trained_layer(torch.optim.SGD, lr=0.1, momentum=0.9)
    flat = torch.arange(18.0)
    layer.weight.grad, layer.bias.grad = flat[:15].view(3, 5), flat[15:]
    optimizer.state[layer.weight] = {"history": [flat[2:4], (torch.ones(7),)], "slow": layer.weight.detach()}
    optimizer.state[layer.bias] = {}
    offload = Offload(optimizer, "cpu")
    offload.move_out()
    assert offload.num_bytes == (18 + 7) * 4
    offload.move_back()
    assert torch.equal(flat, torch.arange(18.0))
    assert torch.equal(layer.bias.grad, torch.tensor([15.0, 16.0, 17.0]))


def test_memory_that_torch_does_not_own_stays_where_it_is():
    layer, optimizer = trained_layer(torch.optim.SGD, lr=0.1)
    borrowed = torch.frombuffer(bytearray(12), dtype=torch.float32)
    layer.weight.grad, layer.bias.grad = None, borrowed
    offload = Offload(optimizer, "cpu")
    offload.move_out()
    assert offload.num_bytes == 0
    assert borrowed.tolist() == [0.0, 0.0, 0.0]


def test_a_device_that_holds_nothing_of_it_gives_nothing():
    _, optimizer = trained_layer(torch.optim.AdamW, lr=0.1)
    offload = Offload(optimizer, "meta")
    offload.move_out()
    assert offload.num_bytes == 0


def shard_bytes(topology, model_dir):
    training = build_loop(topology, model_dir)
    training.optimize(next(training.remaining_steps()))
    optimizer = training.optimizer_step.optimizer
    offload = Offload(optimizer, "cpu")
    offload.move_out()
    moved = offload.num_bytes
    offload.move_back()
    assert all(
        isinstance(state["exp_avg"], DTensor) and state["exp_avg"].to_local().isfinite().all()
        for state in optimizer.state.values()
    )
    return moved


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_rank_moves_its_own_shards(tmp_path, world_size):
    from transformers import AutoModelForCausalLM

    model_dir = save_tiny_llama(tmp_path / "model")
    parameters = list(AutoModelForCausalLM.from_pretrained(model_dir).parameters())
    states = sum(parameter.numel() for parameter in parameters) * 2 * 4
    counts = len(parameters) * 4
    assert sum(on_ranks(world_size, shard_bytes, model_dir)) == states + counts * world_size
