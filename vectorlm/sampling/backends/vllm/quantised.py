"""Products of vLLM's layers with 8-bit weights: check that they read the weights that an update fills."""

from __future__ import annotations

import math

import torch

from vectorlm.errors import ChecksumMismatch
from vectorlm.sampling.backends.vllm.pack import PROBED_COLUMNS
from vectorlm.sampling.weights.quantise import FORMATS, quantised_layers


def renew_products(model: torch.nn.Module) -> None:
    """Renew the products whose kernels keep the weights in their own order (`int8` on CPU)."""
    for _, layer in quantised_layers(model):
        if hasattr(layer.quant_method, "renew"):
            layer.quant_method.renew(layer)


ROUNDING = 2**-7
"""Largest relative error of a product with one column: activations and results are rounded to 16 bits."""
LARGEST_RESULT = 1024.0
"""Size of the largest result, which keeps small results from vanishing in float16."""


def check_quantised(model: torch.nn.Module, seed: int = 0) -> None:
    """Read columns of every quantised weight back through its kernel; raise `ChecksumMismatch` if one differs.

    The product with a multiple of a unit vector is a column of the weight times the scales. Divided by them and rounded
    to the weight's dtype again, it must have the same bits. `seed` chooses the columns; a new seed at every update
    covers all of them in time.
    """
    generator = torch.Generator().manual_seed(seed)
    stale = []
    for name, layer in quantised_layers(model):
        weight, scales = layer.weight.data, layer.weight_scale.data
        width, count = len(weight), min(PROBED_COLUMNS, len(weight))
        start = int(torch.randint(width - count + 1, (), generator=generator))
        probe = torch.zeros(count, width, dtype=layer.params_dtype, device=weight.device)
        size = LARGEST_RESULT / (FORMATS[weight.dtype].largest * scales.nan_to_num().max().item())
        size = 2.0 ** max(min(math.floor(math.log2(size)), 15), 0)
        probe[:, start : start + count].fill_diagonal_(size)
        found = layer.quant_method.apply(layer, probe, None).float()
        held, factors = weight[start : start + count].float(), size * scales.t()
        quotients, expected = found / factors, held * factors
        if not weight.dtype.is_floating_point:
            quotients = quotients.round()
        same = quotients.to(weight.dtype).float() == held
        near = (found - expected).abs() <= ROUNDING * expected.abs()
        # Results below the normal numbers of the dtype have lost digits.
        vanishes = expected.abs() < torch.finfo(layer.params_dtype).tiny
        if not ((same & near) | vanishes).all():
            # Zero times NaN is NaN, so a row with a NaN cannot be read back.
            sound = weight.float().isfinite().all(dim=0) & scales[:, 0].isfinite()
            if not ((same & near) | vanishes)[:, sound].all() or found[:, ~sound].isfinite().any():
                stale.append(name)
    if stale:
        raise ChecksumMismatch(
            f"the kernels of {len(stale)} quantised layers do not use the weights that the engine holds: {stale}. "
            "Update again; until then the engine samples nothing."
        )
