"""Log-probabilities and entropies of tokens, computed without a float32 copy of all logits."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from vectorlm.algorithms.support import WHOLE, Support, truncate
from vectorlm.packages import is_trusted

Head = Callable[[torch.Tensor], torch.Tensor]
EntropyKind = Literal["none", "value", "gradient", "collision"]
"""Whether to compute entropies, and with gradient; `collision` computes sums of squared probabilities instead."""
Places = slice | torch.Tensor
"""Indices of some tokens."""
Comparison = Callable[[Places, torch.Tensor], torch.Tensor]
"""Maps the indices of n targets and the policy's log-probabilities [n, V] to K numbers per target, [n, K]."""


KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TokenValues(NamedTuple):
    """Results for some tokens, float32 tensors of one shape."""

    logprobs: torch.Tensor
    entropies: torch.Tensor
    """Entropies of the distributions that the tokens were sampled from, in nats; 0 if not requested."""
    outside: torch.Tensor
    """1 for sampled tokens that the support would exclude (see `truncate`), else 0."""
    compared: torch.Tensor | None = None
    """Results of `compare`, with one more dimension, K; None without it."""


def compute_head_in_float32(layer: Any) -> None:
    """Let the output layer of a model return float32 logits, for hidden states and weights of any dtype."""
    layer = _inner(layer)
    layer.forward = MethodType(_float32_logits, layer)


def computes_in_float32(layer: Any) -> bool:
    """Return whether `compute_head_in_float32` was called for the layer."""
    return getattr(_inner(layer).forward, "__func__", None) is _float32_logits


def dtype_before(layer: Any, logits: torch.Tensor) -> torch.dtype:
    """Return the dtype in which the model computed the input of its output layer, whose last output is `logits`."""
    return getattr(_inner(layer), "states_dtype", logits.dtype)


def _inner(layer: Any) -> Any:
    """Return the layer inside PEFT's adapters."""
    return getattr(layer, "base_layer", layer)


def _float32_logits(layer: Any, states: torch.Tensor) -> torch.Tensor:
    layer.states_dtype = states.dtype
    return linear(states.float(), layer.weight.float(), None if layer.bias is None else layer.bias.float())


def token_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: float = 1.0,
    chunk_tokens: int = 2048,
    *,
    head: Head | None = None,
) -> torch.Tensor:
    """Return log softmax(logits / temperature) of each token, float32 [B, T] with gradient.

    ``logprobs[b, t]`` belongs to ``token_ids[b, t]``: it is read from the logits at position t - 1. The first token of
    a row has no logits; its entry is 0.

    Args:
        logits: float [B, T, V]; with `head`, the hidden states [B, T, H] before the output layer.
        token_ids: int64 [B, T].
        temperature: The sampling temperature, above 0 (ValueError).
        chunk_tokens: Tokens per chunk: at most [chunk_tokens, V] float32 numbers are in memory; the backward pass
            recomputes them.
        head: The model's output layer, for hidden states.
    """
    # A view of all positions, not a copy without the last ones. align() drops their results.
    targets = token_ids.roll(-1, dims=1).flatten()
    found = token_values(logits.flatten(0, 1), targets, temperature, chunk_tokens, head=head)
    return align(found.logprobs.view(token_ids.shape))


def entropy(
    logits: torch.Tensor, temperature: float = 1.0, chunk_tokens: int = 2048, *, head: Head | None = None
) -> torch.Tensor:
    """Return the entropy of the distribution of each token, in nats, float32 [B, T] with gradient.

    ``entropy[b, t]`` is the entropy of softmax(logits[b, t - 1] / temperature). For the arguments see `token_logprobs`.
    """
    states = logits.flatten(0, 1)
    targets = torch.zeros(len(states), dtype=torch.int64, device=states.device)
    found = token_values(states, targets, temperature, chunk_tokens, head=head, entropy="gradient")
    return align(found.entropies.view(logits.shape[:2]))


