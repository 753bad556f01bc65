"""A real engine that sleeps and wakes on CPU: the order of the calls, and what it samples afterwards."""

import pytest
import torch
from swap_cases import GREEDY, compare, miscounted, perturb
from transformers import AutoModelForCausalLM
from turn_cases import train_and_hand_over

import vectorlm
from vectorlm.errors import EngineError

LONG_PROMPT = list(range(2, 46)) * 4


TINY_LLAMA = {"tied": True, "hidden_size": 64, "max_length": 256}
ENGINE_ARGS = {
    "max_model_len": 256,
    "sampling_params": GREEDY,
    "enable_sleep_mode": True,  # what CUDA needs, and CPU must not stumble over
}


@pytest.fixture
def models(folder):
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2)]


@pytest.fixture
def next_step(engine, models):
    """The next step, with the engine awake at the one before."""
    step = engine.version + 1
    engine.update(models[0], step)
    engine.wake_up()
    return step + 1


def refused(engine, match):
    with pytest.raises(EngineError, match=match):
        engine.sample([[2, 3]])


@pytest.mark.slow
def test_sleep_train_publish_wake_sample(engine, models, next_step):
    engine.sleep()
    refused(
        engine, r"sleeps \(weights and kv_cache\): call wake_up\(weights=True, kv_cache=True\) and update"
    )
    perturb(*models, seed=1)
    report = engine.update(models[0], next_step)  # the weights wake by themselves
    assert not report.skipped
    refused(engine, r"sleeps \(kv_cache\): call wake_up\(kv_cache=True\) before")
    engine.wake_up(weights=False)
    equal, gap, _ = compare(engine, models[1])
    assert all(equal)
    assert gap < 1e-4
    assert engine.version == next_step


def test_weights_that_slept_are_sent_again_even_at_the_same_step(engine, models, next_step):
    engine.sleep(kv_cache=False)
    engine.wake_up()
    refused(engine, "weights slept and hold nothing since: call update")
    assert not engine.update(models[0], next_step - 1).skipped
    assert all(compare(engine, models[1])[0])


def test_a_kv_cache_that_slept_serves_no_old_blocks_and_the_weights_stay(engine, models, next_step):
    for _ in range(2):
        warm = engine.generate([LONG_PROMPT], GREEDY)[0]
    assert warm.num_cached_tokens > 0, "the prompt was not cached, so this test would prove nothing"
    engine.sleep(weights=False)
    refused(engine, r"sleeps \(kv_cache\)")
    engine.wake_up()
    assert engine.generate([LONG_PROMPT], GREEDY)[0].num_cached_tokens == 0
    assert engine.update(models[0], next_step - 1).skipped


def test_an_update_that_fails_leaves_weights_that_slept_shut(engine, models, next_step):
    engine.sleep()
    with miscounted(), pytest.raises(ValueError, match="not those that the trainer sent"):
        engine.update(models[0], next_step)
    engine.wake_up()
    with pytest.raises(ValueError, match="not those that the trainer sent"):
        engine.sample([[2, 3]])
    engine.update(models[0], next_step)
    assert all(compare(engine, models[1])[0])


@pytest.mark.slow
def test_two_ranks_train_hand_over_and_train_on(folder):
    results = vectorlm.launch(train_and_hand_over, str(folder), world_size=2)
    for seen in results:
        for equal, gap, refusal in seen:
            assert equal
            # AdamW divides by the root of tiny second moments, which magnifies what the order of a sum rounds off.
            assert gap < 1e-2
            assert "the engine sleeps (weights and kv_cache)" in refusal
