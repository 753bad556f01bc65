"""Fine-tuning runs: their files, resumption, and the examples that start them."""

import contextlib
import gzip
import io
import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from datasets import Dataset, load_from_disk
from kit.families import FAMILIES, save_family
from kit.rank_processes import on_ranks
from kit.sft_runs import (
    CONFIG,
    ROOT,
    SAMPLER,
    WITH_CHECKPOINTS,
    are_equal,
    assert_last_answers_are_those_of,
    lines,
    make_config,
    train,
    weights_of,
)
from safetensors.torch import load_file

from vectorlm.cli import exit_code
from vectorlm.errors import ConfigError, RankMismatch
from vectorlm.ranks.topology import Topology
from vectorlm.runs.calls import start
from vectorlm.runs.config.load import load_config, save_config
from vectorlm.runs.fine_tuning import finetune
from vectorlm.runs.preflight.resume import find_resumption


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """Return the folder of a run on two ranks, with checkpoints of steps 4 and 6; tests read it or resume a copy."""
    output = tmp_path_factory.mktemp("whole") / "run"
    on_ranks(2, train, make_config(inputs, output, checkpointing_enabled=True))
    return output


def copy_of(whole, output, inputs, *gone, **changes):
    """Copy the run without some of its checkpoints; return a config that resumes the copy."""
    shutil.copytree(whole, output)
    for step in gone:
        shutil.rmtree(output / "checkpoints" / f"step-{step:08d}")
    return make_config(inputs, output, checkpointing_enabled=True, **changes)


def losses_of(output):
    return [line["train/loss"] for line in lines(output / "metrics.jsonl")[1:]]


def test_a_run_leaves_model_metrics_plot_and_a_config_that_loads_again(inputs, whole):
    names = ["checkpoints", "config.yaml", "final-model", "metrics.jsonl", "run.json", "run.png"]
    assert sorted(path.name for path in whole.iterdir()) == names
    assert load_config(whole / "config.yaml") == make_config(inputs, whole, checkpointing_enabled=True)
    metrics = lines(whole / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in metrics if "eval/loss" in line] == [0, 3, 6]
    assert metrics[-1]["eval/loss"] < metrics[0]["eval/loss"]
    assert (whole / "run.png").read_bytes().startswith(b"\x89PNG")
    # Two of six steps are the warm-up; transformers' first learning rate is 0.
    rates = [line["train/learning_rate"] for line in metrics[1:4]]
    assert rates == pytest.approx([0.0, 0.005, 0.01])
    versions = json.loads((whole / "run.json").read_text())["versions"]
    assert (versions["torch"], versions["world_size"]) == (torch.__version__, 2)


def run_with_a_rate_of_its_own(topology, path):
    config = load_config(path, [f"train_parameters.optimizer.lr={0.01 * (1 + topology.rank)}"])
    with pytest.raises(RankMismatch) as caught:
        finetune(config, topology)
    return str(caught.value)


def test_ranks_with_other_settings_are_refused_on_all_of_them_before_anything_is_loaded(inputs, tmp_path):
    make_config(inputs, tmp_path / "run")
    texts = on_ranks(2, run_with_a_rate_of_its_own, tmp_path / "run.yaml")
    assert all("train_parameters.optimizer.lr=0.02" in text for text in texts)


@pytest.mark.slow
def test_a_profiled_run_leaves_a_trace_of_each_step_and_the_time_of_each_phase(inputs, tmp_path):
    output = tmp_path / "profiled"
    config = make_config(inputs, output, profile_steps=2)
    on_ranks(1, train, config)
    traces = sorted(output.glob("trace-step-*.json.gz"))
    assert [path.name for path in traces] == ["trace-step-3.json.gz", "trace-step-4.json.gz"]
    with gzip.open(traces[0]) as file:
        named = [event["name"] for event in json.load(file)["traceEvents"] if "name" in event]
    # A step has two micro-batches.
    assert named.count("time/forward_s") == named.count("time/backward_s") == 2
    assert named.count("time/optimizer_s") == 1
    phases = {line.split()[0] for line in (output / "profile.txt").read_text().splitlines()}
    assert phases == {"time", "forward", "backward", "optimizer", "held_out", "other", "all"}


