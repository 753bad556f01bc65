"""The algorithms by name, and the adapters from the records of a step to the pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from vectorlm.algorithms.batch import LossInputs, RolloutBatch
from vectorlm.algorithms.critic import gae_advantages
from vectorlm.algorithms.groups import (
    baseline_advantages,
    group_advantages,
    leave_one_out_advantages,
    return_advantages,
)
from vectorlm.algorithms.hyperparameters import Hyperparameters
from vectorlm.algorithms.policy_loss import (
    cispo_policy_loss,
    copg_loss,
    online_dpo_loss,
    ppo_policy_loss,
    proximal_rloo_loss,
    reinforce_policy_loss,
    sapo_policy_loss,
)
from vectorlm.algorithms.reduce import masked_sum
from vectorlm.algorithms.spec import AdvantageFunction, AlgorithmSpec, keep_best, keep_best_and_worst
from vectorlm.errors import ConfigError
from vectorlm.plugin import is_plugin, load_plugin

_SPECS: dict[str, AlgorithmSpec] = {}


def register(spec: AlgorithmSpec) -> AlgorithmSpec:
    """Register an algorithm under its name.

    Raises:
        ValueError: The name is taken.
    """
    if spec.name in _SPECS:
        raise ValueError(f"an algorithm named {spec.name!r} exists already: choose another name.")
    _SPECS[spec.name] = spec
    return spec


def get_algorithm(name: str) -> AlgorithmSpec:
    """Return the algorithm of this name, or the one at ``file.py:NAME`` or ``package.module:NAME``.

    Raises:
        ConfigError: There is none.
    """
    if name in _SPECS:
        return _SPECS[name]
    if is_plugin(name):
        spec = load_plugin(name)
        if not isinstance(spec, AlgorithmSpec):
            raise ConfigError(f"{name!r} is a {type(spec).__name__}: it must be an AlgorithmSpec.")
        return spec
    raise ConfigError(
        f"rl.algorithm={name!r} is not known: use one of {', '.join(algorithm_names())}, or file.py:NAME for your own."
    )


def algorithm_names() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_SPECS)


def _of_completions(advantages: Callable[[RolloutBatch], torch.Tensor]) -> AdvantageFunction:
    """Turn a function that returns a value per completion [P, K] into an advantage function."""
    return lambda batch, hparams: batch.spread(advantages(batch))


def _gae(batch: RolloutBatch, hparams: Hyperparameters) -> torch.Tensor:
    assert batch.values is not None
    return gae_advantages(batch.token_rewards, batch.values, batch.mask, hparams.gamma, hparams.lam)[0]


def _returns(batch: RolloutBatch, hparams: Hyperparameters) -> torch.Tensor:
    return return_advantages(batch.token_rewards, batch.mask)


def _greedy_baseline(batch: RolloutBatch, hparams: Hyperparameters) -> torch.Tensor:
    assert batch.greedy_rewards is not None
    return batch.spread(baseline_advantages(batch.rewards, batch.greedy_rewards, batch.valid))


_group_std = _of_completions(lambda batch: group_advantages(batch.rewards, "std", batch.valid))
_group_mean = _of_completions(lambda batch: group_advantages(batch.rewards, "none", batch.valid))
_leave_one_out = _of_completions(lambda batch: leave_one_out_advantages(batch.rewards, batch.valid))
_reward = _of_completions(lambda batch: torch.where(batch.valid, batch.rewards, 0.0))
_one = _of_completions(lambda batch: batch.valid.to(batch.rewards.dtype))
_zero = _of_completions(lambda batch: torch.zeros_like(batch.rewards))


def _ppo(
    inputs: LossInputs, hparams: Hyperparameters, level: Literal["token", "sequence"] = "token"
) -> torch.Tensor:
    rows = (inputs.policy_logprobs, inputs.old_logprobs, inputs.advantages)
    clips = (hparams.clip_low, hparams.clip_high, hparams.dual_clip)
    return ppo_policy_loss(*rows, *clips, level, inputs.mask)


def _cispo(inputs: LossInputs, hparams: Hyperparameters) -> torch.Tensor:
    rows = (inputs.policy_logprobs, inputs.old_logprobs, inputs.advantages)
    return cispo_policy_loss(*rows, hparams.clip_low, hparams.clip_high)


def _sapo(inputs: LossInputs, hparams: Hyperparameters) -> torch.Tensor:
    rows = (inputs.policy_logprobs, inputs.old_logprobs, inputs.advantages)
    return sapo_policy_loss(*rows, hparams.temperature_positive, hparams.temperature_negative)


def _reinforce(inputs: LossInputs, hparams: Hyperparameters) -> torch.Tensor:
    return reinforce_policy_loss(inputs.policy_logprobs, inputs.advantages)


def _proximal_rloo(inputs: LossInputs, hparams: Hyperparameters) -> torch.Tensor:
    # All tokens of a completion have its advantage; tokens outside the mask have 0.
    advantages = inputs.advantages.gather(1, inputs.advantages.abs().argmax(dim=1, keepdim=True))[:, 0]
    rows = (inputs.policy_logprobs, inputs.old_logprobs, advantages, inputs.mask)
    return proximal_rloo_loss(*rows, hparams.clip_low, hparams.clip_high)


def _sums_of_groups(inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of whole completions under policy and reference, [P, K] each."""
    assert inputs.reference_logprobs is not None
    both = (inputs.policy_logprobs, inputs.reference_logprobs)
    policy, reference = (masked_sum(each, inputs.mask).view(-1, inputs.rows_per_group) for each in both)
    return policy, reference


