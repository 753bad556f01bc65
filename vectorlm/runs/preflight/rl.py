"""Rules of the section ``rl`` and its teacher; imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vectorlm.algorithms.registry import get_algorithm
from vectorlm.algorithms.settings import (
    ClipCovSettings,
    OnlineDPOSettings,
    PassAtKSettings,
    SurrogateSettings,
    WhiteningSettings,
)
from vectorlm.algorithms.spec import AlgorithmSpec
from vectorlm.algorithms.support import Support
from vectorlm.data.encoding import is_messages
from vectorlm.data.images import column_images, has_marks, images_of
from vectorlm.data.prompts import check_lengths
from vectorlm.errors import ConfigError, DatasetError
from vectorlm.rl.adapters import OLDER
from vectorlm.rl.environments.environment import AGENT
from vectorlm.rl.prepare import correction_of
from vectorlm.rl.prompts import SCORE
from vectorlm.rl.rewards.registry import short_name
from vectorlm.rl.settings import NO_CORRECTION, SELF, Correction, CorrectionSettings, CriticSettings
from vectorlm.runs.config.schema import Config, RLSettings
from vectorlm.runs.config.setting import all_settings, refuse, settings_of, to_plain, value_at
from vectorlm.runs.preflight.local_model import (
    description_of,
    is_vision_language,
    number_in,
    own_length,
)
from vectorlm.runs.preflight.sampling import PARAMETERS
from vectorlm.runs.preflight.settings import weight_problems
from vectorlm.runs.preflight.user_code import SourcePrompts
from vectorlm.sampling.settings import RETURN_ROUTES, has_experts
from vectorlm.sampling.weights.lora_factors import moving_references
from vectorlm.train.grammar import KINDS
from vectorlm.train.load import load_tokenizer

_RESHAPING_ENGINE: dict[str, tuple[Any, ...]] = {
    "logprobs_mode": ("processed_logprobs",),
    "logits_processors": (None, []),
    "watermark_config": (None,),
    "hf_overrides": (None, {}),
}
"""Engine arguments that change which tokens can be drawn, with the values that do not."""
_SET_ELSEWHERE = {"n": "rl.group_size", "seed": "train_parameters.seed"}


def rl_problems(config: Config, rl: RLSettings) -> Iterator[str]:
    """Yield the problems of the section ``rl``; imports its algorithm."""
    spec = get_algorithm(rl.algorithm.name)
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
    yield from _router_problems(config, rl)
    yield from _adapter_problems(config, rl)


def image_problems(config: Config, rl: RLSettings, prompts: Sequence[SourcePrompts]) -> Iterator[str]:
    """Yield the settings that do not work with prompts that have images."""
    # Costs more than a minute: models are loaded first. A server would score placeholders, silently.
    if not is_vision_language(config.model):
        return
    for source in prompts:
        # Silent: the columns of a text are for rewards alone.
        if any(column_images(record.columns) for record in source.shown if not is_messages(record.prompt)):
            rule = "has images next to text prompts, and the model would not see them"
            fix = 'Write the prompts as messages: [{"role": "user", "content": "…"}].'
            yield refuse(config, source.setting, rule, fix)
        chats = [record.prompt for record in source.shown if is_messages(record.prompt)]
        # Silent too.
        if any(map(has_marks, chats)) and not any(images_of(chat) for chat in chats):
            rule = "has '<image>' in its texts and no images, so the model would read the mark as text"
            yield refuse(config, source.setting, rule, "Put the images into the column 'images'.")
    named = next((s.setting for s in prompts if any(images_of(record.prompt) for record in s.shown)), None)
    if named is None:
        return
    for path, fix, value in text_alone(config, rl):
        yield refuse(config, path, f"cannot be used with images, and {named} has some", fix, value)


def text_alone(config: Config, rl: RLSettings) -> Iterator[tuple[str, str, Any]]:
    """Yield the settings that do not work with images: path, fix and value."""
    inference, num = config.engine.inference, config.train_parameters.model.context_parallel
    if inference != "vllm":
        yield "engine.inference", "Use vllm.", inference
    if num > 1:
        yield "train_parameters.context_parallel", "Use 1.", num
    if get_algorithm(rl.algorithm.name).needs_critic:
        fix = "Use grpo, for example: the critic reads text alone."
        yield "rl.algorithm.name", fix, rl.algorithm.name
    if rl.reward.reward_models:
        yield "rl.reward_models", "Use reward functions: the models read text alone.", "…"
    if rl.teacher is not None and rl.teacher.server is not None:
        yield "rl.teacher.server", "Name the teacher's folder.", rl.teacher.server
    if rl.teacher is not None and rl.teacher.model == SELF:
        yield "rl.teacher.model", "Leave the teacher out.", SELF


def _group_problems(config: Config, rl: RLSettings, spec: AlgorithmSpec) -> Iterator[str]:
    collect = rl.collect
    # Silent: every advantage would be 0.
    if collect.group_size < spec.min_group_size:
        rule = f"must be larger: {spec.name} compares completions of one prompt"
        yield refuse(config, "rl.group_size", rule, f"Use {spec.min_group_size} or more.")
    # A critic's advantages differ within a completion; other advantages that are whitened do not.
    hparams = rl.algorithm.settings
    whitens = isinstance(hparams, WhiteningSettings) and hparams.whiten_advantages and not spec.needs_critic
    num_completions = collect.prompts_per_step * collect.group_size
    least = 2 if whitens else spec.min_completions
    if num_completions < least:
        what = "rl.algorithm.whiten_advantages" if whitens else spec.name
        rule = f"makes a step of {num_completions} completions, which is too few for {what}"
        yield refuse(config, "rl.prompts_per_step", rule, f"Use {least} or more.")
    # Silent: the run would sample forever.
    if collect.group_size < 2 and rl.algorithm.settings.dynamic_sampling:
        rule = "must be larger with rl.algorithm.dynamic_sampling, which drops groups of equal rewards"
        yield refuse(config, "rl.group_size", rule, "Use 2 or more.")
    # Costs more than a minute: the first batch is split after its completions are sampled.
    if rl.update.num_mini_batches > collect.prompts_per_step:
        rule = f"must be at most rl.prompts_per_step={collect.prompts_per_step}, because groups stay whole"
        yield refuse(config, "rl.num_mini_batches", rule, "Use fewer, or more prompts.")
    # Silent: the loss would compare sums over different shares of the completions.
    if spec.level == "group" and rl.async_ is not None and rl.async_.overdue == "mask":
        rule = f"cannot be mask with {spec.name}, which compares whole completions"
        yield refuse(config, "rl.async.overdue", rule, "Use wait or drop.")
    # Silent: the baseline would be one turn, without the replies and rewards of environments.
    if spec.needs_greedy and _has_environment(rl):
        rule = "uses a single-turn greedy completion as its baseline, which does not work with environments or agents"
        yield refuse(config, "rl.algorithm.name", rule, "Use rloo, for example.")


def _sampling_problems(config: Config, rl: RLSettings, spec: AlgorithmSpec) -> Iterator[str]:
    given = rl.collect.sampling_params
    # All of these are silent: the policy would learn from other completions than the formulas assume.
    for name, place in _SET_ELSEWHERE.items():
        if name in given:
            yield refuse(config, f"rl.sampling_params.{name}", "must be set elsewhere", f"Set '{place}'.")
    temperature = rl.collect.sampling["temperature"]
    # vLLM rounds a temperature below 0.01 up to 0.01, or down to greedy sampling, which makes equal completions.
    if not (isinstance(temperature, int | float) and 0.01 <= temperature < math.inf):
        rule = (
            "must be finite and at least 0.01: vLLM rounds lower values, and samples equal completions at 0"
        )
        yield refuse(config, "rl.sampling_params.temperature", rule, "Use 1.0.")
    for name, parameter in PARAMETERS.items():
        is_reshaped = name in given and not parameter.is_followed and given[name] not in parameter.neutral
        if spec.samples_from_policy and is_reshaped:
            rule = "cannot be used: the engine would sample from a different distribution than the trained policy's"
            fix = "Use only temperature, top_p, top_k and min_p; online_dpo, best_of_k and copg may use it."
            yield refuse(config, f"rl.sampling_params.{name}", rule, fix)
    for path, value in reshaped_by(config, rl) if config.train_parameters.model.exact else ():
        # Costs more than a minute: the first step ends the run.
        rule = f"cannot be used with train_parameters.exact: {spec.name} does not truncate probabilities"
        yield refuse(config, path, rule, "Leave it out.", value)
    engine_args = config.engine.engine_args
    for path, value in _reshaped_by_engine(config) if spec.samples_from_policy else ():
        rule = "makes the engine report log-probabilities of a different distribution than the policy's"
        yield refuse(config, path, rule, "Leave it out.", value)
    if spec.samples_from_policy and (asked := given.get("structured_outputs")):
        # The trainer would follow another grammar than the engine.
        if not isinstance(asked, Mapping) or len(asked) != 1 or not set(asked) <= set(KINDS):
            rule = f"must hold one of {', '.join(KINDS)} and its value"
            yield refuse(config, "rl.sampling_params.structured_outputs", rule, "Leave the others out.")
        for name in ("structured_outputs_config", "reasoning_parser"):
            if name in engine_args:
                rule = "cannot be used with structured_outputs: the trainer does not know where the grammar begins"
                yield refuse(config, f"engine.{name}", rule, "Leave it out.")


def reshaped_by(config: Config, rl: RLSettings) -> Iterator[tuple[str, Any]]:
    """Yield the settings that reshape only the engine's distribution, and their values.

    Only algorithms that learn from completions of any policy allow them; `_sampling_problems` refuses them for others.
    """
    if get_algorithm(rl.algorithm.name).samples_from_policy:
        return
    neutral = {name: parameter.neutral for name, parameter in PARAMETERS.items() if parameter.neutral}
    # The trainer applies the temperature.
    del neutral["temperature"]
    for name, values in (neutral | {"structured_outputs": ({},)}).items():
        value = rl.collect.sampling.get(name)
        if value is not None and value not in values:
            yield f"rl.sampling_params.{name}", value
    yield from _reshaped_by_engine(config)


def _reshaped_by_engine(config: Config) -> Iterator[tuple[str, Any]]:
    for name, harmless in _RESHAPING_ENGINE.items():
        value = config.engine.engine_args.get(name, harmless[0])
        if value not in harmless:
            yield f"engine.{name}", value


def correction_problems(
    settings: CorrectionSettings, spec: AlgorithmSpec
) -> Iterator[tuple[str, Any, str, str]]:
    """Yield setting, value, rule and fix for corrections that this algorithm cannot use."""
    # All of these are silent: weights that cancel, count twice or do not exist.
    correction = correction_of(settings, spec)
    if correction == NO_CORRECTION:
        return
    if not spec.samples_from_policy:
        rule = f"must be off: {spec.name} learns from completions of any policy"
        yield "preset", settings.preset, rule, "Use off."
        return
    if correction.bypass and spec.has_ratio and correction.level is not None:
        rule = f"cannot be used with bypass, where the loss of {spec.name} has the ratio of policy and engine already"
        yield "level", correction.level, rule, "Leave it out, or use the preset decoupled."
    masks = correction.level is not None and correction.mode == "mask"
    rejects = masks or correction.gate is not None or correction.veto is not None
    if correction.bypass and (rejects or correction.normalise):
        rule = (
            "must be false to reject tokens or normalise weights, which need a forward pass of the old policy"
        )
        fix = "Leave bypass out, or use mode: truncate without gate, veto and normalise."
        yield "bypass", True, rule, fix
    if spec.level == "group" and correction.level is not None:
        rule = f"cannot weigh completions: {spec.name} has one loss per group"
        yield "level", correction.level, rule, "Leave it out."
    elif spec.level == "completion" and correction.level is not None and not correction.weighs_rows:
        rule = f"cannot weigh tokens: {spec.name} has one loss per completion"
        yield "level", correction.level, rule, "Use sequence, or geometric with mode: truncate."
    if not (correction.low or 0) <= 1 <= (1 if correction.high is None else correction.high):
        yield "low", correction.low, "and high must be bounds around 1: low <= 1 <= high", "Use 0.5 and 2.0."
    # Silent: only the ratio has a lower bound.
    if correction.gate not in (None, "ratio") and "gate_low" in settings.overrides:
        yield "gate_low", correction.gate_low, f"has no effect with gate: {correction.gate}", "Leave it out."
    yield from _gate_problems(correction)


def _gate_problems(correction: Correction) -> Iterator[tuple[str, Any, str, str]]:
    if correction.gate == "ratio":
        if correction.gate_level == "max":
            fix = "Use token, sum or mean; or a veto, to bound the ratio of every token."
            yield "gate_level", "max", "cannot be used with gate: ratio", fix
        low, high = correction.gate_low, correction.gate_high
        if (low is None and high is None) or not (low or 0) <= 1 <= (1 if high is None else high):
            yield "gate_low", low, "and gate_high must be bounds around 1", "Use 0.5 and 2.0."
    elif correction.gate is not None and correction.gate_high is None:
        yield "gate_high", None, f"must be set: the largest {correction.gate} that passes", "Use 0.1."


def _has_environment(rl: RLSettings) -> bool:
    return any(source.environment is not None for source in rl.by_source.values())


def _source_problems(config: Config, rl: RLSettings) -> Iterator[str]:
    source, path = rl.rollout.source, rl.rollout.path
    # Costs more than a minute: the file is opened after models are loaded.
    if source == "file" and (path is None or not Path(path).is_file()):
        rule = "must be set with source: file" if path is None else "must be a file"
        yield refuse(config, "rl.rollout.path", rule, "Name a rollouts.jsonl.")
    # Silent: the run would sample instead of reading it.
    if source == "engine" and path is not None:
        fix = "Set rl.rollout.source: file."
        yield refuse(config, "rl.rollout.path", "cannot be used with source: engine", fix)
    # Silent: the penalty would never apply, or always.
    buffer, longest = rl.collect.overlong_buffer_tokens, rl.collect.sampling["max_tokens"]
    if buffer and _has_environment(rl):
        rule = "cannot be used with environments: it compares the whole rollout with the length of one turn"
        yield refuse(config, "rl.overlong_buffer_tokens", rule, "Leave it out.")
    elif buffer and (longest is None or buffer > longest):
        rule = f"must be at most rl.sampling_params.max_tokens={longest}"
        yield refuse(config, "rl.overlong_buffer_tokens", rule, "Set max_tokens, or use a smaller one.")
    if rl.async_ is None:
        return
    # Silent: nothing would overlap.
    if source == "file":
        rule = "cannot be file with rl.async: nothing is sampled that could overlap with training"
        yield refuse(config, "rl.rollout.source", rule, "Leave rl.async out.")
    # Costs more than a minute: the engine would be asked while it sleeps.
    if config.engine.turn.sleep != "none" or config.engine.turn.offload_optimizer:
        turn = config.engine.turn
        yield (
            f"engine.sleep={turn.sleep!r} and offload_optimizer={turn.offload_optimizer} cannot be "
            "used with rl.async, where engine and trainer work at the same time. Use sleep: none and "
            "offload_optimizer: false."
        )


def _mixture_problems(config: Config, rl: RLSettings, spec: AlgorithmSpec) -> Iterator[str]:
    sources = rl.collect.sources
    # Costs more than a minute: the first step would have no prompts.
    if (rl.collect.prompts is None) != bool(sources):
        yield "the section 'rl' must have either 'prompts' or 'sources'. Add one, or remove one."
    given = [source.weight for source in sources.values() if source.weight is not None]
    # Silent: the mixture would differ from the config's weights.
    if given and (len(given) < len(sources) or not math.isclose(sum(given), 1, abs_tol=0.005)):
        names = ", ".join(f"{name} {source.weight}" for name, source in sources.items())
        yield (
            f"the weights of rl.sources ({names}) must add up to 1, but add up to {sum(given):g}. Correct them, or "
            "leave all of them out for equal shares."
        )
    # Costs more than a minute: the advantages of the first batch need each reward of each completion.
    parts = {
        (source.environment is not None, *sorted(source.rewards.items())) for source in rl.by_source.values()
    }
    if spec.needs_parts and len(parts) > 1:
        rule = f"must have the same rewards and environments: {spec.name} compares each reward over the whole batch"
        yield refuse(config, "rl.sources", rule, "Make them equal.", list(sources))
    for name, source in rl.by_source.items():
        path, overlong = f"rl.sources.{name}" if name else "rl", rl.collect.overlong_prompts
        # Costs more than a minute: environments and agents get the whole prompt.
        if source.environment is not None:
            rule = f"cannot be used with the environment {source.environment}, which gets the whole prompt"
            for place, how in (("rl", overlong), ("evaluation", config.evaluation.overlong_prompts)):
                if how == "truncate_left":
                    yield refuse(
                        config, f"{place}.overlong_prompts", rule, "Use drop, or shorten the prompts."
                    )
        if (curriculum := source.curriculum) is None:
            continue
        # Silent: the items of the other levels would not be measured.
        if overlong != "error":
            rule = f"cannot be used with {path}.prompts.curriculum"
            yield refuse(config, "rl.overlong_prompts", rule, "Leave it out.")
        # Costs more than a minute: the first batch is scored.
        if SCORE not in source.rewards:
            rule = f"needs the reward {SCORE} in {path}.rewards"
            yield refuse(config, f"{path}.prompts.curriculum", rule, "Add it.", "…")
        # Silent: the level would never stop changing.
        if curriculum.fall_below >= curriculum.rise_above:
            rule = f"must be below rise_above={curriculum.rise_above}"
            place = f"{path}.prompts.curriculum.fall_below"
            yield refuse(config, place, rule, "Use 0.2.", curriculum.fall_below)


def _reward_problems(config: Config, rl: RLSettings, spec: AlgorithmSpec) -> Iterator[str]:
    reward = rl.reward
    # Silent: nothing would be learned.
    for name, source in rl.by_source.items():
        has_others = reward.reward_models or source.environment is not None or spec.needs_teacher
        if not source.rewards and not has_others:
            place = f"rl.sources.{name}" if name else "the section 'rl'"
            own = f"rl.sources.{name}.rewards, " if name else ""
            yield f"{place} must have a reward. Fill {own}rl.rewards or rl.reward_models."
    # Silent: one reward would replace the other.
    full_names = {"environment": "rl.environment"} if _has_environment(rl) else {}
    for name in [*rl.all_rewards, *reward.reward_models]:
        other = full_names.setdefault(short_name(name), name)
        if other != name:
            yield (
                f"the rewards {other!r} and {name!r} must have different names in metrics, and both are called "
                f"{short_name(name)!r}. Rename one of the functions or folders."
            )
    of_sources = [(f"sources.{name}.rewards", source.rewards) for name, source in rl.collect.sources.items()]
    for place, weights in (("rewards", reward.rewards), ("reward_models", reward.reward_models), *of_sources):
        yield from weight_problems(config, f"rl.{place}", weights)
    # Costs more than a minute: the policy is loaded first.
    for place, path in config.model_folders.items():
        if place.startswith(("rl.critic", "rl.reward")) and not (Path(path) / "config.json").is_file():
            fix = "Name a folder from save_pretrained."
            yield refuse(config, place, "must be a folder with a config.json", fix, path)


def _unread_settings(config: Config, rl: RLSettings, spec: AlgorithmSpec) -> Iterator[str]:
    """Yield settings that this algorithm does not read."""
    # Setting: the reason that it has no effect, and the setting that would change this.
    unread: dict[str, tuple[str, str]] = {}
    if not spec.needs_critic:
        without = f"{spec.name}, which has no critic"
        unread |= {f"critic.{name}": (without, "") for name in settings_of(CriticSettings)}
    if not rl.has_reference:
        unread["reference_sync_every"] = ("rl.kl_coef=0.0, which needs no reference", "rl.kl_coef")
    environments = {name for source in rl.by_source if (name := rl.collect.environment_of(source))}
    if environments and all(name.startswith(AGENT) for name in environments):
        unread["max_turns"] = ("agents, which end rollouts themselves", "")
    if rl.update.steps_per_batch == 1:
        unread["max_kl"] = ("one optimizer step per batch", "")
    correction = correction_of(rl.correction, spec)
    if rl.learns_from_teacher_alone:
        idle = ["off_policy_mask", "correction.normalise"]
        hparams, of_ratio = rl.algorithm.settings, {*settings_of(SurrogateSettings)} - {"dynamic_sampling"}
        changed = (name for name in of_ratio if getattr(hparams, name) != getattr(type(hparams)(), name))
        idle += [f"algorithm.{name}" for name in sorted(changed)]
        # The entropy bonus is for the chosen tokens too.
        idle += ["top_entropy_quantile"] if rl.update.entropy_coef == 0 else []
        unread |= dict.fromkeys(idle, ("rl.teacher.kind='full', whose divergence is the only loss", ""))
    for kind, names in (
        ("level", ("mode", "low", "high", "normalise")),
        ("gate", ("gate_level", "gate_low", "gate_high")),
    ):
        if getattr(correction, kind) is None:
            # Only the preset `off` turns both off.
            switch = "preset" if rl.correction.preset == "off" else kind
            note = (f"rl.correction.{kind}=null", f"rl.correction.{switch}")
            unread |= {f"correction.{name}": note for name in names}
    sources = rl.collect.sources.values()
    if sources and rl.reward.rewards and all(source.rewards for source in sources):
        rule = "has no effect: all of rl.sources have their own rewards"
        yield refuse(config, "rl.rewards", rule, "Write them into the sources, or leave it out.")
    plain, known = to_plain(config), all_settings()
    for name, (without, switch) in unread.items():
        value = value_at(plain, f"rl.{name}")
        if value not in (None, known[f"rl.{name}"].default) and switch not in config.origins:
            yield refuse(config, f"rl.{name}", f"has no effect with {without}", "Leave it out.", value)


def _hyperparameter_problems(config: Config, rl: RLSettings, spec: AlgorithmSpec) -> Iterator[str]:
    hparams, size = rl.algorithm.settings, rl.collect.group_size
    if isinstance(hparams, OnlineDPOSettings) and hparams.preference == "ipo" and hparams.label_smoothing:
        yield refuse(
            config, "rl.algorithm.label_smoothing", "cannot be used with preference: ipo", "Leave it out."
        )
    if isinstance(hparams, PassAtKSettings) and hparams.pass_k >= size:
        rule = f"must be below rl.group_size={size}"
        yield refuse(
            config, "rl.algorithm.pass_k", rule, "Use a smaller one, or larger groups.", hparams.pass_k
        )
    if spec.needs_parts and hparams.dynamic_sampling:
        rule = f"cannot be used with {spec.name}, which also learns from groups with equal sums of rewards"
        yield refuse(config, "rl.algorithm.dynamic_sampling", rule, "Leave it out.", True)
    if isinstance(hparams, ClipCovSettings) and hparams.covariance_low >= hparams.covariance_high:
        rule = f"must be below rl.algorithm.covariance_high={hparams.covariance_high}"
        yield refuse(config, "rl.algorithm.covariance_low", rule, "Use 1.0 and 5.0.", hparams.covariance_low)
    if rl.update.top_entropy_quantile < 1 and spec.level != "token":
        rule = f"cannot choose tokens: {spec.name} has one loss per {spec.level}"
        yield refuse(config, "rl.top_entropy_quantile", rule, "Leave it out.")
    if rl.update.off_policy_mask is not None and (spec.level == "group" or not spec.samples_from_policy):
        rule = f"cannot be used with {spec.name}, which learns from completions of any policy"
        yield refuse(config, "rl.off_policy_mask", rule, "Leave it out.")
    penalties = {
        "rl.overlong_buffer_tokens": rl.collect.overlong_buffer_tokens,
        "rl.missing_end_penalty": rl.collect.missing_end_penalty,
        "rl.kl_in": rl.kl.kl_coef > 0 and rl.kl.kl_in == "reward",
    }
    for name, value in penalties.items():
        if spec.needs_parts and value:
            rule = f"changes the sum of rewards, which {spec.name} does not read"
            yield refuse(config, name, rule, "Leave it out, or write it as a reward function.")


def _kl_problems(config: Config, rl: RLSettings, spec: AlgorithmSpec) -> Iterator[str]:
    kl, num_completions = rl.kl, rl.collect.prompts_per_step * rl.collect.group_size
    # All but the last are silent: a penalty without an effect, or with two.
    ignores_rewards = spec.needs_teacher or not spec.samples_from_policy
    if ignores_rewards and kl.kl_coef > 0 and kl.kl_in == "reward":
        rule = f"cannot be reward with {spec.name}, which does not learn from rewards"
        yield refuse(config, "rl.kl_in", rule, "Use loss.")
    if kl.kl_straight_through and kl.kl_importance_weights:
        rule = "cannot be used with kl_importance_weights: both correct the gradient"
        yield refuse(config, "rl.kl_straight_through", rule, "Use one of the two.")
    if kl.kl_target is not None and kl.kl_horizon < num_completions:
        rule = f"must be at least the {num_completions} completions of one step"
        yield refuse(config, "rl.kl_horizon", rule, "Use ten times as many.")
    if kl.kl_target is not None and kl.kl_coef == 0:
        rule = "needs an rl.kl_coef above 0 to start from"
        yield refuse(config, "rl.kl_target", rule, "Set rl.kl_coef: 0.05.")
    lora = config.train_parameters.lora_peft_config
    if kl.reference_sync_every is not None and lora is not None:
        rule = "cannot be used with LoRA, whose reference is always the policy with its initial adapters"
        yield refuse(config, "rl.reference_sync_every", rule, "Leave it out.")
    # Silent: the reference would not be the policy before training.
    if lora is not None and (rl.has_reference or config.asks_adapters):
        for option, value, rule, fix in moving_references(lora):
            yield refuse(config, f"train_parameters.lora_peft_config.{option}", rule, fix, value)


def _adapter_problems(config: Config, rl: RLSettings) -> Iterator[str]:
    # All of these cost more than a minute: models are loaded, and an engine is started, first.
    needs = "needs an engine with LoRA adapters"
    fix = "Set train_parameters.lora_peft_config, with engine.inference: vllm and engine.lora_mode: adapter."
    if rl.keep_adapters is not None and not config.has_adapters:
        yield refuse(config, "rl.keep_adapters", needs, fix, to_plain(rl.keep_adapters))
    for name in config.judges if not config.has_adapters else ():
        section = "rl" if name in rl.all_rewards else "evaluation"
        yield refuse(config, f"{section}.rewards.{name}", needs, fix, "…")
    # Silent: the engine would be asked while it sleeps.
    names = dict.fromkeys([*config.evaluation_rewards, *config.held_out_rewards.values()])
    for name in names if config.engine.turn.sleep != "none" else ():
        if name in config.judges:
            rule = (
                f"asks the run's engine after an evaluation, and engine.sleep is {config.engine.turn.sleep}"
            )
            yield refuse(config, f"evaluation.rewards.{name}", rule, "Use engine.sleep: none.", "…")
    num_slots = config.engine.engine_args.get("max_loras")
    if config.num_other_slots and num_slots is not None and num_slots <= config.num_other_slots:
        rule = f"must be at least {config.num_other_slots + 1}, for the policy and the other adapters"
        yield refuse(config, "engine.max_loras", rule, "Leave it out.", num_slots)


def older_judge_problems(config: Config, first_step: int) -> Iterator[str]:
    """Yield the judges that are older policies, unless a run that resumes at `first_step` keeps them to its end."""
    rl = config.rl
    if rl is None or rl.max_steps is None:
        return
    evaluated = {*config.evaluation_rewards, *config.held_out_rewards.values()}
    for name, adapter in config.judges.items():
        if not adapter.startswith(OLDER):
            continue
        # After the last step, only an evaluation asks the engine.
        last_step = rl.max_steps if name in evaluated else rl.max_steps - 1
        kept = [
            [] if rl.keep_adapters is None else rl.keep_adapters.kept_at(step)
            for step in (min(first_step, last_step), last_step)
        ]
        # Costs more than a minute: models are loaded, and completions sampled, first.
        if not all(adapter in [f"{OLDER}{step}" for step in steps] for steps in kept):
            section = "rl" if name in rl.all_rewards else "evaluation"
            rule = f"needs an adapter that exists in every step of the run, and {adapter} does not"
            yield refuse(config, f"{section}.rewards.{name}", rule, "Use adapter='reference'.", "…")


def _length_problems(config: Config, rl: RLSettings, spec: AlgorithmSpec) -> Iterator[str]:
    longest, sampled = config.train_parameters.max_seq_len, config.longest_rollout
    unit = spec.rows_per_loss(rl.collect.group_size)
    # Costs more than a minute: only the longest completions show it.
    if rl.update.max_tokens_per_micro_batch < longest * unit:
        what = "one sequence" if unit == 1 else f"the {unit} sequences that {spec.name} compares"
        rule = f"must hold {what} of train_parameters.max_seq_len={longest}"
        yield refuse(config, "rl.max_tokens_per_micro_batch", rule, f"Use {longest * unit} or more.")
    if sampled > longest:
        rule = f"must be at most train_parameters.max_seq_len={longest}, or rollouts are too long to train on"
        path = "engine.max_model_len"
        yield refuse(config, path, rule, f"Leave it out, or use {longest} or less.")
    if rl.max_steps is None and rl.num_epochs_over_prompts is None:
        yield (
            "missing setting 'rl.max_steps' (the batches of rollouts to train on). Add it, or "
            "'rl.num_epochs_over_prompts'."
        )


def _router_problems(config: Config, rl: RLSettings) -> Iterator[str]:
    # All of these cost more than a minute: models are loaded, and a batch may be sampled, first.
    replay, inference = rl.update.router_replay, config.engine.inference
    description = description_of(Path(config.model))
    if replay != "off" and description is not None and not has_experts(description):
        rule = "needs a mixture-of-experts model"
        yield refuse(config, "rl.router_replay", rule, "Leave it out.", replay)
    if replay != "engine" or rl.rollout.source == "file":
        return
    if inference != "vllm":
        rule = (
            f"needs the experts that the engine chose, and engine.inference={inference} does not return them"
        )
        yield refuse(config, "rl.router_replay", rule, "Use old_policy, or inference: vllm.", replay)
    elif config.engine.engine_args.get(RETURN_ROUTES) is False:
        rule = "must be true with rl.router_replay: engine"
        yield refuse(config, f"engine.{RETURN_ROUTES}", rule, "Leave it out.", False)


SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "unk_token_id")
"""Special tokens that must be equal, in addition to the vocabulary; padding is never compared."""


def teacher_problems(config: Config, rl: RLSettings, spec: AlgorithmSpec) -> Iterator[str]:
    """Yield the problems of the teacher's settings."""
    # All are silent, except folders and servers, which are opened after models are loaded.
    teacher = rl.teacher
    if spec.needs_teacher and rl.algorithm.settings.dynamic_sampling:
        rule = f"cannot be used with {spec.name}, which also learns from groups of equal rewards"
        yield refuse(config, "rl.algorithm.dynamic_sampling", rule, "Leave it out.", True)
    if teacher is None:
        if spec.needs_teacher:
            fix = "Add the section rl.teacher with a model or a server, or choose another algorithm."
            yield refuse(config, "rl.algorithm.name", "needs a teacher", fix)
        return
    if (teacher.model is None) == (teacher.server is None):
        yield "the section 'rl.teacher' must name either a model or a server. Add one, or remove one."
    if teacher.model == SELF:
        if teacher.prompt_column is None:
            fix = "Name a column of the prompts that holds the teacher's prompt."
            yield refuse(config, "rl.teacher.prompt_column", "is needed with rl.teacher.model: self", fix)
        played = next((source for source in rl.by_source.values() if source.environment is not None), None)
        if played is not None:
            rule = (
                "cannot be self with environments and agents, whose conversations begin with their own prompt"
            )
            yield refuse(config, "rl.teacher.model", rule, "Leave the environment out.", SELF)
    elif teacher.model is not None and not (Path(teacher.model) / "config.json").is_file():
        yield refuse(config, "rl.teacher.model", "needs a config.json", "Name a folder from save_pretrained.")
    elif teacher.model is not None:
        fix, longest = "Use a teacher of the policy's family.", config.train_parameters.max_seq_len
        described, its_own = (description_of(Path(folder)) or {} for folder in (config.model, teacher.model))
        mine, its = (number_in(description, ["vocab_size"]) for description in (described, its_own))
        if mine is not None and its is not None and its < mine:
            rule = f"must have embeddings for all {mine} tokens of the policy, and has {its}"
            yield refuse(config, "rl.teacher.model", rule, fix)
        limit = own_length(its_own)
        if limit is not None and limit < longest:
            rule = f"must read train_parameters.max_seq_len={longest} tokens, and reads at most {limit}"
            yield refuse(config, "rl.teacher.model", rule, fix)
    if teacher.kind == "full" and teacher.server is not None and teacher.top_k is None:
        rule = "needs more of the teacher's distribution than the sampled tokens"
        fix = "Add rl.teacher.top_k, use sampled, or name the teacher's folder."
        yield refuse(config, "rl.teacher.kind", rule, fix)
    if teacher.top_k is not None and teacher.kind == "sampled":
        rule = "has no effect with rl.teacher.kind='sampled'"
        yield refuse(config, "rl.teacher.top_k", rule, "Use kind: full, or leave it out.", teacher.top_k)
    if teacher.kind == "sampled" and not (spec.level == "token" and spec.samples_from_policy):
        rule = f"cannot be sampled with {spec.name}, which does not learn from advantages of sampled tokens"
        yield refuse(config, "rl.teacher.kind", rule, "Use full, or another algorithm.")
    correction = correction_of(rl.correction, spec)
    if rl.learns_from_teacher_alone and correction.level is not None and correction.mode == "truncate":
        rule = "weighs losses, and with rl.teacher.kind='full' the teacher's divergence is the only loss"
        name = "level" if "level" in rl.correction.overrides else "preset"
        value = correction.level if name == "level" else rl.correction.preset
        fix = "Use off, or a preset that only rejects, such as mis."
        yield refuse(config, f"rl.correction.{name}", rule, fix, value)
    sampling = rl.collect.sampling
    cuts = not Support.of(sampling).is_whole or sampling.get("structured_outputs")
    if teacher.kind == "full" and teacher.beta == 0 and cuts:
        rule = "must be above 0 with top_p, top_k, min_p or a grammar, which remove tokens that the teacher may draw"
        yield refuse(config, "rl.teacher.beta", rule, "Use 0.1 or more.")
    temperature = sampling["temperature"]
    if teacher.server is not None and temperature != 1:
        rule = "must be 1.0 with rl.teacher.server, which scores only at this temperature"
        fix = "Use 1.0, or name the teacher's folder."
        yield refuse(config, "rl.sampling_params.temperature", rule, fix, temperature)


