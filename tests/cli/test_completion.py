import re
import shutil
import subprocess

import pytest

from vectorlm.cli import COMMANDS, build_parser, main

ASK = """
source {script}
COMP_WORDS=({words}) COMP_CWORD=$(( {count} - 1 ))
_vectorlm
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
# What zsh's own completion system would be asked for.
ASK_ZSH = """
compdef() {{ : }}
compadd() {{ shift; printf '%s\\n' $@ }}
_files() {{ echo FILES }}
source {script}
words=({words}) CURRENT={count}
_vectorlm
"""


def script_of(shell, capsys, folder):
    with pytest.raises(SystemExit) as caught:
        main(["--completion", shell])
    assert caught.value.code == 0
    path = folder / f"completion.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


@pytest.fixture
def offered(capsys, tmp_path):
    script = script_of("bash", capsys, tmp_path)

    def ask(*words):
        quoted = " ".join(f"'{word}'" for word in ("vectorlm", *words))
        code = ASK.format(script=script, words=quoted, count=len(words) + 1)
        command = ["bash", "--norc", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert done.stderr == ""
        return done.stdout.splitlines()

    return ask


def test_bash_offers_the_commands(offered):
    assert offered("") == list(COMMANDS)
    assert offered("che") == ["check"]


def test_bash_offers_each_command_the_flags_of_its_help(offered):
    for name in COMMANDS:
        help_text = build_parser()._subparsers._group_actions[0].choices[name].format_help()
        shown = set(re.findall(r"(?<![\w-])--\w[\w-]*", help_text.partition("options:")[2]))
        flags = set(offered(name, "--"))
        assert "--help" in flags
        assert flags <= shown, "an offered flag that the help does not show"
    assert offered("check", "--nn") == ["--nnodes"]


def test_bash_offers_the_choices_of_a_flag_and_files_elsewhere(offered, tmp_path):
    assert offered("sample", "--engine", "") == ["vllm", "hf"]
    assert offered("sample", "--engine", "v") == ["vllm"]
    (tmp_path / "my run.yaml").touch()
    assert offered("run", "my") == ["my run.yaml"]


def test_the_script_for_zsh_has_the_same_words(capsys, tmp_path):
    bash, zsh = (script_of(shell, capsys, tmp_path).read_text() for shell in ("bash", "zsh"))
    case = re.compile(r'^ *"[\w -]+"\) offered=".*$', re.M)
    assert case.findall(bash) == case.findall(zsh) != []


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_offers_commands_flags_choices_and_files(capsys, tmp_path):
    script = script_of("zsh", capsys, tmp_path)

    def ask(*words):
        quoted = " ".join(f"'{word}'" for word in ("vectorlm", *words))
        code = ASK_ZSH.format(script=script, words=quoted, count=len(words) + 1)
        return subprocess.run(
            ["zsh", "-f", "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()

    assert ask("") == list(COMMANDS)
    assert "--nnodes" in ask("check", "--")
    assert ask("sample", "--engine", "") == ["vllm", "hf"]
    assert ask("run", "") == ["FILES"]


def test_an_unknown_shell_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--completion", "fish"])
    assert caught.value.code == 2
    assert "choose from bash, zsh" in capsys.readouterr().err.replace("'", "")
