"""The rules of the section ``rl`` that need to know the algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vectorlm.algorithms.registry import get_algorithm
from vectorlm.algorithms.spec import AlgorithmSpec
from vectorlm.config import Config
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
            *_other_problems(config),
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
    if spec.samples_from_policy and not (isinstance(temperature, int | float) and temperature > 0):
        rule = "must be above 0: greedy completions have no probability to learn from"
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


def _other_problems(config: Config) -> Iterator[str]:
    assert config.rl is not None
    rl, longest = config.rl, config.train_parameters.max_seq_len
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
    if rl.max_tokens_per_micro_batch < longest:
        rule = f"is less than one sequence of train_parameters.max_seq_len={longest}"
        fix = f"Use {longest} or more."
        yield _refuse(config, "max_tokens_per_micro_batch", rl.max_tokens_per_micro_batch, rule, fix)
    if rl.dual_clip is not None and rl.dual_clip <= 1:
        yield _refuse(config, "dual_clip", rl.dual_clip, "must be above 1", "Use 3.0.")
    if rl.label_smoothing is not None and rl.label_smoothing >= 0.5:
        yield _refuse(config, "label_smoothing", rl.label_smoothing, "must be below 0.5", "Use 0.1.")
    if rl.kl_target is not None and rl.kl_coef == 0:
        rule = "needs an rl.kl_coef above 0 to start from"
        yield _refuse(config, "kl_target", rl.kl_target, rule, "Set rl.kl_coef: 0.05.")
    if rl.reference_sync_every is not None and config.train_parameters.lora_peft_config is not None:
        rule = "cannot be done with LoRA, whose reference is the base without adapters"
        yield _refuse(config, "reference_sync_every", rl.reference_sync_every, rule, "Leave it out.")


def _refuse(config: Config, name: str, value: Any, rule: str, fix: str) -> str:
    path = f"rl.{name}"
    return describe_refusal(path, value, rule, fix, config.origins.get(path, ""))
