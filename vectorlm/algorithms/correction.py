"""Off-policy correction: weights and masks for tokens whose probability differs between engine and trainer.

`old_logprobs`, float [B, T], are the trainer's log-probabilities before the first optimizer step on the batch;
`sampler_logprobs` are the engine's. `mask`, bool or 0/1, marks the tokens that the policy sampled. The ratio r is the
trainer's probability over the sampler's, ``exp(old - sampler)``. Bounds are bounds of r.
No result has a gradient.
"""

from __future__ import annotations

from typing import Literal

import torch

from vectorlm.algorithms.kl import MAX_LOG_RATIO, binary_divergence, exp_clamped, kl_estimate, log_ratio
from vectorlm.algorithms.reduce import masked_mean, masked_sum
from vectorlm.settings import require_choice

RatioLevel = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "mask"]
Divergence = Literal["bernoulli_kl", "tv", "k2", "k3"]
GateLevel = Literal["token", "sum", "mean", "max"]
INFINITE_LOG_RATIO = 1e4
"""The log-ratio of a token if one of the two probabilities is 0."""


def importance_weights(
    old_logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: RatioLevel = "token",
    mode: Mode = "truncate",
    low: float | None = None,
    high: float | None = None,
    normalise: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weigh each token by the trainer's probability over the sampler's.

        =========  =====================================  ===================================================
        level      truncate                               mask
        =========  =====================================  ===================================================
        token      clamp(r)                               r, or 0 where r is out of bounds
        sequence   clamp(exp(sum log r)) for the row      exp(sum log r), or 0 for a row that is out of bounds
        geometric  clamp(exp(mean log r)) for the row     each token's r, or 0 for a row with exp(mean log r)
                                                          out of bounds
        =========  =====================================  ===================================================

    Equal log-probabilities give weights of exactly 1. The expectation of ``exp(sum log r) f`` under the sampler is the
    expectation of f under the trainer. Token weights and bounds trade this property for less variance. Log-ratios of
    tokens, and their sums or means over rows, are clamped to +-20 before they are exponentiated. A token whose ratio is
    NaN is dropped; at the levels of rows the whole row is dropped.

    Source: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl (token truncate, TIS); Ling Team 2025,
    arXiv:2510.18855 (token mask, IcePop); Liu et al. 2025, "When speed kills stability" (masks by sequence).

    Args:
        old_logprobs: float [B, T], the trainer's log-probabilities before the first optimizer step on the batch.
        sampler_logprobs: float [B, T], the engine's log-probabilities.
        mask: [B, T], the tokens that count.
        level: The ratio that the bounds apply to.
        mode: Whether ratios out of bounds are clamped or dropped.
        low: Lower bound, in [0, 1]; None for no bound.
        high: Upper bound, at least 1; None for no bound.
        normalise: Divide by the mean weight of kept tokens, or of kept rows at the levels of rows.

    Returns:
        Weights, float [B, T], 0 outside the mask and for dropped tokens; and which tokens are kept, bool [B, T].

    Raises:
        ValueError: `level` or `mode` is unknown, or the bounds are not in order.
    """
    require_choice("level", level, RatioLevel)
    require_choice("mode", mode, Mode)
    if not (0 <= (0 if low is None else low) <= 1 <= (1 if high is None else high)):
        raise ValueError(f"low={low} and high={high} must be bounds around 1: 0 <= low <= 1 <= high.")
    log_ratios, known = _log_ratios(old_logprobs, sampler_logprobs, mask)
    tokens, kept = exp_clamped(log_ratios), known
    if level == "token":
        compared = tokens
    else:
        row = masked_sum(log_ratios, mask) if level == "sequence" else masked_mean(log_ratios, mask)
        compared = exp_clamped(row)[:, None].expand_as(tokens)
        kept = kept & ~compared.isnan()
    if mode == "truncate":
        weights = compared.clamp(low, high) if low is not None or high is not None else compared
    else:
        weights = tokens if level == "geometric" else compared
        kept = kept & (compared >= (0.0 if low is None else low))
        kept = kept & (compared <= (torch.inf if high is None else high))
    weights = torch.where(kept, weights, 0.0)
    if normalise:
        if level == "token":
            mean = weights.sum() / kept.sum().clamp(min=1)
        else:
            mean = masked_mean(weights, kept).sum() / kept.any(dim=1).sum().clamp(min=1)
        weights = weights / torch.where(mean > 0, mean, 1.0)
    return weights, kept


def rejection_mask(
    old_logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    divergence: Divergence | None = None,
    level: GateLevel = "token",
    bound: float | None = None,
    veto: float | None = None,
) -> torch.Tensor:
    """Return the tokens whose probabilities are close enough to learn from, bool [B, T], False outside the mask.

    With p the sampler's probability of the token and r the ratio:

        bernoulli_kl   p log(p / (p r)) + (1 - p) log((1 - p) / (1 - p r))      tv   |p r - p|
        k2             (log r)^2 / 2                                             k3   r - 1 - log r

    All of them estimate the divergence of trainer and sampler and are at least 0. ``level="token"`` drops tokens above
    `bound`; ``sum``, ``mean`` and ``max`` drop rows whose sum, mean or maximum over tokens is above it. `veto` drops
    rows with a token whose r is below it. A token whose ratio is NaN is dropped, with its row if rows are dropped.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html (k2, k3); the other two are divergences of the event
    that this token is sampled.

    Raises:
        ValueError: A name is unknown, or a divergence has no bound of at least 0.
    """
    log_ratios, known = _log_ratios(old_logprobs, sampler_logprobs, mask)
    kept = known
    if divergence is not None:
        require_choice("divergence", divergence, Divergence)
        require_choice("level", level, GateLevel)
        if bound is None or bound < 0:
            raise ValueError(f"bound={bound} must be at least 0, the largest {divergence} that passes.")
        if divergence == "k2" or divergence == "k3":
            distances = kl_estimate(-log_ratios, torch.zeros_like(log_ratios), divergence)
        else:
            distances = binary_divergence(old_logprobs, sampler_logprobs, divergence)
        # NaN is not below a bound, and neither is a sum, mean or maximum with NaN.
        distances = torch.where(mask.bool(), distances + 0 * log_ratios, 0.0)
        match level:
            case "sum":
                distances = distances.sum(dim=1, keepdim=True)
            case "mean":
                distances = masked_mean(distances, mask)[:, None]
            case "max":
                distances = distances.amax(dim=1, keepdim=True)
        kept = kept & (distances <= bound)
    if veto is not None:
        ratios = torch.where(mask.bool(), log_ratios.exp(), torch.inf)
        kept = kept & (ratios.amin(dim=1, keepdim=True) >= veto)
    return kept


def correction_metrics(
    old_logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    mask: torch.Tensor,
    low: float = 0.5,
    high: float = 2.0,
) -> dict[str, float]:
    """Return metrics of the raw ratios (log-ratios clamped to +-20) by name, with the prefix ``correction/``.

    ``ess`` is the effective sample size as a share, 1 / mean((r / mean r)^2) over tokens, in (0, 1], and ``chi2`` is
    mean(r^2) - 1. ``*_sequences`` are the same metrics of rows, with exp(sum log r). k1 and k3 estimate
    KL(sampler || trainer) per token. ``ppl_ratio`` is the trainer's perplexity over the sampler's, a geometric mean
    over rows. ``pearson`` is the correlation of the probabilities, absent if one of them is constant. Ratios below
    `low` or above `high` are out of band. An empty mask gives the numbers of a perfect match.
    """
    log_ratios, known = _log_ratios(old_logprobs.double(), sampler_logprobs.double(), mask)
    log_tokens = log_ratios[known]
    has_tokens = known.any(dim=1)
    log_rows = masked_sum(log_ratios, known)[has_tokens]
    mean_rows = masked_mean(log_ratios, known)[has_tokens]
    if not len(log_tokens):
        log_tokens = log_rows = mean_rows = log_ratios.new_zeros(1)
    tokens, rows = exp_clamped(log_tokens), exp_clamped(log_rows)
    outside = (tokens < low) | (tokens > high)
    found = {
        "ratio_mean": tokens.mean(),
        "ratio_min": tokens.min(),
        "ratio_max": tokens.max(),
        "out_of_band": outside.double().mean(),
        "out_of_band_sequences": ((rows < low) | (rows > high)).double().mean(),
        "ess": _effective_share(tokens),
        "ess_sequences": _effective_share(rows),
        "chi2": tokens.square().mean() - 1,
        "chi2_sequences": rows.square().mean() - 1,
        "k1": -log_tokens.mean(),
        "k3": kl_estimate(-log_tokens.clamp(max=MAX_LOG_RATIO), torch.zeros_like(log_tokens), "k3").mean(),
        "ppl_ratio": (-mean_rows).mean().exp(),
        "unknown": (mask.bool() & ~known).double().sum(),
    }
    trainer, sampler = old_logprobs[known].double().exp(), sampler_logprobs[known].double().exp()
    if len(trainer) > 1 and trainer.std() > 0 and sampler.std() > 0:
        found["pearson"] = torch.corrcoef(torch.stack([trainer, sampler]))[0, 1]
    return {f"correction/{name}": value.item() for name, value in found.items()}


def _log_ratios(
    old_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log r [B, T], 0 outside the mask; and the tokens in the mask for which it is a number, bool [B, T]."""
    difference = log_ratio(old_logprobs, sampler_logprobs).detach()
    # Two infinite log-ratios of a row must not cancel to NaN.
    finite = difference.nan_to_num(nan=torch.nan, posinf=INFINITE_LOG_RATIO, neginf=-INFINITE_LOG_RATIO)
    log_ratios = torch.where(mask.bool(), finite, 0.0)
    return log_ratios, mask.bool() & ~log_ratios.isnan()


def _effective_share(weights: torch.Tensor) -> torch.Tensor:
    return 1 / (weights / weights.mean()).square().mean()
