"""vLLM's own C++ kernel for RMS norms, on CPU too."""

from __future__ import annotations

import torch
from torch import Tensor

PROVIDER = "vectorlm_cpu"
"""The name under which vLLM chooses between kernels."""
VECTOR_SIZE = 8
"""Numbers that the kernel takes at a time."""


def use_norm_kernel() -> None:
    """Let norms in fp32 take the kernel; call in each worker on CPU once it is initialised.

    vllm 0.32 builds the kernel for CPU but registers it for GPUs alone, and computes norms there from single torch
    operations: ten times as long for 64 rows of 512, a tenth of a decoding step of 36 million parameters. Only fp32:
    in 16 bits the kernel rounds once where a transformers model rounds twice. Delete when ``vllm.kernels.vllm_c``
    supports CPU.
    """
    try:
        from vllm.ir import ops
    except ImportError:
        return
    if PROVIDER not in ops.rms_norm.impls:
        ops.rms_norm.register_impl(PROVIDER, supports_args=_fits)(rms_norm)
        register = ops.fused_add_rms_norm.register_impl
        register(PROVIDER, supports_args=_both_fit, inplace=True)(fused_add_rms_norm)
    for op in (ops.rms_norm, ops.fused_add_rms_norm):
        op.set_default([PROVIDER, "native"])


# Their signatures are vLLM's.
def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """Return the norm of each row of `x`, times `weight`."""
    output = torch.empty_like(x)
    torch.ops._C.rms_norm(output, x, weight, epsilon)
    return output


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Add `x` to `x_residual`, and write the norm of the sum into `x`."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def _fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    is_fp32 = weight is not None and x.dtype == weight.dtype == torch.float32
    # The kernel takes rows as they follow each other in memory.
    return is_fp32 and variance_size is None and x.is_contiguous() and x.shape[-1] % VECTOR_SIZE == 0


def _both_fit(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    same = x_residual.is_contiguous() and x_residual.dtype == x.dtype
    return same and _fits(x, weight, epsilon, variance_size)
