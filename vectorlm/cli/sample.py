"""``vectorlm sample``: continue prompts with a model, from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import yaml

from vectorlm.errors import ConfigError, EngineError
from vectorlm.types import Completion

FLAGS = ("max_tokens", "temperature", "n", "seed")
MAX_TOKENS = 64


@dataclass(frozen=True)
class SampleArguments:
    """The checked arguments of ``vectorlm sample``."""

    model: str
    engine: str
    prompts: Sequence[str]
    sampling_params: Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm sample``."""
    parser.add_argument("--model", required=True, metavar="DIR", help="a folder written by save_pretrained")
    parser.add_argument(
        "--prompt",
        dest="prompts",
        action="append",
        metavar="TEXT",
        help="what to continue; may be repeated; without it, every line of the standard input is a prompt",
    )
    parser.add_argument(
        "--max_tokens", type=int, default=MAX_TOKENS, metavar="N", help=f"default {MAX_TOKENS}"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="X", help="default 1; 0 takes the likeliest token"
    )
    parser.add_argument("--n", type=int, metavar="N", help="completions of each prompt (default 1)")
    parser.add_argument("--seed", type=int, metavar="N", help="makes the answers repeatable")
    parser.add_argument(
        "--param",
        dest="params",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other sampling parameter, for example top_p=0.9; may be repeated",
    )
    parser.add_argument(
        "--engine", choices=("vllm", "hf"), default="vllm", help="hf samples with transformers, without vLLM"
    )


def run(args: argparse.Namespace) -> int:
    """Continue prompts with a model, and print the answers."""
    answer(read_request(args, sys.stdin), sys.stdout)
    return 0


def read_request(args: argparse.Namespace, lines: TextIO) -> SampleArguments:
    """Check the parsed arguments, before anything heavy is imported."""
    if not (Path(args.model) / "config.json").is_file():
        what = "has no config.json" if Path(args.model).is_dir() else "is not a folder"
        raise ConfigError(f"--model {args.model} {what}: it must be a folder written by save_pretrained.")
    if args.engine == "vllm" and find_spec("vllm") is None:
        raise ConfigError("--engine vllm needs the vllm package, which is not installed. Use --engine hf.")
    params = {name: getattr(args, name) for name in FLAGS if getattr(args, name) is not None}
    return SampleArguments(args.model, args.engine, _prompts(args, lines), params | _params(args.params))


def answer(request: SampleArguments, out: TextIO) -> None:
    """Start the engine, and print each prompt with its answers; an `EngineError` keeps one line of its text."""
    from vectorlm.backends.transformers.parameters import NAMES, read_parameters
    from vectorlm.telemetry.progress import sample_aloud

    own = {name: value for name, value in request.sampling_params.items() if name in NAMES}
    try:
        # vLLM takes more names, and checks those itself.
        read_parameters(request.sampling_params if request.engine == "hf" else own)
    except EngineError as error:
        raise ConfigError(str(error)) from error
    try:
        with _engine(request) as engine:
            engine.wait_until_ready()
            answers = sample_aloud(engine, list(request.prompts), dict(request.sampling_params))
    except EngineError as error:
        # The rest is the engine's traceback, which does not help somebody at the command line.
        raise type(error)(str(error).partition("\n\n")[0]) from error
    for index, (prompt, completions) in enumerate(zip(request.prompts, answers, strict=True)):
        print("\n" * (index > 0) + _page(prompt, completions), file=out)


def _page(prompt: str, completions: Sequence[Completion]) -> str:
    texts = [completion.text.strip() or "(nothing)" for completion in completions]
    if len(texts) > 1:
        texts = [f"[{number}] {text}" for number, text in enumerate(texts, start=1)]
    return "\n".join([f"> {prompt}", *texts])


def _engine(request: SampleArguments) -> Any:
    if request.engine == "vllm":
        from vectorlm.engine.engine import SamplingEngine

        return SamplingEngine(request.model)
    from transformers.utils import logging

    from vectorlm.backends.transformers import HFEngine

    logging.disable_progress_bar()
    return HFEngine(request.model)


def _prompts(args: argparse.Namespace, lines: TextIO) -> list[str]:
    if args.prompts is not None:
        if not all(prompt.strip() for prompt in args.prompts):
            raise ConfigError("--prompt is empty: there is nothing to continue.")
        return args.prompts
    if lines.isatty():
        raise ConfigError("no prompt was given. Use --prompt TEXT, or send prompts to the standard input.")
    prompts = [line.rstrip("\n") for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(
            "the standard input has no prompts: it must have one on each line. Or use --prompt TEXT."
        )
    return prompts


def _params(texts: Sequence[str]) -> dict[str, Any]:
    params = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(
                f"--param {text} must be a name and a value. Write --param top_p=0.9, for example."
            )
        try:
            params[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--param {text} has a value that is not YAML. Quote it.") from error
    return params
