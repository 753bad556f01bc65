"""Log-probabilities and entropies of tokens, without ever holding a float32 copy of all logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

Head = Callable[[torch.Tensor], torch.Tensor]


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
    targets = token_ids.roll(-1, dims=1).flatten()

    def picked(scores: torch.Tensor, start: int) -> torch.Tensor:
        chosen = scores.gather(-1, targets[start : start + len(scores), None])[:, 0]
        return chosen - torch.logsumexp(scores, dim=-1)

    return _over_chunks(picked, logits, temperature, chunk_tokens, head)


def entropy(
    logits: torch.Tensor, temperature: float = 1.0, chunk_tokens: int = 2048, *, head: Head | None = None
) -> torch.Tensor:
    """Return the entropy of the distribution that each token was drawn from, in nats, float32 [B, T] with gradient.

    ``entropy[b, t]`` is of softmax(logits[b, t - 1] / temperature); arguments as for `token_logprobs`.
    """

    def spread(scores: torch.Tensor, start: int) -> torch.Tensor:
        logprobs = torch.log_softmax(scores, dim=-1)
        # A token that cannot be drawn adds 0, not 0 times -inf; neither to the gradient.
        return -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(dim=-1)

    return _over_chunks(spread, logits, temperature, chunk_tokens, head)


def _over_chunks(
    of_scores: Callable[[torch.Tensor, int], torch.Tensor],
    logits: torch.Tensor,
    temperature: float,
    chunk_tokens: int,
    head: Head | None,
) -> torch.Tensor:
    """Apply `of_scores` to chunks of float32 scores, and give each token the value of the position before it."""
    if temperature <= 0:
        raise ValueError(
            f"temperature={temperature} must be above 0: greedy decoding has no probabilities. Use 1.0."
        )
    num_rows, length = logits.shape[:2]
    # A view of all positions, not a copy without the last ones; align drops the results of those.
    states = logits.flatten(0, 1)

    def of_chunk(chunk: torch.Tensor, start: int) -> torch.Tensor:
        scores = chunk if head is None else head(chunk)
        # Half precision loses digits of log-probabilities that losses need; float64 is kept.
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return of_scores(scores if temperature == 1.0 else scores / temperature, start)

    parts = []
    for start in range(0, len(states), chunk_tokens):
        chunk = states[start : start + chunk_tokens]
        if torch.is_grad_enabled() and chunk.requires_grad:
            parts.append(checkpoint(of_chunk, chunk, start, use_reentrant=False))
        else:
            parts.append(of_chunk(chunk, start))
    flat = torch.cat(parts) if parts else states.new_zeros(0, dtype=torch.float32)
    return align(flat.view(num_rows, length))


def align(per_position: torch.Tensor) -> torch.Tensor:
    """Give each token [B, T] the value of the position before it; the first token gets 0."""
    return torch.nn.functional.pad(per_position[:, :-1], (1, 0))
