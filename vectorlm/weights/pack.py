"""vLLM's packed linear layers on CPU: keep the plain weights, and pack again when they change.

vLLM hands every linear weight to a oneDNN matrix product at load time and throws the plain weight away; writing to
it later changes nothing, silently. `keep_plain_weights` stops that; `pack` does the same work when we say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from vectorlm.errors import ChecksumMismatch
from vectorlm.weights.experts import keep_plain_experts, pack_experts, stale_experts

ONEDNN_CACHE_SIZE = 32
"""Shapes that one layer keeps compiled products for; vLLM's own choice."""

PROBED_COLUMNS = 8
"""Columns of each packed weight that one check reads back."""


def keep_plain_weights() -> None:
    """Make vLLM leave the weights of linear layers and experts as they are; call before the engine is built.

    vllm 0.26 to 0.32: ``dispatch_cpu_unquantized_gemm`` is looked up at each call. Delete when vLLM packs behind a
    parameter that can still be written to.
    """
    from vllm.model_executor.layers import utils

    def leave_plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = leave_plain
    keep_plain_experts()


def packable_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers whose matrix product oneDNN can do, with their names."""
    heads = {
        id(getattr(module, "base_layer", module))
        for name, module in model.named_modules(remove_duplicate=False)
        if name.endswith("lm_head")
    }
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            # vLLM's LoRA layers pass on the attributes of the layer that they wrap.
            continue
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.ndim == 2:
            # An embedding table is looked up, not multiplied with, unless it serves as the head too.
            if type(module).__name__ == "VocabParallelEmbedding" and id(module) not in heads:
                continue
            yield name, module


def pack(model: torch.nn.Module) -> None:
    """Give every linear layer of `model` a oneDNN product that holds the weights as they are now.

    Layers that oneDNN has no product for on this processor (float16 without AVX512-FP16) stay plain.
    """
    from vllm import _custom_ops as ops

    for _, layer in packable_layers(model):
        try:
            layer.cpu_linear = _product(ops.create_onednn_mm(layer.weight.t(), ONEDNN_CACHE_SIZE))
        except RuntimeError:
            layer.cpu_linear = torch.nn.functional.linear
    pack_experts(model)


def _product(handler: Any) -> Callable[..., torch.Tensor]:
    from vllm import _custom_ops as ops

    return lambda x, weight, bias: ops.onednn_mm(handler, x, bias)


def check_packed(model: torch.nn.Module, seed: int = 0) -> None:
    """Read columns of every packed weight back, and compare them with the plain weight bit by bit.

    A product with a unit vector is a column of the weight, and no rounding is involved: everything else it adds is
    zero.

    Args:
        model: The engine's model.
        seed: Chooses the columns; another one at each update, so that in time all are read.

    Raises:
        ChecksumMismatch: A product was packed from other weights; the text names the layers.
    """
    generator = torch.Generator().manual_seed(seed)
    stale = []
    for name, layer in packable_layers(model):
        width = layer.weight.shape[1]
        columns = torch.randint(width, (PROBED_COLUMNS,), generator=generator)
        probe = torch.nn.functional.one_hot(columns, width).to(layer.weight.dtype)
        packed = layer.cpu_linear(probe, layer.weight, None)
        if not torch.equal(packed, layer.weight[:, columns].t()):
            stale.append(name)
    stale += stale_experts(model, generator)
    if stale:
        raise ChecksumMismatch(
            f"packed weights of {len(stale)} layers are not those that were sent: {stale}."
        )
