"""Keep plain weights in addition to vLLM's packed layers on CPU, and pack again when they change.

vLLM reorders the weights of linear layers and experts for its kernels at load time and discards the plain ones. Later
writes to the parameters silently change nothing. `keep_plain_weights` prevents that; `pack` reorders after an update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vectorlm.errors import ChecksumMismatch, EngineError, WeightMismatch
from vectorlm.sampling import exact
from vectorlm.sampling.settings import why_not_exact
from vectorlm.sampling.weights.inspection import bits_of
from vectorlm.sampling.weights.quantise import is_plain, quantised_layers

ONEDNN_CACHE_SIZE = 32
"""Shapes for which a layer keeps compiled products; vLLM's value."""

PROBED_COLUMNS = 8
"""Columns of each packed weight that one check reads back."""

PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "NoneType")
"""vLLM's classes for weights that have the checkpoint's order in memory."""

Activation = Callable[[torch.Tensor], torch.Tensor]


def _gated(activation: Activation) -> Activation:
    def apply(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up

    return apply


def clamped_swiglu(x: torch.Tensor) -> torch.Tensor:
    r"""Return :math:`g \sigma(1.702 g) (u + 1)`, with gates g at most 7 and u between -7 and 7.

    *Source*: OpenAI 2025, gpt-oss-120b & gpt-oss-20b Model Card, arXiv 2508.10925, sec. 2.2; the constants are those
    of its reference code.

    Args:
        x: g and u, alternating, [T, 2 I].

    Returns:
        [T, I].
    """
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


ACTIVATIONS: dict[str, Activation] = {
    "silu": _gated(functional.silu),
    "gelu": _gated(functional.gelu),
    "gelu_tanh": _gated(functools.partial(functional.gelu, approximate="tanh")),
    "swigluoai": clamped_swiglu,
}
"""Gated activations of the products with gate and up, by vLLM's names."""

PROBED_EXPERTS = 2
"""Experts of each layer that one check packs again."""


def keep_plain_weights() -> None:
    """Make vLLM keep the plain weights of linear layers and experts; call before the engine is built.

    ``dispatch_cpu_unquantized_gemm`` is looked up at each call. Delete when vLLM packs behind a
    parameter that can still be written to.
    """
    from vllm.model_executor.layers import utils

    def leave_plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = functional.linear

    utils.dispatch_cpu_unquantized_gemm = leave_plain
    keep_plain_experts()


def compute_exactly(model: torch.nn.Module, description: Mapping[str, Any]) -> None:
    """Let a model with plain weights compute the same bits in every batch; `description` is its config.

    All operations are torch's, as in transformers: vLLM's kernels of norms and of rotary positions round otherwise. Do
    not call `use_norm_kernel`.

    Raises:
        EngineError: The model cannot be exact.
    """
    if (reason := why_not_exact(description)) is not None:
        raise EngineError(f"{reason}. Choose another model, or build the engine without exact.")
    modules: list[Any] = list(model.modules())
    for module in modules:
        if hasattr(module, "_forward_method"):
            is_activation = "layers.activation" in type(module).__module__
            native = module.forward_native
            module._forward_method = functools.partial(exact.exactly, native) if is_activation else native
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = exact.linear
        if hasattr(module, "cpu_experts"):
            module.cpu_experts.is_exact = True
        if getattr(getattr(module, "router", None), "custom_routing_function", 0) is None:
            module.router.custom_routing_function = exact.route


def packable_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and layers of matrix products that oneDNN supports."""
    heads = {
        id(getattr(module, "base_layer", module))
        for name, module in model.named_modules(remove_duplicate=False)
        if name.endswith("lm_head")
    }
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            # vLLM's LoRA layers forward the attributes of the layer that they wrap.
            continue
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.ndim == 2:
            # An embedding table is a matrix product only if it is the head too.
            if type(module).__name__ == "VocabParallelEmbedding" and id(module) not in heads:
                continue
            yield name, module


def pack(model: torch.nn.Module) -> None:
    """Give every linear layer of `model` a oneDNN product with its present weights.

    Layers that oneDNN does not support on this processor (float16 without AVX512-FP16) stay plain.
    """
    from vllm import _custom_ops as ops

    for _, layer in packable_layers(model):
        # Frees the old product first; the new one can then use its memory.
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
    """Read columns of every packed weight back; raise `ChecksumMismatch` unless the plain weight has the same bits.

    The product with a unit vector is a column of the weight, without rounding, because all other terms are zero. `seed`
    chooses the columns; a new seed at every update covers all of them in time.
    """
    generator = torch.Generator().manual_seed(seed)
    stale = []
    for name, layer in packable_layers(model):
        width = layer.weight.shape[1]
        count = min(PROBED_COLUMNS, width)
        # Adjacent columns share a cache line in each row.
        block = int(torch.randint(-(-width // count), (), generator=generator))
        columns = slice(start := min(block * count, width - count), start + count)
        probe = layer.weight.new_zeros(count, width)
        probe[:, columns].fill_diagonal_(1.0)
        packed = layer.cpu_linear(probe, layer.weight, None)
        found, expected = packed.t(), layer.weight[:, columns]
        if not torch.equal(found, expected):
            # Zero times NaN is NaN, so a row with a NaN (check_finite=False) cannot be read back.
            sound = layer.weight.isfinite().all(dim=1)
            if not torch.equal(found[sound], expected[sound]) or found[~sound].isfinite().any():
                stale.append(name)
    require_none(stale + stale_experts(model, generator))


def require_none(stale: list[str]) -> None:
    """Raise `ChecksumMismatch` if `stale` is not empty; it names rearranged weights that differ from the sent ones."""
    if stale:
        raise ChecksumMismatch(
            f"{len(stale)} weights that vLLM rearranges differ from the weights that were sent: {stale}."
        )


def require_plain_layers(model: torch.nn.Module, may_be_quantised: bool = False) -> None:
    """Raise for layers whose weights vLLM reorders after loading: an update would write to wrong places.

    `may_be_quantised` allows layers with rows in 8 bits and a scale per row.
    """
    quantised = {id(layer) for _, layer in quantised_layers(model) if may_be_quantised and is_plain(layer)}
    odd = {
        f"{type(module).__name__} ({method})"
        for module in model.modules()
        if (method := type(getattr(module, "quant_method", None)).__name__) not in PLAIN_METHODS
        and not (method == "UnquantizedFusedMoEMethod" and are_plain(module))
        and id(getattr(module, "base_layer", module)) not in quantised
    }
    if odd:
        raise WeightMismatch(
            f"this engine cannot take new weights: vLLM reorders the weights of {', '.join(sorted(odd))} when it loads "
            "them. Use an unquantised model; for experts on CUDA, moe_backend='triton'."
        )


def keeps_base(model: torch.nn.Module) -> bool:
    """Return whether layers hold 4-bit words of AWQ or GPTQ, which no update can bring."""
    return any(name.endswith("qweight") for name, _ in model.named_parameters())


def _derived(model: torch.nn.Module) -> Iterator[tuple[str, Any, dict[str, torch.Tensor]]]:
    """Yield layers whose parameters vLLM computes from a projection after loading, with their names and parameters.

    These are the layers of latent attention (MLA, of DeepSeek-V2 and V3).
    """
    for name, module in model.named_modules():
        if type(module).__name__ == "MLAAttention":
            yield name, module, dict(module.named_parameters(prefix=name, recurse=False))


def derived_names(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of the parameters that `derive` computes."""
    return frozenset(name for _, _, parameters in _derived(model) for name in parameters)


def derive(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Recompute the parameters that vLLM computes from others after loading; `dtype` is the model's."""
    for _, layer, _ in _derived(model):
        layer.process_weights_after_loading(dtype)


def stale_derived(model: torch.nn.Module, dtype: torch.dtype) -> list[str]:
    """Recompute the derived parameters, and name the ones whose bits or place in memory change."""
    stale = []
    for name, layer, parameters in _derived(model):
        before = {
            parameter_name: parameter.detach().clone() for parameter_name, parameter in parameters.items()
        }
        layer.process_weights_after_loading(dtype)
        after = dict(layer.named_parameters(prefix=name, recurse=False))
        stale += [
            parameter_name
            for parameter_name, parameter in parameters.items()
            # A captured graph continues to read the old place.
            if after[parameter_name].data_ptr() != parameter.data_ptr()
            or not torch.equal(bits_of(after[parameter_name]), bits_of(before[parameter_name]))
        ]
    return stale


def require_derivable(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Raise if an update could not recompute the derived parameters of the model."""
    # On processors with AMX vLLM drops the projection.
    has_all = all(layer.kv_b_proj.weight.numel() for _, layer, _ in _derived(model))
    if not has_all or stale_derived(model, dtype):
        raise WeightMismatch(
            "this engine cannot take new weights: for latent attention (MLA, of DeepSeek-V2 and V3) vLLM keeps "
            "rearranged weights here that no update can fill. Set VLLM_MLA_DISABLE=1, which keeps the weights "
            "themselves."
        )


def keep_plain_experts() -> None:
    """Make vLLM keep the plain weights of experts; call before the engine is built.

    vllm 0.32: ``CPUUnquantizedExperts``. Without that class, `require_plain_layers` raises for experts.
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
        experts.packed, experts.is_exact = None, False
        layer.cpu_experts = experts

    def apply(experts: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, **rest: Any) -> None:
        if experts.packed is not None:
            w1, w2 = experts.packed
            multiply_packed(experts, output=output, hidden_states=hidden_states, w1=w1, w2=w2, **rest)
            return
        weights = None if rest["apply_router_weight_on_input"] else rest["topk_weights"]
        biases = (experts.w1_bias, experts.w2_bias)
        activation = ACTIVATIONS[rest["activation"].value]
        mix = functools.partial(exact.exactly, mix_experts) if experts.is_exact else mix_experts
        output.copy_(mix(hidden_states, (w1, w2), biases, rest["topk_ids"], weights, activation))

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
        weights: Gate and up, in the order that `activation` takes, [E, 2 I, H]; down, [E, H, I].
        biases: [E, 2 I] and [E, H], or None.
        chosen: The experts of each token, int [T, K].
        shares: Their shares, [T, K]; None if the tokens are already multiplied by them.
        activation: Computes :math:`a(g) \odot u` from the products g and u, [T, 2 I].

    Returns:
        [T, H], in the dtype of `x`, summed in float32.
    """
    (gate_up, down), (gate_up_bias, down_bias) = weights, biases
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        bias = None if gate_up_bias is None else gate_up_bias[expert]
        hidden = activation(functional.linear(x[tokens], gate_up[expert], bias))
        bias = None if down_bias is None else down_bias[expert]
        part = functional.linear(hidden, down[expert], bias).float()
        total.index_add_(0, tokens, part if shares is None else part * shares[tokens, places, None])
    return total.to(x.dtype)


def are_plain(layer: Any) -> bool:
    """Whether the weights of vLLM's `layer` have the checkpoint's order in memory.

    On CPU `keep_plain_experts` keeps the order. On other devices only the Triton kernel does.
    """
    if hasattr(layer, "cpu_experts"):
        return layer.activation.value in ACTIVATIONS
    backend = getattr(layer.quant_method, "unquantized_backend", None)
    return getattr(backend, "name", "") == "TRITON"


def expert_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and layers of experts that compute on CPU."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "cpu_experts"))


def packed_experts(model: torch.nn.Module) -> list[Any]:
    """Return the reordered weights of all experts, which `pack_experts` makes again at each update."""
    return [layer.cpu_experts.packed for _, layer in expert_layers(model)]


def pack_experts(model: torch.nn.Module) -> None:
    """Reorder the present plain weights of all experts for their kernel."""
    for _, layer in expert_layers(model):
        # Zeros cannot be added to a bias, nor to alternating gates and ups.
        is_fixed = layer.cpu_experts.w1_bias is not None or layer.activation.value == "swigluoai"
        if not (_missing_columns(layer) and is_fixed):
            layer.cpu_experts.packed = _packed(layer, slice(None))


def stale_experts(model: torch.nn.Module, generator: torch.Generator) -> list[str]:
    """Name the layers whose packed weights differ from the plain ones, by comparing a few experts bit by bit."""
    stale = []
    for name, layer in expert_layers(model):
        if layer.cpu_experts.packed is None:
            continue
        probed = torch.randint(len(layer.w2_weight), (PROBED_EXPERTS,), generator=generator)
        found = [packed[probed] for packed in layer.cpu_experts.packed]
        # Packing is a permutation, so packing the same weights again gives the same bits.
        if not all(map(torch.equal, found, _packed(layer, probed))):
            stale.append(name)
    return stale


def _packed(layer: Any, experts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm import _custom_ops as ops

    gate_up, down = layer.w13_weight[experts], layer.w2_weight[experts]
    if missing := _missing_columns(layer):
        # The kernel needs a multiple of 32 columns. Zeros stay zero after the activation.
        gate_up = functional.pad(gate_up.unflatten(1, (2, -1)), (0, 0, 0, missing)).flatten(1, 2)
        down = functional.pad(down, (0, missing))
    isa = layer.cpu_experts.isa
    gate_up, down = gate_up.contiguous(), down.contiguous()
    return ops.cpu_prepack_moe_weight(gate_up, isa), ops.cpu_prepack_moe_weight(down, isa)


def _missing_columns(layer: Any) -> int:
    return -layer.w2_weight.shape[2] % layer.cpu_experts._intermediate_alignment()


PROVIDER = "vectorlm_cpu"
"""The kernel's name in vLLM."""
VECTOR_SIZE = 8
"""Elements that the kernel processes at a time."""


def use_norm_kernel() -> None:
    """Use vLLM's norm kernel for fp32 on CPU; call in each worker after its initialisation.

    vllm 0.32 builds the kernel for CPU but registers it for GPUs only. Its torch version takes ten times as long for 64
    rows of 512, a tenth of a decoding step of 36 million parameters. Only fp32: in 16 bits the kernel
    rounds once, a transformers model twice. Delete when ``vllm.kernels.vllm_c`` supports CPU.
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


# The signatures are vLLM's.
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
    # The kernel needs contiguous rows.
    return is_fp32 and variance_size is None and x.is_contiguous() and x.shape[-1] % VECTOR_SIZE == 0


def _both_fit(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    same = x_residual.is_contiguous() and x_residual.dtype == x.dtype
    return same and _fits(x, weight, epsilon, variance_size)
