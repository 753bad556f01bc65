"""Reinforcement learning as pure functions: tensors and floats in, tensors out.

B sequences, T tokens, V vocabulary, P prompts, G completions of each. Masks are bool or 0/1.
"""

from vectorlm.algorithms.batch import LossInputs, RolloutBatch
from vectorlm.algorithms.correction import correction_metrics, importance_weights, rejection_mask
from vectorlm.algorithms.covariance import covariances
from vectorlm.algorithms.critic import gae_advantages, value_loss
from vectorlm.algorithms.groups import (
    baseline_advantages,
    batch_advantages,
    decoupled_advantages,
    group_advantages,
    leave_one_out_advantages,
    length_weighted_advantages,
    optimal_token_advantages,
    pass_at_k_advantages,
    rescaled_advantages,
    return_advantages,
    whiten,
)
from vectorlm.algorithms.kl import AdaptiveKL, binary_divergence, generalised_jsd, kl_estimate
from vectorlm.algorithms.logprobs import align, entropy, token_logprobs
from vectorlm.algorithms.policy_loss import (
    cispo_policy_loss,
    dppo_policy_loss,
    gmpo_policy_loss,
    kl_cov_loss,
    ppo_policy_loss,
    proximal_rloo_loss,
    reinforce_policy_loss,
    sapo_policy_loss,
    vespo_policy_loss,
)
from vectorlm.algorithms.preference import bradley_terry_loss, copg_loss, online_dpo_loss
from vectorlm.algorithms.reduce import count_denominator, reduce_loss
from vectorlm.algorithms.registry import algorithm_names, get_algorithm, register
from vectorlm.algorithms.spec import AlgorithmSpec
from vectorlm.algorithms.support import Support, truncate
from vectorlm.hyperparameters import (
    AlgorithmSettings,
    ClipSettings,
    LevelSettings,
    ReductionSettings,
    SurrogateSettings,
    TokenSettings,
    WhiteningSettings,
)

__all__ = [
    "AdaptiveKL",
    "AlgorithmSettings",
    "AlgorithmSpec",
    "ClipSettings",
    "LevelSettings",
    "LossInputs",
    "ReductionSettings",
    "RolloutBatch",
    "Support",
    "SurrogateSettings",
    "TokenSettings",
    "WhiteningSettings",
    "algorithm_names",
    "align",
    "baseline_advantages",
    "batch_advantages",
    "binary_divergence",
    "bradley_terry_loss",
    "cispo_policy_loss",
    "copg_loss",
    "correction_metrics",
    "count_denominator",
    "covariances",
    "decoupled_advantages",
    "dppo_policy_loss",
    "entropy",
    "gae_advantages",
    "generalised_jsd",
    "get_algorithm",
    "gmpo_policy_loss",
    "group_advantages",
    "importance_weights",
    "kl_cov_loss",
    "kl_estimate",
    "leave_one_out_advantages",
    "length_weighted_advantages",
    "online_dpo_loss",
    "optimal_token_advantages",
    "pass_at_k_advantages",
    "ppo_policy_loss",
    "proximal_rloo_loss",
    "reduce_loss",
    "register",
    "reinforce_policy_loss",
    "rejection_mask",
    "rescaled_advantages",
    "return_advantages",
    "sapo_policy_loss",
    "token_logprobs",
    "truncate",
    "value_loss",
    "vespo_policy_loss",
    "whiten",
]
