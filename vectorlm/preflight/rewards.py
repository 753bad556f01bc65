"""Whether reward functions can be called with the columns of the prompts; loads the functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vectorlm.config.schema import Config
from vectorlm.config.setting import refuse
from vectorlm.rewards.registry import get_reward
from vectorlm.rewards.signature import OF_TRL, RESERVED, RewardSignature
from vectorlm.settings import nearest
from vectorlm.types import PromptRecord


def reward_problems(
    config: Config, prompts: Sequence[PromptRecord], evaluation_prompts: Sequence[PromptRecord]
) -> Iterator[str]:
    """Yield each parameter of a reward function that nothing supplies.

    Raises:
        ConfigError: A function or its file does not exist.
    """
    # Costs more than a minute: the first call comes after models are loaded and completions sampled.
    rl, sampler = config.rl, config.train_parameters.sampler
    for name, weight in (rl.reward.rewards if rl is not None and prompts else {}).items():
        for rule, fix in signature_problems(get_reward(name), prompts, "rl.prompts"):
            yield refuse(config, f"rl.rewards.{name}", rule, fix, weight)
    if sampler is not None and sampler.evaluation.reward is not None and evaluation_prompts:
        reward, source = get_reward(sampler.evaluation.reward), "train_parameters.sampler.prompts"
        for rule, fix in signature_problems(reward, evaluation_prompts, source):
            yield refuse(config, "train_parameters.sampler.reward", rule, fix)


def signature_problems(
    reward: Callable[..., Any], records: Sequence[PromptRecord], source: str
) -> Iterator[tuple[str, str]]:
    """Yield the rule and the fix for each parameter of a reward that these prompts, from `source`, cannot fill."""
    signature = RewardSignature.of(reward)
    columns = {name for record in records for name in record.columns if name not in RESERVED}
    if signature.completion == "prompt":
        rule = "has no parameter for the completion, which would go to its first one, 'prompt'"
        yield rule, "Add a parameter `completion`."
    for name in signature.missing(columns):
        rule = f"asks for {name!r}, which nothing supplies"
        if name in OF_TRL:
            yield f"{rule}: it belongs to TRL's trainer", f"Give it a default: `{name}=None`."
        else:
            has = ", ".join(sorted(columns)) or "none but `prompt`"
            fix = nearest(name, columns) or "Give it a default, or add the column."
            yield f"{rule}: the columns of {source} are {has}", fix
    if signature.takes_lists:
        return  # A list has None where a row lacks the column.
    for name in signature.required:
        lacking = next((place for place, each in enumerate(records) if name not in each.columns), None)
        if name in columns and lacking is not None:
            fix = "Give it a default, or fill the column."
            yield f"asks for {name!r}, which prompt {lacking} of {source} does not have", fix
