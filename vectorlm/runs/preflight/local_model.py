"""The model of a config as a folder: the one that it names, one made of a GGUF file, or a snapshot of the Hub.

A snapshot is a folder in the local Hugging Face cache (``HF_HOME``), one for each revision of a model. A complete one
is used as it is, without a look at the Hub, so that a run that resumes finds the files that it began with.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vectorlm.errors import ConfigError
from vectorlm.runs.config.schema import Config
from vectorlm.runs.config.setting import refuse
from vectorlm.runs.config.value import show
from vectorlm.sampling.weights.model_size import files_of_index
from vectorlm.train.lora import ADAPTER_CONFIG, base_of, is_adapter_folder, options_of

HUB_NAME = re.compile(r"(?!\.)[\w.-]+(/[\w.-]+)?")
"""What may be the name of a model on the Hub; every short relative path looks the same."""
FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""What is downloaded of a model; where none of it holds weights, its ``*.bin`` files too."""
WHOLE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Where the weights are that no index divides over several files."""
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
"""What model families call their longest sequence in config.json."""
HEADS = ("num_attention_heads", "n_head")
"""What they call the number of heads that ask in attention."""


def resolve_model(config: Config) -> Config:
    """Put the model's folder in the place of its name on the Hub or of adapters on it, its own length in that of -1.

    A model that is not here stays as it is, for `preflight` to refuse. Loads no package where the config names a
    folder that exists.

    Raises:
        ConfigError: The length is -1, and the model is here but names none; or the adapters are not LoRA, are not those
            of `lora_peft_config`, or their base is not here.
    """
    notes, train = list(config.notes), config.train_parameters
    folder = local_folder(config.model)
    if folder != config.model:
        notes.append(f"model: {config.model} is {folder}")
        config = replace(config, model=folder)
    if is_adapter_folder(Path(config.model)):
        train = replace(train, adapters=config.model)
        config = replace(config, model=str(base_of(Path(config.model))), train_parameters=train)
        notes.append(f"model: the LoRA adapters in {train.adapters} are on {config.model}")
    if train.adapters is not None:
        config = _with_options_of(config, Path(train.adapters))
        train = config.train_parameters
    if train.max_seq_len == -1 and (described := description_of(Path(config.model))) is not None:
        length = own_length(described)
        if length is None:
            rule = "stands for the model's own length, and its config.json names none"
            raise ConfigError(refuse(config, "train_parameters.max_seq_len", rule, "Use 1024, for example."))
        notes.append(f"max_seq_len: -1 is the model's own length, {length} tokens")
        config = replace(config, train_parameters=replace(train, max_seq_len=length))
    return replace(config, notes=tuple(notes))


def _with_options_of(config: Config, adapters: Path) -> Config:
    """Return the config of a run that goes on training `adapters`, if it does not merge them."""
    if not is_adapter_folder(adapters):
        rule = "is not a folder with an adapter_config.json"
        raise ConfigError(
            refuse(config, "train_parameters.adapters", rule, "Name a folder of LoRA adapters.")
        )
    options, train = options_of(adapters), config.train_parameters
    if train.merge_adapters:
        return config
    for name, value in (train.lora_peft_config or {}).items():
        given, theirs = (
            set(x) if isinstance(x, list | tuple) else x or None for x in (value, options.get(name))
        )
        if given != theirs and name not in ("init_lora_weights", "task_type"):
            rule = f"is not that of the adapters in {adapters}, which is {show(options.get(name))}"
            place = f"train_parameters.lora_peft_config.{name}"
            raise ConfigError(refuse(config, place, rule, "Leave it out.", value))
    places = {f"train_parameters.lora_peft_config.{name}": str(adapters / ADAPTER_CONFIG) for name in options}
    train = replace(train, lora_peft_config=options)
    return replace(config, train_parameters=train, origins={**config.origins, **places})


def with_download(config: Config) -> Config:
    """Download the config's model where it is one of the Hub that the cache lacks; return the config with its folder.

    Raises:
        ConfigError: As `download` and `resolve_model`.
    """
    download(config.model)
    return resolve_model(config)


def local_folder(name: str) -> str:
    """Return the folder of a GGUF file or of a model of the Hub, if it is complete; else the name itself."""
    if (converted := _converted(name)) is not None:
        return str(converted) if _is_complete(converted, name) else name
    if Path(name).exists() or not HUB_NAME.fullmatch(name):
        return name
    snapshot = _snapshot(name)
    return name if snapshot is None or missing_files(snapshot) else str(snapshot)


def download(name: str) -> bool:
    """Fetch what the cache lacks of a model of the Hub, or convert a GGUF file, and return whether that was needed.

    Offline nothing is fetched.

    Raises:
        ConfigError: The Hub does not answer, has no such model, or wants a login; the GGUF file cannot be read.
    """
    if (converted := _converted(name)) is not None and not _is_complete(converted, name):
        from vectorlm.train.checkpoint.export import SOURCE, convert_gguf

        if converted.exists() and not (converted / SOURCE).exists():
            raise ConfigError(
                f"model={name!r} would be converted to the folder {converted}, which holds something else. Rename the "
                "file, or name the folder itself as the model."
            )
        print(f"model: {name} is converted to the folder {converted}, once", file=sys.stderr)
        convert_gguf(Path(name), converted)
        return True
    if Path(name).exists() or not HUB_NAME.fullmatch(name) or local_folder(name) != name:
        return False
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    fetch(name)
    return True


def fetch(name: str, path: Path | None = None) -> None:
    """Fetch a model of the Hub into the cache, or into the folder `path`.

    Raises:
        ConfigError: The Hub does not answer, has no such model, or wants a login.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, local_dir=path, allow_patterns=list(FILES))
        if missing_files(Path(folder)):
            snapshot_download(name, local_dir=path, allow_patterns=["*.bin"])
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise ConfigError(
            f"model={name!r} is not a folder, and its download from the Hugging Face Hub failed: {reason}. Correct the "
            "name or the connection, or run `hf auth login` for a model behind a login."
        ) from error


