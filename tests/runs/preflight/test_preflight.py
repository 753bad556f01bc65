"""Settings of fine-tuning configs that the check refuses; test_messages.py has the texts."""

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from kit.config_texts import MINIMAL
from kit.letters import letter_tokenizer
from safetensors.torch import save_file

from vectorlm import SamplingEngine
from vectorlm.algorithms.registry import get_algorithm
from vectorlm.data.summary import Summary
from vectorlm.errors import ConfigError, DatasetError
from vectorlm.packages import fields_of, is_installed
from vectorlm.runs.config.load import load_config
from vectorlm.runs.preflight import files, settings, summary
from vectorlm.runs.preflight.checked import preflight
from vectorlm.runs.preflight.rl import correction_problems
from vectorlm.runs.preflight.settings import LORA_CONFIG, setting_problems
from vectorlm.runs.preflight.shared_base import shares_base
from vectorlm.sampling.arguments import require_folder

TRAIN = "train_parameters"
SAMPLER = f"{TRAIN}.sampler={{sample_frequency: 2, prompts: p.jsonl}}"
LORA = f"{TRAIN}.lora_peft_config"
RL = "rl={algorithm: grpo, max_steps: 2, prompts: [a], prompts_per_step: 1, rewards: {'mine.py:score': 1}}"
SOURCES = "rl={{algorithm: grpo, max_steps: 2, prompts_per_step: 1, sources: {{one: {}}}}}"
EVERY = "evaluation.every=2"
KEY = re.compile("[^=:]*")


@pytest.fixture
def complete(write_complete):
    return write_complete()


def passes(path, *overrides, world_size=1, num_nodes=1):
    return preflight(load_config(path, overrides), world_size, num_nodes)


def refused(path, *overrides, **more):
    """Return the keys of the refused settings, in order."""
    with pytest.raises(ConfigError) as caught:
        passes(path, *overrides, **more)
    return [KEY.match(line)[0] for line in str(caught.value).split("  - ")[-num_of(caught.value) :]]


def num_of(error):
    first = str(error).split(" ", 1)
    return int(first[0]) if first[1].startswith("problems:") else 1


@pytest.mark.parametrize(
    ("world_size", "num_nodes", "overrides"),
    [
        (1, 1, []),
        (1, 1, [SAMPLER, "evaluation.rewards='mine.py:score'"]),
        (2, 1, [SAMPLER, f"{TRAIN}.sharding_strategy=HYBRID_SHARD", f"{TRAIN}.max_seq_len=256"]),
        (4, 2, [SAMPLER, f"{TRAIN}.sharding_strategy=HYBRID_SHARD"]),
        (4, 2, []),
        (4, 1, [f"{TRAIN}.context_parallel=2"]),
        (1, 1, [f"{TRAIN}.sampler={{sample_frequency: 2, prompts: [a]}}"]),
        (1, 1, [f"{TRAIN}.use_flash_attention=true", f"{TRAIN}.use_mp=false", f"{TRAIN}.dtype=bfloat16"]),
        (2, 1, [SAMPLER, f"{LORA}={{r: 4, bias: none, use_dora: false, modules_to_save: null}}"]),
        (2, 1, [f"{LORA}={{use_dora: true, modules_to_save: [lm_head]}}"]),
        (2, 1, [SAMPLER, "engine.lora_mode=merged", f"{LORA}={{use_dora: true}}"]),
        (1, 1, [f"{LORA}={{init_lora_weights: gaussian}}"]),
        (1, 1, [f"{LORA}={{init_lora_weights: false}}"]),
        (1, 1, [SAMPLER, "engine={tensor_parallel_size: 4}"]),
        (
            1,
            1,
            [
                SAMPLER,
                "engine.inference=transformers",
                "engine={dtype: bfloat16}",
            ],
        ),
        (1, 1, ["trackers={tensorboard: }"]),
        (1, 1, ["trackers={'mine.py:score': {}}"]),
        pytest.param(
            *(1, 1, [SAMPLER, "evaluation.tasks=[gsm8k]"]),
            marks=pytest.mark.skipif(not is_installed("lm_eval"), reason="needs lm_eval"),
        ),
    ],
)
def test_what_can_be_carried_out_passes_and_nothing_is_written(complete, world_size, num_nodes, overrides):
    before = sorted(Path().rglob("*"))
    passes(complete, *overrides, world_size=world_size, num_nodes=num_nodes)
    # Python caches the bytecode of mine.py.
    assert sorted(path for path in Path().rglob("*") if "__pycache__" not in path.parts) == before
    assert Path(complete).read_text() == MINIMAL


