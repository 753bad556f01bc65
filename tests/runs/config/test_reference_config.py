"""configs/config.yaml: every setting of fine-tuning, and the default file of commands."""

import re
from pathlib import Path

import pytest

from vectorlm.cli import build_parser
from vectorlm.runs.config.load import DEFAULT_PATH, load_config
from vectorlm.runs.config.setting import all_settings

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / DEFAULT_PATH).read_text()


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
