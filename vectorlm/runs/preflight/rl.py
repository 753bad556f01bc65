"""The rules of the section ``rl`` that need to know the algorithms, and so need torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vectorlm.algorithms.registry import get_algorithm
from vectorlm.algorithms.settings import (
    ClipCovSettings,
    OnlineDPOSettings,
    PassAtKSettings,
    WhiteningSettings,
)
from vectorlm.algorithms.spec import AlgorithmSpec
from vectorlm.rl.environments.environment import AGENT
from vectorlm.rl.prepare import correction_of
from vectorlm.rl.prompts import SCORE
from vectorlm.rl.rewards.registry import short_name
from vectorlm.rl.settings import NO_CORRECTION, Correction, CorrectionSettings, CriticSettings
from vectorlm.runs.config.schema import Config, RLSettings
from vectorlm.runs.config.setting import all_settings, refuse, settings_of, to_plain, value_at
from vectorlm.runs.preflight.teacher import teacher_problems
from vectorlm.sampling.weights.lora_factors import moving_references
from vectorlm.train.grammar import KINDS

# Parameters that change which tokens can be drawn, or how likely they are, and that the trainer does not follow; with
# the values that change nothing.
_RESHAPING: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1, 1.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "min_tokens": (0,),
    "thinking_token_budget": (None, -1),
}
_RESHAPING_ENGINE: dict[str, tuple[Any, ...]] = {
    "logprobs_mode": ("processed_logprobs",),
    "logits_processors": (None, []),
    "watermark_config": (None,),
    "hf_overrides": (None, {}),
}
"""The same of the engine's arguments."""
_SET_ELSEWHERE = {"n": "rl.group_size", "seed": "train_parameters.seed"}


def rl_problems(config: Config, rl: RLSettings) -> Iterator[str]:
    """Find what is wrong with the section ``rl``; loads the algorithm that it names."""
    spec = get_algorithm(rl.algorithm)
    yield from _group_problems(config, rl, spec)
    yield from _sampling_problems(config, rl, spec)
    for name, value, rule, fix in correction_problems(rl.correction, spec):
        yield refuse(config, f"rl.correction.{name}", rule, fix, value)
    yield from _source_problems(config, rl)
    yield from _mixture_problems(config, rl, spec)
    yield from _unread_settings(config, rl, spec)
    yield from _reward_problems(config, rl, spec)
    yield from teacher_problems(config, rl, spec)
    yield from _hyperparameter_problems(config, rl, spec)
    yield from _kl_problems(config, rl, spec)
    yield from _length_problems(config, rl, spec)


def _group_problems(config: Config, rl: RLSettings, spec: AlgorithmSpec) -> Iterator[str]:
    collect = rl.collect
    # Silent: every advantage would be 0.
    if collect.group_size < spec.min_group_size:
        rule = f"is too small for {spec.name}, which compares completions of one prompt"
        yield refuse(config, "rl.group_size", rule, f"Use {spec.min_group_size} or more.")
    # A critic's advantages differ within a completion; others that are whitened do not.
    hparams = rl.hyperparameters
    whitens = isinstance(hparams, WhiteningSettings) and hparams.whiten_advantages and not spec.needs_critic
    num_completions, least = (
        collect.prompts_per_step * collect.group_size,
        2 if whitens else spec.min_completions,
    )
    if num_completions < least:
        what = "rl.whiten_advantages" if whitens else spec.name
        rule = f"makes a step of {num_completions} completions, and {what} compares the completions of a step"
        yield refuse(config, "rl.prompts_per_step", rule, f"Use {least} or more.")
    # Silent: the run would sample on and on.
    if collect.group_size < 2 and rl.hyperparameters.dynamic_sampling:
        rule = "would drop every group with rl.dynamic_sampling, as one completion has nothing to differ from"
        yield refuse(config, "rl.group_size", rule, "Use 2 or more.")
    # Costs more than a minute: the first batch is split after its completions are sampled.
    if rl.update.num_mini_batches > collect.prompts_per_step:
        rule = f"cannot split {collect.prompts_per_step} prompts: a mini-batch holds whole groups"
        yield refuse(config, "rl.num_mini_batches", rule, "Use fewer, or more prompts.")
    # Silent: the baseline would be one turn, without what environments say and give.
    if spec.needs_greedy and any(each.environment is not None for each in rl.by_source.values()):
        rule = "compares completions with a greedy one of a single turn, and environments and agents make several"
        yield refuse(config, "rl.algorithm", rule, "Use rloo, for example.")


