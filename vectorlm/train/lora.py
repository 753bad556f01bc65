"""Low-rank adapters on a model with frozen weights: PEFT adds them, and they are found again here."""

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
    """Wrap `model` so that only its low-rank adapters are trained: W x + (alpha / r) B A x.

    Source: Hu et al. 2021, arXiv 2106.09685, eq. 3. `lora_config` holds arguments of ``peft.LoraConfig``;
    ``task_type`` defaults to the model's, and a reward model's head is trained whole. Call it before sharding.

    Raises:
        ConfigError: An argument is unknown or does not fit the model.
    """
    from peft import LoraConfig, get_peft_model

    try:
        kind = SCORES if type(model).__name__.endswith("ForSequenceClassification") else WRITES
        return get_peft_model(model, LoraConfig(**{"task_type": kind, **lora_config}))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"train_parameters.lora_peft_config={dict(lora_config)} cannot be used: {error} "
            "It takes the arguments of peft.LoraConfig."
        ) from error


def unmatched_names(model: Any, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names in these options of a model's adapters that no layer has, as PEFT compares them."""
    from peft.utils.other import get_pattern_key

    modules = list(model.get_base_model().named_modules())
    adapted = [name for name, module in modules if is_lora_layer(module)]
    tests: dict[str, Callable[[Any], bool]] = {
        name: lambda given: any(f".{each}".endswith(f".{given}") for each, _ in modules)
        for name in ("target_modules", "exclude_modules", "modules_to_save")
    }
    for name in ("rank_pattern", "alpha_pattern"):
        tests[name] = lambda given: any(
            each == given or get_pattern_key([given], each) != each for each in adapted
        )
    tests["layers_to_transform"] = lambda given: any(f".{given}." in each for each in adapted)
    tests["layers_pattern"] = lambda given: any(re.search(rf"(^|\.){given}\.\d+\.", each) for each in adapted)
    for option, has in tests.items():
        names: Any = options.get(option) or ()
        is_alone = isinstance(names, str | int)
        if is_alone and option.endswith("_modules"):
            # An expression for whole names. PEFT refuses one that targets nothing, and writes a list in a short form.
            if option == "exclude_modules" and not any(re.fullmatch(names, each) for each, _ in modules):
                yield f"{option} {names!r}"
            continue
        if option == "layers_to_transform" and options.get(option) == 0:
            names, is_alone = 0, True
        for given in (names,) if is_alone else names:
            if not has(given):
                yield f"{option} {given!r}"


def is_still(model: Any) -> bool:
    """Whether no trained weight of a model with adapters can get a gradient other than 0."""
    layers = [module for module in model.modules() if is_lora_layer(module)]
    still = {
        id(parameter)
        for layer in layers
        if not any(layer.scaling.values())
        or all(getattr(each, "p", 0) == 1 for each in layer.lora_dropout.values())
        for parameter in layer.parameters()
    }
    return all(id(each) in still for each in model.parameters() if each.requires_grad)


ADAPTER_CONFIG = "adapter_config.json"

STARTING = "starting_adapters"
"""The name of the frozen copy of the adapters that a policy began with."""

_NOT_OPTIONS = frozenset(
    {"peft_type", "peft_version", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping"}
)


def is_adapter_folder(path: Path) -> bool:
    """Whether `path` holds adapters, and no whole model."""
    return (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()


def base_of(path: Path) -> Path:
    """Return the folder of the base model that the adapters in `path` belong to.

    Raises:
        ConfigError: It is not on this machine.
    """
    from huggingface_hub import try_to_load_from_cache

    try:
        base = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
        found: Any = Path(base, "config.json")
        if not found.is_file():
            found = try_to_load_from_cache(base, "config.json") if hub_name(base) is not None else None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path / ADAPTER_CONFIG} does not name a base model ({error!r}).") from error
    if not isinstance(found, str | Path):
        raise ConfigError(
            f"the base model {base!r} of the adapters in {path} is not on this machine: it is neither a folder with a "
            f"config.json nor in the cache of the Hugging Face hub. Download it, or correct base_model_name_or_path "
            f"in {path / ADAPTER_CONFIG}."
        )
    return Path(found).parent


def options_of(path: Path) -> dict[str, Any]:
    """Return the options of the adapters in `path`, as ``peft.LoraConfig`` takes them, without those that are empty.

    Raises:
        ConfigError: They are not LoRA.
    """
    options = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    if (kind := options.get("peft_type")) != "LORA":
        raise ConfigError(f"the adapters in {path} are {kind}, and only LORA can be trained on.")
    if options.get("init_lora_weights") in STARTS:
        # How they once began.
        del options["init_lora_weights"]
    empty: tuple[Any, ...] = (None, False, "none", [], {})
    return {name: value for name, value in options.items() if name not in _NOT_OPTIONS and value not in empty}


def continue_lora(
    model: PreTrainedModel, path: Path, options: Mapping[str, Any], *, is_empty: bool, keeps_start: bool
) -> Any:
    """Put the adapters in `path` on `model`, to be trained; if `is_empty`, others of the same shapes.

    With `keeps_start` a frozen copy of them is beside them, called `STARTING`.
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
    """Compute with the adapters that `model` began with: `STARTING`, or none where they began as zeros."""
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
        ConfigError: They do not fit it, or not all of them have a place in it.
    """
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys", UserWarning)
            model = PeftModel.from_pretrained(base, path, is_trainable=True)
        # Again, since this call alone says what had no place, or no tensor.
        found = model.load_adapter(path, model.active_adapter, is_trainable=True)
        for what, names in (
            ("have no place in it", found.unexpected_keys),
            ("are missing", found.missing_keys),
        ):
            if names:
                raise ValueError(f"{len(names)} tensors {what} ({', '.join(names[:3])})")
    except (ValueError, RuntimeError, KeyError) as error:
        # PEFT reads whole modules by their names, and names no others then.
        why = f"the tensor {error} is missing" if isinstance(error, KeyError) else error
        raise ConfigError(
            f"the adapters in {path} do not fit {base.config.name_or_path}: {why}. Correct base_model_name_or_path "
            f"in {path / ADAPTER_CONFIG}."
        ) from error
    return model


def merged(model: Any) -> PreTrainedModel:
    """Merge adapters into their base model, and return that.

    Raises:
        ConfigError: They change one of two layers that share a weight.
    """
    base = model.get_base_model()
    layers = (base.get_input_embeddings(), base.get_output_embeddings())
    changed = [
        name for name, each in base.named_modules() if each in layers and hasattr(each, "active_adapters")
    ]
    if base.config.tie_word_embeddings and changed:
        raise ConfigError(
            f"the adapters of {' and '.join(changed)} cannot be merged: embeddings and head share one weight "
            "(tie_word_embeddings), which would be two. Leave both layers out of target_modules and modules_to_save in "
            "train_parameters.lora_peft_config."
        )
    return model.merge_and_unload()


def hub_name(model: str) -> str | None:
    """Return the name on the Hugging Face hub of a model that came from there; None for any other folder."""
    if cached := re.search(r"/models--([^/]+)/snapshots/", f"{Path(model).absolute()}/"):
        return cached[1].replace("--", "/")
    return None if Path(model).exists() or model.count("/") > 1 or model.startswith((".", "/")) else model


def lasting_name(model: str) -> str:
    """Return what adapters note as their base: a name on the hub, or a path that holds from any folder."""
    return hub_name(model) or str(Path(model).absolute())
