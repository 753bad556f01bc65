"""When the base model must cross again."""

import torch
from kit.rank_processes import on_ranks
from test_weight_sets import Two, adapted
from torch import nn
from torch.distributed.fsdp import fully_shard

from vectorlm.sampling.weights.lora_source import Fingerprint


def train(model):
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def what_fits(topology):
    """Train, evaluate and change a sharded model; return whether its base was taken for the old one each time."""
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
    # Not every optimizer's step counts as a change: fused ones write past torch's counters.
    model = adapted()
    model.base_model.model.second.weight.requires_grad_(True)
    assert Fingerprint(model) != Fingerprint(model)
