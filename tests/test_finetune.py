import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from rank_processes import on_ranks, save_tiny_llama
from safetensors.torch import load_file
from tiny_runs import rows

from vectorlm.config import load_config, save_config
from vectorlm.errors import ConfigError, RankMismatch
from vectorlm.finetune import finetune
from vectorlm.preflight.resume import find_resumption

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    path = tmp_path_factory.mktemp("inputs")
    save_tiny_llama(path / "model", hidden_size=64)
    Dataset.from_list(rows(21)).save_to_disk(path / "train")
    Dataset.from_list(rows(11, seed=1)).save_to_disk(path / "eval")
    return path


def make_config(inputs, output, **changes):
    path = output.with_suffix(".yaml")
    path.write_text(
        f"""
model: {inputs}/model
train_parameters:
  output_dir: {output}
  max_seq_len: 16
  epochs: 2
  seed: 3
  optimizer: {{lr: 0.01}}
  warmup_ratio: 0.2
  gradient_accumulation_steps: 2
  logging_steps: 3
  checkpointing_enabled: False
  save_frequency: 0.5
dataset: {{train_bs: 2, eval_bs: 4, train_ds: {inputs}/train, eval_ds: {inputs}/eval}}
"""
    )
    return load_config(
        path, [f"train_parameters.{name}={json.dumps(value)}" for name, value in changes.items()]
    )


def run(topology, config):
    finetune(config, topology)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_model_metrics_plot_and_a_config_that_loads_again(inputs, tmp_path):
    output = tmp_path / "run"
    config = make_config(inputs, output)
    on_ranks(2, run, config)
    names = ["config.yaml", "final-model", "metrics.jsonl", "run.json", "run.png"]
    assert sorted(path.name for path in output.iterdir()) == names
    assert load_config(output / "config.yaml") == config
    metrics = lines(output / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in metrics if "eval/loss" in line] == [0, 3, 6]
    assert metrics[-1]["eval/loss"] < metrics[0]["eval/loss"]
    assert (output / "run.png").read_bytes().startswith(b"\x89PNG")
    # Two of six steps warm up: transformers' first learning rate is 0.
    rates = [line["train/learning_rate"] for line in metrics[1:4]]
    assert rates == pytest.approx([0.0, 0.005, 0.01])
    versions = json.loads((output / "run.json").read_text())["versions"]
    assert (versions["torch"], versions["world_size"]) == (torch.__version__, 2)


def run_with_a_rate_of_its_own(topology, path):
    config = load_config(path, [f"train_parameters.optimizer.lr={0.01 * (1 + topology.rank)}"])
    with pytest.raises(RankMismatch) as caught:
        finetune(config, topology)
    return str(caught.value)


def test_ranks_with_other_settings_are_refused_on_all_of_them_before_anything_is_loaded(inputs, tmp_path):
    make_config(inputs, tmp_path / "run")
    texts = on_ranks(2, run_with_a_rate_of_its_own, tmp_path / "run.yaml")
    assert set(texts) == {
        "rank 1 started with other settings than rank 0: train_parameters.optimizer.lr=0.02 instead of 0.01. "
        "Start every rank with the same settings, files and versions."
    }


def test_a_profiled_run_leaves_a_trace_of_each_step_and_the_time_of_each_phase(inputs, tmp_path):
    output = tmp_path / "profiled"
    config = make_config(inputs, output, profile_steps=2)
    on_ranks(1, run, config)
    traces = sorted(output.glob("trace-step-*.json.gz"))
    assert [path.name for path in traces] == ["trace-step-3.json.gz", "trace-step-4.json.gz"]
    with gzip.open(traces[0]) as file:
        named = [event["name"] for event in json.load(file)["traceEvents"] if "name" in event]
    # Two micro-batches a step.
    assert named.count("time/forward_s") == named.count("time/backward_s") == 2
    assert named.count("time/optimizer_s") == 1
    phases = {line.split()[0] for line in (output / "profile.txt").read_text().splitlines()}
    assert phases == {"time", "forward", "backward", "optimizer", "held_out", "other", "all"}


