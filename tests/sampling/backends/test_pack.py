"""Replacements of vLLM's operations on CPU: packed layers, experts and RMS norms."""

from types import SimpleNamespace

import pytest
import torch

from vectorlm.errors import ChecksumMismatch, WeightMismatch
from vectorlm.sampling.backends.vllm.pack import (
    ACTIVATIONS,
    are_plain,
    check_packed,
    clamped_swiglu,
    derive,
    derived_names,
    mix_experts,
    pack_experts,
    packable_layers,
    require_derivable,
    stale_derived,
    stale_experts,
)
from vectorlm.sampling.backends.vllm.shim import rotate_every_head


class Layer(torch.nn.Module):
    """A linear layer of vLLM's CPU backend: `cpu_linear` may hold other weights than `weight`."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        packed = weight.clone()
        self.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, packed, bias)


class VocabParallelEmbedding(Layer):
    """A layer with the class name of vLLM's embedding table."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_packed_before_its_weights_changed_is_named_however_small_the_step(dtype):
    model = torch.nn.Sequential(Layer(torch.randn(64, 96).to(dtype)), Layer(torch.randn(8, 64).to(dtype)))
    check_packed(model)
    model[1].weight.mul_(1 + 2 * torch.finfo(dtype).eps)
    with pytest.raises(ChecksumMismatch, match=r"\['1'\]"):
        check_packed(model)


def test_a_nan_is_not_taken_for_agreement():
    model = torch.nn.Sequential(Layer(torch.randn(64, 96)))
    model[0].weight.fill_(torch.nan)
    with pytest.raises(ChecksumMismatch):
        check_packed(model)


def test_one_changed_column_is_found_after_some_updates():
    model = torch.nn.Sequential(Layer(torch.randn(64, 96)))
    model[0].weight[:, 17] += 1e-6

    def is_found(seed):
        try:
            check_packed(model, seed)
        except ChecksumMismatch:
            return True
        return False

    assert any(is_found(seed) for seed in range(60))


def test_an_embedding_table_is_packed_only_where_it_is_the_head():
    model = torch.nn.Module()
    model.embed_tokens = VocabParallelEmbedding(torch.randn(8, 4))
    assert [name for name, _ in packable_layers(model)] == []
    model.lm_head = model.embed_tokens
    assert [name for name, _ in packable_layers(model)] == ["embed_tokens"]


class MLAAttention(torch.nn.Module):
    """A layer that keeps the transposed projection too, as vLLM's latent attention does."""

    def __init__(self, drops=False):
        super().__init__()
        self.kv_b_proj = torch.nn.Linear(3, 2, bias=False)
        self.product = torch.nn.Parameter(self.kv_b_proj.weight.detach().t().clone())
        if drops:
            self.kv_b_proj.weight.data = torch.empty(0)

    def process_weights_after_loading(self, dtype):
        self.product.data.copy_(self.kv_b_proj.weight.t())


def test_what_latent_attention_derives_is_made_again_and_compared():
    model = torch.nn.Sequential(MLAAttention())
    assert derived_names(model) == {"0.product"}
    require_derivable(model, torch.float32)
    with torch.no_grad():
        model[0].kv_b_proj.weight.add_(1)
        derive(model, torch.float32)
        assert torch.equal(model[0].product, model[0].kv_b_proj.weight.t())
        assert stale_derived(model, torch.float32) == []
        model[0].product[0, 0] += 1
    assert stale_derived(model, torch.float32) == ["0.product"]


def test_latent_attention_without_its_projection_is_refused_by_name():
    with pytest.raises(WeightMismatch, match="latent attention"):
        require_derivable(torch.nn.Sequential(MLAAttention(drops=True)), torch.float32)


def test_the_clamped_activation_is_vllms():
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import SwigluOAIAndMul

    x = torch.randn(5, 12) * 9
    with set_current_vllm_config(VllmConfig()):
        expected = SwigluOAIAndMul().forward_native(x)
    assert torch.equal(clamped_swiglu(x), expected)


