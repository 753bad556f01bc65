"""A PEFT model whose frozen base is in the memory of its vLLM engine."""

import copy
import os
import signal

import pytest
import torch
from kit.tiny_engine import TINY_ENGINE
from lora_cases import WITH_LORA, adapted, move
from swap_cases import FP32_GAP, GREEDY, compare

from vectorlm import SamplingEngine
from vectorlm.errors import EngineDied, EngineError, HandleRefused, WeightMismatch

TINY_LLAMA = {"tied": True, "hidden_size": 64}
ENGINE_ARGS = {**WITH_LORA, "receiver": "packed", "sampling_params": GREEDY}
IDS = torch.tensor([[3, 9, 4, 1, 7]])


def step_of(model):
    """Return the loss and the gradients of one pass."""
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters() if weight.requires_grad)]


def test_a_shared_base_trains_samples_and_is_guarded(engine, folder):
    model = adapted(folder)
    move([model], seed=1)
    apart = copy.deepcopy(model)
    shared = engine.share_base(model)
    base = {name: weight for name, weight in model.named_parameters() if not weight.requires_grad}
    # The engine pads the vocabulary and fuses projections.
    assert {id(weight) for weight in shared.parameters} == {id(weight) for weight in base.values()}
    assert (shared.num_bytes, shared.num_private_bytes) == (sum(weight.nbytes for weight in base.values()), 0)
    assert all(map(torch.equal, step_of(model), step_of(apart)))
    with model.disable_adapter(), apart.disable_adapter():
        assert torch.equal(model(IDS).logits, apart(IDS).logits)

    report = engine.update(model, 1)
    assert report.num_bytes < shared.num_bytes / 5, "the base crossed"
    assert engine.adapters == {"base": -1, "policy": 1}
    assert compare(engine, apart)[1] < FP32_GAP
    assert engine.update(model, 1).skipped
    move([model, apart], seed=2)
    batch = engine.submit([[3, 4, 5]], {"max_tokens": 24, "temperature": 0.0})
    engine.update(model, 2, in_flight="keep")
    assert len(batch.result(60.0)) == 1
    assert compare(engine, apart)[1] < FP32_GAP
    with model.disable_adapter():
        engine.update(model, 3)
        assert compare(engine, model)[1] < FP32_GAP

    with pytest.raises(EngineError, match="cannot sleep"):
        engine.sleep()
    with pytest.raises(WeightMismatch, match="shares its base"):
        engine.update(apart, 4)
    engine.update(model, 5)
    next(iter(base.values())).data[0] += 1.0  # torch does not count writes through `data`.
    assert compare(engine, apart)[1] < FP32_GAP, "the trainer wrote into the engine"
    with torch.no_grad():
        next(iter(base.values())).mul_(2.0)
    with pytest.raises(WeightMismatch, match="frozen base"):
        engine.update(model, 6)

    os.kill(engine._channel.pid, signal.SIGKILL)
    with pytest.raises(EngineDied):
        engine.sample([[1, 2]])
    with pytest.raises(EngineDied, match="share_base"):
        model(IDS)


def test_updates_go_on_after_a_refused_share(folder):
    # The engine rounds the weights of the trainer, so no rank can read them in place.
    options = {**TINY_ENGINE, **ENGINE_ARGS, "dtype": "bfloat16"}
    with SamplingEngine(str(folder), **options) as engine:
        model = adapted(folder)
        expected = copy.deepcopy(model)
        engine.update(model, 0)
        with pytest.raises((HandleRefused, WeightMismatch)):
            engine.share_base(model)
        for step in (1, 2):
            move([model, expected], seed=step)
            engine.update(model, step)
            before = engine.sample([[3, 4, 5]], GREEDY)
            # The same step with equal weights sends nothing.
            assert engine.update(model, step).skipped
        engine.update(expected, 3)
        after = engine.sample([[3, 4, 5]], GREEDY)
        assert after[0][0].sampler_logprobs == before[0][0].sampler_logprobs