def test_a_profile_of_a_run_that_is_too_short_is_refused(inputs, tmp_path):
    config = make_config(inputs, tmp_path / "short", profile_steps=2, epochs=1, gradient_accumulation_steps=8)
    with pytest.raises(
        Exception, match=r"profile_steps=2 records nothing of 2 steps: it leaves out the first 2"
    ):
        on_ranks(1, run, config)


def test_what_saves_memory_changes_no_number(inputs, tmp_path):
    curves = []
    for name, changes in (
        ("plain", {"low_cpu_mem_usage": False}),
        ("thrifty", {"use_activation_checkpointing": True, "cpu_offload": True}),
    ):
        on_ranks(2, run, make_config(inputs, tmp_path / name, **changes))
        curves.append([line.get("train/loss") for line in lines(tmp_path / name / "metrics.jsonl")])
    assert curves[0] == curves[1]


def test_the_same_command_again_goes_on_and_other_settings_are_refused(inputs, tmp_path):
    output = tmp_path / "run"
    config = make_config(inputs, output, checkpointing_enabled=True)
    on_ranks(2, run, config)
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000006",
    ]
    weights, metrics = (
        load_file(output / "final-model" / "model.safetensors"),
        lines(output / "metrics.jsonl"),
    )
    (output / "checkpoints" / "step-00000006").rename(output / "checkpoints" / ".step-00000006.unfinished")
    on_ranks(2, run, config)
    again = load_file(output / "final-model" / "model.safetensors")
    assert all((again[name] == weights[name]).all() for name in weights)
    assert lines(output / "metrics.jsonl")[:5] == metrics[:5]
    assert [line["train/loss"] for line in lines(output / "metrics.jsonl")[5:]] == [
        line["train/loss"] for line in metrics[5:]
    ]
    other = make_config(inputs, output, checkpointing_enabled=True, seed=4)
    message = r"CheckpointError: cannot go on from \S+step-00000006: train_parameters.seed=4 \(was 3\)\. "
    with pytest.raises(AssertionError, match=message):
        on_ranks(2, run, other)


def goes_on(inputs, output, world_size, **changes):
    """Train on two ranks, forget what came after step 4, and go on."""
    on_ranks(2, run, make_config(inputs, output, checkpointing_enabled=True))
    shutil.rmtree(output / "checkpoints" / "step-00000006")
    on_ranks(world_size, run, make_config(inputs, output, checkpointing_enabled=True, **changes))
    return lines(output / "metrics.jsonl"), load_file(output / "final-model" / "model.safetensors")


@pytest.mark.parametrize(
    ("world_size", "num_micro_batches"), [(1, 4), pytest.param(4, 1, marks=pytest.mark.slow)]
)
def test_a_run_goes_on_with_another_number_of_ranks(inputs, tmp_path, world_size, num_micro_batches):
    whole = tmp_path / "whole"
    on_ranks(2, run, make_config(inputs, whole))
    # The same global batch: 21 rows, eight a step.
    metrics, weights = goes_on(
        inputs, tmp_path / "cut", world_size, gradient_accumulation_steps=num_micro_batches
    )
    for line, expected in zip(metrics, lines(whole / "metrics.jsonl"), strict=True):
        kept = ("train/loss", "train/grad_norm", "train/learning_rate", "eval/loss")
        # Round-off: another order of the sums.
        found, wanted = ({name: each.get(name, 0.0) for name in kept} for each in (line, expected))
        assert found == pytest.approx(wanted, rel=1e-5)
    for name, expected in load_file(whole / "final-model" / "model.safetensors").items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-5)


