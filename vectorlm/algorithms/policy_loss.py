"""Losses of the policy: one value per token or per completion.

`policy_logprobs`, float [B, T], carry the gradient. `old_logprobs` [B, T] are the trainer's log-probabilities at the
weights of the rollout. A are the `advantages` [B, T], and r = policy / old. `mask`, bool or 0/1 [B, T], marks the
tokens that the policy sampled. Losses are float [B, T], not masked and not reduced, unless their docstrings have
another shape.

``level="token"`` uses the r of each token. ``level="sequence"`` gives all tokens of a row the geometric mean of their
ratios, ``exp(mean log r)`` over the `mask`. The gradient flows through each token's own ratio (GSPO-token,
arXiv:2507.18071, eq. 13-14). Without a mask it raises ValueError.
"""

from __future__ import annotations

import math

import torch

from vectorlm.algorithms.kl import BinaryKind, binary_divergence, exp_clamped, log_ratio, ratio
from vectorlm.algorithms.reduce import masked_mean, masked_sum
from vectorlm.algorithms.settings import ImportanceLevel
from vectorlm.settings import require_choice

MAX_WEIGHT = 20.0
"""Largest weight of a token in DPPO, as in its authors' code."""


def ppo_policy_loss(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    level: ImportanceLevel = "token",
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return PPO's clipped loss: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    ``level="sequence"`` is GSPO. `dual_clip`, above 1, bounds the loss from above by ``-dual_clip A`` where A < 0.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; Yu et al. 2025 (DAPO, separate bounds), arXiv:2503.14476;
    Ye et al. 2020 (dual clip), arXiv:1912.09729; Zheng et al. 2025 (GSPO-token), arXiv:2507.18071, eq. 13-14.

    Raises:
        ValueError: `dual_clip` is not above 1, `level` is unknown, or a sequence ratio has no mask.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip={dual_clip} must be above 1. A lower value bounds the loss at ratio 1.")
    ratios = _ratio(policy_logprobs, old_logprobs, level, mask)
    advantages = advantages.detach()
    loss = -torch.minimum(ratios * advantages, ratios.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss


def cispo_policy_loss(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float = 1.0,
    clip_high: float = 0.2,
    level: ImportanceLevel = "token",
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log policy: weights are clipped, all tokens keep a gradient.

    Source: MiniMax 2025 (CISPO), arXiv:2506.13585, eq. 4-5; the default has no lower bound.
    """
    ratios = _ratio(policy_logprobs, old_logprobs, level, mask)
    weights = ratios.detach().clamp(1 - clip_low, 1 + clip_high)
    return -weights * advantages.detach() * policy_logprobs


def reinforce_policy_loss(policy_logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Return -A log policy.

    Source: Williams 1992, Machine Learning 8.
    """
    return -advantages.detach() * policy_logprobs


def sapo_policy_loss(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
    level: ImportanceLevel = "token",
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return -f(r) A with a soft gate in place of the clip: f(r) = sigmoid(tau (r - 1)) 4 / tau.

    tau is `temperature_positive` where A > 0, else `temperature_negative`. At r = 1 the slope of f is 1, and the
    gradient is the plain policy gradient. It fades on both sides, faster for a larger tau.

    Source: Gao et al. 2025 (SAPO), arXiv:2511.20347.
    """
    advantages = advantages.detach()
    tau = torch.full_like(advantages, temperature_negative).masked_fill(advantages > 0, temperature_positive)
    gate = torch.sigmoid(tau * (_ratio(policy_logprobs, old_logprobs, level, mask) - 1)) * 4 / tau
    return -gate * advantages


def proximal_rloo_loss(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> torch.Tensor:
    """Return PPO's clipped loss with a completion as the action: r = exp(sum of its tokens' log-ratios).

    `advantages` and the result are float [B], see `leave_one_out_advantages`.

    Source: Noukhovitch et al. 2024, arXiv:2410.18252 (Proximal RLOO).
    """
    ratios = exp_clamped(masked_sum(log_ratio(policy_logprobs, old_logprobs), mask))
    advantages = advantages.detach()
    return -torch.minimum(ratios * advantages, ratios.clamp(1 - clip_low, 1 + clip_high) * advantages)


def gmpo_policy_loss(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float = 0.3297,
    clip_high: float = 0.4918,
) -> torch.Tensor:
    """Return -A exp(mean log r'), with the geometric mean of each row's clipped ratios r', float [B].

    Each token's r is clipped to at most 1 + clip_high if A > 0 and to at least 1 - clip_low if A < 0. A clipped token
    stays in the mean, without gradient. `advantages` are float [B]. The defaults are the paper's bounds, ``exp(-0.4)``
    and ``exp(0.4)``.

    Source: Zhao et al. 2025 (GMPO), arXiv:2507.20673.
    """
    advantages = advantages.detach()
    logs = log_ratio(policy_logprobs, old_logprobs)
    low, high = math.log(1 - clip_low) if clip_low < 1 else -math.inf, math.log1p(clip_high)
    is_positive = (advantages > 0)[:, None]
    clipped = torch.where(is_positive, logs.clamp(max=high), logs.clamp(min=low))
    return -advantages * exp_clamped(masked_mean(clipped, mask))


def dppo_policy_loss(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    bound: float = 0.15,
    divergence: BinaryKind = "tv",
) -> torch.Tensor:
    """Return -sg(min(r, 20)) A log policy, and 0 for `blocked_tokens`: the divergence is bounded, not the ratio.

    Source: Qi et al. 2026 (DPPO), arXiv:2602.04879, the binary approximations; the largest weight as in its code.
    """
    is_blocked = blocked_tokens(policy_logprobs, old_logprobs, advantages, bound, divergence)
    weights = ratio(policy_logprobs, old_logprobs).detach().clamp(max=MAX_WEIGHT).masked_fill(is_blocked, 0.0)
    return -weights * advantages.detach() * policy_logprobs


def blocked_tokens(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    bound: float,
    divergence: BinaryKind,
) -> torch.Tensor:
    """Return the tokens that exceed `bound` in `binary_divergence`, and that the loss would move further from old."""
    policy, old = policy_logprobs.detach(), old_logprobs.detach()
    goes_further = (advantages > 0) & (policy > old) | (advantages < 0) & (policy < old)
    return goes_further & (binary_divergence(policy, old, divergence) > bound)


def vespo_policy_loss(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
    log_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return -sg(phi(w)) A log policy, with the row's ratio w = exp(sum log r) and phi(w) = w^k exp(l (1 - w)).

    ``phi(1) = 1``, and phi falls to 0 for small and for large w. (k, l) is `positive` if A >= 0, else `negative`; a
    larger k reduces the weight of small ratios, a larger l the weight of large ratios. `log_weights`, float [B], are
    logarithms of a correction's weights of the rows. They are added to log w. Then w compares the policy with the
    sampler, as in TRL.

    Source: Shen et al. 2026 (VESPO), arXiv:2602.10693.
    """
    advantages = advantages.detach()
    logs = masked_sum(log_ratio(policy_logprobs, old_logprobs).detach(), mask)
    logs = (logs if log_weights is None else logs + log_weights)[:, None]
    shape, rate = (
        torch.where(advantages >= 0, above, below) for above, below in zip(positive, negative, strict=True)
    )
    weights = torch.exp(shape * logs - rate * (exp_clamped(logs) - 1))
    return -weights * advantages * policy_logprobs


def kl_cov_loss(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    marked: torch.Tensor,
    coef: float = 1.0,
) -> torch.Tensor:
    """Return -r A, plus coef |log r| for the `marked` tokens, bool [B, T], which have the highest `covariances`.

    Source: Cui et al. 2025 (KL-Cov), arXiv:2505.22617.
    """
    logs = log_ratio(policy_logprobs, old_logprobs)
    return -exp_clamped(logs) * advantages.detach() + torch.where(marked, coef * logs.abs(), 0.0)


def _ratio(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    level: ImportanceLevel,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Return r of each token, or of its row with the token's own gradient."""
    require_choice("level", level, ImportanceLevel)
    if level == "token":
        return ratio(policy_logprobs, old_logprobs)
    if mask is None:
        raise ValueError("mask=None: level='sequence' needs the mask of a row's tokens.")
    row = exp_clamped(masked_mean(log_ratio(policy_logprobs, old_logprobs), mask)).detach()
    return row[:, None] * torch.exp(policy_logprobs - policy_logprobs.detach())


def covariances(logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return (A - mean A)(log pi - mean log pi) of each token, means over the mask, float [B, T]; 0 outside."""
    count = mask.sum().clamp(min=1)

    def centred(values: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, values - torch.where(mask, values, 0.0).sum() / count, 0.0)

    return centred(logprobs) * centred(advantages)


def highest(values: torch.Tensor, mask: torch.Tensor, share: float) -> torch.Tensor:
    """Return the `share` of masked tokens with the highest values, at least one, bool [B, T] (KL-Cov)."""
    chosen = torch.zeros_like(mask)
    places = torch.nonzero(mask.flatten())[:, 0]
    if len(places):
        count = min(max(int(share * len(places)), 1), len(places))
        chosen.view(-1)[places[values.flatten()[places].topk(count).indices]] = True
    return chosen


def drawn_between(
    values: torch.Tensor, mask: torch.Tensor, share: float, low: float, high: float, seed: int
) -> torch.Tensor:
    """Draw some of the masked tokens with low < value < high, bool [B, T] (Clip-Cov).

    Their number is `share` times the number of masked tokens, at least one if there is any, and at most all.
    """
    chosen = torch.zeros_like(mask)
    places = torch.nonzero((mask & (values > low) & (values < high)).flatten())[:, 0]
    if len(places):
        count = min(max(int(share * int(mask.sum())), 1), len(places))
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
        chosen.view(-1)[places[order[:count].to(places.device)]] = True
    return chosen
