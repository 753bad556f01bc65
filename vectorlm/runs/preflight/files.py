"""Rules about a run's files and optional packages."""

from __future__ import annotations

import inspect
import json
import netrc
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import which
from urllib.parse import urlsplit

from vectorlm.data.settings import DatasetSettings
from vectorlm.data.summary import VALUE_COLUMNS, Summary
from vectorlm.errors import ConfigError
from vectorlm.packages import is_installed
from vectorlm.plugin import is_plugin, load_plugin
from vectorlm.ranks.topology import has_gpu
from vectorlm.report.metrics import TRACKERS
from vectorlm.runs.config.schema import Config
from vectorlm.runs.config.setting import refuse
from vectorlm.runs.preflight.local_model import (
    advise_without_config,
    describe_absent,
    description_of,
    is_mxfp4,
    missing_weights,
    own_code,
    own_length,
)
from vectorlm.sampling.weights.model_size import damaged_weights, two_sets_of_weights
from vectorlm.settings import nearest

WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
"""Environment variables that replace a line for wandb in ~/.netrc."""


def file_problems(config: Config) -> Iterator[str]:
    """Yield files that are missing, damaged or not supported."""
    train, folder = config.train_parameters, Path(config.model)
    # Costs more than a minute: transformers asks the Hub for it, in every rank.
    if not folder.is_dir():
        yield refuse(config, "model", *describe_absent(config.model))
    # `vectorlm check` would find nothing wrong, and only print that it has no memory plan.
    elif not (folder / "config.json").is_file():
        fix = advise_without_config(folder)
        yield refuse(config, "model", "must have a config.json, as Hugging Face models do", fix)
    else:
        # Costs more than a minute: all other files are read first. A folder without weights still has a memory plan.
        wrong = list(damaged_weights(folder))
        if any(folder.glob("*.safetensors*")) and (missing := missing_weights(folder)):
            wrong.append(f"{', '.join(missing)} is missing")
        for what in wrong:
            fix = "Download or save the model again."
            yield refuse(config, "model", f"must have complete weights ({what})", fix)
        # Silent: the engine would start from other weights than the trainer.
        has_vllm = config.has_engine and config.engine.inference == "vllm"
        if has_vllm and not wrong and (rule := two_sets_of_weights(folder)) is not None:
            yield refuse(config, "model", rule, "Delete one of them.")
        # Silent: the model produces noise beyond its limit.
        limit = own_length(description_of(folder) or {})
        if limit is not None and train.max_seq_len > limit:
            rule = f"must be at most {limit}, the model's own limit"
            yield refuse(config, "train_parameters.max_seq_len", rule, f"Use {limit} or less.")
    # Costs more than a minute: the engine refuses its weights after it has loaded them.
    if is_mxfp4(folder):
        fix = f"Run `vectorlm model {config.model} {folder.name}-bf16`, and name that folder."
        yield refuse(config, "model", "cannot be trained in MXFP4", fix)
    # Costs more than a minute: transformers asks on a terminal that ranks do not have.
    for place, path in () if config.trust_remote_code else config.model_folders.items():
        if (code := own_code(Path(path))) and not _is_known(Path(path)):
            why = f"brings its own classes ({', '.join(code)}), which transformers does not have"
            yield refuse(config, place, why, "Read them, then set trust_remote_code: true.", path)
    # Costs more than a minute: the tokenizer is read after the engine has started.
    if (template := config.chat.chat_template) is not None and not Path(template).is_file():
        yield refuse(config, "chat_template", "must be a file", "Correct the path.")
    # Costs more than a minute: the first step compiles, after models are loaded and completions sampled.
    if train.model.compile and not (has_gpu() or which(os.environ.get("CXX", "g++"))):
        rule = "needs a C++ compiler on CPU"
        yield refuse(config, "train_parameters.compile", rule, "Install g++, or set it to false.")
    # Costs more than a minute: the first evaluation writes it.
    if config.has_engine and config.samples_path.is_dir():
        path = "evaluation.output_jsonl_path"
        yield refuse(config, path, "must be a file", "Name a file in this folder.", str(config.samples_path))
    # Costs more than a minute: the job has waited in a queue, and its engine is loading.
    data, folders = config.dataset, []
    if data is not None and config.rl is None:
        folders = [
            ("dataset.train_ds", data.train_ds),
            *(("dataset.eval_ds", path) for path in data.held_out.values()),
        ]
    elif config.rl is not None and config.rl.sft is not None:
        folders = [("rl.sft.dataset", config.rl.sft.dataset)]
    for place, path in folders:
        index = DatasetSettings.ignore_index if data is None or config.rl is not None else data.ignore_index
        if (problem := _dataset_problem(Path(path), config.examples, index)) is not None:
            yield refuse(config, place, *problem, path)


