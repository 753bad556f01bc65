"""``vectorlm export`` and ``vectorlm verify``: use a checkpoint after its run."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectorlm.cli import at_interrupt
from vectorlm.errors import ConfigError
from vectorlm.report.runs import START
from vectorlm.runs.config.load import load_config
from vectorlm.sampling.weights.lora_factors import SCORES
from vectorlm.train.checkpoint import folder
from vectorlm.train.lora import (
    ADAPTER_CONFIG,
    base_of,
    is_adapter_folder,
    load_adapters,
    merged,
    tokenizer_folder,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Source:
    """A checkpoint, adapters or a whole model to export."""

    path: Path
    run: Path
    """The folder of its run."""
    step: int | None
    """The step of the checkpoint; None if `path` is an exported model."""

    @property
    def is_adapter(self) -> bool:
        """Whether the source has adapters without their base model."""
        if self.step is None:
            return is_adapter_folder(self.path)
        return load_config(self.run / "config.yaml").train_parameters.lora_peft_config is not None


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm export``."""
    parser.add_argument(
        "source",
        metavar="CHECKPOINT_OR_RUN",
        help="a checkpoint (runs/x/checkpoints/step-00000040), a run's folder, or a model that a run has exported",
    )
    help_text = "the folder to create; by default in the run's folder, or next to an exported model"
    parser.add_argument("--output", metavar="DIR", help=help_text)
    parser.add_argument(
        "--best",
        action="store_true",
        help="for a run's folder: export the best checkpoint instead of the newest",
    )
    parser.add_argument("--merge", action="store_true", help="merge LoRA adapters into their base model")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="convert the weights; by default they keep the dtype of training",
    )


def export_command(args: argparse.Namespace) -> int:
    """Export a model, and print its folder."""
    source = find_source(Path(args.source), best=args.best)
    if args.merge and not source.is_adapter:
        raise ConfigError(f"--merge is for LoRA adapters, and {source.path} has none. Leave it out.")
    if not args.merge and source.is_adapter and (args.dtype or source.step is None):
        what = "--dtype is for whole models" if args.dtype else "nothing is left to do"
        raise ConfigError(f"{source.path} holds adapters alone: {what}. Add --merge.")
    if source.step is None and not args.merge and not args.dtype:
        raise ConfigError(
            f"{source.path} is a model in Hugging Face layout already. Add --dtype to convert it."
        )
    endings = ["merged"] * args.merge + [args.dtype] * bool(args.dtype) or ["model"]
    path = Path(args.output or source.run / "-".join([source.path.resolve().name, *endings]))
    if path.exists():
        raise ConfigError(f"{path} exists. Delete it, or name another folder with --output.")
    with at_interrupt(f"nothing of {path} is left"):
        export(source, path, merges=args.merge, dtype=args.dtype)
    print(path)
    return 0


def find_source(path: Path, *, best: bool = False) -> Source:
    """Determine the kind of the folder `path`, without heavy imports.

    Raises:
        ConfigError: There is nothing to export.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder. Name a checkpoint, a run's folder or an exported model.")
    checkpoints = path if path.resolve().name == "checkpoints" else path / "checkpoints"
    if best and not checkpoints.is_dir():
        raise ConfigError(f"--best is for a run's folder, and {path} has no checkpoints in it. Leave it out.")
    if checkpoints.is_dir():
        newest = folder.newest(checkpoints)
        if newest is None:
            raise ConfigError(f"{checkpoints} has no complete checkpoint, so there is nothing to export yet.")
        step = newest.identity.get("best_step") if best else newest.step
        if step is None:
            raise ConfigError(
                f"{checkpoints} has no best checkpoint, because its run did not set train_parameters.keep_best=True "
                "or had no evaluation. Leave --best out, or name a checkpoint."
            )
        path = folder.folder_of(checkpoints, step)
    if (path / "shards").is_dir():
        number = path.resolve().name.removeprefix("step-")
        if not number.isdigit():
            raise ConfigError(f"{path} is not a complete checkpoint. Name a folder such as step-00000040.")
        found = Source(path, path.resolve().parent.parent, int(number))
        if not (found.run / "config.yaml").is_file():
            raise ConfigError(
                f"{found.run} has no config.yaml, which export needs for the weights in {path}. Move the checkpoint "
                "back into its run's folder."
            )
        return found
    if (path / "config.json").is_file() or is_adapter_folder(path):
        return Source(path, path.resolve().parent, None)
    if (path / "final-model").is_dir():
        raise ConfigError(
            f"{path} has no checkpoints, but {path / 'final-model'} is already a model folder. Use it directly, or "
            "pass it to this command to merge or convert it."
        )
    raise ConfigError(
        f"{path} is neither a checkpoint (runs/x/checkpoints/step-00000040), nor a run's folder with checkpoints, nor "
        "an exported model (config.json or adapter_config.json)."
    )


def export(source: Source, path: Path, *, merges: bool, dtype: str | None) -> None:
    """Write a model folder `path` in this process; the folder appears once it is complete.

    Raises:
        CheckpointError: The source cannot be read, or the folder cannot be written.
        ConfigError: The base model is missing, or its adapters cannot be merged.
    """
    from vectorlm.report.card import card_of, noted_of
    from vectorlm.sampling.weights.model_size import auto_class
    from vectorlm.sampling.weights.plan import dtype_of
    from vectorlm.train.checkpoint.export import export_model

    model, tokenizer = load_source(source, merges=merges)
    if dtype is not None:
        _convert(model, dtype_of(dtype))
    step = noted_of(source.path, "step", int) if source.step is None else source.step
    is_adapter, auto = source.is_adapter and not merges, auto_class(model.config).__name__
    # A model that was copied out of its run may be next to another config.yaml.
    is_of_run = source.step is not None or (source.run / START).is_file()
    card = card_of(source.run if is_of_run else source.path, step, is_adapter=is_adapter, auto=auto)
    export_model(model, tokenizer, path, card)


def _convert(model: Any, dtype: torch.dtype) -> None:
    """Convert the weights to the dtypes in which transformers would read them for `dtype`."""
    # Parts of the names of tensors that the model computes in float32, such as the routers of DeepSeek-V3.
    plan = {part.replace("*", ".*"): kept for part, kept in model._get_dtype_plan(dtype).items()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point():
            found = next((kept for part, kept in plan.items() if re.search(part, name)), dtype)
            tensor.data = tensor.data.to(found)


def load_source(source: Source, *, merges: bool = False) -> tuple[Any, Any]:
    """Load the model with its weights, and its tokenizer; with `merges`, merge adapters into their base.

    Adapters of an exported model are on the base of their training, with its dtype and rounding.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model, tokenizer = _load(source, rounds=merges)
    return (merged(model) if merges and source.is_adapter else model), tokenizer