def test_a_finished_run_trains_longer_and_with_another_learning_rate(inputs, tmp_path):
    fresh, longer = tmp_path / "fresh", tmp_path / "longer"
    on_ranks(1, run, make_config(inputs, fresh, epochs=3))
    for changes in ({}, {"epochs": 3, "optimizer.lr": 0.02, "optimizer.betas": [0.8, 0.9]}):
        config = make_config(inputs, longer, checkpointing_enabled=True, **changes)
        on_ranks(1, run, config)
    expected, found = lines(fresh / "metrics.jsonl"), lines(longer / "metrics.jsonl")
    num_steps = len(expected) - 1
    assert [line["step"] for line in found] == list(range(num_steps + 1))
    # The schedule is that of the longer run, from its place in it, with the new peak.
    for line, other in zip(found[num_steps * 2 // 3 + 1 :], expected[num_steps * 2 // 3 + 1 :], strict=True):
        assert line["train/learning_rate"] == pytest.approx(2 * other["train/learning_rate"])
        assert line["train/loss"] < found[0]["eval/loss"]
    assert find_resumption(config, 1).is_finished
    assert not find_resumption(
        make_config(inputs, longer, checkpointing_enabled=True, epochs=4), 1
    ).is_finished


LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}


def test_two_nodes_train_as_one_and_go_on_from_a_checkpoint_in_the_folder_that_they_share(inputs, tmp_path):
    one = make_config(inputs, tmp_path / "one")
    on_ranks(2, run, one)
    changes = {"sharding_strategy": "HYBRID_SHARD", "checkpointing_enabled": True}
    two = make_config(inputs, tmp_path / "two", **changes)
    on_ranks(2, run, two, num_nodes=2)
    curves = [
        [line["train/loss"] for line in lines(tmp_path / name / "metrics.jsonl")[1:]]
        for name in ("one", "two")
    ]
    # Replicas add the same gradients up in another order.
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    weights = load_file(tmp_path / "two" / "final-model" / "model.safetensors")
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step-00000006")
    on_ranks(2, run, two, num_nodes=2)
    again = load_file(tmp_path / "two" / "final-model" / "model.safetensors")
    assert all((again[name] == weights[name]).all() for name in weights)


def test_adapters_are_trained_and_saved_alone(inputs, tmp_path):
    config = make_config(inputs, tmp_path / "run", lora_peft_config=LORA, use_activation_checkpointing=True)
    on_ranks(2, run, config)
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert metrics[-1]["eval/loss"] < metrics[0]["eval/loss"]
    adapters = load_file(tmp_path / "run" / "final-model" / "adapter_model.safetensors")
    assert len(adapters) == 3 * 2 * 2
    assert all("lora_" in name for name in adapters)


def test_lora_options_that_the_engine_cannot_follow_end_the_run_before_it_starts(inputs, tmp_path):
    path = tmp_path / "sampled.yaml"
    save_config(make_config(inputs, tmp_path / "run", lora_peft_config={**LORA, "use_dora": True}), path)
    sampler = "train_parameters.sampler={sample_frequency: 1, prompts: [a]}"
    with pytest.raises(ConfigError) as raised:
        finetune(load_config(path, [sampler]))
    assert str(raised.value) == (
        "train_parameters.lora_peft_config.use_dora=True is beyond vLLM's LoRA layers. Leave it out, or use "
        'train_parameters.sampler.lora_mode: merged (in Python SamplingEngine(..., lora_mode="merged")), which '
        "publishes merged weights."
    )


def start(*command):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@pytest.mark.parametrize(
    ("launcher", "world_size"), [((), 1), pytest.param(TORCHRUN, 2, marks=pytest.mark.slow)]
)
def test_the_plain_example_trains_without_the_sampler_and_says_what_samples(
    launcher, world_size, inputs, tmp_path
):
    config = make_config(inputs, tmp_path / "run")
    path = tmp_path / "run.yaml"
    sampler = 'train_parameters.sampler={sample_frequency: 1, prompts: ["abc"]}'
    done = start(*launcher, "examples/llama_example.py", "--yaml_path", str(path), "--set", sampler)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        f"{path} asks for sampling, which this script leaves out. To sample as well:\n"
        f"  python examples/llama_example_mp.py --yaml_path {path} --world_size {world_size}\n"
    )
    output = Path(config.train_parameters.output_dir)
    assert (output / "final-model" / "model.safetensors").is_file()
    assert not (output / "samples.jsonl").exists()


