"""Memory plans that cannot fit, and their messages."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from demands import DEMAND, ENGINE, MODEL
from kit.rank_processes import save_tiny_llama

from vectorlm.errors import ConfigError
from vectorlm.runs.config.load import load_config
from vectorlm.runs.preflight.checked import preflight
from vectorlm.runs.preflight.memory import Change, find_shortage, memory_report, needs_of, plan_of_config
from vectorlm.runs.preflight.memory_plan import GIB, plan_memory

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import sizes

LARGE = replace(
    DEMAND,
    model=replace(MODEL, num_parameters=GIB, num_block_parameters=GIB // 32, num_layers=30, max_length=4096),
    num_trainable=GIB,
    engine=replace(ENGINE, kv_cache_bytes=4 * GIB),
)


def shortage(demand):
    found = find_shortage(plan_memory(demand))
    return None if found is None else found.text


def test_a_plan_that_fits_has_no_shortage():
    assert shortage(replace(LARGE, device_bytes=20 * GIB)) is None
    assert shortage(replace(LARGE, device_bytes=20 * GIB, engine=None)) is None


def test_training_and_sampling_that_do_not_fit_say_what_takes_most():
    # In GiB: weights 2, gradients 2, optimizer 4, gathered 4 (2/32 + 2/32) + 4 x 2/32, engine 2 + 4, processes 2.
    assert shortage(replace(LARGE, device_bytes=16 * GIB)) == (
        "training needs 16.8 GiB (an estimate; most of it: optimizer state 4.00 GiB, KV cache 4.00 GiB, "
        "weights 2.00 GiB) and the device has 16.0 GiB."
    )
    asleep = replace(LARGE, engine=replace(LARGE.engine, sleep="all"), device_bytes=13 * GIB)
    assert shortage(asleep).startswith(
        "sampling needs 14.0 GiB (an estimate; most of it: optimizer state 4.00 GiB,"
    )
    assert "this machine has 20.0 GiB" in shortage(
        replace(LARGE, is_cpu=True, num_shards=1, device_bytes=20 * GIB)
    )


def test_a_host_that_is_too_small_says_what_fills_it():
    demand = replace(LARGE, device_bytes=20 * GIB, host_bytes=14 * GIB)
    assert shortage(demand) == (
        "loading needs 17.3 GiB (an estimate; most of it: processes 9.27 GiB, the model as it is read 8.00 GiB, "
        "weights for the engine 0.00 MiB) and the host of the devices has 14.0 GiB."
    )
    assert shortage(replace(demand, loads_on_main=True)) is None


def test_the_kv_cache_must_hold_one_sequence():
    demand = replace(LARGE, engine=replace(ENGINE, kv_cache_bytes=1 << 20, max_model_len=4096))
    # Keys and values of 30 blocks x 4 numbers x 2 bytes x 4096 tokens need 1.875 MiB.
    assert shortage(replace(demand, device_bytes=20 * GIB)) == (
        "one sequence of max_model_len=4096 tokens needs 1.88 MiB, and the engine's KV cache has 1.00 MiB."
    )


def test_the_cheapest_changes_that_are_enough_are_named_and_none_that_is_refused_or_does_harm():
    found = find_shortage(plan_memory(replace(LARGE, device_bytes=16 * GIB)))

    def change(text, is_allowed=True, **changes):
        plan = plan_memory(replace(found.plan.demand, **changes))
        return Change(text, plan, lambda: is_allowed)

    less = replace(LARGE.engine, kv_cache_bytes=2 * GIB)
    starved = replace(LARGE.engine, kv_cache_bytes=1)
    changes = [
        change("more: true", micro_batch_size=30),
        change("kv_cache: 1", engine=starved),
        change("engine: none", engine=None, is_allowed=False),
        change("kv_cache: 2", engine=less),
        change("ranks: 4", num_shards=4),
        change("cpu_offload: true", cpu_offload=True),
    ]
    expected = "Set kv_cache: 2 (14.8 GiB), or ranks: 4 (12.8 GiB), or cpu_offload: true (8.75 GiB)."
    assert found.advice(changes) == expected
    assert found.advice(changes[:3]) == "No setting helps. Use a smaller model."
    small = find_shortage(plan_memory(replace(LARGE, device_bytes=5 * GIB)))
    assert small.advice(
        [Change("kv_cache: 2", plan_memory(replace(small.plan.demand, engine=less)), lambda: True)]
    ) == ("No single setting is enough; the most effective one is kv_cache: 2 (14.8 GiB).")


RL = """\
model: model
train_parameters:
  output_dir: run
  max_seq_len: 512
  optimizer: {lr: 0.01}
  sampler: {engine: {}}