def _sampling_problems(config: Config, rl: RLSettings, spec: AlgorithmSpec) -> Iterator[str]:
    given = rl.collect.sampling_params
    # All of these are silent: the policy would learn from other completions than the formulas are about.
    for name, place in _SET_ELSEWHERE.items():
        if name in given:
            yield refuse(config, f"rl.sampling_params.{name}", "is set in another place", f"Set '{place}'.")
    temperature = rl.collect.sampling["temperature"]
    # vLLM rounds a temperature below 0.01 up to 0.01, or down to greedy sampling, which makes equal completions.
    if not (isinstance(temperature, int | float) and 0.01 <= temperature < math.inf):
        rule = (
            "must be at least 0.01, and finite: at 0 all completions of a group are equal, and vLLM rounds values "
            "below 0.01"
        )
        yield refuse(config, "rl.sampling_params.temperature", rule, "Use 1.0.")
    for name, harmless in _RESHAPING.items():
        if spec.samples_from_policy and name in given and given[name] not in harmless:
            rule = (
                "makes the engine sample from another distribution than the one that is trained, so that every "
                "ratio of the two would be wrong"
            )
            fix = "Use only temperature, top_p, top_k and min_p; online_dpo, best_of_k and copg may use it."
            yield refuse(config, f"rl.sampling_params.{name}", rule, fix)
    sampler = config.train_parameters.sampler
    engine_args = {} if sampler is None else sampler.engine.engine_args
    for name, harmless in _RESHAPING_ENGINE.items():
        if spec.samples_from_policy and name in engine_args and engine_args[name] not in harmless:
            rule = (
                "makes the engine's log-probabilities other ones than of what the trained policy would draw"
            )
            path = f"train_parameters.sampler.engine.{name}"
            yield refuse(config, path, rule, "Leave it out.", engine_args[name])
    if spec.samples_from_policy and (asked := given.get("structured_outputs")):
        # The trainer would follow another grammar than the engine.
        if not isinstance(asked, Mapping) or len(asked) != 1 or not set(asked) <= set(KINDS):
            rule = f"must be one of {', '.join(KINDS)}, which the trainer can follow, and its value"
            yield refuse(
                config, "rl.sampling_params.structured_outputs", rule, "Leave the others out.", asked
            )
        for name in ("structured_outputs_config", "reasoning_parser"):
            if name in engine_args:
                rule = "changes where the engine follows structured_outputs, and the trainer would not follow"
                yield refuse(config, f"train_parameters.sampler.engine.{name}", rule, "Leave it out.")


def correction_problems(
    settings: CorrectionSettings, spec: AlgorithmSpec
) -> Iterator[tuple[str, Any, str, str]]:
    """Yield setting, value, rule and fix of everything that cannot be combined with this algorithm."""
    # All of these are silent: weights that cancel, count twice or do not exist.
    correction = correction_of(settings, spec)
    if correction == NO_CORRECTION:
        return
    if not spec.samples_from_policy:
        rule = f"has nothing to correct: {spec.name} may learn from completions of any policy"
        yield "preset", settings.preset, rule, "Use off."
        return
    if correction.bypass and spec.has_ratio and correction.level is not None:
        rule = f"counts the mismatch twice with bypass: {spec.name} has the ratio of policy and engine in its loss"
        yield "level", correction.level, rule, "Leave it out, or use the preset decoupled."
    if correction.bypass and (correction.gate or correction.veto is not None or correction.normalise):
        rule = "makes no forward pass of the old policy, which gates, vetoes and normalised weights need"
        yield "bypass", True, rule, "Use another preset, or leave them out."
    if spec.level == "group" and correction.level is not None:
        rule = f"gives completions different weights, and {spec.name} has one loss for a whole group"
        yield "level", correction.level, rule, "Leave it out."
    elif spec.level == "completion" and correction.level is not None and not correction.weighs_rows:
        rule = f"gives tokens different weights, and {spec.name} has one loss for a whole completion"
        yield "level", correction.level, rule, "Use sequence, or geometric with mode: truncate."
    if not (correction.low or 0) <= 1 <= (1 if correction.high is None else correction.high):
        yield "low", correction.low, "and high must be bounds around 1: low <= 1 <= high", "Use 0.5 and 2.0."
    yield from _gate_problems(correction)


def _gate_problems(correction: Correction) -> Iterator[tuple[str, Any, str, str]]:
    if correction.gate == "ratio":
        if correction.gate_level == "max":
            rule = (
                "does not apply to ratios: to bound the ratio of every token, use gate_level: token or a veto"
            )
            yield "gate_level", "max", rule, "Use token, sum or mean."
        low, high = correction.gate_low, correction.gate_high
        if (low is None and high is None) or not (low or 0) <= 1 <= (1 if high is None else high):
            yield "gate_low", low, "and gate_high must be bounds around 1", "Use 0.5 and 2.0."
    elif correction.gate is not None and correction.gate_high is None:
        yield "gate_high", None, f"is needed: the largest {correction.gate} that passes", "Use 0.1."


