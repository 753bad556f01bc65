"""The size of a model, read from its folder without loading it."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")
"""The number of a transformer block in the name of a tensor."""


@dataclass(frozen=True, kw_only=True)
class VisionSize:
    """The sizes of a vision model that its memory depends on."""

    num_parameters: int
    num_layers: int
    num_block_parameters: int
    """Parameters of the largest block."""
    block_width: int
    """Numbers that go into and come out of the matrices of a block, for one patch."""
    patch_numbers: int
    """Numbers of one patch: its pixels, channels and frames."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The sizes of a dense decoder that its memory depends on."""

    num_parameters: int
    """Parameters of the whole model; tied ones count once."""
    num_block_parameters: int
    """Parameters of the largest transformer block that reads tokens."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Inner size of a feed-forward network; with experts the total of all experts that a token uses."""
    experts_per_token: int = 0
    """Routed experts that a token uses; 0 for a dense model."""
    num_heads: int
    """Query heads."""
    query_size: int
    """Query heads times head size."""
    kv_size: int
    """Key-value heads times head size."""
    vocab_size: int
    max_length: int
    """Longest sequence, in tokens."""
    vision: VisionSize | None = None
    """The vision model; None for a text model."""

    @property
    def num_in_blocks(self) -> int:
        """Parameters of all transformer blocks."""
        seen = self.vision
        in_vision = 0 if seen is None else seen.num_layers * seen.num_block_parameters
        return self.num_layers * self.num_block_parameters + in_vision


def read_model_size(folder: str | Path) -> ModelSize:
    """Read a model's size from its ``config.json`` and the headers of its safetensors files, without torch.

    Without safetensors files, and for a vision-language model, transformers builds the model on the meta device from
    ``config.json``. Raises ValueError for missing or invalid values.
    """
    try:
        return _read_model_size(Path(folder))
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"the files of {folder} have invalid values ({type(error).__name__}: {error})"
        ) from error


def _read_model_size(folder: Path) -> ModelSize:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shapes, seen = _shapes(folder)
    config = {**config, **config.get("text_config", {})}
    if config.get("tie_word_embeddings") and any("embed" in name for name in shapes):
        shapes.pop("lm_head.weight", None)
    blocks = _blocks({name: shape for name, shape in shapes.items() if name not in seen})
    if not blocks:
        raise ValueError(f"the tensors of {folder} must have the names of transformer blocks")
    hidden = _first(config, "hidden_size", "n_embd")
    num_heads = _first(config, "num_attention_heads", "n_head")
    head_size = config.get("head_dim") or hidden // num_heads
    inner = _first(config, "intermediate_size", "n_inner", default=4 * hidden)
    used: int = config.get("num_experts_per_tok") or 0
    if used:
        of_expert = _first(config, "moe_intermediate_size", default=inner)
        shared = config.get("shared_expert_intermediate_size") or config.get("shared_intermediate_size")
        inner = used * of_expert + (shared or (config.get("n_shared_experts") or 0) * of_expert)
    return ModelSize(
        num_parameters=_count(shapes),
        num_block_parameters=max(map(_count, blocks.values())),
        num_layers=len(blocks),
        hidden_size=hidden,
        intermediate_size=inner,
        experts_per_token=used,
        num_heads=num_heads,
        query_size=num_heads * head_size,
        kv_size=_first(config, "num_key_value_heads", default=num_heads) * head_size,
        vocab_size=_first(config, "vocab_size"),
        max_length=_first(config, "max_position_embeddings", "n_positions"),
        vision=_vision_size(seen) if seen else None,
    )


def _vision_size(shapes: Mapping[str, tuple[int, ...]]) -> VisionSize:
    blocks = _blocks(shapes) or {"": dict(shapes)}
    matrices = [shape for shape in max(blocks.values(), key=_count).values() if len(shape) == 2]
    # The first matrix or convolution makes a vector of each patch.
    patch = next(shape for shape in shapes.values() if len(shape) in (2, 4, 5))
    return VisionSize(
        num_parameters=_count(shapes),
        num_layers=len(blocks),
        num_block_parameters=max(map(_count, blocks.values())),
        block_width=sum(map(sum, matrices)),
        patch_numbers=math.prod(patch[1:]),
    )


