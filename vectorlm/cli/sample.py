"""``vectorlm sample``: continue prompts with a model, from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vectorlm.data.encoding import has_chat_template, read_template
from vectorlm.data.images import picture_of, with_images
from vectorlm.data.settings import PLAIN_CHAT, ChatSettings
from vectorlm.errors import ConfigError, EngineError
from vectorlm.packages import is_installed
from vectorlm.report.metrics import printable
from vectorlm.runs.config.value import parse_yaml, raise_problems
from vectorlm.runs.preflight.local_model import (
    advise_without_config,
    describe_absent,
    description_of,
    download,
    four_bit_method_of,
    local_folder,
)
from vectorlm.runs.preflight.sampling import sampling_problems
from vectorlm.sampling.weights.lora_factors import engine_arguments
from vectorlm.train.lora import ADAPTER_CONFIG, base_of, is_adapter_folder, tokenizer_folder
from vectorlm.types import Prompt

FLAGS = ("max_tokens", "temperature", "n", "seed")
MAX_TOKENS = 64


def add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm sample``."""
    add_sampling_arguments(parser)
    parser.add_argument(
        "--prompt",
        dest="prompts",
        action="append",
        metavar="TEXT",
        help="a prompt to continue; may be repeated; without it, every line of the standard input is a prompt",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="send every prompt as a user message, with the model's chat template",
    )
    help_text = "an image to show before the text of every prompt, with --chat; may be repeated"
    parser.add_argument("--image", dest="images", action="append", default=[], metavar="FILE", help=help_text)
    parser.add_argument("--system", metavar="TEXT", help="the system message of each chat; implies --chat")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the model, the engine and the sampling parameters."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR",
        help="a folder written by save_pretrained (a model, or LoRA adapters that name their base model), or a name on "
        "the Hugging Face Hub",
    )
    parser.add_argument(
        "--engine", choices=("vllm", "hf"), default="vllm", help="hf samples with transformers, without vLLM"
    )
    help_text = f"default {MAX_TOKENS}"
    parser.add_argument("--max_tokens", type=int, metavar="N", help=help_text)
    help_text = "default 1; 0 takes the likeliest token"
    parser.add_argument("--temperature", type=float, metavar="X", help=help_text)
    parser.add_argument("--n", type=int, metavar="N", help="completions of each prompt (default 1)")
    parser.add_argument("--seed", type=int, metavar="N", help="makes the answers repeatable")
    help_text = "run the Python files of a model that brings its own"
    parser.add_argument("--trust_remote_code", action="store_true", help=help_text)
    parser.add_argument("--chat_template", metavar="FILE", help="a Jinja file to use as the chat template")
    help_text = "a variable of the chat template, for example enable_thinking=false; may be repeated"
    parser.add_argument(
        "--chat_template_kwarg",
        dest="variables",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=help_text,
    )
    help_text = "any other sampling parameter, for example top_p=0.9; may be repeated"
    parser.add_argument(
        "--param", dest="params", action="append", default=[], metavar="NAME=VALUE", help=help_text
    )


def sample_command(args: argparse.Namespace) -> int:
    """Continue prompts with a model, and print the answers."""
    model, adapter = require_model(args)
    prompts = args.prompts
    if prompts is None and sys.stdin.isatty():
        raise ConfigError(
            "--prompt: the command needs a prompt. Use --prompt TEXT, or send prompts to the standard input."
        )
    if prompts is None:
        prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
        if not prompts:
            raise ConfigError(
                "the standard input must have a prompt on every line, but it is empty. Or use --prompt TEXT."
            )
    if not all(prompt.strip() for prompt in prompts):
        raise ConfigError("--prompt must not be empty. Write a text.")
    params = {"max_tokens": MAX_TOKENS, **sampling_params(args)}
    is_chat = args.chat or args.system is not None
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    asked: list[Prompt] = [
        with_images([*system, {"role": "user", "content": prompt}], args.images) if is_chat else prompt
        for prompt in prompts
    ]
    _require_readable(args.images, is_chat, args.engine)
    chat = chat_settings(args, PLAIN_CHAT)
    tokenizer = tokenizer_folder(model, adapter)
    has_template = chat.chat_template is not None or has_chat_template(tokenizer)
    if is_chat and not has_template:
        raise ConfigError(
            f"--chat needs a chat template, but the tokenizer of {tokenizer} has none. Leave it out."
        )
    from vectorlm.report.step_lines import sample_with_progress

    check_sampling(args.engine, params)
    with open_engine(args.engine, model, adapter, trusted(args), chat) as engine:
        engine.wait_until_ready()
        sampled = sample_with_progress(engine, asked, params)
    pages = []
    for prompt, completions in zip(prompts, sampled, strict=True):
        texts = [completion.text.strip() or "(nothing)" for completion in completions]
        if len(texts) > 1:
            texts = [f"[{number}] {text}" for number, text in enumerate(texts, start=1)]
        pages.append("\n".join([f"> {prompt}", *texts]))
    print(printable("\n\n".join(pages)))
    if not is_chat and has_template:
        print(
            "this tokenizer has a chat template, but the prompt was sent as plain text (--chat sends it as a message)",
            file=sys.stderr,
        )
    return 0


