"""Read 4-bit checkpoints of AWQ and GPTQ as weights in 16 or 32 bits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectorlm.errors import ConfigError
from vectorlm.sampling.weights.model_size import files_of_index

if TYPE_CHECKING:
    import torch

_REQUIRED: Mapping[str, Mapping[str, Any]] = {
    "awq": {"bits": 4, "zero_point": True},
    "gptq": {"bits": 4, "sym": True, "desc_act": False},
}
"""By method: values of `quantization_config` that vLLM and this module read; vLLM has no default for them."""
_OPTIONAL: Mapping[str, tuple[Any, ...]] = {
    "version": (None, "gemm"),
    "lm_head": (None, False),
    "dynamic": (None, {}),
    "checkpoint_format": (None, "gptq", "gptq_v2"),
}
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Places of eight adjacent outputs in a word of AWQ."""


def four_bit_method(description: Mapping[str, Any]) -> str | None:
    """Return the method, `awq` or `gptq`, that a model's config.json declares; None for other models."""
    settings = description.get("quantization_config")
    method = str(settings.get("quant_method")).lower() if isinstance(settings, Mapping) else None
    return method if method in _REQUIRED else None


def why_not_unpacked(description: Mapping[str, Any]) -> str | None:
    """Return why the weights of an AWQ or GPTQ model cannot be read, as a clause; None if they can."""
    settings = description["quantization_config"]
    required = _REQUIRED[four_bit_method(description) or ""]
    for name, allowed in {**{name: (value,) for name, value in required.items()}, **_OPTIONAL}.items():
        value = settings.get(name)
        if (value.lower() if isinstance(value, str) else value) not in allowed:
            return f"quantization_config.{name} of its config.json is {value!r}, and must be {allowed[-1]!r}"
    size = settings.get("group_size")
    if type(size) is not int or not (size == -1 or size > 0):
        return f"quantization_config.group_size of its config.json is {size!r}, and must be a number"
    return None


def unpacked_weights(folder: str | Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Read an AWQ or GPTQ model's weights by name; quantised ones are ``(number - zero point) * scale``, [N, K].

    Scales are rounded to `dtype` before the product, as vLLM rounds them to the engine's dtype.

    Source of the layouts: vLLM 0.32, ``auto_awq.py`` and ``auto_gptq.py``.

    Raises:
        ConfigError: The layout is not supported, or a layer is damaged.
    """
    from safetensors import safe_open

    folder = Path(folder)
    description = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if (reason := why_not_unpacked(description)) is not None:
        raise ConfigError(f"model={str(folder)!r} cannot be read: {reason}. Use another checkpoint.")
    whole, index = "model.safetensors", folder / "model.safetensors.index.json"
    file_names = (
        [whole]
        if (folder / whole).is_file()
        else files_of_index(index) or [path.name for path in folder.glob("*.safetensors")]
    )
    files = [safe_open(folder / name, "pt") for name in sorted(file_names)]
    place = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a mapping)
    is_awq, size = four_bit_method(description) == "awq", description["quantization_config"]["group_size"]
    found = {}
    for name, file in place.items():
        layer, _, part = name.rpartition(".")
        is_quantised = f"{layer}.qweight" in place
        if is_quantised and part == "qweight":
            names = {other: f"{layer}.{other}" for other in ("qweight", "qzeros", "scales", "g_idx")}
            parts = {other: place[key].get_tensor(key) for other, key in names.items() if key in place}
            try:
                found[f"{layer}.weight"] = _unpack(parts, dtype, is_awq, size)
            except (KeyError, RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"model={str(folder)!r} cannot be read: {layer}: {error}. Download it again."
                ) from error
        elif not is_quantised or part == "bias":
            tensor = file.get_tensor(name)
            found[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return found


def _unpack(
    parts: Mapping[str, torch.Tensor], dtype: torch.dtype, is_awq: bool, group_size: int
) -> torch.Tensor:
    """Return the weight [N, K] of one layer.

    Words hold 8 numbers: adjacent outputs in AWQ (`qweight` [K, N/8], `qzeros` [G, N/8]), adjacent inputs in GPTQ
    (`qweight` [K/8, N]). `scales` are [G, N].
    """
    import torch

    scales = parts["scales"].to(dtype).float()
    num_groups, num_outputs = scales.shape
    if is_awq:
        numbers, zeros = (
            _nibbles(parts[name])[..., _AWQ_PLACES].reshape(-1, num_outputs) for name in ("qweight", "qzeros")
        )
    else:
        numbers = _nibbles(parts["qweight"].t()).reshape(num_outputs, -1).t()
        zeros = torch.full((num_groups, num_outputs), 8)
    num_inputs = len(numbers)
    size = num_inputs if group_size == -1 else group_size
    if num_groups * size != num_inputs:
        raise ValueError(f"{num_inputs} inputs have {num_groups} scales, and group_size is {group_size}")
    if "g_idx" in parts and not torch.equal(parts["g_idx"].long(), torch.arange(num_inputs) // size):
        raise ValueError("its groups are not of adjacent inputs (g_idx), as vLLM expects")
    grouped = numbers.reshape(num_groups, -1, num_outputs) - zeros.view(num_groups, 1, num_outputs)
    return (grouped * scales.unsqueeze(1)).view(num_inputs, num_outputs).to(dtype).t().contiguous()


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit numbers of words, [..., 8], the lowest bits first."""
    import torch

    return (words.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15
