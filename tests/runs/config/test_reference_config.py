"""The configs of this repository: configs/config.yaml has every setting, and none uses an older place."""

import re
from pathlib import Path

import pytest
import yaml

from vectorlm.cli import build_parser
from vectorlm.runs.config.load import DEFAULT_PATH, load_config
from vectorlm.runs.config.schema import ALIASES
from vectorlm.runs.config.setting import all_settings

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / DEFAULT_PATH).read_text()
OURS = [path for folder in ("configs", "benchmarks", "vectorlm") for path in (ROOT / folder).rglob("*.yaml")]


def test_with_its_comments_taken_away_it_sets_every_setting_of_fine_tuning(tmp_path):
    everything = tmp_path / "my.yaml"
    everything.write_text(re.sub(r"(?m)^( *)# ([a-z0-9_]+:.*)$", r"\1\2", TEXT))
    given = set(load_config(everything).origins)
    wanted = {
        path for path in all_settings() if path.split(".")[0] != "rl" and "evaluation.prompts." not in path
    }
    assert sorted(wanted - given) == []


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_command_without_a_file_takes_it(command):
    assert build_parser().parse_args([command]).yaml_path == DEFAULT_PATH


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(ROOT)))
def test_none_of_our_configs_uses_an_older_place(path):
    def places(section, prefix=""):
        for name, value in section.items():
            yield prefix + name
            if isinstance(value, dict):
                yield from places(value, f"{prefix}{name}.")

    assert set(places(yaml.safe_load(path.read_text()))) & ALIASES.keys() == set()
