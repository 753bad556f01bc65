"""What a model says of each token, without ever holding a float32 copy of all its logits."""

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
    """Return log softmax(logits / temperature) of each token, in float32.

    ``logprobs[b, t]`` belongs to ``token_ids[b, t]``: it is read from the logits of position t - 1. The first token of
    a row was predicted by nothing, and its entry is 0.

    Args:
        logits: float [B, T, V]; with `head`, the hidden states [B, T, H] that it makes logits of.
        token_ids: int64 [B, T].
        temperature: That of sampling, above 0.
        chunk_tokens: Tokens worked on at a time. In between, no more than [chunk_tokens, V] float32 numbers are held,
            and in the backward they are computed again.
        head: The model's output layer, for hidden states.

    Returns:
        float32 [B, T], with gradient.

    Raises:
        ValueError: The temperature is not above 0.
    """
    targets = token_ids.roll(-1, dims=1).flatten()

    def picked(scores: torch.Tensor, start: int) -> torch.Tensor:
        chosen = scores.gather(-1, targets[start : start + len(scores), None])[:, 0]
        return chosen - torch.logsumexp(scores, dim=-1)

    return _over_chunks(picked, logits, temperature, chunk_tokens, head)


def entropy(
    logits: torch.Tensor, temperature: float = 1.0, chunk_tokens: int = 2048, *, head: Head | None = None
) -> torch.Tensor:
    """Return the entropy of the distribution that each token was drawn from, in nats.

    ``entropy[b, t]`` is of softmax(logits[b, t - 1] / temperature), beside `token_logprobs`; 0 for the first token.

    Args:
        logits: float [B, T, V]; with `head`, the hidden states [B, T, H].
        temperature: That of sampling, above 0.
        chunk_tokens: Tokens worked on at a time.
        head: The model's output layer, for hidden states.

    Returns:
        float32 [B, T], with gradient.

    Raises:
        ValueError: The temperature is not above 0.
    """

    def spread(scores: torch.Tensor, start: int) -> torch.Tensor:
        logprobs = torch.log_softmax(scores, dim=-1)
        # A token that cannot be drawn adds 0, not 0 times -inf.
        return -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(dim=-1)

    return _over_chunks(spread, logits, temperature, chunk_tokens, head)


def _over_chunks(
    of_scores: Callable[[torch.Tensor, int], torch.Tensor],
    logits: torch.Tensor,
    temperature: float,
    chunk_tokens: int,
    head: Head | None,
) -> torch.Tensor:
    """Apply `of_scores` to float32 scores, a chunk at a time, and give each token what the position before it said."""
    if temperature <= 0:
        raise ValueError(
            f"temperature={temperature} must be above 0: a greedy token has no probability to speak of."
        )
    num_rows, length = logits.shape[:2]
    # A view of all positions, not a copy of all but the last ones; what those say is thrown away.
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
    return torch.nn.functional.pad(flat.view(num_rows, length)[:, :-1], (1, 0))


def align(per_position: torch.Tensor) -> torch.Tensor:
    """Give each token what the position before it said; the first token gets 0.

    For a critic's output, whose value of token t is that of the state in which t was chosen.

    Args:
        per_position: float [B, T].

    Returns:
        float [B, T].
    """
    return torch.nn.functional.pad(per_position[:, :-1], (1, 0))
