"""From the records of a step to the pure functions: what the rows name as their advantages, losses and marks."""

from __future__ import annotations

import torch

from vectorlm.algorithms.batch import LossInputs, RolloutBatch
from vectorlm.algorithms.critic import gae_advantages
from vectorlm.algorithms.groups import (
    baseline_advantages,
    decoupled_advantages,
    group_advantages,
    leave_one_out_advantages,
    length_weighted_advantages,
    optimal_token_advantages,
    pass_at_k_advantages,
    rescaled_advantages,
    return_advantages,
    scaled_as_groups,
    turn_advantages,
)
from vectorlm.algorithms.kl import BinaryKind
from vectorlm.algorithms.policy_loss import (
    blocked_tokens,
    cispo_policy_loss,
    covariances,
    dppo_policy_loss,
    drawn_between,
    gmpo_policy_loss,
    highest,
    kl_cov_loss,
    ppo_policy_loss,
    proximal_rloo_loss,
    reinforce_policy_loss,
    sapo_policy_loss,
    vespo_policy_loss,
)
from vectorlm.algorithms.preference import copg_loss, online_dpo_loss
from vectorlm.algorithms.reduce import masked_mean, masked_sum
from vectorlm.algorithms.settings import (
    AlgorithmSettings,
    CISPOSettings,
    ClipCovSettings,
    ClipSettings,
    CovarianceSettings,
    DPPOSettings,
    KLCovSettings,
    OnlineDPOSettings,
    PassAtKSettings,
    PPOSettings,
    ReferenceSettings,
    SAPOSettings,
    ScaleSettings,
    SurrogateSettings,
    VESPOSettings,
)


def gae(batch: RolloutBatch, hparams: PPOSettings) -> torch.Tensor:
    """Return generalised advantage estimates, from the critic's values."""
    assert batch.values is not None
    return gae_advantages(batch.token_rewards, batch.values, batch.mask, hparams.gamma, hparams.lam)[0]


def returns(batch: RolloutBatch, hparams: AlgorithmSettings) -> torch.Tensor:
    """Return what is left of the reward from each token on, against the batch."""
    return return_advantages(batch.token_rewards, batch.mask)


def greedy_baseline(batch: RolloutBatch, hparams: AlgorithmSettings) -> torch.Tensor:
    """Return rewards minus the reward of the greedy completion."""
    assert batch.greedy_rewards is not None
    return batch.spread(baseline_advantages(batch.rewards, batch.greedy_rewards, batch.valid))