def test_a_profile_of_a_run_that_is_too_short_is_refused(inputs, tmp_path):
    config = make_config(inputs, tmp_path / "short", profile_steps=2, epochs=1, gradient_accumulation_steps=8)
    with pytest.raises(ConfigError, match="profile_steps"):
        finetune(config, Topology())


@pytest.mark.slow
def test_what_saves_memory_changes_no_number(inputs, whole, tmp_path):
    ways = {"low_cpu_mem_usage": False, "use_activation_checkpointing": True, "cpu_offload": True}
    on_ranks(2, train, make_config(inputs, tmp_path / "thrifty", **ways))
    assert losses_of(tmp_path / "thrifty") == losses_of(whole)


def test_the_same_command_again_goes_on_and_other_settings_are_refused(inputs, whole, tmp_path):
    output = tmp_path / "run"
    # Two steps are left, which a profile skips.
    config = copy_of(whole, output, inputs, profile_steps=2)
    checkpoints = output / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000004", "step-00000006"]
    (checkpoints / "step-00000006").rename(checkpoints / ".step-00000006.unfinished")
    assert any("profile_steps has no effect" in text for text in on_ranks(2, train_and_listen, config))
    assert not (output / "profile.txt").exists()
    assert are_equal(weights_of(output), weights_of(whole))
    assert lines(output / "metrics.jsonl")[:5] == lines(whole / "metrics.jsonl")[:5]
    assert losses_of(output) == losses_of(whole)
    other = make_config(inputs, output, checkpointing_enabled=True, seed=4)
    with pytest.raises(AssertionError, match=r"CheckpointError: .*train_parameters\.seed=4"):
        on_ranks(2, train, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "num_micro_batches", "shared_by"),
    [(1, 4, 1), (2, 4, 2)],
)
def test_a_run_goes_on_with_another_number_of_ranks(
    inputs, whole, tmp_path, world_size, num_micro_batches, shared_by
):
    # The global batch stays the same: 21 rows, eight per step.
    changes = {"gradient_accumulation_steps": num_micro_batches, "context_parallel": shared_by}
    config = copy_of(whole, tmp_path / "cut", inputs, 6, **changes)
    on_ranks(world_size, train, config)
    pairs = zip(lines(tmp_path / "cut/metrics.jsonl"), lines(whole / "metrics.jsonl"), strict=True)
    for line, expected in pairs:
        kept = ("train/loss", "train/grad_norm", "train/learning_rate", "eval/loss")
        # Sums in another order round differently.
        found, wanted = ({name: metrics.get(name, 0.0) for name in kept} for metrics in (line, expected))
        assert found == pytest.approx(wanted, rel=1e-5)
    torch.testing.assert_close(weights_of(tmp_path / "cut"), weights_of(whole), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_finished_run_trains_longer_and_with_another_learning_rate(inputs, whole, tmp_path):
    changes = {"epochs": 3, "optimizer.lr": 0.02, "optimizer.betas": [0.8, 0.9]}
    config = copy_of(whole, tmp_path / "longer", inputs, **changes)
    on_ranks(2, train, config)
    found = lines(tmp_path / "longer/metrics.jsonl")
    assert [line["step"] for line in found] == list(range(10))
    # These rates follow the longer run's cosine with the new peak. Two of nine steps warm up, and the first is 0.
    rates = [0.01 * (1 + math.cos(math.pi * (place - 2) / 7)) for place in (6, 7, 8)]
    assert [line["train/learning_rate"] for line in found[7:]] == pytest.approx(rates)
    assert all(line["train/loss"] < found[0]["eval/loss"] for line in found[7:])
    assert find_resumption(config, 2).is_finished
    much_longer = make_config(
        inputs, tmp_path / "longer", checkpointing_enabled=True, **changes | {"epochs": 4}
    )
    assert not find_resumption(much_longer, 2).is_finished


def train_and_listen(topology, config):
    """Train; return the rank's console output."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        finetune(config, topology)
    return said.getvalue()


def num_targets(path):
    return sum(sum(label != -100 for label in labels[1:]) for labels in load_from_disk(path)["labels"])


def test_several_held_out_datasets_have_losses_and_padded_texts_are_said_to_see_each_other(
    inputs, whole, tmp_path
):
    texts = {"input_ids": [[5, 6, 7, 8, 9]] * 8, "labels": [[5, 6, 7, 8, 9]] * 8, "seq_lengths": [[2, 3]] * 8}
    Dataset.from_dict(texts).save_to_disk(tmp_path / "packed")
    text = CONFIG.replace("{inputs}/train", f"{tmp_path}/packed")
    text = text.replace("eval_ds: {inputs}/eval", "eval_ds: {{held: {inputs}/eval, seen: {inputs}/train}}")
    config = make_config(inputs, tmp_path / "run", text, epochs=1, pack_rows=False)
    said, _ = on_ranks(2, train_and_listen, config)
    first = lines(tmp_path / "run/metrics.jsonl")[0]
    assert first["eval/held/loss"] == pytest.approx(lines(whole / "metrics.jsonl")[0]["eval/loss"], rel=1e-5)
    held, seen = num_targets(inputs / "eval"), num_targets(inputs / "train")
    together = (held * first["eval/held/loss"] + seen * first["eval/seen/loss"]) / (held + seen)
    assert first["eval/loss"] == pytest.approx(together, rel=1e-12)
    assert "pack_rows" in said


def test_a_run_without_held_out_text_trains_as_one_with_it(inputs, whole, tmp_path):
    text = (
        CONFIG.replace("eval_bs: 4, ", "")
        .replace(", eval_ds: {inputs}/eval", "")
        .replace("  logging_steps: 3\n", "")
    )
    config = make_config(inputs, tmp_path / "run", text)
    assert config.text.eval_ds is None
    on_ranks(2, train, config)
    assert are_equal(weights_of(tmp_path / "run"), weights_of(whole))
    assert not any(
        name.startswith("eval/") for line in lines(tmp_path / "run/metrics.jsonl") for name in line
    )


LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}


@pytest.mark.slow
def test_two_nodes_train_as_one_and_go_on_from_a_checkpoint_in_the_folder_that_they_share(
    inputs, whole, tmp_path
):
    output = tmp_path / "two"
    config = make_config(inputs, output, sharding_strategy="HYBRID_SHARD", checkpointing_enabled=True)
    on_ranks(2, train, config, num_nodes=2)
    # Replicas sum the same gradients in another order.
    assert losses_of(output) == pytest.approx(losses_of(whole), rel=1e-5)
    weights = weights_of(output)
    shutil.rmtree(output / "checkpoints" / "step-00000006")
    on_ranks(2, train, config, num_nodes=2)
    assert are_equal(weights_of(output), weights)


def test_adapters_are_trained_and_saved_alone(inputs, tmp_path):
    config = make_config(inputs, tmp_path / "run", lora_peft_config=LORA, use_activation_checkpointing=True)
    on_ranks(2, train, config)
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert metrics[-1]["eval/loss"] < metrics[0]["eval/loss"]
    adapters = load_file(tmp_path / "run" / "final-model" / "adapter_model.safetensors")
    assert len(adapters) == 3 * 2 * 2
    assert all("lora_" in name for name in adapters)


class Fails:
    def on_step(self, run, step, metrics):
        if step == 3:
            raise KeyError("mine")


@pytest.mark.slow
def test_a_run_that_fails_says_from_which_step_the_same_command_resumes(inputs, tmp_path, capsys):
    config = make_config(inputs, tmp_path / "run", WITH_CHECKPOINTS)
    assert exit_code(lambda: start(config, 1, [Fails()])) == 1
    assert capsys.readouterr().err.endswith("\nThe same command resumes from step 2.\n")


TRACKERS = """
import json

class Kept:
    def __init__(self, config, path, fails_at=()):
        self.file, self.fails_at = open(path, "w"), fails_at
        self.file.write(json.dumps(config["train_parameters"]["seed"]) + "\\n")

    def write(self, metrics, step):
        if step in self.fails_at:
            raise ConnectionError("no server")
        self.file.write(json.dumps([step, metrics["train/loss"]] if "train/loss" in metrics else [step]) + "\\n")
        metrics.clear()

    def close(self):
        self.file.close()
        if self.fails_at:
            raise SystemExit(3)
"""


def test_a_tracker_of_ones_own_gets_every_step_and_its_errors_end_no_run(inputs, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(TRACKERS)
    name = f"{tmp_path}/mine.py:Kept"
    arguments = {"path": str(tmp_path / "kept.txt"), "fails_at": [2, 4]}
    finetune(replace(make_config(inputs, tmp_path / "run"), trackers={name: arguments}), Topology())
    seed, *kept = lines(tmp_path / "kept.txt")
    logged = [[line["step"], line["train/loss"]] for line in lines(tmp_path / "run/metrics.jsonl")[1:]]
    assert seed == 3
    assert len(logged) == 12
    assert kept == [[0], *(entry for entry in logged if entry[0] not in (2, 4))]
    said = capsys.readouterr().err
    assert said.count("ConnectionError: no server") == 1
    assert f"({tmp_path}/mine.py:11)" in said
    assert "SystemExit: 3" in said


@pytest.mark.slow
def test_the_last_answers_of_the_engine_are_those_of_the_final_model(inputs, tmp_path):
    settings = "sleep: all, offload_optimizer: true, "
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = tmp_path / "run"
    make_config(inputs, output)
    sampler = SAMPLER.replace("vllm_dtype", f"{settings}vllm_dtype")
    arguments = ("--yaml_path", str(tmp_path / "run.yaml"), "--world_size", "2", "--set", sampler)
    done = subprocess.run(
        [sys.executable, "examples/llama_example_mp.py", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    samples = lines(output / "samples.jsonl")
    assert [sample["train_step"] for sample in samples] == [0, 0, 4, 4, 6, 6]
    model = AutoModelForCausalLM.from_pretrained(output / "final-model")
    tokenizer = AutoTokenizer.from_pretrained(output / "final-model")
    assert_last_answers_are_those_of(model, tokenizer, samples[-2:])
    assert "step 6: 2 prompts sampled" in done.stderr


@pytest.mark.slow
def test_the_last_answers_of_the_engine_are_those_of_the_final_adapter(inputs, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = tmp_path / "run"
    config = make_config(inputs, output, lora_peft_config=LORA | {"lora_alpha": 16})
    save_config(config, tmp_path / "run.yaml")
    sampler = SAMPLER.replace("sample_frequency", "lora_mode: adapter, sample_frequency")
    on_ranks(2, train, load_config(tmp_path / "run.yaml", [sampler]))
    samples = lines(output / "samples.jsonl")
    assert samples[-1]["options"] != samples[0]["options"]
    base = AutoModelForCausalLM.from_pretrained(inputs / "model")
    tokenizer = AutoTokenizer.from_pretrained(output / "final-model")
    model = PeftModel.from_pretrained(base, output / "final-model")
    assert_last_answers_are_those_of(model, tokenizer, samples[-2:])


EXPERTS = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_adapters_of_experts_are_trained_sampled_from_saved_and_resumed(inputs, tmp_path, world_size):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(inputs / "model").save_pretrained(tmp_path / "model")
    save_family(FAMILIES["Qwen3-MoE"], tmp_path / "model")
    output, lora = tmp_path / "run", {"r": 2, "target_modules": ["q_proj"], "target_parameters": [*EXPERTS]}
    more = {"lora_peft_config": lora, "use_activation_checkpointing": True, "epochs": 2}
    save_config(make_config(inputs, output, WITH_CHECKPOINTS, **more), tmp_path / "run.yaml")
    sampler = SAMPLER.replace("sample_frequency", "lora_mode: merged, sample_frequency")
    config = load_config(tmp_path / "run.yaml", [sampler, f"model={tmp_path}/model"])
    on_ranks(world_size, train, config)
    metrics, samples = lines(output / "metrics.jsonl"), lines(output / "samples.jsonl")
    assert metrics[-1]["eval/loss"] < metrics[0]["eval/loss"]
    adapters = load_file(output / "final-model/adapter_model.safetensors")
    assert sum("experts" in name for name in adapters) == 2 * 2 * 2
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(output / "final-model")
    model = PeftModel.from_pretrained(base, output / "final-model")
    assert_last_answers_are_those_of(model, tokenizer, samples[-2:])
    shutil.rmtree(sorted((output / "checkpoints").iterdir())[-1])
    shutil.rmtree(output / "final-model")
    on_ranks(world_size, train, config)
    assert are_equal(load_file(output / "final-model/adapter_model.safetensors"), adapters)