def teacher_prompt_problems(
    config: Config, rl: RLSettings, prompts: Sequence[SourcePrompts]
) -> Iterator[str]:
    """Yield the prompts that `rl.teacher.prompt_column` does not find, or that leave no room for an answer."""
    column = None if rl.teacher is None else rl.teacher.prompt_column
    if column is None:
        return
    for source in prompts:
        if source.is_held_out:
            continue
        told = [
            replace(record, prompt=record.columns.get(column, ()), token_ids=None) for record in source.shown
        ]
        wrong = next((i for i, record in enumerate(told) if not isinstance(record.prompt, str | list)), None)
        if wrong is not None:
            # Costs more than a minute: models are loaded and answers sampled first.
            rule = (
                f"must be text or messages in every prompt, and prompt {wrong} of {source.setting} has none"
            )
            yield refuse(config, "rl.teacher.prompt_column", rule, "Add the column.", column)
            continue
        room = config.longest_rollout - (rl.collect.sampling["max_tokens"] or 1)
        try:
            check_lengths(told, load_tokenizer(config.model, config.chat), room, f"the column {column!r}")
        except DatasetError as error:
            yield str(error)


def check_teacher(config: Config) -> None:
    """Raise `ConfigError` unless the teacher has the policy's tokenizer.

    A server only returns the texts of the policy's tokens; its special tokens and further tokens are not compared.

    Raises:
        EngineError: The server does not answer, or does not answer like vLLM.
    """
    rl = config.rl
    if rl is None or rl.teacher is None or rl.teacher.model == SELF:
        return
    # Silent: the policy would learn other tokens' probabilities.
    policy, difference = load_tokenizer(config.model), None
    path = "rl.teacher.model" if rl.teacher.model is not None else "rl.teacher.server"
    if rl.teacher.model is not None:
        difference = tokenizer_difference(policy, load_tokenizer(rl.teacher.model))
    elif rl.teacher.server is not None:
        # This imports the HTTP client, which other checks do not need.
        from vectorlm.sampling.backends.server.client import ScoringServer

        server = ScoringServer(rl.teacher.server, rl.teacher.timeout_s)
        longest = config.train_parameters.max_seq_len
        token_ids = sorted(policy.get_vocab().values())
        mine, its = str(policy.decode(token_ids)), server.decode(token_ids)
        if mine != its:
            pairs = enumerate(zip(mine, its, strict=False))
            place = next((index for index, (a, b) in pairs if a != b), min(len(mine), len(its)))
            near = slice(max(place - 8, 0), place + 8)
            difference = f"its text of all tokens has {its[near]!r} where the policy's has {mine[near]!r}"
        elif (limit := server.max_model_len()) <= longest:
            rule = f"must read one token more than max_seq_len={longest}, and reads at most {limit}"
            raise ConfigError(refuse(config, path, rule, f"Start it with `--max-model-len {longest + 1}`."))
        if rl.teacher.top_k is not None:
            # The server refuses more than its --max-logprobs.
            server.top_logprobs([token_ids[:2]], rl.teacher.top_k)
    if difference is not None:
        fix = "Distillation compares token by token: use a teacher of the policy's family."
        raise ConfigError(refuse(config, path, f"must have the policy's tokenizer: {difference}", fix))


def tokenizer_difference(policy: Any, teacher: Any) -> str | None:
    """Describe the first difference of two tokenizers; None if all tokens are equal."""
    tokens = [
        {index: token for token, index in tokenizer.get_vocab().items()} for tokenizer in (policy, teacher)
    ]
    for index in sorted(tokens[0].keys() | tokens[1].keys()):
        mine, its = (vocabulary.get(index) for vocabulary in tokens)
        if mine != its:
            return f"token {index} is {mine!r} for the policy and {its!r} for the teacher"
    for name in SPECIAL_TOKENS:
        mine, its = getattr(policy, name), getattr(teacher, name)
        if mine != its:
            return f"{name} is {mine} for the policy and {its} for the teacher"
    return None
