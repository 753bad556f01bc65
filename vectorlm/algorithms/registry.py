"""The algorithms by name."""

from __future__ import annotations

from functools import partial

import torch

from vectorlm.algorithms.gae import gae_advantages
from vectorlm.algorithms.groups import (
    baseline_advantages,
    batch_advantages,
    group_advantages,
    leave_one_out_advantages,
)
from vectorlm.algorithms.policy_loss import (
    Level,
    cispo_policy_loss,
    ppo_policy_loss,
    reinforce_policy_loss,
    sapo_policy_loss,
)
from vectorlm.algorithms.preference import online_dpo_loss
from vectorlm.algorithms.ratio import masked_sum
from vectorlm.algorithms.selection import keep_best, keep_best_and_worst
from vectorlm.algorithms.sequence_loss import copg_loss, proximal_rloo_loss
from vectorlm.algorithms.spec import AlgorithmSpec, Knobs, LossInputs, Scores
from vectorlm.errors import ConfigError
from vectorlm.plugin import is_plugin, load_plugin

_SPECS: dict[str, AlgorithmSpec] = {}


def register(spec: AlgorithmSpec) -> AlgorithmSpec:
    """Make an algorithm known by its name.

    Raises:
        ValueError: The name is taken.
    """
    if spec.name in _SPECS:
        raise ValueError(f"an algorithm named {spec.name!r} exists already: choose another name.")
    _SPECS[spec.name] = spec
    return spec


def get_algorithm(name: str) -> AlgorithmSpec:
    """Return the algorithm of this name, or the one that ``file.py:NAME`` or ``package.module:NAME`` points to.

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
        f"rl.algorithm={name!r} is not known: use one of {', '.join(algorithm_names())}, or file.py:NAME of your own."
    )


def algorithm_names() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_SPECS)


def _gae(scores: Scores, knobs: Knobs) -> torch.Tensor:
    assert scores.values is not None
    return gae_advantages(scores.token_rewards, scores.values, scores.mask, knobs.gamma, knobs.lam)[0]


def _group_std(scores: Scores, knobs: Knobs) -> torch.Tensor:
    return scores.spread(group_advantages(scores.rewards, "std", scores.valid))


def _group_mean(scores: Scores, knobs: Knobs) -> torch.Tensor:
    return scores.spread(group_advantages(scores.rewards, "none", scores.valid))


def _leave_one_out(scores: Scores, knobs: Knobs) -> torch.Tensor:
    return scores.spread(leave_one_out_advantages(scores.rewards, scores.valid))


def _batch(scores: Scores, knobs: Knobs) -> torch.Tensor:
    return scores.spread(batch_advantages(scores.rewards, scores.valid))


def _greedy_baseline(scores: Scores, knobs: Knobs) -> torch.Tensor:
    assert scores.greedy_rewards is not None
    return scores.spread(baseline_advantages(scores.rewards, scores.greedy_rewards, scores.valid))


def _reward(scores: Scores, knobs: Knobs) -> torch.Tensor:
    return scores.spread(torch.where(scores.valid, scores.rewards, 0.0))


def _one(scores: Scores, knobs: Knobs) -> torch.Tensor:
    return scores.spread(scores.valid.to(scores.rewards.dtype))


def _ppo(inputs: LossInputs, knobs: Knobs, level: Level = "token") -> torch.Tensor:
    return ppo_policy_loss(
        inputs.policy_logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        knobs.clip_low,
        knobs.clip_high,
        knobs.dual_clip,
        level,
        inputs.mask,
    )


def _cispo(inputs: LossInputs, knobs: Knobs) -> torch.Tensor:
    rows = (inputs.policy_logprobs, inputs.old_logprobs, inputs.advantages)
    return cispo_policy_loss(*rows, knobs.clip_low, knobs.clip_high)


def _sapo(inputs: LossInputs, knobs: Knobs) -> torch.Tensor:
    rows = (inputs.policy_logprobs, inputs.old_logprobs, inputs.advantages)
    return sapo_policy_loss(*rows, knobs.temperature_positive, knobs.temperature_negative)


def _reinforce(inputs: LossInputs, knobs: Knobs) -> torch.Tensor:
    return reinforce_policy_loss(inputs.policy_logprobs, inputs.advantages)


def _proximal_rloo(inputs: LossInputs, knobs: Knobs) -> torch.Tensor:
    # All tokens of a completion have its advantage: the largest in size is it, whatever the mask left out.
    advantages = inputs.advantages.gather(1, inputs.advantages.abs().argmax(dim=1, keepdim=True))[:, 0]
    rows = (inputs.policy_logprobs, inputs.old_logprobs, advantages, inputs.mask)
    return proximal_rloo_loss(*rows, knobs.clip_low, knobs.clip_high)


def _pairs(inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probabilities of the better and the worse completion, of the policy and of the reference, [P] each."""
    assert inputs.reference_logprobs is not None
    chosen, rejected = masked_sum(inputs.policy_logprobs, inputs.mask).view(-1, 2).unbind(1)
    reference_chosen, reference_rejected = (
        masked_sum(inputs.reference_logprobs, inputs.mask).view(-1, 2).unbind(1)
    )
    return chosen, rejected, reference_chosen, reference_rejected