def _source_problems(config: Config, rl: RLSettings) -> Iterator[str]:
    source, path, sampler = rl.rollout.source, rl.rollout.path, config.train_parameters.sampler
    # Costs more than a minute: the file is opened after models are loaded.
    if source == "file" and (path is None or not Path(path).is_file()):
        rule = "is needed for source: file" if path is None else "is not a file"
        yield refuse(config, "rl.rollout.path", rule, "Name a rollouts.jsonl.")
    # Silent: the run would sample instead of reading it.
    if source == "engine" and path is not None:
        fix = "Set rl.rollout.source: file."
        yield refuse(config, "rl.rollout.path", "is not read with source: engine", fix)
    # Silent: the penalty would never apply, or always.
    buffer, longest = rl.collect.overlong_buffer_tokens, rl.collect.sampling["max_tokens"]
    if buffer and any(each.environment is not None for each in rl.by_source.values()):
        rule = "is for single turns: with an environment it would compare all turns with the length of one"
        yield refuse(config, "rl.overlong_buffer_tokens", rule, "Leave it out.")
    elif buffer and (longest is None or buffer > longest):
        rule = f"must lie within rl.sampling_params.max_tokens={longest}"
        yield refuse(config, "rl.overlong_buffer_tokens", rule, "Set max_tokens, or use a smaller one.")
    if rl.async_ is None:
        return
    # Silent: nothing would overlap.
    if source == "file":
        rule = "has nothing to overlap with training: stored completions are there already"
        yield refuse(config, "rl.rollout.source", rule, "Leave rl.async out.")
    # Costs more than a minute: the engine would be asked while it sleeps.
    if sampler is not None and (sampler.turn.sleep != "none" or sampler.turn.offload_optimizer):
        turn = sampler.turn
        yield (
            f"train_parameters.sampler.sleep={turn.sleep!r} and offload_optimizer={turn.offload_optimizer}: with "
            "rl.async engine and trainer work at the same time. Use sleep: none and offload_optimizer: False."
        )


def _mixture_problems(config: Config, rl: RLSettings, spec: AlgorithmSpec) -> Iterator[str]:
    sources = rl.collect.sources
    # Costs more than a minute: the first step would take its prompts from nowhere.
    if (rl.collect.prompts is None) != bool(sources):
        yield "the section 'rl' must have one of 'prompts' and 'sources': where its prompts come from."
    given = [each.weight for each in sources.values() if each.weight is not None]
    # Silent: another mixture than the one that was written down.
    if given and (len(given) < len(sources) or not math.isclose(sum(given), 1, abs_tol=0.005)):
        names = ", ".join(f"{name} {each.weight}" for name, each in sources.items())
        yield (
            f"the weights of rl.sources ({names}) add up to {sum(given):g}: they are shares, and must add up to 1. "
            "Correct them, or leave all of them out for equal shares."
        )
    # Costs more than a minute: the advantages of the first batch need each reward of each completion.
    parts = {(each.environment is not None, *sorted(each.rewards.items())) for each in rl.by_source.values()}
    if spec.needs_parts and len(parts) > 1:
        rule = f"differ in their rewards or environments, and {spec.name} compares each reward over the whole batch"
        yield refuse(config, "rl.sources", rule, "Give all of them the same.", list(sources))
    for name, each in rl.by_source.items():
        path = f"rl.sources.{name}" if name else "rl"
        if (curriculum := each.curriculum) is None:
            continue
        # Costs more than a minute: the first batch is scored.
        if SCORE not in each.rewards:
            rule = f"follows the reward {SCORE}, which {path}.rewards lacks"
            yield refuse(config, f"{path}.prompts.curriculum", rule, "Add it.", "…")
        # Silent: the level would change for ever.
        if curriculum.fall_below >= curriculum.rise_above:
            rule = f"must be below rise_above={curriculum.rise_above}"
            yield refuse(
                config, f"{path}.prompts.curriculum.fall_below", rule, "Use 0.2.", curriculum.fall_below
            )


