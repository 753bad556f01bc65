"""Checkpoints in 4 bits, quantised by rounding, in the layouts of AWQ and GPTQ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Order of the outputs in the nibbles of a word, lowest nibble first."""


def save_four_bit(folder: str | Path, path: str | Path, method: str, group_size: int = 32, **options) -> Path:
    """Write the model in `folder` to `path`, with those linear layers of its blocks in 4 bits that vLLM can read.

    `options` are written into quantization_config; ``desc_act`` orders the groups of GPTQ at random.
    """
    shutil.copytree(folder, path, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors, config = (
        load_file(Path(folder, "model.safetensors")),
        json.loads(Path(folder, "config.json").read_text()),
    )
    saved: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        # vLLM's CPU kernel needs sizes that are multiples of 32.
        if name.endswith("_proj.weight") and not any(size % 32 for size in tensor.shape):
            layer = name.removesuffix("weight")
            parts = (awq if method == "awq" else gptq)(tensor, group_size, options.get("desc_act", False))
            saved |= {layer + part: value.contiguous() for part, value in parts.items()}
        else:
            saved[name] = tensor.bfloat16()
    save_file(saved, Path(path, "model.safetensors"), {"format": "pt"})
    of_method = (
        {"zero_point": True, "version": "gemm"} if method == "awq" else {"sym": True, "desc_act": False}
    )
    config["quantization_config"] = {
        "quant_method": method,
        "bits": 4,
        "group_size": group_size,
        **of_method,
        **options,
    }
    config["dtype"] = "bfloat16"
    Path(path, "config.json").write_text(json.dumps(config))
    return Path(path)


def awq(weight: torch.Tensor, group_size: int, _: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of an AWQ layer: words along the outputs, one zero point per group and output."""
    values = weight.float().t().reshape(-1, group_size, len(weight))
    low, high = values.amin(1, keepdim=True).clamp(max=0), values.amax(1, keepdim=True).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-6).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    numbers = (values / scales.float() + zeros).round().clamp(0, 15).view(-1, len(weight))
    return {
        "qweight": packed(numbers, AWQ_ORDER),
        "qzeros": packed(zeros[:, 0], AWQ_ORDER),
        "scales": scales[:, 0],
    }


def gptq(weight: torch.Tensor, group_size: int, desc_act: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a symmetric GPTQ layer: words along the inputs."""
    num_inputs = weight.shape[1]
    groups = torch.arange(num_inputs) // group_size
    if desc_act:
        groups = groups[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(0))]
    values, scales = weight.float().t(), torch.empty(num_inputs // group_size, len(weight))
    for group in range(len(scales)):
        scales[group] = (values[groups == group].abs().amax(0) / 7).clamp(min=1e-6)
    scales = scales.half()
    numbers = (values / scales.float()[groups] + 8).round().clamp(0, 15)
    zeros = torch.full_like(scales, 7.0)  # GPTQ's files store the zero point minus one.
    return {
        "qweight": packed(numbers.t(), range(8)).t(),
        "qzeros": packed(zeros, range(8)),
        "scales": scales,
        "g_idx": groups.int(),
    }


def packed(numbers: torch.Tensor, order) -> torch.Tensor:
    """Pack eight numbers of a row into a word; the first index of `order` goes to the lowest bits."""
    words = numbers.long().view(len(numbers), -1, 8)
    total = sum(words[:, :, which] << (4 * nibble) for nibble, which in enumerate(order))
    return torch.where(total >= 2**31, total - 2**32, total).int()
