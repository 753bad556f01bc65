"""What the README says exists and runs."""

import os
import re
import shlex
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README, OWN_LOOP, MULTI_NODE = (
    (ROOT / name).read_text() for name in ("README.md", "docs/howto/own_loop.md", "docs/multi_node.md")
)
QUICK = [
    "--set", "train_parameters.epochs=1", "--set", "dataset.train_ds=data/countdown/eval",
    "--set", "train_parameters.sampler.sample_frequency=4",
]  # fmt: skip


def blocks(language, page=README):
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def commands(page=README):
    joined = (block.replace("\\\n", " ") for block in blocks("bash", page))
    return [line for block in joined for line in block.splitlines() if line]


def run(command, folder, **kwargs):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder that looks like a clone after `make run` made the data."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("configs", "examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    run(
        [sys.executable, "examples/make_countdown.py", "--output_dir", "data/countdown", "--seed", "0"],
        folder,
    )
    return folder


def test_every_command_is_known_to_this_test():
    assert [command.split()[0] for command in commands()] == [
        "make",
        "make",
        "python",
        "python",
        "python",
        "vectorlm",
        "vectorlm",
    ]


def test_the_make_targets_do_what_the_readme_says():
    steps = subprocess.run(["make", "-n", "run"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    python = next(command for command in commands() if command.startswith("python"))
    assert f".venv/bin/{python}" in steps
    assert "examples/make_countdown.py --output_dir data/countdown --seed 0" in steps
    tests = subprocess.run(
        ["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r'-m pytest -n \d .*-m "not slow and not long"', tests)


def test_the_check_command_runs(checkout):
    command = next(command for command in commands() if command.startswith("vectorlm"))
    assert "my.yaml: ok" in run([sys.executable, "-m", *shlex.split(command)], checkout).replace(
        "configs/countdown_sft.yaml", "my.yaml"
    )


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_ten_lines_run_on_one_rank_and_on_two(checkout, world_size):
    (code,) = blocks("python")
    (checkout / "loop.py").write_text(code.replace("world_size=2", f"world_size={world_size}"))
    run([sys.executable, "loop.py"], checkout)


@pytest.mark.slow
def test_the_custom_loop_runs(checkout):
    command = next(command for command in commands(OWN_LOOP) if "custom_loop" in command)
    words = shlex.split(command.replace("--num_steps 300", "--num_steps 2"))
    printed = run([sys.executable, *words[1:]], checkout)
    answers = re.findall(r"^step (\d+): \d+% of the held-out answers are right$", printed, re.M)
    assert answers == ["0", "2"]


def test_the_sample_command_answers(checkout):
    command = [command for command in commands() if command.startswith("vectorlm")][-1]
    assert "Using the numbers 3, 5, 8 make 16." in run(
        [sys.executable, "-m", *shlex.split(command)], checkout
    )


@pytest.mark.slow
def test_the_main_command_leaves_what_the_readme_lists(checkout):
    command = next(command for command in commands() if command.startswith("python"))
    printed = run([sys.executable, *shlex.split(command)[1:], *QUICK], checkout)
    assert "step 0: 0/128 right" in printed
    made = {path.name for path in (checkout / "runs/countdown_sft").iterdir()}
    listed = [
        "final-model",
        "metrics.jsonl",
        "samples.jsonl",
        "run.png",
        "config.yaml",
        "run.json",
        "sampler.log",
        "checkpoints",
    ]
    assert made == set(listed)
    assert all(f"`{name}`" in README for name in listed)


@pytest.mark.slow
def test_the_commands_for_reinforcement_learning_train(checkout):
    warm_up, reinforce = (command for command in commands() if "warmup" in command or "rl_example" in command)
    run([sys.executable, *shlex.split(warm_up)[1:], *QUICK], checkout)
    few = ["--set", "rl.max_steps=1", "--set", "rl.prompts_per_step=8"]
    printed = run([sys.executable, *shlex.split(reinforce)[1:], *few], checkout)
    assert re.search(r"^step 1: \d+/512 right$", printed, re.M)
    assert (checkout / "runs/countdown_grpo/final-model").is_dir()


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
def test_every_config_is_sound(checkout, name):
    """Against stand-ins for what a config starts from and this machine does not have."""
    stand_ins = {
        "model": "data/countdown/model",
        "rl.prompts": "data/countdown/train.jsonl",
        "train_parameters.sampler.prompts": "data/countdown/eval.jsonl",
        "train_parameters.max_seq_len": 64,
        "train_parameters.use_flash_attention": "False",
    }
    text = (ROOT / "configs" / name).read_text()
    if "enable_wandb_logging: True" in text:
        stand_ins["wandb_config.mode"] = "offline"
    if "max_model_len:" in text:
        stand_ins["train_parameters.sampler.engine.max_model_len"] = 64
    if "  teacher:" in text:
        stand_ins["rl.teacher.model"] = "data/countdown/model"
    settings = [
        word
        for key, value in stand_ins.items()
        if key.split(".")[0] in ("model", "train_parameters", "wandb_config") or "rl:" in text
        for word in ("--set", f"{key}={value}")
    ]
    command = ["-m", "vectorlm", "check", f"configs/{name}", "--world_size", "2", *settings]
    assert f"configs/{name}: ok" in run([sys.executable, *command], checkout)


@pytest.mark.slow
def test_the_plain_torchrun_command_trains_without_a_sampler(checkout):
    command = next(command for command in commands(MULTI_NODE) if "llama_example.py" in command)
    words = ["-m", "torch.distributed.run", "--standalone", *shlex.split(command)[1:]]
    printed = run(
        [sys.executable, *words, *QUICK, "--set", "train_parameters.output_dir=runs/plain"], checkout
    )
    assert "examples/llama_example_mp.py" in printed, (
        "a config that asks for sampling must be told what samples"
    )
    assert (checkout / "runs/plain/final-model").is_dir()


@pytest.mark.slow
def test_the_command_for_several_machines_trains_when_it_is_started_twice(checkout):
    command = next(command for command in commands(MULTI_NODE) if "localhost" in command)
    with socket.create_server(("localhost", 0)) as server:
        command = command.replace("29400", str(server.getsockname()[1]))
    settings = [*QUICK, "--set", "train_parameters.output_dir=runs/machines"]
    words = [sys.executable, "-m", "torch.distributed.run", *shlex.split(command)[1:], *settings]
    with ThreadPoolExecutor(2) as machines:
        printed = "".join(machines.map(lambda _: run(words, checkout), range(2)))
    assert printed.count("step 4/4: ") == 1
    assert (checkout / "runs/machines/final-model").is_dir()


def test_the_slurm_script_starts_one_torchrun_on_each_node(tmp_path):
    for name, text in {"scontrol": "printf 'one\\ntwo\\n'", "srun": 'echo "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "SLURM_JOB_NODELIST": "x",
        "SLURM_JOB_ID": "12007",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
    }
    environment = variables | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    printed = run(["bash", "examples/slurm.sh", "--set", "a=1"], ROOT, env=environment)
    assert "waiting until torchrun has started on all 2 machines, at one:29407" in printed
    words = next(line for line in printed.splitlines() if line.startswith("--")).split()
    assert words[:2] == ["--kill-on-bad-exit=1", "torchrun"]
    assert dict(zip(words[2:12:2], words[3:12:2], strict=True)) == {
        "--nnodes": "2",
        "--nproc_per_node": "4",
        "--rdzv_id": "12007",
        "--rdzv_backend": "c10d",
        "--rdzv_endpoint": "one:29407",
    }
    assert (ROOT / words[12]).is_file()
    assert (ROOT / words[14]).is_file()
    assert words[-2:] == ["--set", "a=1"]


def test_every_path_and_link_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
    tree = blocks("text")[-1]
    for name in re.findall(r"^  ([\w./]+)", tree, re.MULTILINE):
        assert (ROOT / "vectorlm" / name).exists(), name
    for name in tree.splitlines()[-1].split():
        assert (ROOT / name).is_dir(), name


def test_the_tables_are_those_of_the_result_files(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from table import PAGES, with_tables

    for page in ("README.md", *PAGES):
        text = (ROOT / page).read_text()
        assert with_tables(text, page) == text, f"{page}: run python benchmarks/table.py"


def test_the_readme_is_read_in_a_minute():
    assert len(README.splitlines()) <= 150
