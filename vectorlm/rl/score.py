"""Rollouts and their rewards turned into what the losses need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from vectorlm.algorithms import correction_metrics, kl_estimate, whiten
from vectorlm.algorithms.kl import Kind
from vectorlm.algorithms.spec import AlgorithmSpec, Knobs, Scores
from vectorlm.ranks.topology import Topology
from vectorlm.rl.correction import NO_CORRECTION, Correction
from vectorlm.rl.drift import drift_of, gap_of
from vectorlm.rl.roles import Critic, Policy, Reference
from vectorlm.rl.rows import RowFunction, map_rows
from vectorlm.rl.update import TrainBatch
from vectorlm.rollout.batch import RolloutBatch
from vectorlm.weights.plan import reshard


@dataclass(frozen=True, kw_only=True)
class Assessor:
    """Asks policy, reference and critic about the tokens of a batch, and works the advantages out."""

    policy: Policy
    reference: Reference | None
    critic: Critic | None
    spec: AlgorithmSpec
    knobs: Knobs
    kl_in: Literal["reward", "loss"]
    """Where the divergence from the reference is punished."""
    kl_kind: Kind
    whitens: bool
    """Whether advantages are brought to mean 0 and deviation 1 over the batch."""
    is_one_step: bool
    """Whether the batch is trained on in one optimizer step, so that the policy is still the rollout's."""
    max_tokens: int
    """Tokens of one forward pass on one rank."""
    topology: Topology
    correction: Correction = NO_CORRECTION
    """What is done about tokens that the engine sampled with other probabilities."""
    band: tuple[float, float] = (0.5, 2.0)
    """Ratios of trainer and engine outside count as out of band."""

    def assess(self, batch: RolloutBatch, greedy_rewards: torch.Tensor | None, kl_coef: float) -> TrainBatch:
        """Return the batch that is trained on; called on all ranks.

        Args:
            batch: The rollouts and their rewards.
            greedy_rewards: float32 [P], for algorithms that need them.
            kl_coef: Weight of the divergence, used here where it is part of the reward.
        """
        in_reward = self.reference is not None and self.kl_in == "reward"
        needs_old = in_reward or self.correction.is_on or not self.is_one_step
        old = batch.sampler_logprobs if self.correction.bypass else None
        weights, metrics, drift = None, {}, None
        if needs_old and old is None:
            old = self._map(batch, self.policy.logprobs)
            metrics, drift = self._compare(batch, old), drift_of(batch, old, self.band)
            judged = self.correction.judge(batch, old)
            metrics |= judged.metrics()
            batch, weights = judged.rows, judged.weights
        reference = values = None
        if self.reference is not None:
            reference = self._map(batch, self.reference)
        if self.critic is not None:
            critic = self.critic
            values = self._map(batch, lambda ids, attention, _: critic(ids, attention))
        self._reshard()
        token_rewards, rewards = rewards_of(batch), batch.rewards
        if in_reward and kl_coef > 0:
            assert old is not None
            assert reference is not None
            penalty = torch.where(batch.mask, kl_coef * kl_estimate(old, reference, self.kl_kind), 0.0)
            token_rewards = token_rewards - penalty
            rewards = rewards - penalty.sum(dim=1).view_as(rewards)
        scores = Scores(rewards, batch.valid, token_rewards, batch.mask, values, greedy_rewards)
        advantages = self.spec.advantages(scores, self.knobs)
        returns = None if values is None else torch.where(batch.mask, advantages + values, 0.0)
        if self.whitens:
            advantages = whiten(advantages, batch.mask)
        return TrainBatch(
            batch,
            rewards,
            advantages,
            old,
            reference,
            values,
            returns,
            weights=weights,
            metrics=metrics,
            drift=drift,
        )

    def _compare(self, batch: RolloutBatch, old: torch.Tensor) -> dict[str, float]:
        """Describe how far trainer and engine are apart."""
        low, high = self.band
        return gap_of(batch, old) | correction_metrics(old, batch.sampler_logprobs, batch.mask, low, high)

    def _reshard(self) -> None:
        """Let whoever looks at the parameters next see shards, as ever: forward passes left some of them whole."""
        for role in (self.policy, self.reference, self.critic):
            if role is not None and role.model is not None:
                reshard(role.model)

    def _map(self, batch: RolloutBatch, function: RowFunction) -> torch.Tensor:
        return map_rows(batch, function, self.topology, max_tokens=self.max_tokens)


def rewards_of(batch: RolloutBatch) -> torch.Tensor:
    """Put each completion's reward on the last of its tokens that the policy chose, float32 [B, T]."""
    token_rewards = torch.zeros(batch.mask.shape)
    positions = torch.arange(batch.mask.shape[1])
    last = torch.where(batch.mask, positions, -1).amax(dim=1)
    rows = torch.nonzero(last >= 0)[:, 0]
    token_rewards[rows, last[rows]] = batch.rewards.view(-1)[rows]
    return token_rewards