def _of_turns(batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert batch.turns is not None
    return turn_advantages(batch.token_rewards, batch.turns, batch.mask, batch.rows_per_group)


def group(batch: RolloutBatch, hparams: ScaleSettings) -> torch.Tensor:
    """Return rewards against the group's."""
    if batch.turns is not None:
        return batch.spread_turns(scaled_as_groups(*_of_turns(batch), hparams.scale_rewards))
    return batch.spread(group_advantages(batch.rewards, hparams.scale_rewards, batch.valid))


def pass_at_k(batch: RolloutBatch, hparams: PassAtKSettings) -> torch.Tensor:
    """Return what each completion adds to the best of k."""
    return batch.spread(pass_at_k_advantages(batch.rewards, hparams.pass_k, batch.valid))


def decoupled(batch: RolloutBatch, hparams: AlgorithmSettings) -> torch.Tensor:
    """Return each reward against the group's, summed up."""
    assert batch.reward_parts is not None
    assert batch.part_weights is not None
    return batch.spread(decoupled_advantages(batch.reward_parts, batch.part_weights, batch.valid))


def length_weighted(batch: RolloutBatch, hparams: AlgorithmSettings) -> torch.Tensor:
    """Return rewards less the group's mean weighted by length."""
    lengths = batch.mask.sum(dim=1)
    if batch.branch_lengths is not None:
        lengths = lengths + batch.branch_lengths
    lengths = lengths.view_as(batch.rewards)
    return batch.spread(length_weighted_advantages(batch.rewards, lengths, batch.valid))


def optimal_token(batch: RolloutBatch, hparams: AlgorithmSettings) -> torch.Tensor:
    """Return the return of each token less the optimal baseline of its place."""
    assert batch.gradient_norms is not None
    rows = (batch.token_rewards, batch.gradient_norms, batch.mask)
    return optimal_token_advantages(*rows, batch.rows_per_group, batch.weights)


def leave_one_out(batch: RolloutBatch, hparams: AlgorithmSettings) -> torch.Tensor:
    """Return rewards against the mean of the others of the group."""
    if batch.turns is not None:
        return batch.spread_turns(_of_turns(batch)[0])
    return batch.spread(leave_one_out_advantages(batch.rewards, batch.valid))


def rescaled(batch: RolloutBatch, hparams: AlgorithmSettings) -> torch.Tensor:
    """Return rewards against the group's, times groups over groups that differ."""
    if batch.turns is not None:
        advantages = scaled_as_groups(*_of_turns(batch), "none")
        num_differing = advantages.flatten(1).any(dim=1).sum().clamp(min=1)
        return batch.spread_turns(advantages * (len(advantages) / num_differing))
    return batch.spread(rescaled_advantages(batch.rewards, batch.valid))


def reward(batch: RolloutBatch, hparams: AlgorithmSettings) -> torch.Tensor:
    """Return rewards; with rewards of turns, what is left of them from each turn on."""
    if batch.turns is not None:
        left = torch.where(batch.mask, batch.token_rewards, 0.0).flip(1).cumsum(1).flip(1)
        return torch.where(batch.mask, left, 0.0)
    return batch.spread(torch.where(batch.valid, batch.rewards, 0.0))


def zero(batch: RolloutBatch, hparams: AlgorithmSettings) -> torch.Tensor:
    """Return 0 for every token."""
    return batch.spread(torch.zeros_like(batch.rewards))


def one(batch: RolloutBatch, hparams: AlgorithmSettings) -> torch.Tensor:
    """Return 1 for the tokens of valid completions."""
    return batch.spread(batch.valid.to(batch.rewards.dtype))


def _rows(inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return inputs.policy_logprobs, inputs.old_logprobs, inputs.advantages


def _of_rows(inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the arguments of a loss of completions: all tokens of one have its advantage, others have 0."""
    advantages = inputs.advantages.gather(1, inputs.advantages.abs().argmax(dim=1, keepdim=True))[:, 0]
    return inputs.policy_logprobs, inputs.old_logprobs, advantages, inputs.mask


def ppo(inputs: LossInputs, hparams: SurrogateSettings) -> torch.Tensor:
    """Return the clipped surrogate, of tokens or completions."""
    clips = (hparams.clip_low, hparams.clip_high, hparams.dual_clip)
    return ppo_policy_loss(*_rows(inputs), *clips, hparams.importance_sampling_level, inputs.mask)


def cispo(inputs: LossInputs, hparams: CISPOSettings) -> torch.Tensor:
    """Return log-probabilities with clipped weights."""
    clips = (hparams.clip_low, hparams.clip_high)
    return cispo_policy_loss(*_rows(inputs), *clips, hparams.importance_sampling_level, inputs.mask)


def sapo(inputs: LossInputs, hparams: SAPOSettings) -> torch.Tensor:
    """Return the softly gated surrogate."""
    gates = (hparams.temperature_positive, hparams.temperature_negative)
    return sapo_policy_loss(*_rows(inputs), *gates, hparams.importance_sampling_level, inputs.mask)


def gmpo(inputs: LossInputs, hparams: ClipSettings) -> torch.Tensor:
    """Return the geometric mean of clipped ratios, of completions."""
    return gmpo_policy_loss(*_of_rows(inputs), hparams.clip_low, hparams.clip_high)


def dppo(inputs: LossInputs, hparams: DPPOSettings, divergence: BinaryKind) -> torch.Tensor:
    """Return log-probabilities with weights, and 0 beyond the bound of the divergence."""
    return dppo_policy_loss(*_rows(inputs), hparams.divergence_bound, divergence)


def observe_blocked(
    inputs: LossInputs, hparams: DPPOSettings, divergence: BinaryKind
) -> dict[str, torch.Tensor]:
    """Return the share of tokens beyond the bound of the divergence."""
    blocked = blocked_tokens(*_rows(inputs), hparams.divergence_bound, divergence)
    return {"policy/blocked_fraction": masked_mean(blocked.float(), inputs.mask)}


def vespo(inputs: LossInputs, hparams: VESPOSettings) -> torch.Tensor:
    """Return log-probabilities faded by the ratio of their completion."""
    positive = (hparams.shape_positive, hparams.rate_positive)
    negative = (hparams.shape_negative, hparams.rate_negative)
    return vespo_policy_loss(*_rows(inputs), inputs.mask, positive, negative, inputs.log_weights)


def _covariances(batch: RolloutBatch, advantages: torch.Tensor) -> torch.Tensor:
    assert batch.old_logprobs is not None
    return covariances(batch.old_logprobs, advantages, batch.mask)


def mark_drawn(batch: RolloutBatch, advantages: torch.Tensor, hparams: ClipCovSettings) -> torch.Tensor:
    """Draw tokens of high covariance."""
    bounds = (hparams.covariance_share, hparams.covariance_low, hparams.covariance_high)
    # The same draw on all ranks and in a resumed run, another one in the next step.
    seed = int(batch.input_ids.sum())
    return drawn_between(_covariances(batch, advantages), batch.mask, *bounds, seed)


def mark_highest(batch: RolloutBatch, advantages: torch.Tensor, hparams: CovarianceSettings) -> torch.Tensor:
    """Choose the tokens of highest covariance."""
    return highest(_covariances(batch, advantages), batch.mask, hparams.covariance_share)


def clip_cov(inputs: LossInputs, hparams: SurrogateSettings) -> torch.Tensor:
    """Return the clipped surrogate without the marked tokens."""
    assert inputs.marked is not None
    return torch.where(inputs.marked, 0.0, ppo(inputs, hparams))


def kl_cov(inputs: LossInputs, hparams: KLCovSettings) -> torch.Tensor:
    """Return the surrogate with a penalty on the marked tokens."""
    assert inputs.marked is not None
    return kl_cov_loss(*_rows(inputs), inputs.marked, hparams.covariance_kl_coef)


def reinforce(inputs: LossInputs, hparams: AlgorithmSettings) -> torch.Tensor:
    """Return log-probabilities times advantages."""
    return reinforce_policy_loss(inputs.policy_logprobs, inputs.advantages)


def proximal_rloo(inputs: LossInputs, hparams: ClipSettings) -> torch.Tensor:
    """Return the clipped surrogate of completions by the product of their ratios."""
    return proximal_rloo_loss(*_of_rows(inputs), hparams.clip_low, hparams.clip_high)


def _sums_of_groups(inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of whole completions under policy and reference, [P, K] each."""
    assert inputs.reference_logprobs is not None
    both = (inputs.policy_logprobs, inputs.reference_logprobs)
    policy, reference = (masked_sum(each, inputs.mask).view(-1, inputs.rows_per_group) for each in both)
    return policy, reference


def online_dpo(inputs: LossInputs, hparams: OnlineDPOSettings) -> torch.Tensor:
    """Return the preference loss of pairs."""
    policy, reference = _sums_of_groups(inputs)
    (chosen, rejected), (reference_chosen, reference_rejected) = policy.unbind(1), reference.unbind(1)
    pairs = (chosen, rejected, reference_chosen, reference_rejected)
    return online_dpo_loss(*pairs, hparams.beta, hparams.label_smoothing, hparams.preference)


def observe_pairs(inputs: LossInputs, hparams: ReferenceSettings) -> dict[str, torch.Tensor]:
    """Return implicit rewards of pairs and their margin."""
    policy, reference = _sums_of_groups(inputs)
    better, worse = (hparams.beta * (policy - reference)).unbind(1)
    return {
        "preference/chosen_reward": better,
        "preference/rejected_reward": worse,
        "preference/margin": better - worse,
        "preference/accuracy": (better > worse).to(better.dtype),
        "preference/chosen_logprob": policy[:, 0],
        "preference/rejected_logprob": policy[:, 1],
    }


def copg(inputs: LossInputs, hparams: ReferenceSettings) -> torch.Tensor:
    """Return the contrastive policy gradient's loss of groups."""
    size = inputs.rows_per_group
    rewards, valid = inputs.rewards.view(-1, size), inputs.mask.any(dim=1).view(-1, size)
    return copg_loss(*_sums_of_groups(inputs), rewards, hparams.beta, valid)
