"""Low-rank adapters (LoRA) on a frozen model, by PEFT: add, load, continue and merge them."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectorlm.errors import ConfigError
from vectorlm.sampling.weights.lora_factors import SCORES, STARTS, WRITES, is_lora_layer

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def add_lora(model: PreTrainedModel, lora_config: Mapping[str, Any]) -> nn.Module:
    """Wrap `model` to train only low-rank adapters: W x + (alpha / r) B A x. Call this before sharding.

    Source: Hu et al. 2021, arXiv 2106.09685, eq. 3. `lora_config` holds arguments of ``peft.LoraConfig``;
    ``task_type`` defaults to the model's, and a reward model's head is trained too. Vision model and projector get
    adapters only if ``exclude_modules`` is given.

    Raises:
        ConfigError: An argument is unknown or does not fit the model.
    """
    from peft import LoraConfig, get_peft_model

    from vectorlm.train.images import language_model_of, names_of_vision

    try:
        kind = SCORES if type(model).__name__.endswith("ForSequenceClassification") else WRITES
        options = {"task_type": kind, **lora_config}
        if options.get("exclude_modules") is None and (vision := names_of_vision(model)):
            kept = (language_model_of(model), model.get_output_embeddings())
            names = [name for name, module in model.named_modules() if module in kept]
            # The name of the whole model is empty.
            adapted = "|".join(rf"{re.escape(name)}(\.|$)" if name else "" for name in names)
            seen = "|".join(map(re.escape, vision))
            options["exclude_modules"] = rf"({seen})\..*|(?!{adapted}).*"
        return get_peft_model(model, LoraConfig(**options))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"train_parameters.lora_peft_config={dict(lora_config)} needs arguments of peft.LoraConfig: {error}"
        ) from error


def unmatched_names(model: Any, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names in the adapter `options` that match no layer of `model`, by PEFT's rules."""
    from peft.utils.other import get_pattern_key

    modules = list(model.get_base_model().named_modules())
    adapted = [name for name, module in modules if is_lora_layer(module)]
    tests: dict[str, Callable[[Any], bool]] = {
        name: lambda given: any(f".{layer}".endswith(f".{given}") for layer, _ in modules)
        for name in ("target_modules", "exclude_modules", "modules_to_save")
    }
    for name in ("rank_pattern", "alpha_pattern"):
        tests[name] = lambda given: any(
            layer == given or get_pattern_key([given], layer) != layer for layer in adapted
        )
    tests["layers_to_transform"] = lambda given: any(f".{given}." in layer for layer in adapted)
    tests["layers_pattern"] = lambda given: any(
        re.search(rf"(^|\.){given}\.\d+\.", layer) for layer in adapted
    )
    # In some models PEFT adapts fused experts instead of the layers gate_proj, up_proj and down_proj.
    (adapters,) = model.peft_config.values()
    replaced = set(options.get("target_modules") or ()) - set(adapters.target_modules or ())
    for option, has in tests.items():
        names: Any = options.get(option) or ()
        is_alone = isinstance(names, str | int)
        if is_alone and option.endswith("_modules"):
            # A regular expression. PEFT raises if target_modules matches nothing, and may turn a list into a text.
            if option == "exclude_modules" and not any(re.fullmatch(names, layer) for layer, _ in modules):
                yield f"{option} {names!r}"
            continue
        if option == "layers_to_transform" and options.get(option) == 0:
            names, is_alone = 0, True
        for given in (names,) if is_alone else names:
            is_replaced = option == "target_modules" and given in replaced and adapters.target_parameters
            if not has(given) and not is_replaced:
                yield f"{option} {given!r}"


def is_still(model: Any) -> bool:
    """Return whether the gradients of all trained weights of a model with adapters are always 0."""
    layers = [module for module in model.modules() if is_lora_layer(module)]
    still = {
        id(parameter)
        for layer in layers
        if not any(layer.scaling.values())
        or all(getattr(dropout, "p", 0) == 1 for dropout in layer.lora_dropout.values())
        for parameter in layer.parameters()
    }
    return all(id(parameter) in still for parameter in model.parameters() if parameter.requires_grad)


ADAPTER_CONFIG = "adapter_config.json"

STARTING = "starting_adapters"
"""Name of the frozen copy of the adapters that a policy started from."""