@pytest.mark.parametrize(
    ("overrides", "more", "keys"),
    [
        ([], {"world_size": 0}, ["world_size"]),
        ([], {"num_nodes": 0}, ["nnodes"]),
        ([], {"world_size": 3, "num_nodes": 2}, ["world_size"]),
        ([SAMPLER], {"world_size": 4, "num_nodes": 2}, [f"{TRAIN}.sharding_strategy"]),
        ([f"{TRAIN}.context_parallel=2"], {"world_size": 3}, [f"{TRAIN}.context_parallel"]),
        ([f"{TRAIN}.context_parallel=3"], {"world_size": 3}, [f"{TRAIN}.context_parallel"]),
        (["dataset=null"], {}, ["there is nothing to train on"]),
        ([f"{TRAIN}.max_seq_len=257"], {}, [f"{TRAIN}.max_seq_len"]),
        ([f"{TRAIN}.optimizer.fused=true", f"{TRAIN}.optimizer.foreach=true"], {}, [f"{TRAIN}.optimizer.foreach"]),
        ([f"{TRAIN}.optimizer.capturable=true", f"{TRAIN}.cpu_offload=true"], {}, [f"{TRAIN}.optimizer.capturable"]),
        ([f"{TRAIN}.sampler={{prompts: q.jsonl}}"], {}, ["evaluation.prompts"]),
        ([f"{TRAIN}.sampler={{prompts: [a], output_jsonl_path: data}}"], {}, ["evaluation.output_jsonl_path"]),
        ([SAMPLER, "engine.enable_lora=true"], {}, ["engine.enable_lora"]),
        (
            [SAMPLER, "evaluation.rewards={'mine.py:score': 1}", "evaluation.thresholds={scor: 0.5}"],
            {},
            ["evaluation.thresholds.scor"],
        ),
        ([SAMPLER, "engine.slep=all"], {}, ["engine.slep"]),
        ([SAMPLER, "engine.data_parallel_size=2"], {"world_size": 3}, ["engine.data_parallel_size"]),
        (
            [SAMPLER, "engine={inference: server, url: 'http://127.0.0.1:8000', data_parallel_size: 2}"],
            {"world_size": 2},
            ["engine.data_parallel_size"],
        ),
        ([SAMPLER, "engine.pipeline_parallel_size=2"], {}, ["engine.pipeline_parallel_size"]),
        *(
            ([SAMPLER, f"engine.quantization={name}"], {}, ["engine.quantization"])
            for name in ("fp8_per_tensor", "awq", "gptq", "fp8", "mxfp4", "true")
        ),
        ([SAMPLER, "engine.quantization=int8", "engine.dtype=float32"], {}, ["engine.dtype"]),
        ([SAMPLER, "engine.quantization=int8", "engine.transport=pull"], {}, ["engine.transport"]),
        *(
            ([SAMPLER, f"engine.speculative_config={drafts}"], {}, ["engine.speculative_config.method"])
            for drafts in ("{method: eagle}", "{method: mtp}", "{model: draft}", "suffix")
        ),
        (
            [SAMPLER, "engine.speculative_config={method: ngram}", "evaluation.sampling_params={min_p: 0.1}"],
            {},
            ["evaluation.sampling_params.min_p"],
        ),
        ([SAMPLER, "engine.token=hunter2"], {}, ["engine.token"]),
        (["wandb_config.api_key=hunter2"], {}, ["wandb_config.api_key"]),
        ([SAMPLER, "engine.inference=server", "engine.url=http://a:b@localhost:80"], {}, ["engine.url"]),
        (["trackers={tensorboard: {hf_token: abc}}"], {}, ["trackers.tensorboard.hf_token"]),
        (["trackers={tensorbord: {}}"], {}, ["trackers.tensorbord"]),
        (["trackers={wandb: {}}"], {}, ["trackers.wandb"]),
        (["trackers={tensorboard: logs}"], {}, ["trackers.tensorboard"]),
        (["trackers={'mine.py:absent': {}}"], {}, ["trackers.mine.py"]),
        (["trackers={'mine.py:score': {unknown: 1}}"], {}, ["trackers.mine.py"]),
        *(
            (
                [SAMPLER, "evaluation.tasks=[gsm8k]", *(f"{TRAIN}.sampler.{change}" for change in how)],
                {},
                ["evaluation.tasks"],
            )
            for how in (["inference=transformers"], ["inference=server", "engine.url=http://localhost:80"])
        ),
        ([SAMPLER, f"{LORA}={{use_dora: true}}"], {}, [f"{LORA}.use_dora"]),
        ([SAMPLER, f"{LORA}={{bias: all}}"], {}, [f"{LORA}.bias"]),
        ([SAMPLER, f"{LORA}={{r: 8, rank_pattern: {{q_proj: 600}}}}"], {}, [f"{LORA}.r"]),
        ([SAMPLER, "engine.lora_mode=merged", f"{LORA}={{lora_bias: true}}"], {}, [f"{LORA}.lora_bias"]),
        ([f"{LORA}={{r: 4, lora_alhpa: null}}"], {}, [f"{LORA}.lora_alhpa"]),
        ([f"{LORA}={{trainable_token_indices: [5, 6]}}"], {}, [f"{LORA}.trainable_token_indices"]),
        ([f"{LORA}={{inference_mode: true}}"], {}, [f"{LORA}.inference_mode"]),
        ([f"{LORA}={{task_type: SEQ_CLS}}"], {}, [f"{LORA}.task_type"]),
        (
            [SAMPLER, "evaluation.sampling_params={detokenize: false}"],
            {},
            ["evaluation.sampling_params.detokenize"],
        ),
        *(
            ([f"{LORA}={{init_lora_weights: {start}}}"], {}, [f"{LORA}.init_lora_weights"])
            for start in ("pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "eva", "loftq", "lora_ga", "mica")
        ),
        (
            [SAMPLER, f"{LORA}={{r: 9}}", "engine.max_lora_rank=8"],
            {},
            ["engine.max_lora_rank"],
        ),
        *(
            (
                [RL, "rl.group_size=4", f"rl.rewards={{'judge(url=\"u\", model=\"j\", pattern=\"{pattern}\")': 1}}"],
                {},
                ["rl.rewards.judge(url"],
            )
            for pattern in ("(score|rating) ([0-9])", "[0-9")
        ),
        (["dataset.train_ds=data"], {}, ["dataset.train_ds"]),
        (["model=gone", "dataset.train_ds=gone"], {}, ["model", "dataset.train_ds"]),
        (["dataset.train_ds=/dev/null", "dataset.eval_ds=gone"], {}, ["dataset.train_ds", "dataset.eval_ds"]),
    ],
)  # fmt: skip
def test_what_would_fail_late_or_silently_is_refused(complete, overrides, more, keys):
    assert refused(complete, *overrides, **more) == keys


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([f"{TRAIN}.context_parallel=2"], f"{TRAIN}.context_parallel"),
        (["reward_model={}"], "model"),
    ],
)
def test_what_a_vision_language_model_cannot_do_is_refused(complete, overrides, key):
    path = Path("models/tiny/config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "vision_config": {}}))
    problems = list(setting_problems(load_config(complete, overrides), 2))
    assert [problem.partition("=")[0] for problem in problems if "vision" in problem] == [key]


def test_the_engine_of_transformers_has_the_trainer_s_dtype_on_cpu(complete):
    config = load_config(complete, [SAMPLER, "engine.inference=transformers", f"{TRAIN}.dtype=bfloat16"])
    assert config.engine_arguments(is_cuda=False)["dtype"] == "bfloat16"
    assert "dtype" not in config.engine_arguments(is_cuda=True)


@pytest.mark.parametrize(
    "override",
    [
        "wandb_config.api_key=hunter2hunter2",
        "rl.rewards={\"judge(url='http://user:hunter2@host/v1', model='m')\": 1}",
        "evaluation.rewards=[\"judge(url='http://user:hunter2@host/v1', model='m')\"]",
    ],
)
def test_a_secret_is_found_and_not_repeated(complete, override):
    config = load_config(complete, [RL, f"{TRAIN}.epochs=1", override])
    (found,) = (text for text in settings.setting_problems(config, 1) if "others may read it" in text)
    assert "user" not in found
    assert "hunter2" not in found


def test_hidden_tokens_must_be_the_same_for_the_data_and_the_loss(complete):
    made = "dataset_preprocess={ignore_index: -1, dataset_format: hf, data_field: text, load_path: a, save_path: b}"
    assert refused(complete, made) == ["dataset_preprocess.ignore_index"]
    passes(complete, made, "dataset.ignore_index=-1")


def test_a_dataset_made_with_another_ignore_index_is_refused(complete):
    dataset = Dataset.from_dict({"input_ids": [[1, 2, 3]], "labels": [[0, 2, 3]]})
    Summary(8, ignore_index=0).keep_in(dataset)
    dataset.save_to_disk("data/hidden")
    places = ["dataset.train_ds", "dataset.eval_ds"]
    assert refused(complete, *(f"{place}=data/hidden" for place in places)) == places
    passes(complete, *(f"{place}=data/hidden" for place in places), "dataset.ignore_index=0")
    config = load_config(complete, [RL, f"{TRAIN}.epochs=1", "rl.sft.dataset=data/hidden", "dataset=null"])
    (found,) = files.file_problems(config)
    assert found.startswith("rl.sft.dataset=")
    assert "ignore_index=0" in found


def test_a_misspelt_setting_of_the_old_section_is_named_where_it_is_now(complete):
    overrides = f"{TRAIN}.sampler={{sample_freq: 2, prompts: [a]}}", f"{TRAIN}.epochs=1"
    (found,) = settings.setting_problems(load_config(complete, overrides), 1)
    assert "'evaluation.every'" in found


@pytest.mark.parametrize("inference", ["vlm", "mine.py:Egnine", "absent.py:Engine"])
def test_an_engine_that_does_not_exist_is_refused(complete, inference):
    Path("mine.py").write_text("class Engine: ...\n")
    assert refused(complete, SAMPLER, f"engine.inference='{inference}'") == ["engine.inference"]


def test_the_time_that_an_engine_may_take_to_load_is_a_number_above_0(complete):
    passes(complete, SAMPLER, "engine.start_timeout_s=60")
    for wrong in ("0", "-1", ".inf", "yes", "soon"):
        assert refused(complete, SAMPLER, f"engine.start_timeout_s={wrong}") == ["engine.start_timeout_s"]


@pytest.mark.skipif(not fields_of("sampling_params.py", "SamplingParams"), reason="needs vLLM's source")
def test_a_sampling_parameter_that_vllm_does_not_know_is_refused(complete):
    params = "evaluation.sampling_params"
    assert refused(complete, SAMPLER, f"{params}.temprature=1") == [f"{params}.temprature"]
    assert refused(complete, SAMPLER, f"{params}.top_p=1.5") == [f"{params}.top_p"]
    with pytest.raises(ConfigError, match=rf"Did you mean '{params}.max_tokens'"):
        passes(complete, SAMPLER, f"{params}.max_completion_length=48")


def test_a_sampling_parameter_that_transformers_cannot_honour_is_refused(complete):
    path, here = "evaluation.sampling_params", "engine.inference=transformers"
    passes(complete, SAMPLER, f"{path}.top_p=0.9", f"{path}.presence_penalty=0", here)
    with pytest.raises(ConfigError, match=f"{path} .*'logit_bias'"):
        passes(complete, SAMPLER, f"{path}.logit_bias={{1: 2.0}}", here)


BF16, ADAM = f"{TRAIN}.dtype=bfloat16", f"{TRAIN}.optimizer"
MADE = "dataset_preprocess={{load_path: a, save_path: b, packing_type: {}, truncate: true}}"
ENGINE_DTYPE = "engine.dtype={}"


@pytest.mark.parametrize(
    ("overrides", "is_cuda", "named", "is_said"),
    [
        # On CPU, the engine's dtype defaults to the trainer's.
        ([RL], False, "engine in", False),
        ([RL, ENGINE_DTYPE.format("bfloat16")], False, "engine in bfloat16", True),
        ([RL, ENGINE_DTYPE.format("float32")], False, "engine in", False),
        ([RL], True, "engine in", False),
        ([RL, ENGINE_DTYPE.format("float16")], True, "engine in float16", True),
        # bfloat16 rounds these steps away.
        ([f"{ADAM}.lr=1e-6"], False, "lr 1e-06", False),
        ([f"{ADAM}.lr=1e-6", LORA + "={r: 4}"], False, "lr 1e-06", False),
        ([f"{ADAM}.lr=1e-6", BF16], False, "lr 1e-06 cannot move weights above 0.00051", True),
        # bfloat16 keeps this average of squared gradients from falling.
        ([BF16], False, "betas[1]=0.999", True),
        ([BF16, f"{ADAM}.betas=[0.9, 0.95]"], False, "betas[1]", False),
        ([BF16, f"{ADAM}.name=sgd", f"{ADAM}.momentum=0.9"], False, "betas[1]", False),
        ([MADE.format("partial")], False, "truncate", True),
        ([MADE.format("best_fit")], False, "truncate", False),
        ([MADE.format("null")], False, "truncate", False),
        ([f"{LORA}={{r: 4, lora_dropout: 0.1}}"], False, "lora_dropout", False),
        ([RL, f"{LORA}={{r: 4, lora_dropout: 0.1}}"], False, "lora_dropout 0.1", True),
    ],
)
def test_what_a_run_silently_does_otherwise_is_noted(
    complete, monkeypatch, overrides, is_cuda, named, is_said
):
    monkeypatch.setattr(summary, "has_gpu", lambda: is_cuda)
    more = [f"{TRAIN}.epochs=1"] if RL in overrides else []
    notes = summary.notes_of(load_config(complete, [*overrides, *more]))
    assert any(named in note for note in notes) is is_said


@pytest.mark.parametrize(
    ("overrides", "preset", "is_said"),
    [
        ([], "off", False),
        (["engine.dtype=bfloat16"], "off", False),
        (["engine.quantization=int8"], "tis", True),
        (["engine.quantization=fp8_per_channel", "rl.correction.min_ess=0.1"], "tis", True),
        (["engine.quantization=int8", "rl.correction.preset=off"], "off", False),
        (["engine.quantization=int8", "rl.correction.preset=mis"], "mis", False),
        (["engine.quantization=int8", "rl.correction={level: sequence, high: 3.0}"], "off", False),
        (["engine.quantization=int8", "rl.algorithm=online_dpo"], "off", False),
        (["engine.quantization=int8", "rl.algorithm=best_of_k"], "off", False),
        (["engine.quantization=int8", "rl.algorithm=copg"], "off", False),
        (["engine.quantization=int8", "rl.algorithm=gmpo"], "geometric", True),
        (["engine.quantization=int8", "rl.algorithm=proximal_rloo"], "geometric", True),
    ],
)
def test_a_quantised_engine_is_corrected_unless_the_file_says_how(complete, overrides, preset, is_said):
    config = load_config(complete, [RL, f"{TRAIN}.epochs=1", *overrides])
    assert config.rl.correction.preset == preset
    notes = [note for note in summary.notes_of(config) if "rl.correction.preset" in note]
    assert len(notes) == is_said
    assert all(preset in note and config.engine.quantization in note for note in notes)
    assert not [*correction_problems(config.rl.correction, get_algorithm(config.rl.algorithm.name))]
    assert not config.engine.quantization or config.engine_dtype(is_cuda=False) == "bfloat16"
    changed = dataclasses.replace(config, model="other")
    assert (changed.rl.correction, changed.notes) == (config.rl.correction, config.notes)


SHARED = [SAMPLER, f"{LORA}={{r: 4}}"]


@pytest.mark.parametrize(
    ("overrides", "is_cuda", "key"),
    [
        ([f"{TRAIN}.sampler=null"], False, f"{TRAIN}.share_base"),
        ([f"{LORA}=null"], False, LORA),
        (["engine.sleep=all"], False, "engine.sleep"),
        (["engine.sleep=kv_cache", BF16], True, "engine.sleep"),
        (["engine.lora_mode=merged"], False, "engine.lora_mode"),
        (["engine.inference=transformers"], False, "engine.inference"),
        (["engine.quantization=int8", BF16], False, "engine.quantization"),
        ([f"{TRAIN}.quantization=nf4"], False, f"{TRAIN}.quantization"),
        ([f"{TRAIN}.cpu_offload=true"], False, f"{TRAIN}.cpu_offload"),
        ([f"{TRAIN}.tensor_parallel=2"], False, f"{TRAIN}.tensor_parallel"),
        (["engine.tensor_parallel_size=2"], False, "engine.tensor_parallel_size"),
        (["engine.enable_expert_parallel=true"], False, "engine.enable_expert_parallel"),
        (["engine.dtype=bfloat16"], False, f"{TRAIN}.dtype"),
        ([], True, f"{TRAIN}.dtype"),
        (
            [RL, f"{TRAIN}.epochs=1", BF16, "rl.async={max_staleness: 1, placement: split}"],
            True,
            "rl.async.placement",
        ),
    ],
)
def test_what_forbids_one_base_in_memory_is_named_and_by_default_leaves_two(
    complete, monkeypatch, overrides, is_cuda, key
):
    monkeypatch.setattr(settings, "has_gpu", lambda: is_cuda)
    monkeypatch.setattr(summary, "has_gpu", lambda: is_cuda)
    given = [*SHARED, *overrides]
    found = settings.setting_problems(load_config(complete, [*given, f"{TRAIN}.share_base=true"]), 2)
    named = [text for text in found if "share_base" in text]
    assert [KEY.match(text)[0] for text in named] == [key]
    config = load_config(complete, given)
    assert not any("share_base" in text for text in settings.setting_problems(config, 2))
    assert not shares_base(config, is_cuda)
    notes = [note for note in summary.notes_of(config) if "in memory" in note]
    assert all("twice" in note and key in note for note in notes)
    assert bool(notes) == (key not in (LORA, f"{TRAIN}.share_base"))


def test_one_base_is_the_default_where_it_is_possible(complete):
    assert passes(complete, *SHARED, f"{TRAIN}.share_base=true")
    for more in ([], ["engine.sleep=kv_cache"], [BF16], ["engine.transport=pull", "engine.receiver=live"]):
        config = load_config(complete, [*SHARED, *more])
        assert shares_base(config, is_cuda=False)
        assert any("in memory once" in note for note in summary.notes_of(config))
    assert shares_base(load_config(complete, [*SHARED, BF16]), is_cuda=True)
    off = load_config(complete, [*SHARED, f"{TRAIN}.share_base=false"])
    assert not shares_base(off, is_cuda=False)
    assert any("twice" in note and "share_base: false" in note for note in summary.notes_of(off))


def test_bfloat16_rounds_as_the_notes_say():
    weight = torch.tensor([480e-6, 520e-6, 1.0], dtype=torch.bfloat16)
    assert (weight - 1e-6 != weight).tolist() == [True, False, False]
    average = torch.linspace(1, 2, 100, dtype=torch.bfloat16)
    for beta, falls in ((0.999, False), (0.95, True)):
        assert bool((average * beta < average).all()) == bool((average * beta < average).any()) == falls


def test_on_cuda_every_worker_of_the_engine_needs_the_device_of_a_rank(complete, monkeypatch):
    override = "engine.tensor_parallel_size=4"
    monkeypatch.setattr(settings, "has_gpu", lambda: True)
    passes(complete, SAMPLER, override, world_size=4)
    assert refused(complete, SAMPLER, override, world_size=2) == [override.partition("=")[0]]


def test_flash_attention_in_32_bits_is_refused_only_on_cuda(complete, monkeypatch):
    flash = f"{TRAIN}.use_flash_attention"
    for is_cuda in (False, True):
        monkeypatch.setattr(settings, "has_gpu", lambda is_cuda=is_cuda: is_cuda)
        config = load_config(complete, [f"{flash}=true", f"{TRAIN}.use_mp=false"])
        assert [KEY.match(text)[0] for text in settings.setting_problems(config, 1)] == [flash] * is_cuda


@pytest.mark.parametrize(("engine_devices", "is_refused"), [(4, False), (2, True), ("null", True)])
def test_an_engine_with_devices_of_its_own_may_have_a_worker_on_each(
    complete, monkeypatch, engine_devices, is_refused
):
    monkeypatch.setattr(settings, "has_gpu", lambda: True)
    split = f"rl.async={{max_staleness: 1, placement: split, engine_devices: {engine_devices}}}"
    size = "engine.tensor_parallel_size"
    config = load_config(complete, [RL, f"{TRAIN}.epochs=1", split, f"{size}=4"])
    assert any(text.startswith(size) for text in settings.setting_problems(config, 1)) == is_refused


@pytest.mark.parametrize(
    ("has_gpu", "inference", "sizes", "is_refused"),
    [
        (True, "vllm", (), True),
        (True, "vllm", ("tensor_parallel_size=2",), True),
        (True, "vllm", ("tensor_parallel_size=2", "data_parallel_size=2"), False),
        (True, "vllm", ("tensor_parallel_size=4", "data_parallel_size=2"), True),
        (True, "vllm", ("data_parallel_size=4",), False),
        (True, "transformers", (), True),
        (True, "server", ("url=http://127.0.0.1:8000",), False),
        (False, "vllm", (), False),
    ],
)
def test_an_engine_uses_all_devices_of_its_own(complete, monkeypatch, has_gpu, inference, sizes, is_refused):
    monkeypatch.setattr(settings, "has_gpu", lambda: has_gpu)
    setting = "rl.async.engine_devices"
    split = "rl.async={max_staleness: 1, placement: split, engine_devices: 4}"
    overrides = [f"engine.{text}" for text in (f"inference={inference}", *sizes)]
    config = load_config(complete, [RL, f"{TRAIN}.epochs=1", split, *overrides])
    found = [text for text in settings.setting_problems(config, 4) if setting in text]
    assert [text.partition("=")[0] for text in found] == [setting] * is_refused, found


def test_compiling_on_cpu_needs_a_compiler(complete, monkeypatch):
    monkeypatch.setattr(files, "has_gpu", lambda: False)
    monkeypatch.setattr(files, "which", lambda name: None)
    assert refused(complete, f"{TRAIN}.compile=true") == [f"{TRAIN}.compile"]


def test_weights_that_a_download_left_incomplete_are_refused(complete):
    folder = Path("models/tiny")
    index = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    save_file({"a": torch.ones(100)}, folder / "model-1.safetensors")
    assert refused(complete) == ["model"]
    os.truncate(folder / "model-1.safetensors", (folder / "model-1.safetensors").stat().st_size - 1)
    assert refused(complete) == ["model", "model"]


def test_a_model_without_a_limit_takes_any_length(complete):
    Path("models/tiny/config.json").write_text("{}")
    passes(complete, f"{TRAIN}.max_seq_len=99999")


NAMES = ("model.safetensors", "model-00001-of-00001.safetensors")


@pytest.mark.parametrize("index", [None, NAMES[0], NAMES[1]])
def test_a_folder_with_two_sets_of_weights_is_refused(complete, index):
    for name in NAMES:
        save_file({"weight": torch.zeros(2)}, Path("models/tiny", name))
    if index is not None:
        named = json.dumps({"weight_map": {"weight": index}})
        Path("models/tiny/model.safetensors.index.json").write_text(named)
    passes(complete)
    passes(complete, f"{SAMPLER[:-1]}, inference: transformers}}")
    if index == NAMES[0]:
        passes(complete, SAMPLER)
        require_folder("models/tiny")
        return
    with pytest.raises(ConfigError, match=f"transformers reads {NAMES[0]}, and vLLM {NAMES[1]}"):
        passes(complete, SAMPLER)
    with pytest.raises(ValueError, match=f"transformers reads {NAMES[0]}, and vLLM {NAMES[1]}"):
        SamplingEngine("models/tiny")
    Path("models/tiny", NAMES[0]).unlink()
    passes(complete, SAMPLER) if index is not None else require_folder("models/tiny")


def test_fine_tuning_without_held_out_text_follows_no_evaluation_of_it(complete):
    text = Path(complete).read_text().replace("  eval_ds: data/eval\n", "").replace("  eval_bs: 4\n", "")
    Path(complete).write_text(text)
    passes(complete)
    path, best = f"{TRAIN}.lr_scheduler_type", f"{TRAIN}.keep_best"
    keeps = [f"{TRAIN}.checkpointing_enabled=true", f"{best}=true"]
    assert refused(complete, *keeps) == [best]
    assert refused(complete, *keeps, SAMPLER) == [best]
    passes(complete, *keeps, SAMPLER, f"{TRAIN}.best_metric=eval/accuracy")
    tasks = f"{TRAIN}.sampler={{sample_frequency: 2, tasks: [copa]}}"
    passes(complete, *keeps, tasks, f"{TRAIN}.best_metric=eval/copa/acc")
    once = tasks.replace("sample_frequency: 2, ", "")
    assert refused(complete, *keeps, once, f"{TRAIN}.best_metric=eval/copa/acc") == [best]
    assert refused(complete, f"{path}=plateau-with-warmup") == [path]
    for override in ("dataset.eval_bs=4", f"{TRAIN}.logging_steps=3"):
        assert refused(complete, override) == [override.partition("=")[0]]


@pytest.mark.parametrize(
    ("metric", "is_refused"),
    [("eval/loss", False), ("eval/a/loss", False), ("eval/accuracy", True), ("eval/copa/acc", True)],
)
def test_the_best_of_evaluations_at_the_end_only_is_refused_unless_it_follows_held_out_text(
    complete, metric, is_refused
):
    keeps = [f"{TRAIN}.{change}" for change in ("checkpointing_enabled=true", "early_stopping_patience=2")]
    overrides = [
        *keeps,
        "dataset.eval_ds={a: data/eval}",
        "evaluation={prompts: [a], tasks: [copa]}",
        f"{TRAIN}.best_metric={metric}",
    ]
    for every, expected in (("evaluation.every=null", is_refused), ("evaluation.every=2", False)):
        config = load_config(complete, [*overrides, every])
        found = [line for line in settings.setting_problems(config, 1) if "early_stopping" in line]
        assert bool(found) is expected, found


@pytest.mark.parametrize("text", ["{broken", "[]", None])
def test_a_folder_without_a_readable_dataset_is_refused(complete, text):
    description = Path("data/train/dataset_info.json")
    description.unlink() if text is None else description.write_text(text)
    assert refused(complete) == ["dataset.train_ds"]


def test_each_of_several_held_out_datasets_is_looked_at(complete):
    passes(complete, "dataset.eval_ds={a: data/eval, b: data/train}")
    assert refused(complete, "dataset.eval_ds={a: data/eval, b: nowhere}") == ["dataset.eval_ds"]
    for wrong in ("{}", "[data/eval]", "{a: 1}", "{a: {b: data/eval}}"):
        with pytest.raises(ConfigError, match=r"dataset\.eval_ds"):
            load_config(complete, [f"dataset.eval_ds={wrong}"])


def test_a_dataset_needs_the_columns_that_training_reads(complete):
    Path("data/train/dataset_info.json").write_text('{"features": {"text": {}, "input_ids": {}}}')
    assert refused(complete) == ["dataset.train_ds"]


def test_the_prompts_are_read_once(complete, monkeypatch):
    read = Path.read_bytes
    opened = []
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path.name) or read(path))
    checked = passes(complete, SAMPLER, "evaluation.rewards='mine.py:score'")
    assert [record.prompt for record in checked.evaluation_prompts] == ["a", "b"]
    assert [name for name in opened if not name.endswith(".py")] == ["p.jsonl"]