def _require_readable(images: Sequence[str], is_chat: bool, inference: str) -> None:
    """Raise `ConfigError` for images that cannot be shown, before the engine starts."""
    if images and not is_chat:
        raise ConfigError("--image needs a chat, because the chat template places the images. Add --chat.")
    if images and inference != "vllm":
        raise ConfigError("--engine hf reads text alone, and --image needs a model with images. Use vllm.")
    for image in images:
        try:
            picture_of(image).open()
        except ValueError as error:
            raise ConfigError(f"--image {image}: {error}. Name an image file.") from error


def trusted(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's arguments for a model that brings its own code."""
    return {"trust_remote_code": True} if args.trust_remote_code else {}


def chat_settings(args: argparse.Namespace, given: ChatSettings) -> ChatSettings:
    """Return `given` with the template and the variables of the command line."""
    variables = read_pairs("--chat_template_kwarg", "enable_thinking=false", args.variables)
    if args.chat_template is not None:
        read_template(args.chat_template)  # An unreadable file is refused before the engine starts.
    return ChatSettings(
        chat_template=args.chat_template or given.chat_template,
        chat_template_kwargs={**given.chat_template_kwargs, **variables},
    )


def require_model(args: argparse.Namespace) -> tuple[str, str | None]:
    """Return the model's folder, and the folder of its adapters if ``--model`` names adapters.

    Raises:
        ConfigError: ``--model`` is not a model's folder, or ``--engine`` is not installed.
    """
    download(args.model)
    model, adapter = local_folder(args.model), None
    if not Path(model).is_dir():
        rule, fix = describe_absent(model)
        raise ConfigError(f"--model {model} {rule}. {fix}")
    if is_adapter_folder(Path(model)):
        model, adapter = str(base_of(Path(model))), model
    elif not (Path(model) / "config.json").is_file():
        raise ConfigError(f"--model {model} must have a config.json. {advise_without_config(Path(model))}")
    if args.trust_remote_code:
        from vectorlm.train.load import trust_code

        trust_code(model)
    if args.engine == "vllm" and not is_installed("vllm"):
        raise ConfigError("--engine vllm needs the vllm package, which is not installed. Use --engine hf.")
    return model, adapter


def sampling_params(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that the command line names."""
    flags = {name: getattr(args, name) for name in FLAGS if getattr(args, name) is not None}
    return flags | read_pairs("--param", "top_p=0.9", args.params)


def check_sampling(inference: str, params: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the engine would refuse the sampling parameters, before it starts."""
    if inference == "vllm":
        raise_problems(list(sampling_problems(params)))
        return
    from vectorlm.sampling.backends.generation import read_parameters

    try:
        read_parameters(params)
    except EngineError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def open_engine(
    inference: str,
    model: str,
    adapter: str | None,
    engine_args: Mapping[str, Any],
    chat: ChatSettings = PLAIN_CHAT,
) -> Iterator[Any]:
    """Start the engine, with the weights and the tokenizer of the adapters if there are any, and the template `chat`.

    An `EngineError` keeps its first paragraph only, without the engine's traceback.
    """
    in_4_bits = four_bit_method_of(model) is not None
    if in_4_bits and engine_args.get("dtype") in ("float32", "float"):
        engine_args = {**engine_args, "dtype": "bfloat16"}  # The kernels compute in 16 bits.
    if in_4_bits and adapter is not None:
        options = description_of(Path(adapter), ADAPTER_CONFIG) or {}
        engine_args = {**engine_args, **engine_arguments(options)}
    if adapter is not None:
        engine_args = {"tokenizer": str(tokenizer_folder(model, adapter)), **engine_args}
    try:
        if inference == "vllm":
            from vectorlm.sampling.engine import SamplingEngine

            opened: Any = SamplingEngine(model, chat=chat, **engine_args)
        else:
            from transformers.utils import logging

            from vectorlm.sampling.inline_engines import HFEngine

            logging.disable_progress_bar()
            given = {
                name: engine_args[name]
                for name in ("max_model_len", "tokenizer", "trust_remote_code")
                if name in engine_args
            }
            opened = HFEngine(model, chat=chat, **given)
        with opened as engine:
            if adapter is not None:
                from vectorlm.cli.export import find_source, load_source

                # The engine receives the merged weights, as in a training step; with a base in 4 bits, only adapters.
                engine.update(load_source(find_source(Path(adapter)))[0], 0)
            yield engine
    except EngineError as error:
        raise type(error)(str(error).partition("\n\n")[0]) from error


def read_pairs(flag: str, example: str, texts: Sequence[str]) -> dict[str, Any]:
    """Read the values of a repeatable ``NAME=VALUE`` argument as YAML."""
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(
                f"{flag} {text} must be a name and a value. Write {flag} {example}, for example."
            )
        try:
            # As in a config, 1e-1 is a number.
            pairs[name] = parse_yaml(value, lambda line: flag).plain()
        except ConfigError as error:
            raise ConfigError(f"{flag} {text} has a value that is not YAML. Quote it.") from error
    return pairs
