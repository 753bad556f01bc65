"""Shell completion: a bash or zsh script of the commands, their flags and the flags' choices."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

SHELLS = ("bash", "zsh")

BASH = """# Completion of vectorlm for bash: source <(vectorlm --completion bash)
_vectorlm() {{
    local now=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} offered=
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$now"))
        return
    fi
    case "${{COMP_WORDS[1]}} $before" in
{choices}
    esac
    case "$offered$now" in
    -*) case ${{COMP_WORDS[1]}} in
{flags}
        esac ;;
    esac
    if [ -n "$offered" ]; then
        COMPREPLY=($(compgen -W "$offered" -- "$now"))
    else
        # A file's name may hold spaces.
        mapfile -t COMPREPLY < <(compgen -f -- "$now")
    fi
}}
complete -o filenames -F _vectorlm vectorlm"""

ZSH = """#compdef vectorlm
# Completion of vectorlm for zsh: source <(vectorlm --completion zsh)
_vectorlm() {{
    local now=${{words[CURRENT]}} before=${{words[CURRENT - 1]}} offered=
    if (( CURRENT == 2 )); then
        compadd -- {commands}
        return
    fi
    case "${{words[2]}} $before" in
{choices}
    esac
    case "$offered$now" in
    -*) case ${{words[2]}} in
{flags}
        esac ;;
    esac
    if [ -n "$offered" ]; then
        compadd -- ${{=offered}}
    else
        _files
    fi
}}
compdef _vectorlm vectorlm"""


class PrintCompletion(argparse.Action):
    """``--completion SHELL``: print the script of a shell, and end."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> None:
        """Print the script made from the parser that was asked."""
        print(completion_script(values, _commands(parser)))
        parser.exit()


def completion_script(shell: str, commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the script of `shell` that completes `commands`."""
    template = {"bash": BASH, "zsh": ZSH}[shell]
    choices, flags = [], []
    for name, parser in commands.items():
        shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
        flags.append((name, [flag for action in shown for flag in action.option_strings]))
        for action in shown:
            for flag in action.option_strings if action.choices else ():
                choices.append((f"{name} {flag}", [str(choice) for choice in action.choices or ()]))
    return template.format(
        commands=" ".join(commands), choices=_cases(choices, "    "), flags=_cases(flags, "        ")
    )


def _commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    subparsers = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next(subparsers).choices


def _cases(rows: Iterable[tuple[str, list[str]]], indent: str) -> str:
    """Return a line of a shell's ``case`` for each pattern and what it offers."""
    return "\n".join(f'{indent}"{pattern}") offered="{" ".join(words)}" ;;' for pattern, words in rows)