def describe_absent(name: str) -> tuple[str, str]:
    """Return what is wrong with a model that is no folder, and what to do about it."""
    if (converted := _converted(name)) is not None:
        return "is a GGUF file that no run has converted yet", f"Run `vectorlm model {name} {converted}`."
    if not HUB_NAME.fullmatch(name):
        return "is not a folder", "Download the model and name its folder."
    from huggingface_hub import constants

    cache, snapshot = constants.HF_HUB_CACHE, _snapshot(name)
    lacking = "is not" if snapshot is None else f"lacks {', '.join(missing_files(snapshot))}"
    rule = f"is not a folder, and as a model of the Hugging Face Hub it {lacking} in the cache {cache}"
    return rule, f"Run `hf download {name}`, or name a folder."


def missing_files(folder: Path) -> list[str]:
    """Name what a model's folder lacks: its description, its tokenizer, weights."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        missing.append("tokenizer.json")
    return missing + missing_weights(folder)


def missing_weights(folder: Path) -> list[str]:
    """Name up to three files of weights that a model's folder lacks; one index whose files are all there is enough."""
    if any((folder / name).is_file() for name in WHOLE_WEIGHTS):
        return []
    lacking = list(WHOLE_WEIGHTS[:1])
    for index in sorted(folder.glob("*.index.json"), reverse=True):
        files = files_of_index(index)
        if files is None:
            files = {f"a readable {index.name}"}
        lacking = sorted(name for name in files if not (folder / name).is_file())
        if not lacking:
            break
    return lacking[:3]


def own_length(description: Mapping[str, Any]) -> int | None:
    """Return the longest sequence that a model's description (config.json) names; None where it names none."""
    return number_in(description, LENGTHS)


def number_in(description: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """Return the first of these numbers that a model's description holds, or its part for text; None without any."""
    sections = (description, description.get("text_config"))
    named = (section.get(name) for section in sections if isinstance(section, Mapping) for name in names)
    return next((number for number in named if type(number) is int and number > 0), None)


def vocab_size(folder: Path) -> float:
    """Return how many tokens a model has by its config.json; infinity where that does not say."""
    return number_in(description_of(folder) or {}, ("vocab_size",)) or math.inf


def description_of(folder: Path, name: str = "config.json") -> Mapping[str, Any] | None:
    """Read a model's config.json, or another; None where that fails, which `preflight` or transformers reports."""
    try:
        description = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return description if isinstance(description, Mapping) else None


def _converted(name: str) -> Path | None:
    """Return the folder that a GGUF file is converted to, complete or not; None for anything else."""
    return Path(name).with_suffix("") if name.endswith(".gguf") and Path(name).is_file() else None


def _is_complete(converted: Path, name: str) -> bool:
    """Return whether the folder of a GGUF file is whole, and of the file as it is now."""
    from vectorlm.train.checkpoint.export import is_made_of

    return not missing_files(converted) and is_made_of(converted, Path(name))


def _snapshot(name: str) -> Path | None:
    """Return the folder of a model's newest revision in the cache, complete or not."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        description = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(description).parent if isinstance(description, str) else None