def _observe_pairs(inputs: LossInputs, knobs: Knobs) -> dict[str, torch.Tensor]:
    chosen, rejected, reference_chosen, reference_rejected = _pairs(inputs)
    better, worse = knobs.beta * (chosen - reference_chosen), knobs.beta * (rejected - reference_rejected)
    return {
        "preference/chosen_reward": better,
        "preference/rejected_reward": worse,
        "preference/margin": better - worse,
        "preference/accuracy": (better > worse).to(better.dtype),
        "preference/chosen_logprob": chosen,
        "preference/rejected_logprob": rejected,
    }


def _online_dpo(inputs: LossInputs, knobs: Knobs) -> torch.Tensor:
    return online_dpo_loss(
        *_pairs(inputs),
        knobs.beta,
        knobs.label_smoothing,
        knobs.preference,
    )


def _copg(inputs: LossInputs, knobs: Knobs) -> torch.Tensor:
    assert inputs.reference_logprobs is not None
    size = inputs.rows_per_group
    return copg_loss(
        masked_sum(inputs.policy_logprobs, inputs.mask).view(-1, size),
        masked_sum(inputs.reference_logprobs, inputs.mask).view(-1, size),
        inputs.rewards.view(-1, size),
        knobs.beta,
        inputs.mask.any(dim=1).view(-1, size),
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
    AlgorithmSpec(
        name="grpo",
        advantages=_group_std,
        loss=_ppo,
        has_ratio=True,
        clips="token",
        reduction="sequence_mean_token_mean",
        min_group_size=2,
        source="Shao et al. 2024, arXiv:2402.03300",
    ),
    AlgorithmSpec(
        name="dr_grpo",
        advantages=_group_mean,
        loss=_ppo,
        has_ratio=True,
        clips="token",
        reduction="sequence_sum_fixed",
        min_group_size=2,
        source="Liu et al. 2025, arXiv:2503.20783",
    ),
    AlgorithmSpec(
        name="dapo",
        advantages=_group_std,
        loss=_ppo,
        has_ratio=True,
        clips="token",
        min_group_size=2,
        settings={"clip_high": 0.28, "dynamic_sampling": True},
        source="Yu et al. 2025, arXiv:2503.14476",
    ),
    AlgorithmSpec(
        name="gspo",
        advantages=_group_std,
        loss=partial(_ppo, level="sequence"),
        has_ratio=True,
        clips="mean",
        reduction="sequence_mean_token_mean",
        min_group_size=2,
        settings={"clip_low": 3e-4, "clip_high": 4e-4},
        source="Zheng et al. 2025, arXiv:2507.18071; its bounds, section 5.1",
    ),
    AlgorithmSpec(
        name="cispo",
        advantages=_group_std,
        loss=_cispo,
        has_ratio=True,
        min_group_size=2,
        settings={"clip_low": 1.0, "clip_high": 4.0},
        source="MiniMax 2025, arXiv:2506.13585; the upper bound of 5 as in Khatri et al. 2025, arXiv:2510.13786",
    ),
    AlgorithmSpec(
        name="sapo",
        advantages=_group_std,
        loss=_sapo,
        has_ratio=True,
        reduction="sequence_mean_token_mean",
        min_group_size=2,
        source="Gao et al. 2025, arXiv:2511.20347",
    ),
    AlgorithmSpec(
        name="rloo",
        advantages=_leave_one_out,
        loss=_reinforce,
        reduction="sequence_mean_token_sum",
        min_group_size=2,
        source="Ahmadian et al. 2024, arXiv:2402.14740",
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
        name="reinforce",
        advantages=_reward,
        loss=_reinforce,
        reduction="sequence_mean_token_sum",
        source="Williams 1992",
    ),
    AlgorithmSpec(
        name="reinforce_pp",
        advantages=_batch,
        loss=_ppo,
        has_ratio=True,
        clips="token",
        source="Hu 2025, arXiv:2501.03262",
    ),
    AlgorithmSpec(
        name="remax",
        advantages=_greedy_baseline,
        loss=_reinforce,
        reduction="sequence_mean_token_sum",
        needs_greedy=True,
        source="Li et al. 2023, arXiv:2310.10505",
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
):
    register(_spec)
