"""Arithmetic of exact mode: its bits depend neither on the other rows of a batch nor on the number of threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vectorlm.errors import ConfigError

ROWS, COLUMNS, DEPTH = 16, 16, 512
"""Block of rows, block of columns, and longest sum. A product of whole blocks, with sums up to this length, has the
same bits in every batch (MKL, float32)."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Do what `torch.nn.functional.linear` does; each row of the result depends on its own row of `x` alone.

    MKL has other kernels for few rows (below 4 or 16, by processor), and for the last columns if their number is not a
    multiple of 16. They add in another order, and threads split all dimensions. Therefore rows are padded, the last
    columns are a separate product, and long sums are several products.
    """
    rows = x.reshape(-1, x.shape[-1])
    num_rows = len(rows)
    if num_rows % ROWS:
        rows = F.pad(rows, (0, 0, 0, -num_rows % ROWS))
    first, *more = zip(rows.split(DEPTH, dim=1), weight.split(DEPTH, dim=1), strict=True)
    found = _product(*first, bias)
    for part in more:
        found += _product(*part)
    return found[:num_rows].view(*x.shape[:-1], len(weight))


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rest = len(weight) % COLUMNS
    if not rest:
        return F.linear(rows, weight, bias)
    whole = len(weight) - rest
    first, last = (None, None) if bias is None else (bias[:whole], F.pad(bias[whole:], (0, COLUMNS - rest)))
    found = F.linear(rows, F.pad(weight[whole:], (0, 0, 0, COLUMNS - rest)), last)[:, :rest]
    return torch.cat([F.linear(rows, weight[:whole], first), found], dim=1) if whole else found


def silu(x: Tensor) -> Tensor:
    """Compute SiLU from operations that round every element alike; torch's SiLU rounds differently at ends of rows."""
    return x / (1 + torch.exp(-x))


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute GELU's approximation by tanh from operations that round every element alike."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))


class _WithBits(torch.autograd.Function):
    """The values of one tensor with the gradient of another, which equals it up to rounding."""

    @staticmethod
    def forward(ctx: Any, plain: Tensor, values: Tensor) -> Tensor:
        return values.view_as(plain)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def with_bits(values: Callable[[], Tensor], plain: Callable[[], Tensor]) -> Tensor:
    """Return the result of `values` with the gradient of `plain`."""
    found = plain() if torch.is_grad_enabled() else None
    with torch.no_grad():
        computed = values()
    return computed if found is None or not found.requires_grad else _WithBits.apply(found, computed)


class _Arithmetic(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = partial(func, *args, **(kwargs or {}))
        if func is F.linear:
            return linear(*args, **(kwargs or {}))
        if func is F.silu:
            return with_bits(lambda: silu(args[0]), plain)
        if func is F.gelu:
            if (kwargs or {}).get("approximate") != "tanh":
                raise ConfigError(
                    "exact cannot compute GELU, only its approximation by tanh. Choose another model."
                )
            return with_bits(lambda: gelu_tanh(args[0]), plain)
        return plain()


def exactly(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with this module's products and activations in place of torch's; gradients stay torch's."""
    with _Arithmetic():
        return forward(*args, **kwargs)


def route(
    hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """Return the shares [T, K] and the numbers [T, K] of the experts of each token, as transformers computes them.

    It takes the arguments of vLLM's ``custom_routing_function``.
    """
    shares, chosen = torch.softmax(gating_output, dim=-1, dtype=torch.float32).topk(topk, dim=-1)
    return shares / shares.sum(dim=-1, keepdim=True) if renormalize else shares, chosen
