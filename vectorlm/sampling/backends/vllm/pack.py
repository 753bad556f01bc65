"""vLLM's packed layers on CPU: keep the plain weights, and pack again when they change.

vLLM puts the weights of linear layers and experts into its kernels' order at load time and throws the plain ones away;
writing to them later changes nothing, silently. `keep_plain_weights` stops that; `pack` does the same work when we say
so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vectorlm.errors import ChecksumMismatch, WeightMismatch

ONEDNN_CACHE_SIZE = 32
"""Shapes that one layer keeps compiled products for; vLLM's own choice."""

PROBED_COLUMNS = 8
"""Columns of each packed weight that one check reads back."""

PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "NoneType")
"""How vLLM keeps weights that lie in memory as the checkpoint has them."""

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
}
"""By vLLM's names; those that are multiplied with a second projection."""

PROBED_EXPERTS = 2
"""Experts of each layer that one check packs again."""


def keep_plain_weights() -> None:
    """Make vLLM leave the weights of linear layers and experts as they are; call before the engine is built.

    vllm 0.26 to 0.32: ``dispatch_cpu_unquantized_gemm`` is looked up at each call. Delete when vLLM packs behind a
    parameter that can still be written to.
    """
    from vllm.model_executor.layers import utils

    def leave_plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = functional.linear

    utils.dispatch_cpu_unquantized_gemm = leave_plain
    keep_plain_experts()


def packable_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers with a matrix product that oneDNN can do, with their names."""
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
        # The old product first: its memory is there for the new one, and need not be asked of the kernel.
        layer.cpu_linear = functional.linear
        try:
            layer.cpu_linear = _product(ops.create_onednn_mm(layer.weight.t(), ONEDNN_CACHE_SIZE))
        except RuntimeError:
            continue
    pack_experts(model)


def _product(handler: Any) -> Callable[..., torch.Tensor]:
    from vllm import _custom_ops as ops

    return lambda x, weight, bias: ops.onednn_mm(handler, x, bias)


def check_packed(model: torch.nn.Module, seed: int = 0) -> None:
    """Read columns of every packed weight back, and raise `ChecksumMismatch` unless the plain weight has the same bits.

    A product with a unit vector is a column of the weight, and no rounding is involved: everything else it adds is
    zero. `seed` chooses the columns; another one at each update, so that in time all are read.
    """
    generator = torch.Generator().manual_seed(seed)
    stale = []
    for name, layer in packable_layers(model):
        width = layer.weight.shape[1]
        count = min(PROBED_COLUMNS, width)
        # Neighbours, which lie in one line of the cache in each row.
        block = int(torch.randint(-(-width // count), (), generator=generator))
        columns = slice(start := min(block * count, width - count), start + count)
        probe = layer.weight.new_zeros(count, width)
        probe[:, columns].fill_diagonal_(1.0)
        packed = layer.cpu_linear(probe, layer.weight, None)
        found, expected = packed.t(), layer.weight[:, columns]
        if not torch.equal(found, expected):
            # Zero times NaN is NaN: of a row with one that was let in (check_finite=False) no number comes back.
            sound = layer.weight.isfinite().all(dim=1)
            if not torch.equal(found[sound], expected[sound]) or found[~sound].isfinite().any():
                stale.append(name)
    stale += stale_experts(model, generator)
    if stale:
        raise ChecksumMismatch(
            f"packed weights of {len(stale)} layers are not those that were sent: {stale}."
        )


def require_plain_layers(model: torch.nn.Module) -> None:
    """Refuse layers that vLLM rearranges after loading: bytes written to their weights would mean something else."""
    odd = {
        f"{type(module).__name__} ({method})"
        for module in model.modules()
        if (method := type(getattr(module, "quant_method", None)).__name__) not in PLAIN_METHODS
        and not (method == "UnquantizedFusedMoEMethod" and are_plain(module))
    }
    if odd:
        raise WeightMismatch(
            f"this engine cannot take new weights: vLLM rearranges the weights of {', '.join(sorted(odd))} when it "
            "loads them. Use an unquantised model; for experts on CUDA, moe_backend='triton'."
        )


def require_no_latent_attention(model: torch.nn.Module) -> None:
    """Refuse latent attention (MLA): vLLM multiplies two of its weights when it loads them, and keeps the product."""
    if any(type(module).__name__ == "MLAAttention" for module in model.modules()):
        raise WeightMismatch(
            "this engine cannot take new weights: the model has latent attention (MLA, as of DeepSeek-V2 and V3), of "
            "which vLLM keeps products of weights that no update fills. VLLM_MLA_DISABLE=1 computes it plainly."
        )


def keep_plain_experts() -> None:
    """Make vLLM leave the weights of experts as they are when it loads a model; call before the engine is built.

    vllm 0.32: ``CPUUnquantizedExperts``. Where it does not exist, experts are refused when the receiver is made.
    """
    try:
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    except ImportError:
        return
    kernel: Any = getattr(cpu_moe, "CPUUnquantizedExperts", None)
    if kernel is None:
        return
    multiply_packed = kernel.apply

    def leave_plain(experts: Any, layer: Any) -> None:
        experts.packed = None
        layer.cpu_experts = experts

    def apply(experts: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, **rest: Any) -> None:
        if experts.packed is not None:
            w1, w2 = experts.packed
            multiply_packed(experts, output=output, hidden_states=hidden_states, w1=w1, w2=w2, **rest)
            return
        weights = None if rest["apply_router_weight_on_input"] else rest["topk_weights"]
        biases = (experts.w1_bias, experts.w2_bias)
        activation = ACTIVATIONS[rest["activation"].value]
        output.copy_(mix_experts(hidden_states, (w1, w2), biases, rest["topk_ids"], weights, activation))

    kernel.process_weights_after_loading = leave_plain
    kernel.apply = apply


def mix_experts(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    chosen: torch.Tensor,
    shares: torch.Tensor | None,
    activation: Activation,
) -> torch.Tensor:
    r"""Compute :math:`\sum_k s_{tk} W^{down}_{e_{tk}} (a(W^{gate}_{e_{tk}} x_t) \odot W^{up}_{e_{tk}} x_t)`.

    *Source*: Shazeer et al. 2017, arXiv 1701.06538, eq. 1, with the gated experts of Shazeer 2020, arXiv 2002.05202.

    Args:
        x: Tokens, [T, H].
        weights: Gate and up, one after the other, [E, 2 I, H]; down, [E, H, I].
        biases: [E, 2 I] and [E, H], or None.
        chosen: The experts of each token, int [T, K].
        shares: Their shares, [T, K]; None where the tokens carry them already.
        activation: a.

    Returns:
        [T, H], in the dtype of `x`, summed in float32.
    """
    (gate_up, down), (gate_up_bias, down_bias) = weights, biases
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        bias = None if gate_up_bias is None else gate_up_bias[expert]
        gate, up = functional.linear(x[tokens], gate_up[expert], bias).chunk(2, dim=-1)
        bias = None if down_bias is None else down_bias[expert]
        part = functional.linear(activation(gate) * up, down[expert], bias).float()
        total.index_add_(0, tokens, part if shares is None else part * shares[tokens, places, None])
    return total.to(x.dtype)


def are_plain(layer: Any) -> bool:
    """Whether the weights of vLLM's layer `layer` lie in memory as the checkpoint has them.

    On CPU `keep_plain_experts` sees to it; of the kernels for other devices the Triton one takes them as they are.
    """
    if hasattr(layer, "cpu_experts"):
        return layer.activation.value in ACTIVATIONS
    backend = getattr(layer.quant_method, "unquantized_backend", None)
    return getattr(backend, "name", "") == "TRITON"


def expert_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers of experts that compute on CPU, with their names."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "cpu_experts"))


def pack_experts(model: torch.nn.Module) -> None:
    """Give every layer of experts weights in its kernel's order, made from the plain ones as they are now."""
    for _, layer in expert_layers(model):
        if not (_missing_columns(layer) and layer.cpu_experts.w1_bias is not None):
            layer.cpu_experts.packed = _packed(layer, slice(None))


