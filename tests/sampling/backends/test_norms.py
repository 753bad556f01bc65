"""RMS norms in fp32 on CPU take vLLM's C++ kernel, and everything else vLLM's own operations."""

import pytest
import torch


@pytest.fixture(scope="module")
def ops():
    from vllm import ir
    from vllm.platforms import current_platform

    from vectorlm.sampling.backends.vllm.pack import use_norm_kernel

    current_platform.import_kernels()
    use_norm_kernel()
    use_norm_kernel()  # Each engine in a process calls it.
    return ir.ops


def float64_norm(x, weight, epsilon):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


@pytest.mark.parametrize("size", [8, 24, 512])
def test_norms_are_right(ops, size):
    x, residual, weight = torch.randn(5, size), torch.randn(5, size), torch.randn(size)
    assert ops.rms_norm.dispatch(x, weight, 1e-5).provider == "vectorlm_cpu"
    # Rounding of fp32 numbers around 1.
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