rl: {algorithm: grpo, max_steps: 2, prompts: [a, b], prompts_per_step: 8, group_size: 8,
     sampling_params: {max_tokens: 256}, rewards: {"rewards.py:score": 1}}
"""
SFT = """\
model: model
train_parameters:
  output_dir: run
  max_seq_len: 512
  epochs: 1
  optimizer: {lr: 0.01}
  sampler: {sample_frequency: 1, prompts: [a], engine: {max_model_len: 512}}
dataset: {train_bs: 8, train_ds: train}
"""
LORA = "train_parameters.lora_peft_config={r: 8, target_modules: all-linear}"
KINDS = {
    "rl": (RL, ()),
    "rl with LoRA": (RL, (LORA,)),
    "rl beside transformers": (RL, ("engine.inference=transformers",)),
    "rl beside an engine that never rests": (RL, ("rl.async={max_staleness: 1}",)),
    "rl that compares groups": (RL, ("rl.algorithm=online_dpo", "rl.max_tokens_per_micro_batch=8192")),
    "fine-tuning": (SFT, ()),
    "fine-tuning on replicas": (SFT, ("train_parameters.sharding_strategy=NO_SHARD",)),
    "fine-tuning alone": (SFT, ("train_parameters.sampler=null",)),
    "preferences": (SFT, ("preference={loss: dpo}",)),
    "a small KV cache": (SFT, ("engine={kv_cache_memory_bytes: 1000000}",)),
}
FIRST = ("rl", "fine-tuning", "a small KV cache")
NAMED = re.compile(r"(--world_size) (\d+)|((?:train_parameters|engine|dataset|rl)\.[\w.]+): ([\w.]*\w)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a model of half a billion parameters without weights, and the files that its runs read."""
    folder = tmp_path_factory.mktemp("large")
    save_tiny_llama(folder / "model")
    sizes.make_folder(folder / "model", "Qwen2.5-0.5B")
    (folder / "rewards.py").write_text("def score(text):\n    return 1.0\n")
    (folder / "train").mkdir()
    (folder / "train/dataset_info.json").write_text("{}")
    return folder


@pytest.mark.parametrize("place", ["cpu", "cuda", "host"])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in FIRST else pytest.mark.slow) for kind in KINDS]
)
def test_every_advice_is_accepted_and_saves_memory(folder, monkeypatch, kind, place):
    monkeypatch.chdir(folder)
    text, overrides = KINDS[kind]
    is_cpu = place == "cpu"
    if place == "host":
        overrides = (*overrides, "train_parameters.low_cpu_mem_usage=false")
    Path("my.yaml").write_text(text)

    def plan_of(settings, world_size, size):
        config = preflight(load_config("my.yaml", [*overrides, *settings]), world_size).config
        host = 500 * GIB if place == "cuda" else size
        monkeypatch.setattr("vectorlm.runs.preflight.memory.host_memory_bytes", lambda: host)
        size = 80 * GIB if place == "host" else size
        monkeypatch.setattr("vectorlm.runs.preflight.memory.device_memory_bytes", lambda: size)
        return config, plan_of_config(config, world_size, None if is_cpu else size)

    num_named = 0
    for size in (7.5, 10.5, 13, 15) if place == "host" else (2, 7, 9, 12):
        config, before = plan_of((), 2, int(size * GIB))
        if find_shortage(before) is None:
            continue
        with pytest.raises(ConfigError) as caught:
            memory_report(config, 2, device_bytes=before.demand.device_bytes if not is_cpu else None)
        advice = str(caught.value).partition(" and ")[2]
        for option, number, setting, value in NAMED.findall(advice):
            num_named += 1
            settings = () if option else (f"{setting}={value}",)
            _, after = plan_of(settings, int(number or 2), int(size * GIB))
            kind = find_shortage(before).kind
            lacking = [
                needed - available for needed, available in (needs_of(plan)[kind] for plan in (before, after))
            ]
            assert lacking[1] < lacking[0], (setting, value)
            if "Set " in advice:
                assert find_shortage(after) is None
    assert num_named