def stale_experts(model: torch.nn.Module, generator: torch.Generator) -> list[str]:
    """Name the layers with packed weights that differ from the plain ones, judged by a few experts, bit by bit."""
    stale = []
    for name, layer in expert_layers(model):
        if layer.cpu_experts.packed is None:
            continue
        probed = torch.randint(len(layer.w2_weight), (PROBED_EXPERTS,), generator=generator)
        held = [packed[probed] for packed in layer.cpu_experts.packed]
        # The packed order is a plain permutation, so that packing the same weights again gives the same bits.
        if not all(map(torch.equal, held, _packed(layer, probed))):
            stale.append(name)
    return stale


def _packed(layer: Any, experts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm import _custom_ops as ops

    gate_up, down = layer.w13_weight[experts], layer.w2_weight[experts]
    if missing := _missing_columns(layer):
        # Columns of zeros, which the activation keeps at zero: the kernel takes multiples of 32 only.
        gate_up = functional.pad(gate_up.unflatten(1, (2, -1)), (0, 0, 0, missing)).flatten(1, 2)
        down = functional.pad(down, (0, missing))
    isa = layer.cpu_experts.isa
    gate_up, down = gate_up.contiguous(), down.contiguous()
    return ops.cpu_prepack_moe_weight(gate_up, isa), ops.cpu_prepack_moe_weight(down, isa)


def _missing_columns(layer: Any) -> int:
    return -layer.w2_weight.shape[2] % layer.cpu_experts._intermediate_alignment()


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
