"""vLLM's quantisation `int8`: symmetric weights with a scale per row, activations with a scale per token.

Importing this module registers it. vLLM 0.32 has these products, but quantises only experts in this way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase, _is_tp_sharded
from vllm.model_executor.layers.quantization.utils.quant_utils import amax_for_tp_weight_quant
from vllm.model_executor.utils import replace_parameter

from vectorlm.errors import EngineError
from vectorlm.sampling.backends.vllm.pack import ONEDNN_CACHE_SIZE
from vectorlm.sampling.weights.quantise import quantise, scales_of

Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


class Int8Linear(OnlineLinearBase):
    """A linear layer that quantises its 16-bit weights once all of them are loaded."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantise the rows, and prepare the product with them."""
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        rows = layer.weight.data
        # The scale of a whole row, of which this worker of a parallel engine may have a part.
        is_cut = _is_tp_sharded(layer, reduces_output_dim=False)
        scales = amax_for_tp_weight_quant(scales_of(rows, torch.int8), is_cut)
        replace_parameter(layer, "weight", quantise(rows, scales, torch.int8).t())
        replace_parameter(layer, "weight_scale", scales)
        layer.input_scale = None
        require_right_products(rows.device, rows.dtype)
        self.renew(layer)
        layer._already_called_process_weights_after_loading = True

    def renew(self, layer: Any) -> None:
        """Prepare the product with the layer's present weights."""
        layer.int8_product = None  # Frees the old one first.
        layer.int8_product = product(layer.weight.data, layer.weight_scale.data, layer.params_dtype)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W + b."""
        found: torch.Tensor = layer.int8_product(x.reshape(-1, x.shape[-1]), bias)
        return found.reshape(*x.shape[:-1], found.shape[-1])


@register_quantization_config("int8")
class Int8Config(QuantizationConfig):
    """The layers that `int8` quantises: linear layers, without the output layer."""

    @classmethod
    def get_name(cls) -> Any:
        """Return the name for `quantization`."""
        return "int8"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return the dtypes of activations."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the least CUDA capability."""
        return 75

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        """Return no files: weights are quantised while they are loaded."""
        return []

    @classmethod
    def from_config(cls, config: Any) -> Int8Config:
        """Return the configuration, which has no options."""
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return the method of a linear layer; None for layers that stay as they are."""
        if isinstance(layer, RoutedExperts):
            raise EngineError(
                "quantization='int8' does not work with experts. Leave it out, or use another model."
            )
        return Int8Linear() if isinstance(layer, LinearBase) else None


def product(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> Product:
    """Return the product of vLLM with `weight`, int8 [K, N] in the order of its transpose, and `scales` [N, 1].

    On CPU oneDNN copies the weight in its own order, and reads the scales at each call.
    """
    if weight.is_cuda:

        def multiply_on_cuda(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            rows, row_scales, _ = ops.scaled_int8_quant(x.contiguous(), None, None, symmetric=True)
            found: torch.Tensor = ops.cutlass_scaled_mm(rows, weight, row_scales, scales, x.dtype, bias)
            return found

        return multiply_on_cuda
    handler = ops.create_onednn_scaled_mm(weight, scales, dtype, True, False, ONEDNN_CACHE_SIZE)

    def multiply(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows, row_scales, _ = ops.onednn_scaled_int8_quant(x.contiguous(), None, None, True)
        # The handler has no reference to the scales, whose memory it reads.
        found = x.new_empty(len(x), len(scales))
        ops.onednn_scaled_mm(handler, rows, found, row_scales, None, None, bias)
        return found

    return multiply


@functools.cache
def require_right_products(device: torch.device, dtype: torch.dtype) -> None:
    """Raise `EngineError` if products of the largest numbers are wrong here.

    Processors with AVX2 or AVX-512 but without VNNI add pairs of 8-bit products in 16 bits, which saturate.
    """
    size = 64
    weight = torch.full((size, size), 127, dtype=torch.int8, device=device)
    scales = torch.full((size, 1), 1 / 127, dtype=torch.float32, device=device)
    found = product(weight.t(), scales, dtype)(torch.ones(3, size, dtype=dtype, device=device), None)
    if not torch.allclose(found.float(), torch.full_like(found, size).float(), rtol=0.01):
        raise EngineError(
            f"quantization='int8' computes wrong products on this {device.type}: {found[0, 0].item():g} instead of "
            f"{size}. x86 processors need VNNI (AVX512-VNNI or AVX-VNNI). Use fp8_per_channel, or leave it out."
        )
