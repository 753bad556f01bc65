"""Dry run of the export at the end of a run, with empty weights."""

from __future__ import annotations

import inspect
import shutil
import tempfile
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch.utils._pytree import tree_leaves
from transformers import AutoModel, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from vectorlm.errors import ConfigError, VectorLMError
from vectorlm.ranks.topology import Topology
from vectorlm.report.card import card_of
from vectorlm.runs.config.schema import Config
from vectorlm.runs.config.setting import refuse
from vectorlm.sampling.weights.lora_factors import require_expressible
from vectorlm.sampling.weights.lora_source import merged_source
from vectorlm.sampling.weights.module_source import manifest_of
from vectorlm.sampling.weights.plan import require_same
from vectorlm.train.checkpoint.export import saved_tensors, write_model
from vectorlm.train.language_model import inner_model
from vectorlm.train.load import load_model, load_pretrained, load_scorer, load_tokenizer
from vectorlm.train.lora import add_lora, is_still, merged, unmatched_names
from vectorlm.train.split import why_not_split

LEFTOVER = ".dry-run-"
"""Prefix of the temporary folder of a dry run."""


def dry_run(config: Config) -> list[str]:
    """Export and merge the model of a run in a temporary folder; return notes about the model.

    Raises:
        ConfigError: The model cannot be exported, merged or sampled from; the text has the reason.
    """
    train = config.train_parameters
    output = Path(train.output_dir).absolute()
    existing = next(folder for folder in (output, *output.parents) if folder.exists())
    disable_progress_bar()
    with _errors_as_config(config), warnings.catch_warnings(action="ignore"), ExitStack() as stack:
        tokenizer = load_tokenizer(config.model, config.chat)

        def load() -> Any:
            if config.reward_model is not None:
                base = load_scorer(config.model, tokenizer, dtype=train.model.dtype, is_empty=True)
            else:
                base = load_model(config.model, dtype=train.model.dtype, is_empty=True)
                with suppress(OSError):  # A model without this file gets transformers' default.
                    base.generation_config = GenerationConfig.from_pretrained(config.model)
            return base if train.lora_peft_config is None else add_lora(base, train.lora_peft_config)

        model = load()
        if (problem := why_not_split(inner_model(model), train.model)) is not None:
            name, rule, fix = problem
            raise ConfigError(refuse(config, f"train_parameters.{name}", rule, fix))
        notes = [*_length_problems(config, model), *_untrained(config, model)]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=LEFTOVER, dir=existing)))
        stack.enter_context(patch("transformers.modeling_utils.safe_save_file", _save_names))
        card = card_of(output, 0, is_adapter=train.lora_peft_config is not None)
        weights = saved_tensors(model)
        if train.lora_peft_config is not None:
            stack.enter_context(patch("peft.peft_model.safe_save_file", _save_names))
            whole = merged(load())
            write_model(whole, saved_tensors(whole), tokenizer, folder / "merged", card)
            if config.reward_model is None:
                # `vectorlm sample` sends the merged weights.
                expected = manifest_of(load_model(config.model, is_empty=True))
                require_same(merged_source(model, Topology()).manifest(), expected)
        write_model(model, weights, tokenizer, folder / "final-model", card)
        needed, free = sum(weight.nbytes for weight in weights.values()), shutil.disk_usage(existing).free
        if needed > free:
            rule = f"must be on a disk with {needed:,} bytes for the exported model; {free:,} are free"
            fix = "Delete files, or name another folder."
            raise ConfigError(refuse(config, "train_parameters.output_dir", rule, fix))
    return notes


def _length_problems(config: Config, policy: Any) -> Iterator[str]:
    """Refuse models whose results for a short row depend on longer rows of the batch; for texts, yield a note."""
    rl, train = config.rl, config.train_parameters
    longest = train.max_seq_len if rl is None else config.longest_rollout
    models = {"model": policy}
    if rl is not None:
        teacher = config.model_folders.get("rl.teacher.model")
        paths = {"rl.critic.model": rl.critic.model, "rl.teacher.model": teacher}
        paths |= {f"rl.reward_models.{path}": path for path in rl.reward.reward_models}
        for name, path in paths.items():
            if path is not None and (Path(path) / "config.json").is_file():
                models[name] = load_pretrained(AutoModel, path, train.model.dtype, is_empty=True)
    for name, model in models.items():
        if (border := rows_apart(model, longest)) is None:
            continue
        setting = "max_seq_len" if longest == train.max_seq_len else "engine.max_model_len"
        rule = (
            f"must be at most {border}: beyond that, the rotary position embeddings of {name} change for all rows of a "
            "batch"
        )
        if config.examples == "texts" and rl is None:
            yield (
                f"train_parameters.max_seq_len={train.max_seq_len}: rows longer than {border} tokens change the rotary "
                f"position embeddings of {name} for all rows of a batch, and so the loss of shorter rows"
            )
        else:
            fix = f"Use {border} at most, or a model without such a scaling (longrope, dynamic)."
            raise ConfigError(refuse(config, f"train_parameters.{setting}", rule, fix, longest))


