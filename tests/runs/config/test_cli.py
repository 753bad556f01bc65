import argparse
import json
import os
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from kit.config_texts import FULL, MINIMAL

from vectorlm.cli import COMMANDS, build_parser, exit_code, main
from vectorlm.cli.arguments import add_config_arguments, config_from_arguments


def test_output_that_nobody_reads_ends_a_command_without_a_traceback():
    code = "import sys; from vectorlm.cli import exit_code; sys.exit(exit_code(lambda: print('x' * 100_000)))"
    reader = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    reader.stdout.close()
    assert (reader.stderr.read(), reader.wait()) == ("", 141)
    reader.stderr.close()


@pytest.fixture
def wrong(tmp_path, monkeypatch):
    """Go to a folder with files and folders that commands cannot use."""
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "other", "run", "config_is_folder/config.yaml"):
        Path(name).mkdir(parents=True)
    Path("file").write_text("text")
    Path("config_is_folder/metrics.jsonl").touch()
    # A run's folder, and one with files of these names by another program.
    line = {"train_step": 1, "prompt": "a", "completion": "b", "reward": 1.0, "advantage": 0.5, "group": 0}
    Path("run/metrics.jsonl").write_text('{"step": 1, "train/loss": 0.5}\n')
    Path("run/rollouts.jsonl").write_text(json.dumps(line) + "\n")
    Path("other/metrics.jsonl").write_text('{"loss": 1}\n{"step": 2, "loss": "low"}\n{"step": "a"}\n')
    Path("other/rollouts.jsonl").write_text('{"reward": 1}\n{"train_step": 3, "reward": 1}\n')
    Path("other/run.json").write_text('{"num_steps": "many"}')


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("replay other --step 1", "--step 1 is not in other/metrics.jsonl, which ends at step 2"),
        ("replay empty --step 1", "empty/metrics.jsonl does not exist"),
        ("replay run --bisect other", "run and other have no step in common"),
        ("report config_is_folder", "config_is_folder/config.yaml: Is a directory"),
        ("report run --output empty", "--output empty: it must be a file"),
        ("report file/x", "'file/x' is not a folder"),
        ("new file", "file must be empty or new"),
        ("new file/new", "file/new: Not a directory"),
        ("model file new", "file exists, so there is nothing to download"),
        ("model empty new", "empty exists, so there is nothing to download"),
        ("sample --model file --prompt a", "--model file must be a folder, but is a file"),
        ("sample --model empty --prompt a", "--model empty must have a config.json"),
    ],
)
def test_a_wrong_path_ends_a_command_with_one_line_that_names_it(wrong, capsys, command, message):
    assert main(command.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert message in printed.err


@pytest.mark.parametrize("command", ["report other --output page.html", "watch other"])
def test_files_of_another_program_are_read_as_far_as_they_are_a_run_s(wrong, capsys, command):
    assert main(command.split()) == 0
    assert "page.html" in (printed := capsys.readouterr().out) or "step 2" in printed


def test_a_file_without_permission_is_named(capsys):
    def read():
        raise PermissionError(13, "Permission denied", "runs/x/metrics.jsonl")

    assert exit_code(read) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("PermissionError: runs/x/metrics.jsonl: Permission denied.")


@pytest.mark.parametrize("text", ["a", "", "1,x", "0", "-1"])
def test_numbers_that_cannot_be_read_are_shown(capsys, text):
    with pytest.raises(SystemExit):
        main(["evaluate", "--model", "m", f"--at_k={text}"])
    assert f"argument --at_k: {text!r} must be integers >= 1" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["my.yaml", "a.b=c", "d=1"], ["a.b=c"]])
def test_an_override_without_set_is_answered_with_set(words, capsys):
    with suppress(SystemExit):
        main(["check", *words])
    assert "write --set a.b=c" in capsys.readouterr().err