def _reward_problems(config: Config, rl: RLSettings, spec: AlgorithmSpec) -> Iterator[str]:
    reward = rl.reward
    # Silent: nothing would be learned.
    for source, each in rl.by_source.items():
        has_others = reward.reward_models or each.environment is not None or spec.needs_teacher
        if not each.rewards and not has_others:
            places = "rl.rewards or rl.reward_models"
            if source:
                yield f"rl.sources.{source} has no reward: fill rl.sources.{source}.rewards, {places}."
            else:
                yield f"the section 'rl' names no reward: fill {places}."
    # Silent: one would take the other's place.
    has_environment = any(each.environment is not None for each in rl.by_source.values())
    full_names = {"environment": "rl.environment"} if has_environment else {}
    for name in [*rl.all_rewards, *reward.reward_models]:
        other = full_names.setdefault(short_name(name), name)
        if other != name:
            yield (
                f"the rewards {other!r} and {name!r} would both be called {short_name(name)!r} in metrics: rename one "
                "of the functions or folders."
            )
    # Costs more than a minute: the first sum of rewards comes after the first completions.
    of_sources = [(f"sources.{name}.rewards", each.rewards) for name, each in rl.collect.sources.items()]
    for place, weights in (("rewards", reward.rewards), ("reward_models", reward.reward_models), *of_sources):
        for name, weight in weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                yield refuse(config, f"rl.{place}.{name}", "must be a finite number", "Use 1.0.", weight)
    # Costs more than a minute: the policy is loaded first.
    folders = {f"rl.reward_models.{path}": path for path in reward.reward_models}
    if rl.critic.model is not None:
        folders["rl.critic.model"] = rl.critic.model
    for place, path in folders.items():
        if not (Path(path) / "config.json").is_file():
            yield refuse(config, place, "has no config.json", "Name a folder of save_pretrained.", path)


def _unread_settings(config: Config, rl: RLSettings, spec: AlgorithmSpec) -> Iterator[str]:
    """Find settings that this algorithm, with these others, does not read."""
    # By the setting: without what it has no effect, and the setting that turns that on.
    unread: dict[str, tuple[str, str]] = {}
    if not spec.needs_critic:
        without = f"{spec.name}, which has no critic"
        unread |= {f"critic.{name}": (without, "") for name in settings_of(CriticSettings)}
    if not (spec.needs_reference or rl.kl.kl_coef > 0):
        unread["reference_sync_every"] = ("rl.kl_coef=0.0, which needs no reference", "rl.kl_coef")
    if not rl.hyperparameters.dynamic_sampling:
        unread["max_sampling_rounds"] = ("rl.dynamic_sampling=false", "rl.dynamic_sampling")
    environments = {each for source in rl.by_source if (each := rl.collect.environment_of(source))}
    if environments and all(each.startswith(AGENT) for each in environments):
        unread["max_turns"] = ("agents, which end their rollouts themselves", "")
    if rl.update.steps_per_batch == 1:
        unread["max_kl"] = ("one optimizer step a batch", "")
    correction = correction_of(rl.correction, spec)
    for kind, names in (
        ("level", ("mode", "low", "high", "normalise")),
        ("gate", ("gate_level", "gate_low", "gate_high")),
    ):
        if getattr(correction, kind) is None:
            # A preset turns both off by being `off` alone.
            switch = "preset" if rl.correction.preset == "off" else kind
            note = (f"rl.correction.{kind}=null", f"rl.correction.{switch}")
            unread |= {f"correction.{name}": note for name in names}
    sources = rl.collect.sources.values()
    if sources and rl.reward.rewards and all(each.rewards for each in sources):
        rule = "has no effect: each of rl.sources has rewards of its own, which take its place"
        yield refuse(config, "rl.rewards", rule, "Write them into the sources, or leave it out.")
    plain, known = to_plain(config), all_settings()
    for name, (without, switch) in unread.items():
        value = value_at(plain, f"rl.{name}")
        if value not in (None, known[f"rl.{name}"].default) and switch not in config.origins:
            yield refuse(config, f"rl.{name}", f"has no effect with {without}", "Leave it out.", value)


