"""Rows in 8 bits: their numbers, the places of rows and scales in an engine, and refused models."""

import pytest
import torch

from vectorlm.errors import WeightMismatch
from vectorlm.sampling.weights.plan import TensorSpec
from vectorlm.sampling.weights.quantise import FORMATS, is_plain, quantise, scales_of
from vectorlm.sampling.weights.receive import match_tensors

ROWS = torch.tensor([[1.0, -2.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16)


def test_the_numbers_are_those_on_paper():
    scales = scales_of(ROWS, torch.int8)
    assert scales[0, 0].item() == torch.tensor(2 / 127).item()
    # 63.5 rounds to the even number.
    assert quantise(ROWS, scales, torch.int8).tolist() == [[64, -127, 32, 0], [0, 0, 0, 0]]
    scales = scales_of(ROWS, torch.float8_e4m3fn)
    assert scales.tolist() == torch.tensor([[2 / 448], [1 / (448 * 512)]]).tolist()
    assert quantise(ROWS, scales, torch.float8_e4m3fn).float().tolist() == [[224, -448, 112, 0], [0] * 4]


@pytest.mark.parametrize("dtype", FORMATS)
def test_any_rank_computes_its_rows_as_if_it_had_all(dtype):
    rows = torch.randn(37, 24, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole, scales = quantise(rows, scales_of(rows, dtype), dtype), scales_of(rows, dtype)
    for sizes in ((37,), (10, 27), (1, 1, 35)):
        parts = rows.split(sizes)
        assert torch.equal(torch.cat([scales_of(part, dtype) for part in parts]), scales)
        quantised = [quantise(part, scales_of(part, dtype), dtype) for part in parts]
        assert torch.equal(torch.cat(quantised).view(torch.uint8), whole.view(torch.uint8))
    error = (whole.float() * scales - rows.float()).abs() / scales
    assert error.max() <= (0.501 if dtype == torch.int8 else 16.001)


@pytest.mark.slow
def test_fp8_has_the_bits_of_vllm():
    from vllm.model_executor.layers.quantization.online.fp8 import _fp8_channel_scale, _fp8_quant_per_channel

    dtype = torch.float8_e4m3fn
    rows = torch.randn(300, 200, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)
    rows[7] = 0
    theirs = _fp8_channel_scale(rows.abs().amax(-1, keepdim=True))
    assert torch.equal(scales_of(rows, dtype), theirs)
    found = quantise(rows, theirs, dtype).view(torch.uint8)
    assert torch.equal(found, _fp8_quant_per_channel(rows, theirs).view(torch.uint8))


class Fused(torch.nn.Module):
    """An engine's layer, [K, N] in int8, that holds two tensors of a checkpoint one after the other."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(5, 4, dtype=torch.int8).t(), requires_grad=False)
        self.weight.weight_loader = lambda parameter, tensor, place: parameter.data[place].copy_(tensor)
        self.weight_scale = torch.nn.Parameter(torch.zeros(5, 1), requires_grad=False)
        self.params_dtype = torch.bfloat16


class Model(torch.nn.Module):
    def __init__(self, change=lambda tensor: tensor):
        super().__init__()
        self.fused, self.change = Fused(), change
        self.norm = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name == "norm":
                parameters["norm"].data.copy_(tensor)
            else:
                weight = parameters["fused.weight"]
                weight.weight_loader(weight, self.change(tensor), slice(0, 2) if name == "q" else slice(2, 5))


MANIFEST = [TensorSpec("q", (2, 4)), TensorSpec("k", (3, 4)), TensorSpec("norm", (4,))]


def test_rows_and_scales_go_where_the_loader_puts_rows():
    model = Model()
    weight = model.fused.weight
    plan, unfilled = match_tensors(model, MANIFEST)
    assert model.fused.weight is weight
    assert not unfilled
    places = {copy.source: (copy.parameter, copy.parameter_view.offset) for copy in plan.copies}
    assert places["k"] == ("fused.weight", 2 * 4)
    assert places["k scale"] == ("fused.weight_scale", 2)
    assert plan.quantised.keys() == {"q", "k", "q scale", "k scale"}
    assert plan.quantised["k scale"].source == "k"
    assert (plan.quantised["q"].dtype, plan.quantised["q"].rounded_to) == ("int8", "bfloat16")


def test_a_layer_whose_rows_are_the_trainers_columns_is_refused():
    manifest = [TensorSpec("q", (4, 2)), TensorSpec("k", (4, 3)), TensorSpec("norm", (4,))]
    with pytest.raises(WeightMismatch, match="'q'"):
        match_tensors(Model(lambda tensor: tensor.t()), manifest)


def test_a_loader_that_computes_is_refused():
    with pytest.raises(WeightMismatch, match="'q'"):
        match_tensors(Model(lambda tensor: 2 * tensor), MANIFEST)


def test_rearranged_weights_are_not_plain():
    layer = Fused()
    assert is_plain(layer)
    layer.weight_scale = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    assert not is_plain(layer)
    layer = Fused()
    layer.weight = torch.nn.Parameter(torch.zeros(4, 5, dtype=torch.int8), requires_grad=False)
    assert not is_plain(layer)