def test_check_says_what_the_run_would_do(write_complete, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    for module in ("files", "summary"):
        monkeypatch.setattr(f"vectorlm.runs.preflight.{module}.has_gpu", lambda: False)
    Path("models/tiny/config.json").write_text('{"max_position_embeddings": 4096}')
    Path("p.jsonl").write_text('{"prompt": "a", "numbers": [1, 2, 3], "target": 6}\n')
    here = ["--set", "evaluation.prompts=p.jsonl"]
    assert main(["check", write_complete(FULL), "--world_size", "2", *here]) == 0
    out = capsys.readouterr().out
    heads = "model ranks training evaluation global micro-batches optimizer answers checkpoints output"
    summary = out.partition("yaml: ok\n")[2].splitlines()
    assert " ".join(line.split()[1] for line in summary[:10]) == heads
    for value in (
        "LoRA",
        "2, HYBRID_SHARD, bfloat16",
        "256 sequences",
        "lr 2e-05",
        "data/samples.jsonl",
        "runs/full",
    ):
        assert value in out
    for noted in ("sampling_params", "use_flash_attention", "truncate", "no memory plan"):
        assert noted in out


def test_check_counts_the_ranks_of_all_nodes(write_complete, capsys):
    assert main(["check", write_complete(MINIMAL), "--world_size", "4", "--nnodes", "2"]) == 0
    assert "4 on 2 nodes" in capsys.readouterr().out
    assert main(["check", write_complete(MINIMAL), "--world_size", "3", "--nnodes", "2"]) == 2
    assert "world_size=3" in capsys.readouterr().err


def test_a_wrong_config_ends_with_code_2_and_no_traceback(write_config):
    path = write_config(MINIMAL, ("epochs: 2", "epochs: two"))
    done = subprocess.run([sys.executable, "-m", "vectorlm", "check", path], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("ConfigError: train_parameters.epochs='two'")
    assert done.stderr.count("\n") == 1


def test_check_of_a_description_imports_neither_torch_nor_vllm(write_complete):
    code = (
        "import sys; from vectorlm.cli import main; code = main(['check', 'my.yaml']); "
        "sys.exit(code or bool({'torch', 'vllm', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    write_complete(MINIMAL)
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_the_help_imports_no_command():
    code = "import sys; from vectorlm.cli import main; main([]); sys.exit('vectorlm.runs' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_the_examples_in_the_help_parse():
    for _, example, _ in COMMANDS.values():
        assert build_parser().parse_args(shlex.split(example)[1:]).run_command


def test_scripts_share_the_same_arguments(write_config):
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    line = ["--yaml_path", write_config(), "--world_size", "3", "--set", "model=a"]
    line += ["--set", "dataset.eval_bs=1"]
    args = parser.parse_args(line)
    config = config_from_arguments(args)
    assert args.world_size == 3
    assert (config.model, config.dataset.eval_bs) == ("a", 1)
    again = parser.parse_args(["--yaml_path", "my.yaml"])
    assert (again.world_size, again.overrides) == (1, [])


def test_scripts_send_whoever_asks_for_several_machines_to_torchrun(capsys):
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--yaml_path", "my.yaml", "--nnodes", "2", "--node_rank", "1"])
    assert "torchrun" in capsys.readouterr().err
    assert "--nnodes" not in parser.format_help()


def test_preprocess_without_its_section_says_what_is_missing(write_config, capsys):
    begun = MINIMAL.replace("  eval_bs: 4\n", "").replace("  eval_ds: data/eval\n", "")
    assert main(["preprocess", write_config(begun)]) == 2
    assert "dataset_preprocess" in capsys.readouterr().err


def test_letters_that_a_console_does_not_have_are_escaped(write_complete):
    """This applies to every command, because a run prints its model's text."""
    words = ["check", write_complete(MINIMAL), "--set", "train_parameters.output_dir=läuft"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "vectorlm", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "UnicodeEncodeError" not in done.stderr
    assert r"l\xe4uft" in done.stdout


def test_an_option_that_begins_with_the_home_folder_is_that_folder(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr("vectorlm.cli.report.plot_command", lambda args: seen.append(args.output) or 0)
    assert main(["plot", "run", "--output=~/curves.png"]) == 0
    assert seen == [tmp_path / "curves.png"]
