from types import SimpleNamespace

import pytest
import torch

from vectorlm.errors import ChecksumMismatch
from vectorlm.sampling.backends.vllm.pack import (
    ACTIVATIONS,
    are_plain,
    check_packed,
    mix_experts,
    pack_experts,
    stale_experts,
)

TOKENS, HIDDEN, EXPERTS, CHOICES = 7, 64, 5, 2


class Layer(torch.nn.Module):
    """A layer of experts as vLLM's CPU backend has it, with `columns` between its two matrices."""

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
    """Do token after token, expert after expert, in float64."""
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
    layer = Layer(24)
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
    layer = Layer(columns)
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
    model = torch.nn.Sequential(Layer(columns, dtype), Layer(columns, dtype))
    pack_experts(model)
    assert stale_experts(model, torch.Generator().manual_seed(0)) == []
    model[1].w2_weight.mul_(1 + 2 * torch.finfo(dtype).eps)
    with pytest.raises(ChecksumMismatch, match=r"\['1'\]"):
        check_packed(model)
    pack_experts(model)
    check_packed(model)


def test_one_changed_expert_is_found_after_some_updates():
    model = torch.nn.Sequential(Layer(32))
    pack_experts(model)
    model[0].w13_weight[3, 5, 7] += 1e-6
    found = [stale_experts(model, torch.Generator().manual_seed(seed)) for seed in range(20)]
    assert ["0"] in found


def test_experts_are_plain_where_their_kernel_takes_the_checkpoints_order():
    layer = Layer(32)
    assert are_plain(layer)
    layer.activation.value = "swigluoai"
    assert not are_plain(layer)
    for backend, plain in {"TRITON": True, "FLASHINFER_CUTLASS": False}.items():
        method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=backend))
        assert are_plain(SimpleNamespace(quant_method=method)) == plain
