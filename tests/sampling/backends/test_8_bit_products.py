"""Products of 8-bit weights in vLLM: correct on this machine, refused if they saturate, and checked after an update."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from vectorlm.errors import ChecksumMismatch
from vectorlm.sampling.backends.vllm.quantised import check_quantised, renew_products
from vectorlm.sampling.backends.vllm.shim import multiply_fp8, multiply_fp8_fast
from vectorlm.sampling.weights.quantise import quantise, scales_of

pytestmark = pytest.mark.slow
PROBE = """
import torch
from vectorlm.sampling.backends.vllm.int8 import require_right_products
require_right_products(torch.device("cpu"), torch.bfloat16)
"""


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def layer(request):
    from vectorlm.sampling.backends.vllm.int8 import Int8Linear

    rows = torch.randn(48, 40, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(request.param)
    rows[3] = 0
    scales = scales_of(rows, torch.int8)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(quantise(rows, scales, torch.int8).t(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
    # The constructor needs an engine's configuration.
    layer.params_dtype, layer.quant_method = request.param, Int8Linear.__new__(Int8Linear)
    renew_products(layer)
    return layer


def test_products_are_those_of_8_bit_numbers(layer):
    x = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(1)).to(layer.params_dtype)
    bias = torch.randn(48).to(layer.params_dtype)
    largest = x.double().abs().amax(-1, keepdim=True) / 127
    rows = (x.double() / largest).round() * largest
    exact = rows @ (layer.weight.double() * layer.weight_scale[:, 0].double()) + bias.double()
    found = layer.quant_method.apply(layer, x, bias)
    # The layer rounds its result to 8 bits.
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-6)


def test_a_product_with_old_weights_or_other_scales_is_noticed(layer):
    check_quantised(layer)
    layer.weight.data.copy_(layer.weight.data.roll(1, 1))
    with pytest.raises(ChecksumMismatch):
        check_quantised(layer)
    renew_products(layer)
    check_quantised(layer)
    layer.weight_scale = torch.nn.Parameter(layer.weight_scale * 1.1, requires_grad=False)
    with pytest.raises(ChecksumMismatch):
        check_quantised(layer)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN's limit is for x86")
def test_a_processor_without_vnni_is_refused():
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-c", PROBE]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "EngineError: quantization='int8'" in found.stderr


def test_every_fp8_number_is_multiplied_exactly():
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    numbers = numbers[~numbers.float().isnan()]
    ones = torch.eye(len(numbers)).to(torch.float8_e4m3fn)
    assert torch.equal(multiply_fp8(ones, numbers[None])[:, 0], numbers.float())
    assert torch.equal(multiply_fp8(numbers[:, None], ones[:1, :1])[:, 0], numbers.float())


def test_fp8_products_have_the_scales_of_rows_and_tokens_and_leave_out_padding():
    from vllm.model_executor.kernels.linear.scaled_mm.pytorch import ChannelWiseTorchFP8ScaledMMLinearKernel

    multiply_fp8_fast()
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 40, generator=draw).mul_(100).to(torch.float8_e4m3fn)
    rows = torch.randn(17, 40, generator=draw).mul_(100).to(torch.float8_e4m3fn)
    scales, row_scales = torch.rand(48, 1, generator=draw), torch.rand(17, 1, generator=draw)
    bias = torch.randn(48, generator=draw).bfloat16()
    found = ChannelWiseTorchFP8ScaledMMLinearKernel.apply_scaled_mm(
        None,
        A=rows,
        B=weight.t(),
        out_dtype=torch.bfloat16,
        As=row_scales,
        Bs=scales,
        bias=bias,
        output_shape=[2, 3, 48],
    )
    exact = (rows.double() * row_scales) @ (weight.double() * scales).t() + bias.double()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact[:6].view(2, 3, 48), rtol=2**-8, atol=1e-2)