def test_every_argument_of_peft_is_known():
    from peft import LoraConfig

    known = set().union(*(fields_of(path, name, "peft") for path, name in LORA_CONFIG))
    public = {field.name for field in dataclasses.fields(LoraConfig) if field.init and field.name[0] != "_"}
    assert public <= known


def test_a_tracker_without_its_package_is_refused_before_a_model_is_loaded(complete, monkeypatch):
    monkeypatch.setattr(files, "is_installed", lambda package: False)
    asked = ["enable_wandb_logging=true", "trackers={tensorboard: null, trackio: null}"]
    assert refused(complete, *asked) == ["enable_wandb_logging", "trackers.tensorboard", "trackers.trackio"]


def test_wandb_without_a_key_is_refused_before_a_model_is_loaded(complete, monkeypatch, tmp_path):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    online = "enable_wandb_logging=true"
    assert refused(complete, online) == ["enable_wandb_logging"]
    passes(complete, online, "wandb_config={mode: offline}")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    passes(complete, online)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8080")
    assert refused(complete, online) == ["enable_wandb_logging"]
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    passes(complete, online)


@pytest.mark.parametrize(
    ("overrides", "is_refused"),
    [
        ([], True),
        ([SAMPLER], False),
        ([SAMPLER, "evaluation.rewards='mine.py:score'"], False),
        ([SAMPLER, f"{TRAIN}.best_metric=eval/pass_at_4"], False),
        # Without held-out questions an environment has no evaluation.
        (["rl.environment=mine.py:Game"], True),
        (["rl.environment=mine.py:Game", SAMPLER], False),
        ([SOURCES.format("{prompts: [a], environment: 'mine.py:Game'}"), SAMPLER], True),
        (
            [
                SOURCES.format(
                    "{prompts: [a], environment: 'mine.py:Game'}, two: {prompts: [b], held_out: [c]}"
                )
            ],
            True,
        ),
        ([SOURCES.format("{prompts: [a], environment: 'mine.py:Game', held_out: [b]}"), EVERY], False),
        ([SOURCES.format("{prompts: [a], rewards: {'mine.py:score': 1}, held_out: [b]}"), EVERY], False),
        ([SOURCES.format("{prompts: [a], rewards: {'mine.py:score': 1}, held_out: [b]}")], True),
        (["evaluation.prompts=[b]"], True),
    ],
    ids=str,
)
def test_reinforcement_learning_needs_a_score_of_held_out_questions_to_keep_the_best(
    complete, overrides, is_refused
):
    keeps = [f"{TRAIN}.{change}" for change in ("checkpointing_enabled=true", "keep_best=true", "epochs=1")]
    config = load_config(
        complete, [RL, *keeps, f"{TRAIN}.early_stopping_patience=2", "dataset=null", *overrides]
    )
    found = [line.partition("=")[0] for line in settings.setting_problems(config, 1)]
    for name in ("keep_best", "early_stopping_patience"):
        assert (f"{TRAIN}.{name}" in found) is is_refused