_NOT_OPTIONS = frozenset(
    {"peft_type", "peft_version", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping"}
)


def is_adapter_folder(path: Path) -> bool:
    """Return whether the folder `path` has adapters and no whole model."""
    return (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()


def base_of(path: Path) -> Path:
    """Return the folder of the base model of the adapters in `path`.

    Raises:
        ConfigError: The base model is not on this machine.
    """
    from huggingface_hub import try_to_load_from_cache

    try:
        described = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        base = described["base_model_name_or_path"]
        found: Any = Path(base, "config.json")
        if not found.is_file():
            is_on_hub, revision = hub_name(base) is not None, described.get("revision")
            found = try_to_load_from_cache(base, "config.json", revision=revision) if is_on_hub else None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path / ADAPTER_CONFIG} does not name a base model ({error!r}).") from error
    if not isinstance(found, str | Path):
        raise ConfigError(
            f"the base model {base!r} of the adapters in {path} is neither a folder with a config.json nor in the "
            f"Hugging Face cache. Download it, or correct base_model_name_or_path in {path / ADAPTER_CONFIG}."
        )
    return Path(found).parent


def tokenizer_folder(model: str | Path, adapters: str | Path | None) -> Path:
    """Return the folder with the tokenizer of adapters on a model: their own if it is complete, else the model's."""
    model, own = Path(model), Path(adapters or model)
    processors = ("processor_config.json", "preprocessor_config.json")
    reads_images, is_complete = (any((path / name).is_file() for name in processors) for path in (model, own))
    has_own = (own / "tokenizer_config.json").is_file() and (is_complete or not reads_images)
    return own if has_own else model


def options_of(path: Path) -> dict[str, Any]:
    """Return the options of the adapters in `path` as arguments of ``peft.LoraConfig``, without unset ones.

    `exclude_modules` is always there, because `add_lora` has a default for new adapters.

    Raises:
        ConfigError: The adapters are not LoRA.
    """
    options = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    if (kind := options.get("peft_type")) != "LORA":
        raise ConfigError(f"the adapters in {path} are {kind}, but only LORA can be trained further.")
    if options.get("init_lora_weights") in STARTS:
        # It describes how the adapters were initialised; trained adapters must not be initialised again.
        del options["init_lora_weights"]
    kept = {
        name: value for name, value in options.items() if name not in _NOT_OPTIONS and not is_unset(value)
    }
    return {**kept, "exclude_modules": kept.get("exclude_modules", [])}


def is_unset(value: Any) -> bool:
    """Return whether an option of adapters has PEFT's value for "not used"; 0 and [] are settings."""
    return value is None or value is False or value in ("none", {})


def continue_lora(
    model: PreTrainedModel, path: Path, options: Mapping[str, Any], *, is_empty: bool, keeps_start: bool
) -> Any:
    """Put the adapters in `path` on `model` for training; if `is_empty`, new adapters of the same shapes.

    With `keeps_start`, add a frozen copy named `STARTING`.
    """
    adapted: Any = add_lora(model, options) if is_empty else load_adapters(path, model)
    if keeps_start:
        (trained,) = adapted.peft_config.values()
        adapted.add_adapter(STARTING, copy.copy(trained))
        weights = dict(adapted.named_parameters(remove_duplicate=False))
        for name, weight in weights.items():
            if f".{STARTING}" in name:
                weight.requires_grad_(False)
                if not is_empty:
                    weight.data.copy_(weights[name.replace(f".{STARTING}", ".default")])
    return adapted


@contextmanager
def start_alone(model: Any) -> Iterator[None]:
    """Compute with the adapters that `model` started from: `STARTING`, or none if they were zero."""
    if STARTING not in model.peft_config:
        with model.disable_adapter():
            yield
        return
    model.set_adapter(STARTING, inference_mode=True)
    try:
        yield
    finally:
        model.set_adapter("default")


def load_adapters(path: Path, base: PreTrainedModel) -> Any:
    """Put the adapters in `path` on their base model.

    Raises:
        ConfigError: They cannot be read, or do not fit the base model.
    """
    from peft import PeftConfig, PeftModel
    from safetensors import SafetensorError

    try:
        PeftConfig.from_pretrained(str(path))
    except Exception as error:  # PEFT raises all kinds of errors for a broken file.
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{path / ADAPTER_CONFIG} cannot be read by PEFT ({why}). Save it again."
        ) from error
    if not any((path / f"adapter_model.{kind}").is_file() for kind in ("safetensors", "bin")):
        raise ConfigError(f"the adapters in {path} have no adapter_model.safetensors. Complete the folder.")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys", UserWarning)
            model = PeftModel.from_pretrained(base, path, is_trainable=True)
        # Only this second call reports keys without a place or a tensor.
        found = model.load_adapter(path, model.active_adapter, is_trainable=True)
        for problem, names in (
            ("have no place in it", found.unexpected_keys),
            ("are missing", found.missing_keys),
        ):
            if names:
                raise ValueError(f"{len(names)} tensors {problem} ({', '.join(names[:3])})")
    except SafetensorError as error:
        raise ConfigError(f"the adapters in {path} cannot be read ({error}). Save them again.") from error
    except (ValueError, RuntimeError, KeyError) as error:
        # If a whole module is missing, PEFT raises KeyError with its name.
        why = f"the tensor {error} is missing" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise ConfigError(
            f"the adapters in {path} do not fit {base.config.name_or_path}: {why}. Correct base_model_name_or_path "
            f"in {path / ADAPTER_CONFIG}."
        ) from error
    return model


def merged(model: Any) -> PreTrainedModel:
    """Merge adapters into their base model, and return the base model.

    Raises:
        ConfigError: The adapters change one of two layers that share a weight.
    """
    base = model.get_base_model()
    layers = (base.get_input_embeddings(), base.get_output_embeddings())
    changed = [
        name for name, layer in base.named_modules() if layer in layers and hasattr(layer, "active_adapters")
    ]
    if base.config.tie_word_embeddings and changed:
        raise ConfigError(
            f"the adapters of {' and '.join(changed)} cannot be merged: embeddings and head share one weight "
            "(tie_word_embeddings). Leave both layers out of target_modules and modules_to_save in "
            "train_parameters.lora_peft_config."
        )
    return model.merge_and_unload()


def hub_name(model: str) -> str | None:
    """Return a model's name on the Hugging Face hub; None for a folder that is not in its cache."""
    if cached := _cached(model):
        return cached[1].replace("--", "/")
    return None if Path(model).exists() or model.count("/") > 1 or model.startswith((".", "/")) else model


def _cached(model: str) -> re.Match[str] | None:
    """Match repository and commit in the path of a snapshot in the Hub's cache."""
    return re.search(r"/models--([^/]+)/snapshots/([^/]+)/", f"{Path(model).absolute()}/")


def lasting_name(model: str) -> tuple[str, str | None]:
    """Return the base model for an adapter's config: its name on the hub and its commit, or an absolute path."""
    cached = _cached(model)
    return hub_name(model) or str(Path(model).absolute()), cached and cached[2]
