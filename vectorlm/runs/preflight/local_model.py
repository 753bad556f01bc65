"""Find the folder of a config's model: a folder, a converted GGUF file, or a snapshot of the Hub.

A snapshot is a folder in the local Hugging Face cache (``HF_HOME``), one per revision of a model. A complete snapshot
is used without a request to the Hub, because a resumed run must find the same files.
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
from vectorlm.train.four_bit import four_bit_method
from vectorlm.train.lora import ADAPTER_CONFIG, base_of, is_adapter_folder, is_unset, options_of

HUB_NAME = re.compile(r"(?!\.)([\w.-]+(?:/[\w.-]+)?)(?:@([\w./-]+))?")
"""A possible name of a model on the Hub, `owner/name` or `owner/name@revision`; short relative paths match too."""
FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")
"""Files to download; ``*.bin`` too if none of these contains weights."""
WHOLE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files of weights without an index."""
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
"""Names of the length limit in config.json, by model family."""
HEADS = ("num_attention_heads", "n_head")
"""Names of the number of attention heads."""


def resolve_model(config: Config) -> Config:
    """Replace the model by its folder, adapters by their base, and a `max_seq_len` of -1 by the model's own length.

    A model that is not on this machine is kept; `preflight` refuses it. No package is imported if the config names an
    existing folder.

    Raises:
        ConfigError: The model has no length limit; or the adapters are not LoRA, contradict `lora_peft_config`, or have
            no base on this machine.
    """
    notes, train = list(config.notes), config.train_parameters
    if train.adapters is not None and (found := local_folder(train.adapters)) != train.adapters:
        notes.append(f"adapters: {train.adapters} is {found}")
        train = replace(train, adapters=found)
        config = replace(config, train_parameters=train)
    folder = local_folder(config.model)
    if folder != config.model:
        notes.append(f"model: {config.model} is {folder}")
        config = replace(config, model=folder)
    if is_adapter_folder(Path(config.model)):
        if train.adapters not in (None, config.model):
            rule = f"cannot be set, because model={show(config.model)} names adapters too"
            raise ConfigError(
                refuse(config, "train_parameters.adapters", rule, "Name one of the two folders.")
            )
        train = replace(train, adapters=config.model)
        config = replace(config, model=str(base_of(Path(config.model))), train_parameters=train)
        notes.append(f"model: the LoRA adapters in {train.adapters} are on {config.model}")
    if train.adapters is not None:
        config = _with_options_of(config, Path(train.adapters))
        train = config.train_parameters
    if train.max_seq_len == -1 and (described := description_of(Path(config.model))) is not None:
        length = own_length(described)
        if length is None:
            rule = "cannot be used, because the model's config.json has no length"
            raise ConfigError(refuse(config, "train_parameters.max_seq_len", rule, "Use 1024, for example."))
        notes.append(f"max_seq_len: -1 is the model's own length, {length} tokens")
        config = replace(config, train_parameters=replace(train, max_seq_len=length))
    for folder in config.model_folders.values():
        if config.trust_remote_code and own_code(Path(folder)):
            # This imports torch.
            from vectorlm.train.load import trust_code

            trust_code(folder)
    return replace(config, notes=tuple(notes))


def is_vision_language(folder: str) -> bool:
    """Return whether the config.json of a model's folder describes a vision model too."""
    return "vision_config" in (description_of(Path(folder)) or {})