def test_the_examples_report_a_mistake_in_one_line(inputs, tmp_path):
    make_config(inputs, tmp_path / "run")
    for script in ("examples/llama_example.py", "examples/llama_example_mp.py"):
        done = start(script, "--yaml_path", str(tmp_path / "run.yaml"), "--set", "model=/nowhere")
        assert done.returncode == 2
        assert "ConfigError: " in done.stderr
        assert "/nowhere" in done.stderr
        assert "Traceback" not in done.stderr


SAMPLER = (
    'train_parameters.sampler={sample_frequency: 4, prompts: ["abc", "xyzk"], vllm_dtype: float32, '
    "sampling_params: {temperature: 0, max_tokens: 6, ignore_eos: true}, "
    "engine: {max_model_len: 32, kv_cache_memory_bytes: 16777216}}"
)


def assert_last_answers_are_those_of(model, tokenizer, samples):
    model.generation_config.eos_token_id = None
    for sample in samples:
        inputs = tokenizer(sample["prompt"], return_tensors="pt")
        rest = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        expected = tokenizer.decode(rest[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        assert sample["options"][0].split() == expected.split()


@pytest.mark.slow
def test_the_last_answers_of_the_engine_are_those_of_the_final_model(inputs, tmp_path):
    settings = "sleep: all, offload_optimizer: true, "
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = tmp_path / "run"
    make_config(inputs, output)
    sampler = SAMPLER.replace("vllm_dtype", f"{settings}vllm_dtype")
    arguments = ("--yaml_path", str(tmp_path / "run.yaml"), "--world_size", "2", "--set", sampler)
    done = start("examples/llama_example_mp.py", *arguments)
    assert done.returncode == 0, done.stderr
    samples = lines(output / "samples.jsonl")
    assert [sample["train_step"] for sample in samples] == [0, 0, 4, 4, 6, 6]
    model = AutoModelForCausalLM.from_pretrained(output / "final-model")
    tokenizer = AutoTokenizer.from_pretrained(output / "final-model")
    assert_last_answers_are_those_of(model, tokenizer, samples[-2:])
    assert "step 6: 2 prompts sampled" in done.stderr


@pytest.mark.parametrize(
    ("mode", "use_dora"),
    [
        pytest.param("adapter", False, marks=pytest.mark.slow),
        pytest.param("merged", True, marks=pytest.mark.long),
    ],
)
def test_the_last_answers_of_the_engine_are_those_of_the_final_adapter(inputs, tmp_path, mode, use_dora):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = tmp_path / "run"
    lora = LORA | {"lora_alpha": 16, "use_dora": use_dora}
    config = make_config(inputs, output, lora_peft_config=lora)
    save_config(config, tmp_path / "run.yaml")
    sampler = SAMPLER.replace("sample_frequency", f"lora_mode: {mode}, sample_frequency")
    arguments = ("--yaml_path", str(tmp_path / "run.yaml"), "--world_size", "2", "--set", sampler)
    done = start("examples/llama_example_mp.py", *arguments)
    assert done.returncode == 0, done.stderr
    samples = lines(output / "samples.jsonl")
    assert samples[-1]["options"] != samples[0]["options"]
    base = AutoModelForCausalLM.from_pretrained(inputs / "model")
    tokenizer = AutoTokenizer.from_pretrained(output / "final-model")
    model = PeftModel.from_pretrained(base, output / "final-model")
    assert_last_answers_are_those_of(model, tokenizer, samples[-2:])
