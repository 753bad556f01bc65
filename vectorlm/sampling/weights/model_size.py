"""The size of a model, read from its folder without loading it."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")
"""The number of a transformer block in the name of a tensor."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The sizes of a dense decoder that its memory depends on."""

    num_parameters: int
    """Parameters of the whole model; tied ones count once."""
    num_block_parameters: int
    """Parameters of the largest transformer block."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    """Query heads."""
    query_size: int
    """Query heads times head size."""
    kv_size: int
    """Key-value heads times head size."""
    vocab_size: int
    max_length: int
    """Longest sequence, in tokens."""

    @property
    def num_in_blocks(self) -> int:
        """Parameters of all transformer blocks."""
        return self.num_layers * self.num_block_parameters


def read_model_size(folder: str | Path) -> ModelSize:
    """Read a model's size from its ``config.json`` and the headers of its safetensors files, without torch.

    Without safetensors files, transformers builds the model on the meta device from ``config.json``. Raises ValueError
    for missing or invalid values.
    """
    try:
        return _read_model_size(Path(folder))
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"the files of {folder} have invalid values ({type(error).__name__}: {error})"
        ) from error


def _read_model_size(folder: Path) -> ModelSize:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = {**config, **config.get("text_config", {})}
    shapes = _tensor_shapes(folder)
    if config.get("tie_word_embeddings") and any("embed" in name for name in shapes):
        shapes.pop("lm_head.weight", None)
    blocks: dict[str, int] = defaultdict(int)
    for name, shape in shapes.items():
        if match := _BLOCK.search(name):
            blocks[match[1]] += math.prod(shape)
    if not blocks:
        raise ValueError(f"the tensors of {folder} must have the names of transformer blocks")
    hidden = _first(config, "hidden_size", "n_embd")
    num_heads = _first(config, "num_attention_heads", "n_head")
    head_size = config.get("head_dim") or hidden // num_heads
    return ModelSize(
        num_parameters=sum(map(math.prod, shapes.values())),
        num_block_parameters=max(blocks.values()),
        num_layers=len(blocks),
        hidden_size=hidden,
        intermediate_size=_first(config, "intermediate_size", "n_inner", default=4 * hidden),
        num_heads=num_heads,
        query_size=num_heads * head_size,
        kv_size=_first(config, "num_key_value_heads", default=num_heads) * head_size,
        vocab_size=_first(config, "vocab_size"),
        max_length=_first(config, "max_position_embeddings", "n_positions"),
    )


def count_adapter_parameters(folder: str | Path, lora_config: Mapping[str, Any]) -> int:
    """Count the parameters that LoRA trains: r rows and r columns of every adapted matrix.

    Source: Hu et al. 2021, arXiv 2106.09685, section 4.2.
    """
    targets = lora_config.get("target_modules") or ("q_proj", "v_proj")
    targets = (targets,) if isinstance(targets, str) else tuple(targets)
    return sum(
        lora_config.get("r", 8) * sum(shape)
        for name, shape in _tensor_shapes(Path(folder)).items()
        if len(shape) == 2
        and name != "lm_head.weight"
        and (("all-linear" in targets and _BLOCK.search(name)) or name.split(".")[-2] in targets)
    )


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


def _tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files and "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8")):
        return _shapes_of_config(folder)
    if not files:
        raise ValueError(f"{folder} holds no .safetensors file")
    return {
        name: tuple(entry["shape"])
        for path in files
        for name, entry in _head(path)[1].items()
        if name != "__metadata__"
    }


def _shapes_of_config(folder: Path) -> dict[str, tuple[int, ...]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.tie_weights()
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