def token_values(
    states: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    chunk_tokens: int = 2048,
    *,
    places: torch.Tensor | None = None,
    head: Head | None = None,
    entropy: EntropyKind = "none",
    support: Support = WHOLE,
    bitmasks: torch.Tensor | None = None,
    compare: Comparison | None = None,
) -> TokenValues:
    """Return log softmax(scores / temperature) of one target per state, and the entropy of that softmax.

    A `support` that is not whole, and `bitmasks`, restrict the softmax to the tokens that they keep.

    Args:
        states: float [N, V], the scores; with `head`, its inputs [N, H].
        targets: int64 [N].
        temperature: Above 0 (ValueError).
        chunk_tokens: States per chunk, see `token_logprobs`.
        places: int64 [N], indices into `states`; None for all, in their order.
        head: The model's output layer.
        entropy: ``none`` (entropies are 0), ``value``, ``gradient`` (with gradient), or ``collision`` (the sum of
            squared probabilities instead).
        support: The tokens that the sampler could sample.
        bitmasks: int32 [N, ceil(V / 32)], the tokens that a grammar allowed, as bits; None for all.
        compare: A function of each softmax, whose results are returned too.

    Returns:
        float32 [N] tensors; with `compare`, also its results [N, K].
    """
    if temperature <= 0:
        raise ValueError(
            f"temperature={temperature} must be above 0. Greedy decoding has no probabilities; use 1.0."
        )

    is_plain = support.is_whole and bitmasks is None and compare is None and entropy in ("none", "value")

    def of_chunk(start: int) -> tuple[torch.Tensor, ...]:
        chunk = slice(start, start + chunk_tokens)
        scores = states[chunk] if places is None else states[places[chunk]]
        scores = scores if head is None else head(scores)
        if (
            is_plain
            and scores.dtype in KERNEL_DTYPES
            and is_trusted("log-probabilities", scores.device, _differs)
        ):
            from vectorlm.algorithms.softmax_kernel import chosen_and_entropies

            chosen, spread = chosen_and_entropies(scores, targets[chunk], temperature)
            return chosen, spread, chosen.new_zeros(len(chosen))
        # Losses need more digits than half precision has; float64 stays float64. A second name would keep both alive.
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        outside = torch.zeros(len(scores), dtype=scores.dtype, device=scores.device)
        if is_plain:
            chosen, logprobs, probabilities = _Chosen.apply(scores, targets[chunk], temperature)
            del scores  # Frees memory for the entropies: it is as large as the log-probabilities.
            # Last: a backward pass stops recomputing a chunk once it has the tensors that it needs.
            return chosen, _spread(logprobs, probabilities) if entropy == "value" else outside, outside
        scores = scores if temperature == 1.0 else scores / temperature
        if not support.is_whole or bitmasks is not None:
            allowed = None if bitmasks is None else bitmasks[chunk]
            scores, is_outside = truncate(scores, targets[chunk], support, allowed)
            outside = is_outside.to(scores.dtype)
        logprobs = torch.log_softmax(scores, dim=-1)
        del scores  # Frees memory for the entropies: it is as large as the log-probabilities.
        chosen = logprobs.gather(-1, targets[chunk, None])[:, 0]
        found = (chosen, _entropy(logprobs, entropy), outside)
        return found if compare is None else (*found, compare(chunk, logprobs))

    starts = range(0, max(len(targets), 1), chunk_tokens)
    # The last chunk is not checkpointed, because the backward pass begins with it.
    *again, last = starts
    parts = [
        checkpoint(of_chunk, start, use_reentrant=False) if torch.is_grad_enabled() else of_chunk(start)
        for start in again
    ]
    return TokenValues(*(torch.cat(chunks) for chunks in zip(*parts, of_chunk(last), strict=True)))


def _differs(device: torch.device) -> str:
    from vectorlm.algorithms.softmax_kernel import differs

    return differs(device)


class _Chosen(torch.autograd.Function):
    """The log-probability of a target of each row of scores, with few passes over the scores."""

    @staticmethod
    def forward(
        ctx: Any, scores: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, ...]:
        """Return log-probabilities [N] of the targets; without gradient, all log-probabilities and probabilities."""
        logprobs = torch.log_softmax(scores if temperature == 1.0 else scores / temperature, dim=-1)
        probabilities = logprobs.exp()
        ctx.save_for_backward(probabilities, targets)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(logprobs, probabilities)
        ctx.set_materialize_grads(False)
        return logprobs.gather(-1, targets[:, None])[:, 0], logprobs, probabilities

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, None, None]:
        """Return ``gradient (1[target] - softmax) / temperature``."""
        if gradient is None:
            return None, None, None
        probabilities, targets = ctx.saved_tensors
        gradient = gradient[:, None] / ctx.temperature
        return (probabilities * -gradient).scatter_add_(-1, targets[:, None], gradient), None, None


def _spread(logprobs: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Return the entropies [N] of distributions [N, V], in nats, without gradient."""
    if logprobs.device.type == "cpu":
        spread = -torch.einsum("nv,nv->n", probabilities, logprobs)
        # NaN comes from 0 times -inf, if a model masks tokens.
        if not np.isnan(spread.numpy()).any():
            return spread
    # Four times slower on CPU.
    return torch.special.entr(probabilities).sum(-1)


def _entropy(logprobs: torch.Tensor, kind: EntropyKind) -> torch.Tensor:
    """Return the entropies of log-probabilities [N, V], or the sums that `kind` names, float [N]."""
    if kind == "none":
        return logprobs.new_zeros(len(logprobs))
    logprobs = logprobs if kind == "gradient" else logprobs.detach()
    if kind == "collision":
        return (2 * logprobs).exp().sum(dim=-1)
    # A token of probability 0 must add 0, not 0 times -inf, to the value and to the gradient.
    finite, probabilities = logprobs.masked_fill(logprobs == -torch.inf, 0.0), logprobs.exp()
    return -(probabilities * finite if kind == "gradient" else probabilities.mul_(finite)).sum(dim=-1)


def align(per_position: torch.Tensor) -> torch.Tensor:
    """Give each token [B, T] the value of the position before it; the first token gets 0."""
    return torch.nn.functional.pad(per_position[:, :-1], (1, 0))