def _dataset_problem(folder: Path, examples: str, ignore_index: int) -> tuple[str, str] | None:
    """Return rule and fix for a folder that is not a preprocessed dataset; does not import `datasets`."""
    if folder.is_file():
        fix = "Name this file in dataset_preprocess.load_path, and run `vectorlm preprocess`."
        return "must be a folder with a preprocessed dataset", fix
    if not folder.is_dir():
        return "must be a folder", "Preprocess the dataset first: `vectorlm preprocess` writes it."
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(str(child) for child in folder.iterdir() if child.is_dir())
        return "must be a single dataset", f"Name one of: {', '.join(splits)}."
    try:
        info = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
        columns, made = info.get("features") or (), Summary.parse(info.get("description"))
    except (OSError, ValueError, AttributeError):
        return "must be a dataset", "Name a folder written by `datasets.Dataset.save_to_disk`."
    if missing := [name for name in ("input_ids", "labels") if columns and name not in columns]:
        fix = "Preprocess it: training reads token ids and labels."
        return f"needs the column {' and the column '.join(map(repr, missing))}", fix
    # Silent: training would treat both texts of a pair alike.
    found = next((kind for kind, column in VALUE_COLUMNS.items() if column in columns), "texts")
    if columns and found != examples:
        fix = f"Preprocess with dataset_preprocess.examples={examples}, or add the section that trains on {found}."
        return f"must hold {examples}, which this run trains on, and holds {found}", fix
    # Silent: the loss would count hidden tokens.
    if made is not None and made.ignore_index != ignore_index:
        rule = f"must be preprocessed with ignore_index={ignore_index}, not ignore_index={made.ignore_index}"
        return rule, "Preprocess it again, or set dataset.ignore_index."
    return None


def package_problems(config: Config) -> Iterator[str]:
    """Yield packages that are not installed, and trackers that cannot be opened."""
    # All of these cost more than a minute: tasks are read and trackers opened after models are loaded.
    if config.evaluation.tasks and not is_installed("lm_eval"):
        fix = "Run `pip install 'vectorlm[eval]'`."
        yield refuse(config, "evaluation.tasks", "needs the package lm_eval", fix)
    if config.enable_wandb_logging and not is_installed("wandb"):
        yield refuse(config, "enable_wandb_logging", "needs the package wandb", "Run `pip install wandb`.")
    elif config.enable_wandb_logging and (host := _host_without_key(config)) is not None:
        fix = "Run `wandb login`, or set wandb_config.mode: offline."
        yield refuse(config, "enable_wandb_logging", f"needs a key for {host}", fix)
    if config.push_to_hub is not None:
        from huggingface_hub import get_token

        # Costs more than a minute: the first upload comes after the last step.
        if get_token() is None:
            yield refuse(
                config,
                "push_to_hub",
                "needs a token of the Hugging Face Hub",
                "Run `hf auth login`, or set HF_TOKEN.",
            )
        if config.push_to_hub.checkpoints and not config.train_parameters.checkpointing_enabled:
            fix = "Set train_parameters.checkpointing_enabled: True, or leave it out."
            yield refuse(config, "push_to_hub.checkpoints", "needs checkpoints", fix)
    for name, arguments in config.trackers.items():
        path, package = f"trackers.{name}", TRACKERS.get(name)
        if name == "wandb":
            yield refuse(config, path, "must be set elsewhere", "Set enable_wandb_logging and wandb_config.")
        elif is_plugin(name):
            try:
                inspect.signature(load_plugin(name)).bind({}, **(arguments or {}))
            except (ConfigError, TypeError) as error:
                rule = f"cannot be called as NAME(config, **arguments): {error}"
                yield refuse(config, path, rule, "Correct it.", arguments)
        elif package is None:
            fix = nearest(name, TRACKERS) or f"Use {', '.join(TRACKERS)}, or your own file.py:NAME."
            yield refuse(config, path, "must be a known tracker", fix, arguments)
        elif not is_installed(package):
            fix = f"Run `pip install {package}`."
            yield refuse(config, path, f"needs the package {package}", fix, arguments)
        elif not isinstance(arguments or {}, Mapping):
            rule = "must be a mapping of the tracker's arguments"
            yield refuse(config, path, rule, "Use {} for none.", arguments)


def callback_problems(config: Config) -> Iterator[str]:
    """Yield each callback that cannot be made."""
    if not config.callbacks:
        return
    from vectorlm.train.callbacks import require_callback

    for name in config.callbacks:
        try:
            require_callback(name)
        except ConfigError as error:
            yield str(error)


def _host_without_key(config: Config) -> str | None:
    """Return the host that needs a key for wandb; None if there is a key or no key is necessary."""
    mode = config.wandb_config.get("mode") or os.environ.get("WANDB_MODE", "online")
    if mode != "online" or any(map(os.environ.get, WANDB_KEYS)):
        return None
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return None if host in netrc.netrc(os.environ.get("NETRC")).hosts else host
    except (OSError, netrc.NetrcParseError):
        return host


def _is_known(folder: Path) -> bool:
    """Return whether transformers has a class for the model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return (description_of(folder) or {}).get("model_type") in CONFIG_MAPPING
