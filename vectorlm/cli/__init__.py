"""The ``vectorlm`` command line: its commands, its exit codes, and the form of its errors."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, NoReturn

from vectorlm.errors import ConfigError, VectorLMError
from vectorlm.ranks.wait import escape_what_the_console_cannot_show


class Command(NamedTuple):
    """A command of the command line."""

    what: str
    """The description of the command, without its name."""
    example: str
    module: str | None = None
    """The module with `add_COMMAND_arguments(parser)` and `COMMAND_command(args)`; None means ``vectorlm.cli.COMMAND``.

    The command returns the exit code. The module imports nothing heavy at its top.
    """


COMMANDS = {
    "run": Command(
        "train by fine-tuning or reinforcement learning, from a config file",
        "vectorlm run configs/countdown_sft.yaml --world_size 2",
    ),
    "watch": Command(
        "show the progress of a run, from its output folder",
        "vectorlm watch runs/countdown_sft",
    ),
    "check": Command(
        "check a config file without starting anything",
        "vectorlm check configs/countdown_sft.yaml --world_size 2",
        "vectorlm.cli.run",
    ),
    "doctor": Command(
        "check whether a run can start on this machine, and how to fix problems",
        "vectorlm doctor",
    ),
    "new": Command(
        "create a project folder: a config, a reward, an environment, and tests for them",
        "vectorlm new my_project",
    ),
    "preprocess": Command(
        "tokenise a dataset, from the section dataset_preprocess of a config",
        "vectorlm preprocess my.yaml --set dataset_preprocess.save_path=data/mine",
        "vectorlm.cli.run",
    ),
    "model": Command(
        "download a model from the Hugging Face Hub, or convert a GGUF file",
        "vectorlm model HuggingFaceTB/SmolLM2-135M-Instruct data/smollm2",
    ),
    "sample": Command(
        "continue prompts with a model",
        'vectorlm sample --model data/countdown/model --prompt "Using the numbers 3, 5, 8 make 16."',
    ),
    "export": Command(
        "export a run, a checkpoint or LoRA adapters as a model folder for vLLM and transformers",
        "vectorlm export runs/countdown_lora --merge --dtype bfloat16",
    ),
    "plot": Command(
        "plot the curves of several runs in one picture",
        "vectorlm plot runs/countdown_sft runs/countdown_lora --output compared.png",
        "vectorlm.cli.report",
    ),
    "report": Command(
        "write an HTML page about runs: settings, curves, samples, times",
        "vectorlm report runs/countdown_sft --output report.html",
    ),
    "evaluate": Command(
        "score a model on a run's held-out questions, or on tasks of the lm-evaluation-harness",
        "vectorlm evaluate --model runs/countdown_grpo/final-model configs/countdown_grpo.yaml",
    ),
    "replay": Command(
        "repeat a logged step of a run and compare it, or find the first step at which two runs differ",
        "vectorlm replay runs/countdown_grpo --step 5",
    ),
    "verify": Command(
        "check that a running vLLM server holds the weights of a checkpoint",
        "vectorlm verify http://127.0.0.1:8000 runs/countdown_sft/final-model",
        "vectorlm.cli.export",
    ),
    "serve": Command(
        "run a vLLM server whose weights a trainer on this machine can replace",
        "vectorlm serve --model data/countdown/model --port 8000 -- --dtype float32",
        "vectorlm.sampling.backends.server.serve",
    ),
}
"""Commands by name. A new command needs an entry here and two functions in its module."""

INTERRUPTED, UNREAD = (128 + number for number in (signal.SIGINT, signal.SIGPIPE))
"""Exit codes after Ctrl-C and after a closed pipe, as in shells."""

HELP = """Train a language model with PyTorch FSDP and sample from it with vLLM on the same devices: the weights are
hot-swapped inside the running engine between optimizer steps.

commands:
{commands}

examples:
{examples}

`vectorlm COMMAND --help` lists a command's arguments. README.md shows a training run; docs/ has the rest: config.md
every setting, engines.md the engines, dev/architecture.md how it works."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, 1 (the run failed), 2 (the input was wrong) or 130 (Ctrl-C)."""
    given = sys.argv[1:] if argv is None else argv
    # A shell expands ~ at the beginning of a word, but not after an equals sign.
    words = [re.sub(r"^(--[\w-]+=)~(?=/|$)", rf"\1{Path.home()}", word) for word in given]
    args = build_parser([name for name in COMMANDS if name in words]).parse_args(words)
    return exit_code(lambda: args.run_command(args))


def exit_code(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; print an error or Ctrl-C, with its notes, on the standard error."""
    escape_what_the_console_cannot_show()
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # For example `vectorlm check | head`. The interpreter would write the rest again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except VectorLMError as error:
        print(f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        # The reason is a path of the user. A missing file may also be a fault of this program, which needs a traceback.
        fix = "Correct the path, or its permissions."
        print(f"{type(error).__name__}: {error.filename}: {error.strerror}. {fix}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        first = "; ".join(["interrupted", *map(str, interrupt.args)])
        print(first, *getattr(interrupt, "__notes__", ()), sep="\n", file=sys.stderr)
        return INTERRUPTED


@contextmanager
def at_interrupt(what_is_left: str) -> Iterator[None]:
    """Add `what_is_left` to the message that is printed for Ctrl-C in the block."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(what_is_left) from None


def build_parser(names: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Return the parser of all commands; `run_command` of its result runs the command.

    Only the commands in `names` get their arguments, because importing all modules takes a second.
    """
    parser = _Parser(
        prog="vectorlm",
        usage="vectorlm COMMAND ...",
        description=HELP.format(
            commands="\n".join(f"  {name:12}{command.what}" for name, command in COMMANDS.items()),
            examples="\n".join(f"  {command.example}" for command in COMMANDS.values()),
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    # The description lists the commands; argparse would wrap its own list.
    added = parser.add_subparsers(metavar="COMMAND", help=argparse.SUPPRESS, prog="vectorlm")
    for name, (what, example, module) in COMMANDS.items():
        command = added.add_parser(
            name, description=f"{what[0].upper()}{what[1:]}.", epilog=f"example: {example}"
        )
        if name not in names:
            continue
        home = import_module(module or f"vectorlm.cli.{name}")
        getattr(home, f"add_{name}_arguments")(command)
        command.set_defaults(run_command=getattr(home, f"{name}_command"))
    parser.set_defaults(run_command=lambda args: _show_help(parser))
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser that explains how to change a setting."""

    def error(self, message: str) -> NoReturn:
        """Add a hint to the message about arguments such as ``a.b=c``, as verl takes them."""
        if message.startswith("unrecognized arguments: ") and (
            found := re.search(r"(?<= )[\w.]+=\S*", message)
        ):
            message += f". To change a setting, write --set {found[0]}."
        super().error(message)


def _show_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0