def test_the_rotary_kernel_is_right_for_heads_that_are_slices():
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    rotate_every_head()
    query, key = torch.randn(5, 3, 12)[..., 4:], torch.randn(5, 1, 20)[..., 12:]
    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(8, 8, 64, 10000.0, False, torch.float32)
    places = torch.arange(5) + 2
    expected = rotary.forward_native(places, query.clone(), key.clone())
    for found, wanted in zip(rotary.forward_cpu(places, query, key), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert rotary.forward_cpu(places, query, None)[1] is None


TOKENS, HIDDEN, EXPERTS, CHOICES = 7, 64, 5, 2


class ExpertLayer(torch.nn.Module):
    """A layer of experts of vLLM's CPU backend; `columns` is the size between its two matrices."""

    def __init__(self, columns, dtype=torch.float32):
        super().__init__()
        w13 = torch.randn(EXPERTS, 2 * columns, HIDDEN).to(dtype)
        w2 = torch.randn(EXPERTS, HIDDEN, columns).to(dtype)
        self.w13_weight = torch.nn.Parameter(w13, requires_grad=False)
        self.w2_weight = torch.nn.Parameter(w2, requires_grad=False)
        self.activation = SimpleNamespace(value="silu")
        self.cpu_experts = SimpleNamespace(
            isa="vec", packed=None, w1_bias=None, _intermediate_alignment=lambda: 32
        )


def routed():
    chosen = torch.stack([torch.randperm(EXPERTS)[:CHOICES] for _ in range(TOKENS)])
    return torch.randn(TOKENS, HIDDEN), chosen, torch.rand(TOKENS, CHOICES)


def slowly(x, w13, w2, chosen, shares, bias13=None, bias2=None):
    """Compute token by token and expert by expert, in float64."""
    columns = w2.shape[2]
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for place, expert in enumerate(chosen[token].tolist()):
            both = w13[expert].double() @ row + (0 if bias13 is None else bias13[expert])
            gate, up = both[:columns], both[columns:]
            answer = w2[expert].double() @ (gate * torch.sigmoid(gate) * up)
            answer += 0 if bias2 is None else bias2[expert]
            out[token] += answer * (1.0 if shares is None else shares[token, place].item())
    return out


def test_plain_experts_are_the_sum_of_their_parts():
    x, chosen, shares = routed()
    layer = ExpertLayer(24)
    weights = (layer.w13_weight, layer.w2_weight)
    for given in (shares, None):
        ours = mix_experts(x, weights, (None, None), chosen, given, ACTIVATIONS["silu"])
        torch.testing.assert_close(ours.double(), slowly(x, *weights, chosen, given), rtol=1e-4, atol=1e-3)
    biases = (torch.randn(EXPERTS, 48), torch.randn(EXPERTS, HIDDEN))
    ours = mix_experts(x, weights, biases, chosen, shares, ACTIVATIONS["silu"])
    wanted = slowly(x, *weights, chosen, shares, *biases)
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("columns", [64, 48], ids=["fits", "padded"])
def test_vllms_kernel_computes_with_the_packed_weights(columns):
    from vllm import _custom_ops as ops

    x, chosen, shares = routed()
    layer = ExpertLayer(columns)
    pack_experts(torch.nn.Sequential(layer))
    out = torch.empty_like(x)
    ops.cpu_fused_moe(
        out, x, *layer.cpu_experts.packed, None, None, shares, chosen.to(torch.int32), "silu", "vec"
    )
    wanted = slowly(x, layer.w13_weight, layer.w2_weight, chosen, shares)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [64, 48], ids=["fits", "padded"])
def test_experts_packed_before_their_weights_changed_are_named_however_small_the_step(columns, dtype):
    model = torch.nn.Sequential(ExpertLayer(columns, dtype), ExpertLayer(columns, dtype))
    pack_experts(model)
    assert stale_experts(model, torch.Generator().manual_seed(0)) == []
    model[1].w2_weight.mul_(1 + 2 * torch.finfo(dtype).eps)
    with pytest.raises(ChecksumMismatch, match=r"\['1'\]"):
        check_packed(model)
    pack_experts(model)
    check_packed(model)


def test_one_changed_expert_is_found_after_some_updates():
    model = torch.nn.Sequential(ExpertLayer(32))
    pack_experts(model)
    model[0].w13_weight[3, 5, 7] += 1e-6
    found = [stale_experts(model, torch.Generator().manual_seed(seed)) for seed in range(20)]
    assert ["0"] in found


def test_experts_are_plain_where_their_kernel_takes_the_checkpoints_order():
    layer = ExpertLayer(32)
    assert are_plain(layer)
    layer.activation.value = "swigluoai"
    assert are_plain(layer)
    layer.activation.value = "relu2_no_mul"
    assert not are_plain(layer)
    for backend, plain in {"TRITON": True, "FLASHINFER_CUTLASS": False}.items():
        method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=backend))
        assert are_plain(SimpleNamespace(quant_method=method)) == plain


@pytest.fixture(scope="module")
def ops():
    from vllm import ir
    from vllm.platforms import current_platform

    from vectorlm.sampling.backends.vllm.pack import use_norm_kernel

    current_platform.import_kernels()
    use_norm_kernel()
    use_norm_kernel()  # Each engine in a process calls this function.
    return ir.ops


def float64_norm(x, weight, epsilon):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


@pytest.mark.parametrize("size", [8, 24, 512])
def test_norms_are_right(ops, size):
    x, residual, weight = torch.randn(5, size), torch.randn(5, size), torch.randn(size)
    assert ops.rms_norm.dispatch(x, weight, 1e-5).provider == "vectorlm_cpu"
    # fp32 numbers around 1 round by this much.
    torch.testing.assert_close(
        ops.rms_norm(x, weight, 1e-5).double(), float64_norm(x, weight, 1e-5), atol=2e-6, rtol=2e-6
    )
    total = x + residual
    normed, kept = ops.fused_add_rms_norm.maybe_inplace(x.clone(), residual.clone(), weight, 1e-5)
    torch.testing.assert_close(normed.double(), float64_norm(total, weight, 1e-5), atol=2e-6, rtol=2e-6)
    assert torch.equal(kept, total)


def test_what_the_kernel_cannot_do_is_left_to_vllm(ops):
    weight = torch.randn(16)
    rows = torch.randn(4, 32)[:, :16]
    for x, scale, width in [
        (rows, weight, None),  # not contiguous
        (torch.randn(4, 12), torch.randn(12), None),
        (torch.randn(4, 16).bfloat16(), weight.bfloat16(), None),
        (torch.randn(4, 16), weight.bfloat16(), None),
        (torch.randn(4, 16), None, None),
        (torch.randn(4, 16), weight, 8),
    ]:
        assert ops.rms_norm.dispatch(x, scale, 1e-5, width).provider == "native"
        other = x.clone() if x is not rows else rows
        assert ops.fused_add_rms_norm.dispatch(x, other, scale, 1e-5, width).provider == "native"
    assert ops.fused_add_rms_norm.dispatch(torch.randn(4, 16), rows, weight, 1e-5).provider == "native"
    found = ops.rms_norm(rows, weight, 1e-5)
    torch.testing.assert_close(found.double(), float64_norm(rows, weight, 1e-5), atol=2e-6, rtol=2e-6)
