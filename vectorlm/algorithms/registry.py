"""The table of algorithms: the advantages, the loss, the needs and the initial settings of each.

Reading the table does not import torch: `pure` loads a function's module when the function is first called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import vectorlm.algorithms as pure
from vectorlm.algorithms import settings
from vectorlm.algorithms.spec import AlgorithmSpec, keep_best, keep_best_and_worst, keep_unscored
from vectorlm.errors import ConfigError
from vectorlm.plugin import is_plugin, load_plugin
from vectorlm.settings import nearest

if TYPE_CHECKING:
    import torch

    from vectorlm.algorithms.batch import LossInputs, RolloutBatch


def _turns(batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return pure.turn_advantages(batch.whole_rewards(), batch.turns, batch.mask, batch.rows_per_group)


def _group(batch: RolloutBatch, hparams: settings.ScaleSettings) -> torch.Tensor:
    if batch.turns is not None:
        return batch.spread_turns(pure.scaled_as_groups(*_turns(batch), hparams.scale_rewards))
    return batch.spread(pure.group_advantages(batch.rewards, hparams.scale_rewards, batch.valid))


def _leave_one_out(batch: RolloutBatch, hparams: settings.AlgorithmSettings) -> torch.Tensor:
    if batch.turns is not None:
        return batch.spread_turns(_turns(batch)[0])
    return batch.spread(pure.leave_one_out_advantages(batch.rewards, batch.valid))


def _rescaled(batch: RolloutBatch, hparams: settings.AlgorithmSettings) -> torch.Tensor:
    if batch.turns is not None:
        advantages, trained = pure.scaled_as_groups(*_turns(batch), "none"), batch.trained_groups
        num_differing = (trained & advantages.flatten(1).any(dim=1)).sum().clamp(min=1)
        return batch.spread_turns(advantages * (trained.sum() / num_differing))
    return batch.spread(pure.rescaled_advantages(batch.rewards, batch.valid, batch.trained_groups))


def _reward(batch: RolloutBatch, hparams: settings.AlgorithmSettings) -> torch.Tensor:
    if batch.turns is not None:
        return pure.returns_to_go(batch.token_rewards, batch.mask).masked_fill(~batch.mask, 0.0)
    return batch.spread(batch.rewards.masked_fill(~batch.valid, 0.0))


def _one(batch: RolloutBatch, hparams: settings.AlgorithmSettings) -> torch.Tensor:
    return batch.spread(batch.valid.to(batch.rewards.dtype))


def _length_weighted(batch: RolloutBatch, hparams: settings.AlgorithmSettings) -> torch.Tensor:
    lengths = batch.mask.sum(dim=1)
    if batch.branch_lengths is not None:
        lengths = lengths + batch.branch_lengths
    lengths = lengths.view_as(batch.rewards)
    return batch.spread(pure.length_weighted_advantages(batch.rewards, lengths, batch.valid))


def _covariances(batch: RolloutBatch, advantages: torch.Tensor) -> torch.Tensor:
    return pure.covariances(batch.old_logprobs, advantages, batch.mask)


def _tokens(inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the first arguments of every loss with one value per token."""
    return inputs.policy_logprobs, inputs.old_logprobs, inputs.advantages