def _with_options_of(config: Config, adapters: Path) -> Config:
    """Return the config with the options of `adapters`, unless the run merges them."""
    if not is_adapter_folder(adapters):
        rule = "must be a folder with an adapter_config.json"
        raise ConfigError(
            refuse(config, "train_parameters.adapters", rule, "Name a folder of LoRA adapters.")
        )
    options, train = options_of(adapters), config.train_parameters
    if train.merge_adapters:
        return config
    for name, value in (train.lora_peft_config or {}).items():
        given, theirs = (
            (set(x) or None) if isinstance(x, list | tuple) else None if is_unset(x) else x
            for x in (value, options.get(name))
        )
        if given != theirs and name not in ("init_lora_weights", "task_type"):
            rule = f"must be {show(options.get(name))}, as in the adapters {adapters}"
            place = f"train_parameters.lora_peft_config.{name}"
            raise ConfigError(refuse(config, place, rule, "Leave it out.", value))
    places = {f"train_parameters.lora_peft_config.{name}": str(adapters / ADAPTER_CONFIG) for name in options}
    train = replace(train, lora_peft_config=options)
    return replace(config, train_parameters=train, origins={**config.origins, **places})


def with_download(config: Config) -> Config:
    """Download the config's model and adapters from the Hub if necessary; return the config with their folders.

    Raises:
        ConfigError: As `download` and `resolve_model`.
    """
    for name in (config.model, config.train_parameters.adapters):
        if name is None:
            continue
        download(name)
        described = description_of(Path(local_folder(name)), ADAPTER_CONFIG) or {}
        if name == config.model and isinstance(base := described.get("base_model_name_or_path"), str):
            revision = described.get("revision")
            download(f"{base}@{revision}" if revision and not Path(base).exists() else base)
    return resolve_model(config)


def local_folder(name: str) -> str:
    """Return the folder of a GGUF file or a model of the Hub if it is complete, else the name."""
    if (converted := _converted(name)) is not None:
        return str(converted) if _is_complete(converted, name) else name
    if Path(name).exists() or not HUB_NAME.fullmatch(name):
        return name
    snapshot = _snapshot(name)
    return name if snapshot is None or missing_files(snapshot) else str(snapshot)


def download(name: str) -> bool:
    """Download missing files of a model of the Hub, or convert a GGUF file; return whether that was necessary.

    In offline mode nothing is downloaded.

    Raises:
        ConfigError: The Hub does not answer, has no such model or requires a login; or the GGUF file is not readable.
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
    """Download a model of the Hub into the cache, or into the folder `path`.

    Raises:
        ConfigError: The Hub does not answer, has no such model, or requires a login.
    """
    from huggingface_hub import snapshot_download

    try:
        repo, revision = _parts(name)
        folder = snapshot_download(repo, revision=revision, local_dir=path, allow_patterns=list(FILES))
        if missing_files(Path(folder)):
            snapshot_download(repo, revision=revision, local_dir=path, allow_patterns=["*.bin"])
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise ConfigError(
            f"model={name!r} is not a folder, and its download from the Hugging Face Hub failed: {reason}. Correct the "
            "name or the connection, or run `hf auth login` for a model behind a login."
        ) from error


def describe_absent(name: str) -> tuple[str, str]:
    """Return rule and fix for a model that is not a folder."""
    if (converted := _converted(name)) is not None:
        return "must be converted, because it is a GGUF file", f"Run `vectorlm model {name} {converted}`."
    if Path(name).exists():
        return "must be a folder, but is a file", "Name the folder of a model."
    if not HUB_NAME.fullmatch(name):
        near = next(folder for folder in Path(name).absolute().parents if folder.is_dir())
        names = sorted(path.name for path in near.iterdir() if path.is_dir())[-5:]
        if names and near not in (Path.cwd(), *Path.cwd().parents):
            return "is not a folder", f"{near} has the folders {', '.join(names)}. Name one with a model."
        return "is not a folder", "Download the model and name its folder."
    from huggingface_hub import constants

    cache, snapshot = constants.HF_HUB_CACHE, _snapshot(name)
    lacking = "is not" if snapshot is None else f"lacks {', '.join(missing_files(snapshot))}"
    rule = f"must be a folder or a model in the Hugging Face cache; it {lacking} in {cache}"
    repo, revision = _parts(name)
    how = f"{repo} --revision {revision}" if revision else repo
    return rule, f"Run `hf download {how}`, or name a folder."


def advise_without_config(folder: Path) -> str:
    """Return the fix for a folder without a config.json, which may be a checkpoint or a run's folder."""
    if (folder / "shards").is_dir():
        return f"It is a checkpoint: run `vectorlm export {folder}`, and name the new folder."
    if (folder / "final-model").is_dir():
        return f"Name {folder / 'final-model'}."
    return "Name a folder that save_pretrained wrote."