def _blocks(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of the tensors of each block, by its number."""
    blocks: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, shape in shapes.items():
        if match := _BLOCK.search(name):
            blocks[match[1]][name] = shape
    return blocks


def _count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes.values()))


def names_of_vision(causal: Any) -> list[str]:
    """Return the names of a vision-language model's outermost vision modules; no names for a text model."""
    if getattr(causal.config, "vision_config", None) is None:
        return []
    kind = type(causal.config.vision_config)
    found: list[str] = []
    for name, module in causal.named_modules():
        if type(getattr(module, "config", None)) is kind and not name.startswith(
            tuple(f"{one}." for one in found)
        ):
            found.append(name)
    return found


def count_adapter_parameters(
    folder: str | Path, lora_config: Mapping[str, Any], *, only_vision: bool = False
) -> int:
    """Count the parameters that LoRA trains, in all parts or `only_vision`: r rows and columns of adapted matrices.

    Source: Hu et al. 2021, arXiv 2106.09685, section 4.2.
    """
    targets = lora_config.get("target_modules") or ("q_proj", "v_proj")
    excluded = lora_config.get("exclude_modules")
    shapes, seen = _shapes(Path(folder))
    return sum(
        lora_config.get("r", 8) * sum(shape)
        for name, shape in shapes.items()
        if len(shape) == 2
        and (name in seen or not only_vision)
        and (name not in seen if excluded is None else not _names(excluded, name))
        and name != "lm_head.weight"
        and (_BLOCK.search(name) if str(targets).lower() == "all-linear" else _names(targets, name))
    )


def _names(given: str | Collection[str], weight: str) -> bool:
    """Return whether a regular expression, or one of several endings, names the layer of a weight, as in PEFT."""
    layer = weight.rpartition(".")[0]
    if not isinstance(given, str):
        return any(f".{layer}".endswith(f".{name}") for name in given)
    try:
        return re.fullmatch(given, layer) is not None
    except re.error as error:
        raise ValueError(f"{given!r} is not a regular expression ({error})") from error


def damaged_weights(folder: Path) -> Iterator[str]:
    """Yield the problems of a folder's safetensors files, judged by headers and sizes."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            start, entries = _head(path)
            # A header without offsets is a description for memory plans, without data.
            ends = [entry.get("data_offsets", (0, 0))[1] for entry in entries.values()]
            whole = start + max(ends, default=0)
        except (ValueError, LookupError, TypeError, AttributeError):
            yield f"{path.name} is not a safetensors file"
            continue
        if (size := path.stat().st_size) < whole:
            yield f"{path.name} is cut off: {size:,} bytes of {whole:,}"


def files_of_index(index: Path) -> set[str] | None:
    """Return the files that an index of weights names; None if it cannot be read."""
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, LookupError, AttributeError, TypeError):
        return None


def two_sets_of_weights(folder: Path) -> str | None:
    """Describe the problem if vLLM would fail or read other weights of a folder than transformers; else None.

    transformers reads ``model.safetensors``. vLLM reads the files that an index names, without an index all files.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not whole.is_file():
        return None
    others: set[str] | None = {path.name for path in folder.glob("model-*-of-*.safetensors")}
    if index.is_file():
        others = files_of_index(index)
    if others is None:
        return f"has an index that cannot be read, {index.name}"
    if not (others := others - {whole.name}):
        return None
    return f"has two sets of weights: transformers reads {whole.name}, and vLLM {min(others)}"


def _shapes(folder: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return the shapes of a model's tensors, and those in its vision model."""
    if "vision_config" not in json.loads((folder / "config.json").read_text(encoding="utf-8")):
        return _tensor_shapes(folder), {}
    shapes = shapes_of(model := empty_model(folder))
    inside = tuple(f"{name}." for name in names_of_vision(model))
    return shapes, {name: shape for name, shape in shapes.items() if name.startswith(inside)}


def _tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files and "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8")):
        return shapes_of(empty_model(folder))
    if not files:
        raise ValueError(f"{folder} holds no .safetensors file")
    shapes = {
        name: tuple(entry["shape"])
        for path in files
        for name, entry in _head(path)[1].items()
        if name != "__metadata__"
    }
    # A layer in 4 bits (AWQ, GPTQ) holds eight weights in a word, and a scale per group and output.
    for layer in [name.removesuffix(".qweight") for name in shapes if name.endswith(".qweight")]:
        num_weights = 8 * math.prod(shapes.pop(f"{layer}.qweight"))
        num_outputs = shapes.pop(f"{layer}.scales", (1,))[-1]
        for part in ("qzeros", "g_idx"):
            shapes.pop(f"{layer}.{part}", None)
        shapes[f"{layer}.weight"] = num_outputs, num_weights // num_outputs
    return shapes


@cache
def empty_model(folder: Path) -> Any:
    """Return the model of a ``config.json`` on the meta device, made once."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    model.tie_weights()
    return model


def auto_class(config: Any) -> Any:
    """Return transformers' class for a model's config: with its vision model, if it has one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    has_vision = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if has_vision else AutoModelForCausalLM


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _head(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the start of the tensors in a safetensors file, and its header: 8 bytes of length, then JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path} is not a safetensors file")
        entries = json.loads(file.read(length))
    if not isinstance(entries, dict):
        raise ValueError(f"the header of {path} must be a JSON object")
    return 8 + length, entries


def _first(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if not isinstance(value, int):
        raise ValueError(f"config.json has no {names[0]}")
    return value
