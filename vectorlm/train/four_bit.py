"""Checkpoints in 4 bits, by AWQ and GPTQ: which of them can be read, and their weights in 16 or 32 bits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectorlm.errors import ConfigError

if TYPE_CHECKING:
    import torch

_VALUES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "awq": {"bits": (4,), "version": ("gemm",), "zero_point": (True,), "lm_head": (False,)},
    "gptq": {"bits": (4,), "sym": (True,), "desc_act": (False,), "lm_head": (False,), "dynamic": ({}, None)},
}
"""By method: the values of `quantization_config` that vLLM and this module read, the default first."""
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ's place in a word for each of eight adjacent outputs."""


def four_bit_method(description: Mapping[str, Any]) -> str | None:
    """Return `awq` or `gptq` if a model's config.json declares such weights; None for other models."""
    settings = description.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    return method if method in _VALUES else None


def why_not_unpacked(description: Mapping[str, Any]) -> str | None:
    """Return why the weights of an AWQ or GPTQ model cannot be read, as a clause; None if they can."""
    settings, method = description["quantization_config"], four_bit_method(description)
    for name, allowed in _VALUES[method or ""].items():
        value = settings.get(name, allowed[0])
        if (value.lower() if isinstance(value, str) else value) not in allowed:
            return f"quantization_config.{name} of its config.json is {value!r}, and must be {allowed[0]!r}"
    return None


def unpacked_weights(folder: str | Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Read an AWQ or GPTQ model's weights by name; quantised ones are ``(number - zero point) * scale``, [N, K].

    Scales are rounded to `dtype` before the product, as in vLLM. Source of the layouts: vLLM 0.32, ``auto_awq.py`` and
    ``auto_gptq.py``.

    Raises:
        ConfigError: The layout is not supported.
    """
    from safetensors import safe_open

    folder = Path(folder)
    description = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if (reason := why_not_unpacked(description)) is not None:
        raise ConfigError(f"model={str(folder)!r} cannot be read: {reason}. Use another checkpoint.")
    whole = folder / "model.safetensors"
    files = [
        safe_open(path, "pt")
        for path in ([whole] if whole.is_file() else sorted(folder.glob("*.safetensors")))
    ]
    place = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a mapping)
    found = {}
    for name, file in place.items():
        layer, _, part = name.rpartition(".")
        is_quantised = f"{layer}.qweight" in place
        if is_quantised and part == "qweight":
            names = [
                other for other in ("qweight", "qzeros", "scales", "g_idx") if f"{layer}.{other}" in place
            ]
            parts = {other: place[f"{layer}.{other}"].get_tensor(f"{layer}.{other}") for other in names}
            try:
                found[f"{layer}.weight"] = _unpack(parts, dtype, is_awq=four_bit_method(description) == "awq")
            except (KeyError, RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"model={str(folder)!r} cannot be read: {layer}: {error}. Download it again."
                ) from error
        elif not is_quantised or part == "bias":
            tensor = file.get_tensor(name)
            found[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return found


def _unpack(parts: Mapping[str, torch.Tensor], dtype: torch.dtype, is_awq: bool) -> torch.Tensor:
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
    if "g_idx" in parts:
        groups = torch.arange(num_inputs) // (num_inputs // num_groups)
        if not torch.equal(parts["g_idx"].long(), groups):
            raise ValueError("its groups are not of adjacent inputs (g_idx), as vLLM expects")
    grouped = numbers.reshape(num_groups, -1, num_outputs) - zeros.view(num_groups, 1, num_outputs)
    return (grouped * scales.unsqueeze(1)).view(num_inputs, num_outputs).to(dtype).t().contiguous()


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit numbers of words, [..., 8], the lowest bits first."""
    import torch

    return (words.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15