def missing_files(folder: Path) -> list[str]:
    """Return missing files of a model: its description, tokenizer, code and weights; or of adapters."""
    if is_adapter_folder(folder):
        has_weights = any((folder / f"adapter_model.{kind}").is_file() for kind in ("safetensors", "bin"))
        return [] if has_weights else ["adapter_model.safetensors"]
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        missing.append("tokenizer.json")
    missing += [name for name in own_code(folder) if not (folder / name).is_file()]
    return missing + missing_weights(folder)


def own_code(folder: Path) -> list[str]:
    """Return the Python files of the classes of a model and its tokenizer; empty if transformers has them."""
    names = set()
    for file in ("config.json", "tokenizer_config.json"):
        named = (description_of(folder, file) or {}).get("auto_map")
        for classes in named.values() if isinstance(named, Mapping) else ():
            names |= set(classes if isinstance(classes, list) else [classes])
    # A class of another repository has its name before `--`.
    return sorted(
        {f"{name.split('.')[0]}.py" for name in names if isinstance(name, str) and "--" not in name}
    )


def missing_weights(folder: Path) -> list[str]:
    """Return up to three missing weight files; one complete index is enough."""
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
    """Return the length limit in a model's config.json, in tokens; None if it has none."""
    return number_in(description, LENGTHS)


def number_in(description: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """Return the first positive integer with one of `names` in a description or its `text_config`; None without one."""
    sections = (description, description.get("text_config"))
    named = (section.get(name) for section in sections if isinstance(section, Mapping) for name in names)
    return next((number for number in named if type(number) is int and number > 0), None)


def is_mxfp4(folder: Path) -> bool:
    """Return whether the experts of a model are in MXFP4, as in the published gpt-oss."""
    quantised = (description_of(folder) or {}).get("quantization_config")
    return isinstance(quantised, Mapping) and quantised.get("quant_method") == "mxfp4"


def four_bit_method_of(folder: str | Path) -> str | None:
    """Return `awq` or `gptq` if the model in a folder has 4-bit weights of this kind, else None."""
    return four_bit_method(description_of(Path(folder)) or {})


def vocab_size(folder: Path) -> float:
    """Return the vocabulary size in config.json; infinity if it has none."""
    return number_in(description_of(folder) or {}, ("vocab_size",)) or math.inf


def description_of(folder: Path, name: str = "config.json") -> Mapping[str, Any] | None:
    """Read a model's config.json or another file; None if that fails, which `preflight` or transformers reports."""
    try:
        description = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return description if isinstance(description, Mapping) else None


def _converted(name: str) -> Path | None:
    """Return the folder of a converted GGUF file, complete or not; None for other names."""
    return Path(name).with_suffix("") if name.endswith(".gguf") and Path(name).is_file() else None


def _is_complete(converted: Path, name: str) -> bool:
    """Return whether a converted GGUF file is complete and up to date."""
    from vectorlm.train.checkpoint.export import is_made_of

    return not missing_files(converted) and is_made_of(converted, Path(name))


def _snapshot(name: str) -> Path | None:
    """Return the newest snapshot of a model in the cache, complete or not."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    repo, revision = _parts(name)
    try:
        found = [
            try_to_load_from_cache(repo, file, revision=revision) for file in ("config.json", ADAPTER_CONFIG)
        ]
    except HFValidationError:
        return None
    return next((Path(description).parent for description in found if isinstance(description, str)), None)


def _parts(name: str) -> tuple[str, str | None]:
    """Split ``owner/name@revision``."""
    repo, _, revision = name.partition("@")
    return repo, revision or None
