"""Log-probabilities and entropies of tokens, without ever holding a float32 copy of all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from vectorlm.algorithms.support import WHOLE, Support, truncate

Head = Callable[[torch.Tensor], torch.Tensor]
EntropyKind = Literal["none", "value", "gradient", "collision"]
"""Whether entropies are computed, and with gradient; `collision` means sums of squared probabilities in their place."""
Comparison = Callable[[slice, torch.Tensor], torch.Tensor]
"""From the places of n targets and the policy's log-probabilities there, [n, V], to K numbers of each, [n, K]."""


class TokenValues(NamedTuple):
    """What is known of some tokens, float32 of one shape each."""

    logprobs: torch.Tensor
    entropies: torch.Tensor
    """Of the distributions that the tokens were drawn from, in nats; 0 where they were not asked for."""
    outside: torch.Tensor
    """1 for tokens outside the support, which has them because they were drawn (`truncate`); else 0."""
    compared: torch.Tensor | None = None
    """What `compare` made of each distribution, with one more dimension, K; None without it."""


def token_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: float = 1.0,
    chunk_tokens: int = 2048,
    *,
    head: Head | None = None,
) -> torch.Tensor:
    """Return log softmax(logits / temperature) of each token, float32 [B, T] with gradient.

    ``logprobs[b, t]`` belongs to ``token_ids[b, t]``: it is read from the logits of position t - 1. The first token of
    a row has no such position, and its entry is 0.

    Args:
        logits: float [B, T, V]; with `head`, the hidden states [B, T, H] before the output layer.
        token_ids: int64 [B, T].
        temperature: The sampling temperature; ValueError unless it is above 0.
        chunk_tokens: Tokens computed at a time: at most [chunk_tokens, V] float32 numbers are held, and the backward
            computes them again.
        head: The model's output layer, for hidden states.
    """
    # A view of all positions, not a copy without the last ones; align drops the results of those.
    targets = token_ids.roll(-1, dims=1).flatten()
    found = token_values(logits.flatten(0, 1), targets, temperature, chunk_tokens, head=head)
    return align(found.logprobs.view(token_ids.shape))


def entropy(
    logits: torch.Tensor, temperature: float = 1.0, chunk_tokens: int = 2048, *, head: Head | None = None
) -> torch.Tensor:
    """Return the entropy of the distribution that each token was drawn from, in nats, float32 [B, T] with gradient.

    ``entropy[b, t]`` is of softmax(logits[b, t - 1] / temperature); arguments as for `token_logprobs`.
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
    """Return log softmax(scores / temperature) of one target for each of N states, and the entropy of that softmax.

    With a `support` that is not whole, or with `bitmasks`, the softmax is over the tokens that these keep.

    Args:
        states: float [N, V], the scores; with `head`, what it takes, [N, H].
        targets: int64 [N].
        temperature: ValueError unless it is above 0.
        chunk_tokens: States computed at a time, as for `token_logprobs`.
        places: int64 [N], which of more states are meant; None for all, in their order.
        head: The model's output layer.
        entropy: Whether the entropies are computed, else 0, and whether with gradient.
        support: Which tokens the targets were drawn from.
        bitmasks: int32 [N, ceil(V / 32)], which of all tokens a grammar allowed, as bits; None for all.
        compare: What else is made of each softmax.

    Returns:
        float32 [N] each; with `compare`, its numbers too, [N, K].
    """
    if temperature <= 0:
        raise ValueError(
            f"temperature={temperature} must be above 0: greedy decoding has no probabilities. Use 1.0."
        )

    def of_chunk(start: int) -> tuple[torch.Tensor, ...]:
        chunk = slice(start, start + chunk_tokens)
        picked = states[chunk] if places is None else states[places[chunk]]
        scores = picked if head is None else head(picked)
        # Half precision loses digits of log-probabilities that losses need; float64 is kept.
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        scores = scores if temperature == 1.0 else scores / temperature
        outside = scores.new_zeros(len(scores))
        if not support.is_whole or bitmasks is not None:
            allowed = None if bitmasks is None else bitmasks[chunk]
            scores, is_outside = truncate(scores, targets[chunk], support, allowed)
            outside = is_outside.to(scores.dtype)
        logprobs = torch.log_softmax(scores, dim=-1)
        del scores  # As large as the log-probabilities: entropies need the room.
        chosen = logprobs.gather(-1, targets[chunk, None])[:, 0]
        # Last, because a backward pass stops computing a chunk again once it has what it needs.
        found = (chosen, _entropy(logprobs, entropy), outside)
        return found if compare is None else (*found, compare(chunk, logprobs))

    starts = range(0, max(len(targets), 1), chunk_tokens)
    # The backward pass begins with the last chunk, which need not be computed again.
    *again, last = starts
    parts = [
        checkpoint(of_chunk, start, use_reentrant=False) if torch.is_grad_enabled() else of_chunk(start)
        for start in again
    ]
    return TokenValues(*(torch.cat(each) for each in zip(*parts, of_chunk(last), strict=True)))


def _entropy(logprobs: torch.Tensor, kind: EntropyKind) -> torch.Tensor:
    """Return the entropies of log-probabilities [N, V], float [N]."""
    if kind == "none":
        return logprobs.new_zeros(len(logprobs))
    logprobs = logprobs if kind == "gradient" else logprobs.detach()
    if kind == "collision":
        return (2 * logprobs).exp().sum(dim=-1)
    # A token that cannot be drawn adds 0, not 0 times -inf; neither to the gradient.
    finite, probabilities = logprobs.masked_fill(logprobs == -torch.inf, 0.0), logprobs.exp()
    return -(probabilities * finite if kind == "gradient" else probabilities.mul_(finite)).sum(dim=-1)


def align(per_position: torch.Tensor) -> torch.Tensor:
    """Give each token [B, T] the value of the position before it; the first token gets 0."""
    return torch.nn.functional.pad(per_position[:, :-1], (1, 0))