def _hyperparameter_problems(config: Config, rl: RLSettings, spec: AlgorithmSpec) -> Iterator[str]:
    hparams, size = rl.hyperparameters, rl.collect.group_size
    if isinstance(hparams, OnlineDPOSettings) and hparams.preference == "ipo" and hparams.label_smoothing:
        yield refuse(config, "rl.label_smoothing", "belongs to preference: sigmoid", "Leave it out with ipo.")
    if isinstance(hparams, PassAtKSettings) and hparams.pass_k >= size:
        rule = (
            f"must be below rl.group_size={size}: with all completions there is nothing to compare them with"
        )
        yield refuse(config, "rl.pass_k", rule, "Use a smaller one, or larger groups.", hparams.pass_k)
    if spec.needs_parts and hparams.dynamic_sampling:
        rule = f"drops groups whose sums of rewards are equal, from which {spec.name} may learn"
        yield refuse(config, "rl.dynamic_sampling", rule, "Leave it out.", True)
    if isinstance(hparams, ClipCovSettings) and hparams.covariance_low >= hparams.covariance_high:
        rule = f"must be below rl.covariance_high={hparams.covariance_high}"
        yield refuse(config, "rl.covariance_low", rule, "Use 1.0 and 5.0.", hparams.covariance_low)
    if rl.update.top_entropy_quantile < 1 and spec.level != "token":
        rule = f"chooses tokens, and {spec.name} has one loss for a whole {spec.level}"
        yield refuse(config, "rl.top_entropy_quantile", rule, "Leave it out.")
    if rl.update.off_policy_mask is not None and (spec.level == "group" or not spec.samples_from_policy):
        rule = f"has nothing to mask: {spec.name} may learn from completions of any policy"
        yield refuse(config, "rl.off_policy_mask", rule, "Leave it out.")
    penalties = {
        "rl.overlong_buffer_tokens": rl.collect.overlong_buffer_tokens,
        "rl.missing_end_penalty": rl.collect.missing_end_penalty,
        "rl.kl_in": rl.kl.kl_coef > 0 and rl.kl.kl_in == "reward",
    }
    for name, value in penalties.items():
        if spec.needs_parts and value:
            rule = f"changes the sum of rewards, and {spec.name} reads each reward alone"
            yield refuse(config, name, rule, "Leave it out, or make it a reward function of its own.")


def _kl_problems(config: Config, rl: RLSettings, spec: AlgorithmSpec) -> Iterator[str]:
    kl, num_completions = rl.kl, rl.collect.prompts_per_step * rl.collect.group_size
    # All but the last are silent: a penalty without an effect, or with two.
    ignores_rewards = spec.needs_teacher or not spec.samples_from_policy
    if ignores_rewards and kl.kl_coef > 0 and kl.kl_in == "reward":
        rule = f"would change nothing: {spec.name} does not learn from what the penalty leaves of the rewards"
        yield refuse(config, "rl.kl_in", rule, "Use loss.")
    if kl.kl_straight_through and kl.kl_importance_weights:
        rule = "already replaces the gradient of the estimate, which importance weights would correct"
        yield refuse(config, "rl.kl_straight_through", rule, "Use one of the two.")
    if kl.kl_target is not None and kl.kl_horizon < num_completions:
        rule = f"is less than the {num_completions} completions of one step"
        yield refuse(config, "rl.kl_horizon", rule, "Use ten times as many.")
    if kl.kl_target is not None and kl.kl_coef == 0:
        rule = "needs an rl.kl_coef above 0 to start from"
        yield refuse(config, "rl.kl_target", rule, "Set rl.kl_coef: 0.05.")
    lora = config.train_parameters.lora_peft_config
    if kl.reference_sync_every is not None and lora is not None:
        rule = "cannot be done with LoRA, whose reference stays what it was before training"
        yield refuse(config, "rl.reference_sync_every", rule, "Leave it out.")
    # Silent: the reference would not be the policy before training.
    if lora is not None and (spec.needs_reference or kl.kl_coef > 0):
        for option, value, rule, fix in moving_references(lora):
            yield refuse(config, f"train_parameters.lora_peft_config.{option}", rule, fix, value)


def _length_problems(config: Config, rl: RLSettings, spec: AlgorithmSpec) -> Iterator[str]:
    longest, sampled = config.train_parameters.max_seq_len, config.train_parameters.longest_rollout
    unit = spec.rows_per_loss(rl.collect.group_size)
    # Costs more than a minute: only the longest completions show it.
    if rl.update.max_tokens_per_micro_batch < longest * unit:
        what = "one sequence" if unit == 1 else f"the {unit} sequences that {spec.name} compares"
        rule = f"is less than {what} of train_parameters.max_seq_len={longest}"
        yield refuse(config, "rl.max_tokens_per_micro_batch", rule, f"Use {longest * unit} or more.")
    if sampled > longest:
        rule = f"is more than train_parameters.max_seq_len={longest}: rollouts could be too long to train on"
        path = "train_parameters.sampler.engine.max_model_len"
        yield refuse(config, path, rule, f"Leave it out, or use {longest} or less.")
    # Silent: the policy would never change.
    if spec.needs_critic and rl.critic.warmup_steps >= rl.max_steps:
        rule = f"leaves no step of rl.max_steps={rl.max_steps} to the policy"
        yield refuse(config, "rl.critic.warmup_steps", rule, "Use fewer.")
