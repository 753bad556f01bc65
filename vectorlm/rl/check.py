"""The rules of the section ``rl`` that need to know the algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vectorlm.algorithms.registry import get_algorithm
from vectorlm.algorithms.spec import AlgorithmSpec
from vectorlm.config import Config, RLSettings
from vectorlm.config.problem import describe_refusal, raise_problems
from vectorlm.model.schedule import BY_LOSS
from vectorlm.plugin import load_plugin
from vectorlm.rewards.registry import get_reward
from vectorlm.rl.correction import correction_problems

# Parameters that change which tokens can be drawn, or how likely they are, other than by the temperature. The values
# are those that do nothing.
_RESHAPING: dict[str, tuple[Any, ...]] = {
    "top_p": (1, 1.0),
    "top_k": (0, -1),
    "min_p": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "min_tokens": (0,),
    "structured_outputs": (None,),
}
_OURS = {"n": "rl.group_size", "seed": "train_parameters.seed"}


def check_rl(config: Config) -> AlgorithmSpec:
    """Check the section ``rl`` and return its algorithm; loads the files that it names.

    Raises:
        ConfigError: Lists every problem found.
    """
    assert config.rl is not None
    spec = get_algorithm(config.rl.algorithm)
    raise_problems(
        [
            *_group_problems(config, spec),
            *_sampling_problems(config, spec),
            *_correction_problems(config, spec),
            *_other_problems(config, spec),
        ]
    )
    for name in config.rl.rewards:
        get_reward(name)
    if config.rl.environment is not None:
        load_plugin(config.rl.environment)
    return spec


def _group_problems(config: Config, spec: AlgorithmSpec) -> Iterator[str]:
    assert config.rl is not None
    if config.rl.group_size < spec.min_group_size:
        rule = f"is too small for {spec.name}, which compares completions of one prompt"
        fix = f"Use {spec.min_group_size} or more."
        yield _refuse(config, "group_size", config.rl.group_size, rule, fix)
    if config.rl.group_size < 2 and own(config.rl, spec, "dynamic_sampling", False):
        rule = "would drop every group with rl.dynamic_sampling, as one completion has nothing to differ from"
        yield _refuse(config, "group_size", config.rl.group_size, rule, "Use 2 or more.")
    if config.rl.num_mini_batches > config.rl.prompts_per_step:
        rule = f"cannot cut {config.rl.prompts_per_step} prompts, whose groups stay together, into so many"
        yield _refuse(
            config, "num_mini_batches", config.rl.num_mini_batches, rule, "Use fewer, or more prompts."
        )


def _sampling_problems(config: Config, spec: AlgorithmSpec) -> Iterator[str]:
    assert config.rl is not None
    given = config.rl.sampling_params
    for name, place in _OURS.items():
        if name in given:
            yield _refuse(
                config, f"sampling_params.{name}", given[name], "has a setting of its own", f"Set '{place}'."
            )
    temperature = given.get("temperature", 1.0)
    # vLLM takes what is below 0.01 for 0.01, or for greedy sampling, which gives no groups.
    if not (isinstance(temperature, int | float) and temperature >= 0.01):
        rule = "must be at least 0.01: greedy completions are all the same, and vLLM knows none in between"
        yield _refuse(config, "sampling_params.temperature", temperature, rule, "Use 1.0.")
    for name, harmless in _RESHAPING.items():
        if spec.samples_from_policy and name in given and given[name] not in harmless:
            rule = (
                "makes the engine sample from another distribution than the one that is trained, so that every "
                "ratio of the two would be wrong"
            )
            fix = "Leave it out; online_dpo, best_of_k and copg may use it."
            yield _refuse(config, f"sampling_params.{name}", given[name], rule, fix)


def _correction_problems(config: Config, spec: AlgorithmSpec) -> Iterator[str]:
    assert config.rl is not None
    for name, value, rule, fix in correction_problems(config.rl.correction, spec):
        yield _refuse(config, f"correction.{name}", value, rule, fix)


def _overlong_problems(config: Config) -> Iterator[str]:
    assert config.rl is not None
    buffer, longest = config.rl.overlong_buffer_tokens, config.rl.sampling_params.get("max_tokens")
    if not buffer:
        return
    if config.rl.environment is not None:
        rule = "is for single turns: with an environment, it would hold all turns against the length of one"
        yield _refuse(config, "overlong_buffer_tokens", buffer, rule, "Leave it out.")
    elif longest is None or buffer > longest:
        rule = f"must lie within rl.sampling_params.max_tokens={longest}"
        yield _refuse(config, "overlong_buffer_tokens", buffer, rule, "Set max_tokens, or use a smaller one.")


def _reward_problems(config: Config) -> Iterator[str]:
    assert config.rl is not None
    full_names: dict[str, str] = {}
    for name in [*config.rl.rewards, *config.rl.reward_models]:
        other = full_names.setdefault(short_name(name), name)
        if other != name:
            yield (
                f"the rewards {other!r} and {name!r} would both be called {short_name(name)!r} in metrics: rename one "
                "of the functions or folders."
            )
    folders = [(f"reward_models.{path}", path) for path in config.rl.reward_models]
    if config.rl.critic.model is not None:
        folders.append(("critic.model", config.rl.critic.model))
    for place, path in folders:
        if not (Path(path) / "config.json").is_file():
            yield _refuse(config, place, path, "has no config.json", "Name a folder of save_pretrained.")


def _no_effect_problems(config: Config, spec: AlgorithmSpec) -> Iterator[str]:
    """Yield settings that would be carried out and change nothing, or leave nothing to learn."""
    assert config.rl is not None
    rl = config.rl
    if spec.needs_critic and rl.critic.warmup_steps >= rl.max_steps:
        rule = f"leaves no step of rl.max_steps={rl.max_steps} to the policy"
        yield _refuse(config, "critic.warmup_steps", rl.critic.warmup_steps, rule, "Use fewer.")
    if not spec.samples_from_policy:
        if rl.whiten_advantages:
            rule = f"has nothing to whiten: {spec.name} trains on what it has chosen, without advantages"
            yield _refuse(config, "whiten_advantages", True, rule, "Leave it out.")
        if rl.kl_coef > 0 and rl.kl_in == "reward":
            rule = f"would change nothing: {spec.name} compares the rewards before the penalty"
            yield _refuse(config, "kl_in", "reward", rule, "Use loss.")
    if rl.kl_target is not None and rl.kl_horizon < rl.prompts_per_step * rl.group_size:
        rule = f"is less than the {rl.prompts_per_step * rl.group_size} completions of one step"
        yield _refuse(config, "kl_horizon", rl.kl_horizon, rule, "Use ten times as many.")


def _rollout_problems(config: Config) -> Iterator[str]:
    assert config.rl is not None
    rollout = config.rl.rollout
    if rollout.source == "file" and rollout.path is None:
        yield _refuse(config, "rollout.path", None, "is needed for source: file", "Name a rollouts.jsonl.")
    if rollout.source == "file" and rollout.path is not None and not Path(rollout.path).is_file():
        yield _refuse(config, "rollout.path", rollout.path, "is not a file", "Name a rollouts.jsonl.")
    if rollout.source == "engine" and rollout.path is not None:
        rule = "is not read with source: engine"
        yield _refuse(config, "rollout.path", rollout.path, rule, "Set rl.rollout.source: file.")


def _async_problems(config: Config) -> Iterator[str]:
    assert config.rl is not None
    sampler = config.train_parameters.sampler
    if config.rl.async_ is None:
        return
    if config.rl.rollout.source == "file":
        rule = "has nothing to overlap with training: stored completions are there already"
        yield _refuse(config, "async", config.rl.rollout.source, rule, "Leave rl.async out.")
    if sampler is not None and (sampler.sleep != "none" or sampler.offload_optimizer):
        yield (
            f"train_parameters.sampler.sleep={sampler.sleep!r} and offload_optimizer={sampler.offload_optimizer}: with "
            "rl.async engine and trainer work at the same time. Use sleep: none and offload_optimizer: False."
        )


def _other_problems(config: Config, spec: AlgorithmSpec) -> Iterator[str]:
    assert config.rl is not None
    rl, longest = config.rl, config.train_parameters.max_seq_len
    yield from _rollout_problems(config)
    yield from _overlong_problems(config)
    yield from _reward_problems(config)
    yield from _no_effect_problems(config, spec)
    yield from _async_problems(config)
    if not rl.rewards and not rl.reward_models:
        yield "the section 'rl' names no reward: fill rl.rewards or rl.reward_models."
    for place in ("rewards", "reward_models"):
        for name, weight in getattr(rl, place).items():
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                yield _refuse(config, f"{place}.{name}", weight, "must be a number", "Use 1.0.")
    schedule = config.train_parameters.lr_scheduler_type
    if schedule in BY_LOSS:
        yield (
            f"train_parameters.lr_scheduler_type={schedule!r} waits for an evaluation loss, and reinforcement learning "
            "has none. Use constant, linear or cosine."
        )
    unit = spec.rows_per_loss(rl.group_size)
    if rl.max_tokens_per_micro_batch < longest * unit:
        what = "one sequence" if unit == 1 else f"the {unit} sequences that {spec.name} compares"
        rule = f"is less than {what} of train_parameters.max_seq_len={longest}"
        fix = f"Use {longest * unit} or more."
        yield _refuse(config, "max_tokens_per_micro_batch", rl.max_tokens_per_micro_batch, rule, fix)
    if rl.dual_clip is not None and rl.dual_clip <= 1:
        yield _refuse(config, "dual_clip", rl.dual_clip, "must be above 1", "Use 3.0.")
    sampler = config.train_parameters.sampler
    engine_length = None if sampler is None else sampler.engine.get("max_model_len")
    if isinstance(engine_length, int) and engine_length > longest:
        yield (
            f"train_parameters.sampler.engine.max_model_len={engine_length} is more than train_parameters.max_seq_len="
            f"{longest}: rollouts could be too long to train on. Leave it out, or use {longest} or less."
        )
    if rl.preference == "ipo" and rl.label_smoothing:
        rule = "belongs to preference: sigmoid"
        yield _refuse(config, "label_smoothing", rl.label_smoothing, rule, "Leave it out with ipo.")
    if rl.label_smoothing is not None and rl.label_smoothing >= 0.5:
        yield _refuse(config, "label_smoothing", rl.label_smoothing, "must be below 0.5", "Use 0.1.")
    if rl.kl_target is not None and rl.kl_coef == 0:
        rule = "needs an rl.kl_coef above 0 to start from"
        yield _refuse(config, "kl_target", rl.kl_target, rule, "Set rl.kl_coef: 0.05.")
    if rl.reference_sync_every is not None and config.train_parameters.lora_peft_config is not None:
        rule = "cannot be done with LoRA, whose reference is the base without adapters"
        yield _refuse(config, "reference_sync_every", rl.reference_sync_every, rule, "Leave it out.")


def own(rl: RLSettings, spec: AlgorithmSpec, name: str, default: Any) -> Any:
    """Return a setting of the section ``rl``, or what the algorithm starts from where it is null."""
    value = getattr(rl, name)
    return spec.settings.get(name, default) if value is None else value


def short_name(name: str) -> str:
    """Return what metrics call a reward: the function's name, or the last folder of a model's path."""
    return name.rpartition(":")[2].rstrip("/").rpartition("/")[2]


def _refuse(config: Config, name: str, value: Any, rule: str, fix: str) -> str:
    path = f"rl.{name}"
    return describe_refusal(path, value, rule, fix, config.origins.get(path, ""))
