"""Reinforcement learning as pure functions: tensors and floats in, tensors out."""

from vectorlm.algorithms.correction import correction_metrics, importance_weights, rejection_mask
from vectorlm.algorithms.gae import gae_advantages
from vectorlm.algorithms.groups import (
    baseline_advantages,
    batch_advantages,
    group_advantages,
    leave_one_out_advantages,
)
from vectorlm.algorithms.kl import AdaptiveKL, kl_estimate
from vectorlm.algorithms.logprobs import align, entropy, token_logprobs
from vectorlm.algorithms.policy_loss import (
    cispo_policy_loss,
    ppo_policy_loss,
    reinforce_policy_loss,
    sapo_policy_loss,
)
from vectorlm.algorithms.preference import online_dpo_loss
from vectorlm.algorithms.reduce import count_denominator, reduce_loss
from vectorlm.algorithms.registry import algorithm_names, get_algorithm, register
from vectorlm.algorithms.sequence_loss import copg_loss, proximal_rloo_loss
from vectorlm.algorithms.spec import AlgorithmSpec, Knobs, LossInputs, Scores
from vectorlm.algorithms.value_loss import value_loss
from vectorlm.algorithms.whiten import whiten

__all__ = [
    "AdaptiveKL",
    "AlgorithmSpec",
    "Knobs",
    "LossInputs",
    "Scores",
    "algorithm_names",
    "align",
    "baseline_advantages",
    "batch_advantages",
    "cispo_policy_loss",
    "copg_loss",
    "correction_metrics",
    "count_denominator",
    "entropy",
    "gae_advantages",
    "get_algorithm",
    "group_advantages",
    "importance_weights",
    "kl_estimate",
    "leave_one_out_advantages",
    "online_dpo_loss",
    "ppo_policy_loss",
    "proximal_rloo_loss",
    "reduce_loss",
    "register",
    "reinforce_policy_loss",
    "rejection_mask",
    "sapo_policy_loss",
    "token_logprobs",
    "value_loss",
    "whiten",
]
