"""configs/config.yaml: every setting of fine-tuning with a comment, and the file of a command that names none."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vectorlm.cli import build_parser
from vectorlm.config import load_config
from vectorlm.config.load import DEFAULT_PATH
from vectorlm.config.setting import all_settings

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / DEFAULT_PATH).read_text()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder that looks like a clone after `make run` made the data, fewer rows of it."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    run(folder, "examples/make_countdown.py", "--num_train", "128", "--num_eval", "64")
    return folder


def run(folder, *words):
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_with_its_comments_taken_away_it_sets_every_setting_of_fine_tuning(tmp_path):
    everything = tmp_path / "my.yaml"
    everything.write_text(re.sub(r"(?m)^( *)# ([a-z_]+:.*)$", r"\1\2", TEXT))
    given = set(load_config(everything).origins)
    wanted = {path for path in all_settings() if path.split(".")[0] != "rl"}
    assert sorted(wanted - given) == []


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_command_without_a_file_takes_it(command):
    assert build_parser().parse_args([command]).yaml_path == DEFAULT_PATH


def test_check_without_a_file_is_content_with_it(checkout):
    assert f"{DEFAULT_PATH}: ok" in run(checkout, "-m", "vectorlm", "check", "--world_size", "2")


def test_a_script_without_a_file_trains_as_it_says(checkout):
    few = ["--set", "train_parameters.epochs=1"]
    printed = run(checkout, "examples/llama_example.py", *few)
    assert f"{DEFAULT_PATH} asks for sampling, which this script leaves out" in printed
    assert (checkout / "runs/config/final-model/model.safetensors").is_file()
