"""The commands of docs/export.md are ones that vectorlm and vLLM know."""

import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from vectorlm.checkpoint.settings import KeepSettings
from vectorlm.cli import build_parser
from vectorlm.config.setting import all_settings, settings_of

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "export.md").read_text()
COMMANDS = [
    line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
]


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.startswith("vectorlm ")])
def test_a_command_of_vectorlm_parses_and_names_configs_that_exist(command):
    words = shlex.split(command)[1:]
    assert build_parser().parse_args(words).run_command
    assert all((ROOT / word).is_file() for word in words if word.endswith(".yaml"))


@pytest.mark.slow
def test_the_commands_of_vllm_parse():
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # It moved within the versions that vectorlm supports.
    home = "launchers" if find_spec("vllm.entrypoints.launchers") else "openai"
    cli_args = import_module(f"vllm.entrypoints.{home}.cli_args")
    ours = [each for each in COMMANDS if not each.startswith("vectorlm ")]
    starts = ("vllm serve ", "python -m vllm.entrypoints.openai.api_server ")
    assert len(ours) == 4
    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    for command in ours:
        (start,) = (each for each in starts if command.startswith(each))
        cli_args.validate_parsed_serve_args(parser.parse_args(shlex.split(command.removeprefix(start))))


def test_the_page_names_settings_that_exist_and_all_that_decide_what_is_kept():
    named = re.findall(r"^\| `(\w+)[^|]*` \|", PAGE, re.MULTILINE)
    assert set(settings_of(KeepSettings)) - {"final_model"} < set(named)
    assert [name for name in named if f"train_parameters.{name}" not in all_settings()] == []