def _online_dpo(inputs: LossInputs, hparams: Hyperparameters) -> torch.Tensor:
    policy, reference = _sums_of_groups(inputs)
    (chosen, rejected), (reference_chosen, reference_rejected) = policy.unbind(1), reference.unbind(1)
    pairs = (chosen, rejected, reference_chosen, reference_rejected)
    return online_dpo_loss(*pairs, hparams.beta, hparams.label_smoothing, hparams.preference)


def _observe_pairs(inputs: LossInputs, hparams: Hyperparameters) -> dict[str, torch.Tensor]:
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


def _copg(inputs: LossInputs, hparams: Hyperparameters) -> torch.Tensor:
    size = inputs.rows_per_group
    rewards, valid = inputs.rewards.view(-1, size), inputs.mask.any(dim=1).view(-1, size)
    return copg_loss(*_sums_of_groups(inputs), rewards, hparams.beta, valid)


GRPO = AlgorithmSpec(
    name="grpo",
    advantages=_group_std,
    loss=_ppo,
    has_ratio=True,
    clips="token",
    reduction="sequence_mean_token_mean",
    min_group_size=2,
    source="Shao et al. 2024, arXiv:2402.03300",
)
REINFORCE = AlgorithmSpec(
    name="reinforce",
    advantages=_reward,
    loss=_reinforce,
    reduction="sequence_mean_token_sum",
    source="Williams 1992",
)
for _spec in (
    AlgorithmSpec(
        name="ppo",
        advantages=_gae,
        loss=_ppo,
        has_ratio=True,
        clips="token",
        needs_critic=True,
        settings={"whiten_advantages": True},
        source="Schulman et al. 2017, arXiv:1707.06347",
    ),
    GRPO,
    replace(
        GRPO,
        name="dr_grpo",
        advantages=_group_mean,
        reduction="sequence_sum_fixed",
        source="Liu et al. 2025, arXiv:2503.20783",
    ),
    replace(
        GRPO,
        name="dapo",
        reduction="token_mean",
        settings={"clip_high": 0.28, "dynamic_sampling": True},
        source="Yu et al. 2025, arXiv:2503.14476",
    ),
    replace(
        GRPO,
        name="gspo",
        loss=partial(_ppo, level="sequence"),
        clips="mean",
        settings={"clip_low": 3e-4, "clip_high": 4e-4},
        source="Zheng et al. 2025, arXiv:2507.18071; its bounds, section 5.1",
    ),
    replace(
        GRPO,
        name="cispo",
        loss=_cispo,
        clips=None,
        reduction="token_mean",
        settings={"clip_low": 1.0, "clip_high": 4.0},
        source="MiniMax 2025, arXiv:2506.13585; the upper bound of 5 as in Khatri et al. 2025, arXiv:2510.13786",
    ),
    replace(GRPO, name="sapo", loss=_sapo, clips=None, source="Gao et al. 2025, arXiv:2511.20347"),
    REINFORCE,
    replace(
        REINFORCE,
        name="rloo",
        advantages=_leave_one_out,
        min_group_size=2,
        source="Ahmadian et al. 2024, arXiv:2402.14740",
    ),
    replace(
        REINFORCE,
        name="remax",
        advantages=_greedy_baseline,
        needs_greedy=True,
        source="Li et al. 2023, arXiv:2310.10505",
    ),
    AlgorithmSpec(
        name="proximal_rloo",
        advantages=_leave_one_out,
        loss=_proximal_rloo,
        has_ratio=True,
        clips="sum",
        level="completion",
        min_group_size=2,
        source="Noukhovitch et al. 2024, arXiv:2410.18252",
    ),
    AlgorithmSpec(
        name="reinforce_pp",
        advantages=_returns,
        loss=_ppo,
        has_ratio=True,
        clips="token",
        source="Hu 2025, arXiv:2501.03262",
    ),
    AlgorithmSpec(
        name="online_dpo",
        advantages=_one,
        samples_from_policy=False,
        loss=_online_dpo,
        observe=_observe_pairs,
        level="group",
        select=keep_best_and_worst,
        needs_reference=True,
        min_group_size=2,
        source="Guo et al. 2024, arXiv:2402.04792; best against worst as in Noukhovitch et al. 2024, arXiv:2410.18252",
    ),
    AlgorithmSpec(
        name="best_of_k",
        advantages=_one,
        samples_from_policy=False,
        loss=_reinforce,
        select=keep_best,
        min_group_size=2,
        source="Gao et al. 2022, arXiv:2210.10760, as fine-tuning on the best completion",
    ),
    AlgorithmSpec(
        name="copg",
        advantages=_one,
        samples_from_policy=False,
        loss=_copg,
        level="group",
        needs_reference=True,
        min_group_size=2,
        source="Flet-Berliac et al. 2024, arXiv:2406.19185",
    ),
    AlgorithmSpec(
        name="on_policy_distillation",
        advantages=_zero,
        loss=_ppo,
        has_ratio=True,
        clips="token",
        needs_teacher=True,
        source="Lu 2025, On-Policy Distillation, Thinking Machines Lab; Agarwal et al. 2023, arXiv:2306.13649",
    ),
):
    register(_spec)
