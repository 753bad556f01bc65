"""The migration page: every key of VectorLM's files is on it, and what it names on this side exists."""

import re
import shlex
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from vectorlm.cli import build_parser
from vectorlm.config.schema import ALIASES
from vectorlm.config.setting import all_settings

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/from_vectorlm.md").read_text()
ROWS = [tuple(line.strip("| ").split(" | ")) for line in PAGE.splitlines() if line.startswith("| `")]
HERE = [name for row in ROWS for name in re.findall(r"`([^`]+)`", row[1])]


def keys_of(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def test_every_key_of_the_ten_files_is_in_the_table():
    files = (ROOT / "tests/config/vectorlm_configs").glob("*.yaml")
    keys = {key for path in files for key in keys_of(yaml.safe_load(path.read_text()))}
    named = {name for row in ROWS for name in re.findall(r"`([^`]+)`", row[0])}
    assert len(keys) > 40
    assert sorted(keys - named) == []


def test_keys_that_are_the_same_exist():
    same = [name for row in ROWS if row[1] == "the same" for name in re.findall(r"`([^`]+)`", row[0])]
    assert len(same) > 10
    assert [name for name in same if name not in all_settings()] == []


def resolve(name):
    """Import the longest module in a dotted name, and read the rest off it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[end:], module)
    raise AssertionError(f"{name} is not there")


@pytest.mark.parametrize("name", sorted(set(HERE)))
def test_what_the_page_names_here_exists(name):
    if name.startswith("vectorlm."):
        assert resolve(name) is not None
    elif name.startswith("vectorlm "):
        assert build_parser().parse_args([*name.split()[1:], "my.yaml"]).run_command
    elif "/" in name:
        assert (ROOT / name).is_file()
    elif name in ALIASES:
        assert ALIASES[name] in all_settings()
    elif name.split(".")[0] in ("wandb", "peft", "torch"):
        assert name in ("wandb.init", "peft.LoraConfig", "torch.optim.AdamW")
    else:
        values = ("half", "plataeu-with-warmup", "enable_lora=True", "max_lora_rank=16")
        assert name in all_settings() or name in values


def test_the_settings_and_files_in_its_text_exist():
    text = " ".join(line for line in PAGE.splitlines() if not line.startswith("|"))
    named = re.findall(r"`(train_parameters\.[\w.]+)[^`]*`", text)
    assert len(named) >= 2
    assert [name for name in named if name not in all_settings()] == []
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target
    for path in re.findall(r"`((?:examples|configs)/[\w./]+)`", text):
        assert (ROOT / path).is_file(), path


def test_its_command_parses():
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    assert build_parser().parse_args(shlex.split(block)[1:]).world_size == 2
