"""How far engine and trainer are apart, kept for the picture that a run leaves."""

from __future__ import annotations

from typing import Any

import torch

from vectorlm.rollout.batch import RolloutBatch

LOWEST, HIGHEST, NUM_BINS = -2.0, 2.0, 80
"""Of the histogram, in log-ratios of trainer and engine; what is beyond counts in the outermost bins."""
NUM_PLACES = 32
"""Parts that completions are cut into, by the place of a token."""


def gap_of(rows: RolloutBatch, old_logprobs: torch.Tensor) -> dict[str, float]:
    """Return the metrics of the absolute difference of the trainer's and the engine's log-probabilities."""
    gap = (old_logprobs - rows.sampler_logprobs)[rows.mask].abs()
    return {"sampler/logprob_gap_mean": gap.mean().item(), "sampler/logprob_gap_max": gap.max().item()}


def drift_of(rows: RolloutBatch, old_logprobs: torch.Tensor, band: tuple[float, float]) -> dict[str, Any]:
    """Count the log-ratios of a batch.

    Args:
        rows: The rollouts, before anything of them was rejected.
        old_logprobs: float [B, T], the trainer's at the weights of the rollout.
        band: Ratios outside count as out of band.

    Returns:
        ``histogram``, the tokens in each bin from ``lowest`` to ``highest``; ``tokens_per_place``, how many tokens a
        place stands for; ``tokens`` and ``out_of_band`` of each of at most `NUM_PLACES` places, the first token of a
        completion in the first.
    """
    log_ratios = old_logprobs - rows.sampler_logprobs
    known = rows.mask & ~log_ratios.isnan()
    values = log_ratios[known].clamp(LOWEST, HIGHEST)
    histogram = torch.histc(values.float(), bins=NUM_BINS, min=LOWEST, max=HIGHEST)
    first = torch.tensor(rows.first_trained)[:, None]
    places = (torch.arange(known.shape[1]) - first)[known]
    width = max(-(-(int(places.max()) + 1) // NUM_PLACES), 1) if len(places) else 1
    ratios = log_ratios[known].exp()
    outside = (ratios < band[0]) | (ratios > band[1])
    count = int(places.max()) // width + 1 if len(places) else 1
    return {
        "lowest": LOWEST,
        "highest": HIGHEST,
        "histogram": histogram.int().tolist(),
        "tokens_per_place": width,
        "tokens": torch.bincount(places // width, minlength=count).tolist(),
        "out_of_band": torch.bincount(places[outside] // width, minlength=count).tolist(),
    }