def _completions(inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the arguments of a loss with one value per completion; its trained tokens all have the same advantage."""
    advantages = inputs.advantages.gather(1, inputs.advantages.abs().argmax(dim=1, keepdim=True))[:, 0]
    return inputs.policy_logprobs, inputs.old_logprobs, advantages, inputs.mask


def _groups(inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of whole completions under policy and reference, [P, K] each."""
    shape = (-1, inputs.rows_per_group)
    policy = pure.masked_sum(inputs.policy_logprobs, inputs.mask).view(shape)
    return policy, pure.masked_sum(inputs.reference_logprobs, inputs.mask).view(shape)


def _reinforce(inputs: LossInputs, hparams: settings.AlgorithmSettings) -> torch.Tensor:
    return pure.reinforce_policy_loss(inputs.policy_logprobs, inputs.advantages)


def _ppo(inputs: LossInputs, hparams: settings.SurrogateSettings) -> torch.Tensor:
    clips = (hparams.clip_low, hparams.clip_high, hparams.dual_clip)
    return pure.ppo_policy_loss(*_tokens(inputs), *clips, hparams.importance_sampling_level, inputs.mask)


def _clip_cov(inputs: LossInputs, hparams: settings.SurrogateSettings) -> torch.Tensor:
    assert inputs.marked is not None
    return _ppo(inputs, hparams).masked_fill(inputs.marked, 0.0)


def _observe_pairs(inputs: LossInputs, hparams: settings.ReferenceSettings) -> dict[str, torch.Tensor]:
    policy, reference = _groups(inputs)
    better, worse = (hparams.beta * (policy - reference)).unbind(1)
    return {
        "preference/chosen_reward": better,
        "preference/rejected_reward": worse,
        "preference/margin": better - worse,
        "preference/accuracy": (better > worse).to(better.dtype),
        "preference/chosen_logprob": policy[:, 0],
        "preference/rejected_logprob": policy[:, 1],
    }


GRPO = AlgorithmSpec(
    name="grpo",
    settings=settings.GRPOSettings(reduction="sequence_mean_token_mean"),
    advantages=_group,
    loss=_ppo,
    scales_with_advantage=True,
    has_ratio=True,
    clips="token",
    min_group_size=2,
    source="Shao et al. 2024, arXiv:2402.03300",
)
REINFORCE = AlgorithmSpec(
    name="reinforce",
    settings=settings.TokenSettings(reduction="sequence_mean_token_sum"),
    advantages=_reward,
    loss=_reinforce,
    scales_with_advantage=True,
    source="Williams 1992",
)


def _dppo(name: str, divergence: str, bound: float) -> AlgorithmSpec:
    def observe(inputs: LossInputs, hparams: settings.DPPOSettings) -> dict[str, torch.Tensor]:
        blocked = pure.blocked_tokens(*_tokens(inputs), hparams.divergence_bound, divergence)
        return {"policy/blocked_fraction": pure.masked_mean(blocked.float(), inputs.mask)}

    return replace(
        GRPO,
        name=name,
        settings=settings.DPPOSettings(divergence_bound=bound),
        loss=lambda inputs, hparams: pure.dppo_policy_loss(
            *_tokens(inputs), hparams.divergence_bound, divergence
        ),
        observe=observe,
        clips=None,
        source="Qi et al. 2026, arXiv:2602.04879",
    )


ROWS: tuple[AlgorithmSpec, ...] = (
    AlgorithmSpec(
        name="ppo",
        settings=settings.PPOSettings(whiten_advantages=True),
        advantages=lambda batch, hparams: pure.gae_advantages(
            batch.token_rewards, batch.values, batch.mask, hparams.gamma, hparams.lam
        )[0],
        loss=_ppo,
        has_ratio=True,
        clips="token",
        needs_critic=True,
        scales_with_advantage=True,
        source="Schulman et al. 2017, arXiv:1707.06347",
    ),
    GRPO,
    replace(
        GRPO,
        name="dr_grpo",
        settings=settings.GRPOSettings(reduction="sequence_sum_fixed", scale_rewards="none"),
        source="Liu et al. 2025, arXiv:2503.20783",
    ),
    replace(
        GRPO,
        name="dapo",
        settings=settings.GRPOSettings(clip_high=0.28, dynamic_sampling=True),
        source="Yu et al. 2025, arXiv:2503.14476",
    ),
    replace(
        GRPO,
        name="gspo",
        settings=settings.GRPOSettings(
            reduction="sequence_mean_token_mean",
            importance_sampling_level="sequence",
            clip_low=3e-4,
            clip_high=4e-4,
        ),
        source="Zheng et al. 2025, arXiv:2507.18071; its bounds, section 5.1",
    ),
    replace(
        GRPO,
        name="cispo",
        settings=settings.CISPOSettings(clip_low=1.0, clip_high=4.0),
        loss=lambda inputs, hparams: pure.cispo_policy_loss(
            *_tokens(inputs),
            hparams.clip_low,
            hparams.clip_high,
            hparams.importance_sampling_level,
            inputs.mask,
        ),
        clips=None,
        source="MiniMax 2025, arXiv:2506.13585; the upper bound of 5 as in Khatri et al. 2025, arXiv:2510.13786",
    ),
    replace(
        GRPO,
        name="sapo",
        settings=settings.SAPOSettings(reduction="sequence_mean_token_mean"),
        loss=lambda inputs, hparams: pure.sapo_policy_loss(
            *_tokens(inputs),
            hparams.temperature_positive,
            hparams.temperature_negative,
            hparams.importance_sampling_level,
            inputs.mask,
        ),
        clips=None,
        source="Gao et al. 2025, arXiv:2511.20347",
    ),
    replace(
        GRPO,
        name="lite_ppo",
        settings=settings.GRPOSettings(scale_rewards="batch"),
        source="Liu et al. 2025, arXiv:2508.08221",
    ),
    replace(
        GRPO,
        name="gdpo",
        settings=settings.ClippedSettings(reduction="sequence_mean_token_mean"),
        advantages=lambda batch, hparams: batch.spread(
            pure.decoupled_advantages(batch.reward_parts, batch.part_weights, batch.valid)
        ),
        needs_parts=True,
        sums_turns=True,
        source="Liu et al. 2026, arXiv:2601.05242",
    ),
    replace(
        GRPO,
        name="pass_at_k",
        settings=settings.PassAtKSettings(),
        advantages=lambda batch, hparams: batch.spread(
            pure.pass_at_k_advantages(batch.rewards, hparams.pass_k, batch.valid)
        ),
        sums_turns=True,
        source="Chen et al. 2025, arXiv:2508.10751; any reward as in Walder and Karkhanis 2025, arXiv:2505.15201",
    ),
    replace(
        GRPO,
        name="gmpo",
        settings=settings.GMPOSettings(clip_low=0.3297, clip_high=0.4918),
        loss=lambda inputs, hparams: pure.gmpo_policy_loss(
            *_completions(inputs), hparams.clip_low, hparams.clip_high
        ),
        level="completion",
        source="Zhao et al. 2025, arXiv:2507.20673; its bounds exp(-0.4) and exp(0.4) of a ratio",
    ),
    replace(
        GRPO,
        name="clip_cov",
        settings=settings.ClipCovSettings(),
        loss=_clip_cov,
        mark=lambda batch, advantages, hparams: pure.drawn_between(
            _covariances(batch, advantages),
            batch.mask,
            hparams.covariance_share,
            hparams.covariance_low,
            hparams.covariance_high,
            # All ranks and a resumed run draw the same tokens; the next step draws other tokens.
            seed=int(batch.input_ids.sum()),
        ),
        needs_old=True,
        source="Cui et al. 2025, arXiv:2505.22617",
    ),
    replace(
        GRPO,
        name="kl_cov",
        settings=settings.KLCovSettings(covariance_share=2e-3),
        loss=lambda inputs, hparams: pure.kl_cov_loss(
            *_tokens(inputs), inputs.marked, hparams.covariance_kl_coef
        ),
        scales_with_advantage=False,
        clips=None,
        mark=lambda batch, advantages, hparams: pure.highest(
            _covariances(batch, advantages), batch.mask, hparams.covariance_share
        ),
        needs_old=True,
        source="Cui et al. 2025, arXiv:2505.22617; the share for 7B",
    ),
    _dppo("dppo_tv", "tv", 0.15),
    _dppo("dppo_kl", "bernoulli_kl", 0.05),
    replace(
        GRPO,
        name="vespo",
        settings=settings.VESPOSettings(),
        loss=lambda inputs, hparams: pure.vespo_policy_loss(
            *_tokens(inputs),
            inputs.mask,
            (hparams.shape_positive, hparams.rate_positive),
            (hparams.shape_negative, hparams.rate_negative),
            inputs.log_weights,
        ),
        clips=None,
        reads_weights=True,
        source="Shen et al. 2026, arXiv:2602.10693",
    ),
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
        name="opo",
        advantages=_length_weighted,
        sums_turns=True,
        min_group_size=2,
        source="Hao et al. 2025, arXiv:2505.23585",
    ),
    replace(
        REINFORCE,
        name="gpg",
        settings=settings.TokenSettings(),
        advantages=_rescaled,
        min_group_size=2,
        source="Chu et al. 2025, arXiv:2504.02546",
    ),
    replace(
        REINFORCE,
        name="otb",
        advantages=lambda batch, hparams: pure.optimal_token_advantages(
            batch.token_rewards, batch.gradient_norms, batch.mask, batch.rows_per_group, batch.weights
        ),
        needs_gradient_norms=True,
        min_group_size=2,
        source="Li et al. 2026, arXiv:2602.07078",
    ),
    replace(
        REINFORCE,
        name="remax",
        advantages=lambda batch, hparams: batch.spread(
            pure.baseline_advantages(batch.rewards, batch.greedy_rewards, batch.valid)
        ),
        sums_turns=True,
        needs_greedy=True,
        source="Li et al. 2023, arXiv:2310.10505",
    ),
    AlgorithmSpec(
        name="proximal_rloo",
        settings=settings.ProximalRLOOSettings(),
        advantages=_leave_one_out,
        loss=lambda inputs, hparams: pure.proximal_rloo_loss(
            *_completions(inputs), hparams.clip_low, hparams.clip_high
        ),
        has_ratio=True,
        clips="sum",
        level="completion",
        min_group_size=2,
        scales_with_advantage=True,
        source="Noukhovitch et al. 2024, arXiv:2410.18252",
    ),
    AlgorithmSpec(
        name="reinforce_pp",
        settings=settings.ClippedSettings(),
        advantages=lambda batch, hparams: pure.return_advantages(batch.token_rewards, batch.mask),
        loss=_ppo,
        has_ratio=True,
        clips="token",
        min_completions=2,
        scales_with_advantage=True,
        source="Hu 2025, arXiv:2501.03262",
    ),
    AlgorithmSpec(
        name="online_dpo",
        settings=settings.OnlineDPOSettings(),
        advantages=_one,
        samples_from_policy=False,
        loss=lambda inputs, hparams: pure.online_dpo_loss(
            *(pair for logprobs in _groups(inputs) for pair in logprobs.unbind(1)),
            hparams.beta,
            hparams.label_smoothing,
            hparams.preference,
        ),
        observe=_observe_pairs,
        level="group",
        select=keep_best_and_worst,
        needs_reference=True,
        min_group_size=2,
        source="Guo et al. 2024, arXiv:2402.04792; best against worst as in Noukhovitch et al. 2024, arXiv:2410.18252",
    ),
    AlgorithmSpec(
        name="best_of_k",
        settings=settings.ReductionSettings(),
        advantages=_one,
        samples_from_policy=False,
        loss=_reinforce,
        select=keep_best,
        min_group_size=2,
        scales_with_advantage=True,
        source="Gao et al. 2022, arXiv:2210.10760, as fine-tuning on the best completion",
    ),
    AlgorithmSpec(
        name="copg",
        settings=settings.ReferenceSettings(),
        advantages=_one,
        samples_from_policy=False,
        loss=lambda inputs, hparams: pure.copg_loss(
            *_groups(inputs),
            inputs.rewards.view(-1, inputs.rows_per_group),
            hparams.beta,
            inputs.mask.any(dim=1).view(-1, inputs.rows_per_group),
        ),
        level="group",
        needs_reference=True,
        min_group_size=2,
        source="Flet-Berliac et al. 2024, arXiv:2406.19185",
    ),
    AlgorithmSpec(
        name="on_policy_distillation",
        settings=settings.DistillationSettings(),
        advantages=lambda batch, hparams: batch.spread(batch.rewards.new_zeros(batch.rewards.shape)),
        sums_turns=True,
        select=keep_unscored,
        loss=_ppo,
        has_ratio=True,
        clips="token",
        needs_teacher=True,
        scales_with_advantage=True,
        source="Lu 2025, On-Policy Distillation, Thinking Machines Lab; Agarwal et al. 2023, arXiv:2306.13649",
    ),
)
"""The algorithms of this library."""
_SPECS: dict[str, AlgorithmSpec] = {spec.name: spec for spec in ROWS}
SETTINGS: Mapping[str, settings.AlgorithmSettings] = {name: _SPECS[name].settings for name in sorted(_SPECS)}
"""Initial settings of the algorithms of this library, by name."""


def register(spec: AlgorithmSpec) -> AlgorithmSpec:
    """Register an algorithm under its name.

    Raises:
        ValueError: The name is taken.
    """
    if spec.name in _SPECS:
        raise ValueError(f"name={spec.name!r} is already the name of an algorithm. Choose another name.")
    _SPECS[spec.name] = spec
    return spec


def get_algorithm(name: str) -> AlgorithmSpec:
    """Return the algorithm of this name, or the user's at ``file.py:NAME`` or ``package.module:NAME``.

    Raises:
        ConfigError: There is none.
    """
    if name in _SPECS:
        return _SPECS[name]
    if is_plugin(name):
        spec = load_plugin(name)
        if not isinstance(spec, AlgorithmSpec):
            raise ConfigError(
                f"rl.algorithm={name!r} must be an AlgorithmSpec. It is a {type(spec).__name__}."
            )
        return spec
    rule = f"is not known. Use one of {', '.join(algorithm_names())}, or file.py:NAME for your own."
    raise ConfigError(f"rl.algorithm={name!r} {rule} {nearest(name, _SPECS)}".rstrip())


def algorithm_names() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_SPECS)