def _load(source: Source, *, rounds: bool) -> tuple[Any, Any]:
    """Load model and tokenizer; with `rounds`, round the base of a checkpoint's adapters too."""
    from vectorlm.runs.start import base_settings_of, read_start, round_base, with_trained_parts
    from vectorlm.train.checkpoint.state import load_weights
    from vectorlm.train.load import (
        is_scorer,
        load_model,
        load_scorer,
        load_tokenizer,
        reads_images,
        trust_code,
    )

    if source.step is not None:
        config = load_config(source.run / "config.yaml")
        train = config.train_parameters
        if config.trust_remote_code:
            trust_code(config.model)
        tokenizer = load_tokenizer(config.model, config.chat, config.step_separator)
        read: Callable[..., Any] = partial(load_model, config.model)
        if config.reward_model is not None:
            read = partial(load_scorer, config.model, tokenizer)
        # A checkpoint has no frozen weights. Without frozen weights, the adapters' folder is not needed.
        has_frozen = reads_images(config.model)
        model = read_start(read, config) if has_frozen else read(dtype=train.model.dtype)
        if rounds and train.lora_peft_config is not None:
            round_base(model, train.model)
        # The checkpoint has the adapters' values.
        model = with_trained_parts(model, config, is_empty=True)
        load_weights(source.path, model)
        return model, tokenizer
    if not source.is_adapter:
        tokenizer = load_tokenizer(source.path)
        model = load_scorer(source.path, tokenizer) if is_scorer(source.path) else load_model(source.path)
        return model, tokenizer
    from transformers import AutoTokenizer

    base = base_of(source.path)
    place = tokenizer_folder(base, source.path)
    tokenizer = load_tokenizer(base) if place == base else AutoTokenizer.from_pretrained(place)
    described = json.loads((source.path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    is_reward_model = described.get("task_type") == SCORES
    settings = base_settings_of(source.run, source.path)
    read = partial(load_scorer, tokenizer=tokenizer) if is_reward_model else load_model
    model = read(base, dtype=settings.dtype)
    round_base(model, settings)
    return load_adapters(source.path, model), tokenizer


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm verify``."""
    parser.add_argument(
        "address", metavar="ADDRESS", help="the URL of a vLLM server, for example http://127.0.0.1:8000"
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a model folder, LoRA adapters (compared after merging), a run's folder or one of its checkpoints",
    )


def verify_command(args: argparse.Namespace) -> int:
    """Compare the server's weights with the checkpoint's weights, and print the proof."""
    source = find_source(Path(args.checkpoint))
    url = args.address if "://" in args.address else f"http://{args.address}"
    # This imports torch, which reporting a wrong path does not need.
    from vectorlm.sampling.verify import verify_server

    proof = verify_server(url, lambda: load_source(source, merges=True)[0])
    print(f"{url} and {source.path}: {proof}.")
    return 0