def _untrained(config: Config, model: Any) -> Iterator[str]:
    """Refuse adapters on layers that do not exist; yield notes about weights and losses that are not trained."""
    options, text = config.train_parameters.lora_peft_config, inner_model(model).config.get_text_config()
    if options is not None:
        if unmatched := [*unmatched_names(model, options)]:
            rule = f"must name layers of the model, and not {', '.join(unmatched)}"
            fix = "Correct these names, or leave them out."
            raise ConfigError(refuse(config, "train_parameters.lora_peft_config", rule, fix))
        if config.has_engine:
            # For some models PEFT replaces options of the config.
            require_expressible(model, config.engine.lora_mode_of_run)
        if is_still(model):
            yield (
                "train_parameters.lora_peft_config: no weight will move: lora_alpha is 0, or lora_dropout 1, and "
                "gradients of the adapters are exactly 0"
            )
    coefficients = (name for name in vars(text) if "aux_loss" in name or "z_loss" in name)
    lost = {name for name in coefficients if isinstance(value := getattr(text, name), float) and value > 0}
    if config.reward_model is None and config.train_parameters.model.router_aux_loss_coef != 0:
        lost -= {"router_aux_loss_coef"}
    if lost and getattr(text, "output_router_logits", False):
        yield f"model: the loss of the router ({', '.join(sorted(lost))} in config.json) is not trained on"


def rows_apart(model: Any, longest: int) -> int | None:
    """Return the longest row that keeps the position embeddings of other rows as they are; None if `longest` does.

    This calls the modules without weights that turn positions into embeddings.
    """

    def embedded(last: int) -> list[torch.Tensor]:
        positions = torch.cat([torch.arange(8), torch.tensor([last])])[None]
        found = []
        for module in model.modules():
            taken = inspect.signature(module.forward).parameters
            if "position_ids" not in taken or any(True for _ in module.parameters()):
                continue
            kinds = set(module.config.layer_types) if "layer_type" in taken else {None}
            for kind in sorted(kinds, key=str):
                more = {} if kind is None else {"layer_type": kind}
                # Modules of several kinds may take positions of another shape; they are skipped here.
                with suppress(Exception):
                    found += tree_leaves(module(torch.zeros(1, 9, 1), position_ids=positions, **more))
        return [embedding[..., :8, :].clone() for embedding in found]

    def are_apart(length: int) -> bool:
        return all(map(torch.equal, embedded(8), embedded(length - 1)))

    if longest <= 9 or are_apart(longest):
        return None
    return bisect_left(range(longest), True, lo=9, key=lambda length: not are_apart(length)) - 1


@contextmanager
def _errors_as_config(config: Config) -> Iterator[None]:
    """Turn errors of the export into `ConfigError`."""
    try:
        yield
    except (ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except OSError as error:
        rule = f"must be a folder that the exported model can be written to ({error})"
        fix = "Make it writable, or name another folder."
        raise ConfigError(refuse(config, "train_parameters.output_dir", rule, fix)) from error
    except Exception as error:
        if "allocate memory" in str(error):  # torch on CPU; other files or adapters would not help.
            raise
        what = "" if isinstance(error, VectorLMError) else f"{type(error).__name__}: "
        raise ConfigError(
            f"the trained model could not be exported, merged or sampled from ({what}{error}). Change "
            f"train_parameters.lora_peft_config, or the files in model={config.model!r}."
        ) from error


def _save_names(tensors: Mapping[str, torch.Tensor], path: Any, metadata: dict[str, str]) -> None:
    save_file({name: torch.empty(0) for name in tensors}, path, metadata)
