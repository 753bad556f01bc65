"""Plans that cannot fit, and what is said of them."""

from dataclasses import replace

import pytest
from demands import DEMAND, ENGINE, MODEL

from vectorlm.errors import ConfigError
from vectorlm.preflight.memory_plan import GIB, plan_memory
from vectorlm.preflight.memory_report import check_memory

LARGE = replace(
    DEMAND,
    model=replace(MODEL, num_parameters=GIB, num_block_parameters=GIB // 32, num_layers=30, max_length=4096),
    num_trainable=GIB,
    engine=replace(ENGINE, kv_cache_bytes=4 * GIB),
)


def refusal(demand):
    with pytest.raises(ConfigError) as caught:
        check_memory(plan_memory(demand))
    return str(caught.value)


def test_a_plan_that_fits_passes():
    check_memory(plan_memory(replace(LARGE, device_bytes=20 * GIB)))
    check_memory(plan_memory(replace(LARGE, device_bytes=20 * GIB, engine=None)))


def test_training_that_does_not_fit_names_numbers_and_settings():
    # weights 2, gradients 2, optimizer 4, gathered 4 (2/32 + 2/32) + 4 x 2/32, engine 2 + 4, processes 2 GiB
    assert refusal(replace(LARGE, device_bytes=16 * GIB)) == (
        "training needs 16.8 GiB (an estimate; most of it: optimizer state 4.00 GiB, KV cache 4.00 GiB, "
        "weights 2.00 GiB) and the device has 16.0 GiB. Set train_parameters.sampler.sleep: all (10.8 GiB), or "
        "--world_size 4 (12.8 GiB), or train_parameters.sampler.engine.kv_cache_memory_bytes to half of it (14.8 GiB)."
    )


def test_sampling_that_does_not_fit_names_the_optimizer():
    asleep = replace(LARGE, engine=replace(LARGE.engine, sleep="all"), device_bytes=13 * GIB)
    assert refusal(asleep).startswith(
        "sampling needs 14.0 GiB (an estimate; most of it: optimizer state 4.00 GiB,"
    )
    assert "train_parameters.sampler.offload_optimizer: true (10.0 GiB)" in refusal(asleep)


def test_where_no_one_setting_is_enough_it_says_so():
    text = refusal(replace(LARGE, device_bytes=5 * GIB))
    assert (
        "No one setting is enough; most is gained by train_parameters.cpu_offload: true (8.75 GiB), or "
        "train_parameters.sampler.sleep: all (10.8 GiB)," in text
    )


def test_a_host_that_is_too_small_says_what_fills_it():
    demand = replace(LARGE, device_bytes=20 * GIB, host_bytes=14 * GIB)
    assert refusal(demand) == (
        "the host of the devices needs 17.3 GiB (an estimate; most of it: processes) and has 14.0 GiB. "
        "Set train_parameters.low_cpu_mem_usage: true, or use more nodes."
    )
    check_memory(plan_memory(replace(demand, loads_on_main=True)))


def test_on_cpu_sleep_is_no_advice():
    text = refusal(replace(LARGE, is_cpu=True, num_shards=1, device_bytes=20 * GIB))
    assert "this machine has 20.0 GiB" in text
    assert "sleep" not in text
    assert "train_parameters.sharding_strategy: FULL_SHARD" in text


def test_the_kv_cache_must_hold_one_sequence():
    demand = replace(LARGE, engine=replace(ENGINE, kv_cache_bytes=1 << 20, max_model_len=4096))
    # Keys and values of 30 blocks x 4 numbers x 2 bytes x 4096 tokens are 1.875 MiB.
    assert refusal(replace(demand, device_bytes=20 * GIB)) == (
        "the engine's KV cache has 1.00 MiB, and one sequence of max_model_len=4096 tokens takes 1.88 MiB. Raise "
        "train_parameters.sampler.engine.kv_cache_memory_bytes, or lower "
        "train_parameters.sampler.engine.max_model_len."
    )
    starved = replace(LARGE, engine=replace(ENGINE, kv_cache_bytes=None, device_share=0.1))
    assert "Raise train_parameters.sampler.gpu_memory_utilization, or" in refusal(
        replace(starved, device_bytes=20 * GIB)
    )