def test_reinforcement_learning_has_no_loss_that_a_schedule_could_follow(complete):
    schedule = f"{TRAIN}.lr_scheduler_type=plateau-with-warmup"
    config = load_config(complete, [RL, f"{TRAIN}.epochs=1", "dataset=null", schedule])
    (found,) = settings.setting_problems(config, 1)
    assert found.startswith(f"{TRAIN}.lr_scheduler_type")


def test_a_model_folder_without_a_description_is_refused(complete):
    Path("models/tiny/config.json").unlink()
    assert refused(complete) == ["model"]


def test_a_file_of_texts_in_place_of_a_dataset_is_sent_to_preprocess(complete):
    Path("texts.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match="load_path, and run `vectorlm preprocess`"):
        passes(complete, "dataset.train_ds=texts.jsonl")


def test_an_unknown_argument_of_lora_is_refused_once_and_rank_is_r(complete):
    with pytest.raises(ConfigError, match="Did you mean 'r'") as caught:
        passes(complete, SAMPLER, f"{LORA}={{rank: 8}}")
    assert num_of(caught.value) == 1


def test_a_description_that_is_no_json_object_is_left_to_transformers(complete):
    Path("models/tiny/config.json").write_text(json.dumps([]))
    passes(complete)


def test_what_becomes_of_the_rows_at_this_length_is_noted(complete):
    rows = {"input_ids": [[1, 2, 3, 4, 5]] * 3, "labels": [[-100, 2, 3, 4, 5], [-100] * 4 + [5], [-100] * 5]}
    Dataset.from_dict(rows).save_to_disk("data/train")
    sizes = ["dataset.train_bs=1", f"{TRAIN}.epochs=4"]

    def numbers(*overrides, **more):
        return [re.findall(r"\d+", note) for note in passes(complete, *overrides, **more).config.notes]

    # The notes have rows, texts, tokens and counted tokens; steps in all and per epoch; rows without a counted token.
    assert numbers(*sizes, world_size=2) == [["3", "3", "15", "5"], ["8", "2"], ["1", "3", "128"]]
    more = [*sizes, f"{TRAIN}.max_seq_len=3", f"{TRAIN}.gradient_accumulation_steps=2"]
    cut = ["3", "3", "6", "3"]  # Rows beyond the limit of 3, and the tokens cut off them.
    assert numbers(*more) == [["3", "3", "15", "2"], ["8", "2"], cut, ["2", "3", "3"]]


def test_texts_for_a_model_with_a_chat_template_are_noted_and_long_prompts_refused(complete):
    def notes():
        return [note for note in passes(complete, SAMPLER).config.notes if "evaluation.prompts" in note]

    assert notes() == []
    Path("models/tiny/chat_template.jinja").write_text("{{ messages[0].content }}")
    assert len(notes()) == 1
    letter_tokenizer().save_pretrained("models/tiny")
    Path("p.jsonl").write_text(json.dumps({"prompt": "a" * 241}))
    with pytest.raises(DatasetError, match=r"prompt 0 of evaluation\.prompts has 241 tokens"):
        passes(complete, SAMPLER)
    Path("p.jsonl").write_text(json.dumps({"prompt": "a" * 240}))
    passes(complete, SAMPLER)


def test_a_run_without_an_end_is_refused(complete):
    with pytest.raises(ConfigError, match=r"rl\.max_steps"):
        passes(complete, RL.replace("max_steps: 2, ", ""))


def test_a_stop_token_that_the_model_does_not_have_is_refused(complete):
    Path("models/tiny/config.json").write_text(json.dumps({"vocab_size": 99}))
    stops = "evaluation.sampling_params={stop_token_ids: [%d]}"
    passes(complete, SAMPLER, stops % 98)
    assert refused(complete, SAMPLER, stops % 99) == ["evaluation.sampling_params.stop_token_ids"]


def test_what_the_publisher_samples_with_is_said_where_the_run_does_not(complete):
    def notes(*changes):
        config = passes(complete, SAMPLER, *changes).config
        return [note for note in config.notes if "generation_config" in note]

    Path("models/tiny/generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_p": 0.9, "top_k": -1, "eos_token_id": [1, 2]})
    )
    path = "evaluation.sampling_params"
    assert [note.split(" of ")[0] for note in notes()] == [f"{path}: temperature 0.6, top_p 0.9"]
    assert "top_p" not in notes(f"{path}.top_p=0.8")[0]
    assert notes(f"{path}.temperature=0.0") == []
