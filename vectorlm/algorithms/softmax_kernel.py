"""Triton kernels for log-probabilities and entropies on CUDA: one read of the logits forward, one backward."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

BLOCK = 4096
"""Scores that a program reads at a time."""


@triton.jit
def _forward(logits, stride, targets, found, size, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a row's log-probability and entropy; and, for `_backward`, its largest score and sum of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    scores = logits + row * stride
    # Finite, because `highest - new` must be finite.
    highest = -3.0e38
    total = 0.0
    weighted = 0.0
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        score = tl.load(scores + place, mask=place < size, other=-float("inf")).to(tl.float32) * scale
        new = tl.maximum(highest, tl.max(score, axis=0))
        shrink = tl.exp(highest - new)
        exponential = tl.exp(score - new)
        # A score of -inf adds 0, not 0 times -inf.
        product = tl.where(exponential > 0, exponential * (score - new), 0.0)
        weighted = (weighted + total * (highest - new)) * shrink + tl.sum(product, axis=0)
        total = total * shrink + tl.sum(exponential, axis=0)
        highest = new
    of_target = tl.load(scores + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(found + 4 * row, of_target - highest - tl.log(total))
    tl.store(found + 4 * row + 1, tl.log(total) - weighted / total)
    tl.store(found + 4 * row + 2, highest)
    tl.store(found + 4 * row + 3, total)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    logits, stride, targets, found, gradients, result, size, scale, BLOCK: tl.constexpr
):
    """Write ``gradient (1[target] - softmax) scale`` of a row."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    factor = tl.load(gradients + row) * scale
    highest, total = tl.load(found + 4 * row + 2), tl.load(found + 4 * row + 3)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        score = tl.load(logits + row * stride + place, mask=place < size, other=0.0).to(tl.float32) * scale
        probability = tl.exp(score - highest) / total
        value = factor * ((place == target).to(tl.float32) - probability)
        tl.store(result + row * size + place, value.to(result.dtype.element_ty), mask=place < size)


class _ChosenAndEntropies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: torch.Tensor, targets: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = scores if scores.stride(-1) == 1 else scores.contiguous()
        found = torch.empty(len(scores), 4, dtype=torch.float32, device=scores.device)
        with _on(scores):
            _forward[(len(scores),)](scores, scores.stride(0), targets, found, scores.shape[1], scale, BLOCK)
        ctx.save_for_backward(scores, targets, found)
        ctx.scale = scale
        chosen, entropies = found[:, 0].clone(), found[:, 1].clone()
        ctx.mark_non_differentiable(entropies)
        return chosen, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, _: None) -> tuple[torch.Tensor, None, None]:
        scores, targets, found = ctx.saved_tensors
        result = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
        arguments = (scores, scores.stride(0), targets, found, gradient.contiguous(), result, scores.shape[1])
        with _on(scores):
            _backward[(len(scores),)](*arguments, ctx.scale, BLOCK)
        return result, None, None


def chosen_and_entropies(
    scores: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log softmax(scores / temperature) of each row's target, and the entropy of that softmax.

    Args:
        scores: float32, bfloat16 or float16 [N, V].
        targets: int64 [N].
        temperature: Above 0.

    Returns:
        float32 [N] with gradient, and float32 [N] without.
    """
    if not len(scores):
        empty = scores.sum(dim=1, dtype=torch.float32)
        return empty, empty.detach()
    chosen, entropies = _ChosenAndEntropies.apply(scores, targets, 1.0 / temperature)
    return chosen, entropies


def differs(device: torch.device) -> str:
    """Compare the kernels with torch on small tensors; name the first kind that differs, or return an empty text."""
    generator = torch.Generator().manual_seed(0)
    for dtype, size, temperature in (
        (torch.float32, 11, 1.0),
        (torch.bfloat16, BLOCK + 7, 0.7),
        (torch.float16, 2 * BLOCK, 1.0),
    ):
        scores = (4 * torch.randn(5, size, generator=generator)).to(dtype).to(device)
        scores[1, 3] = -torch.inf
        targets = torch.randint(4, size, (5,), generator=generator).to(device)
        weights = torch.randn(5, generator=generator).to(device)
        ours, theirs = scores.clone().requires_grad_(), scores.double().requires_grad_()
        chosen, entropies = chosen_and_entropies(ours, targets, temperature)
        (chosen * weights).sum().backward()
        logprobs = torch.log_softmax(theirs / temperature, dim=-1)
        expected = logprobs.gather(-1, targets[:, None])[:, 0]
        (expected * weights).sum().backward()
        spread = torch.special.entr(logprobs.detach().exp()).sum(-1)
        assert ours.grad is not None
        assert theirs.grad is not None
        found = ((chosen, expected), (entropies, spread), (ours.grad, theirs.grad.to(dtype)))
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        if not all(torch.allclose(x.double(), y.double(), tolerance, tolerance) for x, y in found):
            return f"{dtype}, {size} scores, temperature {temperature}"
    return ""


def _on(tensor: torch.Tensor) -> Any:
    """Return a context in which Triton launches on the tensor's device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
