"""Reinforcement learning as pure functions: tensors and floats in, tensors out.

B sequences, T tokens, V vocabulary, P prompts, G completions of each. Masks are bool or 0/1.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vectorlm.algorithms.batch import LossInputs, RolloutBatch
    from vectorlm.algorithms.correction import correction_metrics, importance_weights, rejection_mask
    from vectorlm.algorithms.critic import gae_advantages, value_loss
    from vectorlm.algorithms.groups import (
        baseline_advantages,
        batch_advantages,
        group_advantages,
        leave_one_out_advantages,
        return_advantages,
        whiten,
    )
    from vectorlm.algorithms.hyperparameters import Hyperparameters
    from vectorlm.algorithms.kl import AdaptiveKL, generalised_jsd, kl_estimate
    from vectorlm.algorithms.logprobs import align, entropy, token_logprobs
    from vectorlm.algorithms.policy_loss import (
        cispo_policy_loss,
        copg_loss,
        online_dpo_loss,
        ppo_policy_loss,
        proximal_rloo_loss,
        reinforce_policy_loss,
        sapo_policy_loss,
    )
    from vectorlm.algorithms.reduce import count_denominator, reduce_loss
    from vectorlm.algorithms.registry import algorithm_names, get_algorithm, register
    from vectorlm.algorithms.spec import AlgorithmSpec

__all__ = [
    "AdaptiveKL",
    "AlgorithmSpec",
    "Hyperparameters",
    "LossInputs",
    "RolloutBatch",
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
    "generalised_jsd",
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
    "return_advantages",
    "sapo_policy_loss",
    "token_logprobs",
    "value_loss",
    "whiten",
]

_FILES = (
    *("hyperparameters", "batch", "spec", "registry", "groups", "policy_loss"),
    *("critic", "kl", "reduce", "logprobs", "correction"),
)


def __getattr__(name: str) -> Any:
    # The files import torch, which checking a config does not need: they are imported when a name is first used.
    if name in __all__:
        for file in _FILES:
            module = import_module(f"{__name__}.{file}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
