"""The same script under accelerate and in cluster jobs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.fake_slurm import put_on_path
from kit.sft_runs import ROOT, lines, make_config

from vectorlm.runs.config.load import load_config


@pytest.fixture
def my_yaml(inputs, tmp_path):
    make_config(inputs, tmp_path / "run")
    return tmp_path / "run.yaml"


def finish(command, environment=None):
    """Run a command to its end; return its output."""
    done = subprocess.run(
        list(map(str, command)),
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_accelerate_starts_the_ranks_and_its_fsdp_settings_are_honoured(my_yaml, tmp_path):
    accelerate = [Path(sys.executable).with_name("accelerate"), "launch", "--num_processes", 2, "--use_fsdp"]
    accelerate += ["--main_process_port", 0, "--fsdp_sharding_strategy", "SHARD_GRAD_OP"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf")}
    said = finish([*accelerate, "examples/llama_example_mp.py", "--yaml_path", my_yaml], environment)
    assert said.count("from accelerate: train_parameters.sharding_strategy='SHARD_GRAD_OP'") == 1
    saved = load_config(tmp_path / "run" / "config.yaml")
    assert saved.train_parameters.model.sharding_strategy == "SHARD_GRAD_OP"
    # Two epochs of 21 rows, on two ranks with two micro-batches of two rows.
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == list(range(7))


@pytest.mark.slow
def test_the_job_for_one_machine_starts_a_rank_per_device(my_yaml, tmp_path):
    environment = put_on_path(tmp_path / "bin", SLURM_GPUS_ON_NODE="2", CONFIG=str(my_yaml))
    finish(["bash", "examples/slurm_one_node.sh", "--set", "train_parameters.epochs=1"], environment)
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == list(range(4))


@pytest.mark.slow
def test_the_job_for_several_machines_makes_one_run_of_them(my_yaml, tmp_path):
    nodes = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "localhost,localhost", "TMPDIR": str(tmp_path)}
    nodes["SLURM_CPUS_PER_TASK"] = "1"
    environment = put_on_path(tmp_path / "bin", CONFIG=str(my_yaml), **nodes)
    settings = ["train_parameters.epochs=1", "train_parameters.checkpointing_enabled=True"]
    words = [word for setting in settings for word in ("--set", setting)]
    said = finish(["bash", "examples/slurm.sh", *words], environment)
    assert "waiting until torchrun has started on all 2 machines, at localhost:" in said
    saved = load_config(tmp_path / "run" / "config.yaml")
    assert saved.train_parameters.model.sharding_strategy == "HYBRID_SHARD"
    output = tmp_path / "run"
    assert [line["step"] for line in lines(output / "metrics.jsonl")] == list(range(4))
    assert (output / "final-model" / "model.safetensors").is_file()
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000003",
    ]
