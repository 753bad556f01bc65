"""What the run's own reward functions ask for, against the columns of its prompts; loads both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vectorlm.config.schema import Config
from vectorlm.config.setting import refuse
from vectorlm.config.value import raise_problems
from vectorlm.data.prompts import read_prompts
from vectorlm.rewards.registry import get_reward
from vectorlm.rewards.signature import OF_TRL, RESERVED, RewardSignature
from vectorlm.settings import nearest
from vectorlm.types import PromptRecord

_SAMPLER = "train_parameters.sampler"


def check_rewards(config: Config) -> None:
    """Refuse a reward function with a parameter that nothing supplies.

    Raises:
        ConfigError: Lists every such parameter, or a function or file does not exist.
        DatasetError: The prompts cannot be read.
    """
    problems: list[str] = []
    rl, sampler = config.rl, config.train_parameters.sampler
    if rl is not None and rl.reward.rewards:
        records = read_prompts(rl.collect.prompts, "rl.prompts")
        for name, weight in rl.reward.rewards.items():
            found = signature_problems(get_reward(name), records, "rl.prompts")
            problems += (refuse(config, f"rl.rewards.{name}", *each, weight) for each in found)
    evaluation = None if sampler is None else sampler.evaluation
    if evaluation is not None and evaluation.prompts is not None and evaluation.reward is not None:
        records = read_prompts(evaluation.prompts, f"{_SAMPLER}.prompts")
        found = signature_problems(get_reward(evaluation.reward), records, f"{_SAMPLER}.prompts")
        problems += (refuse(config, f"{_SAMPLER}.reward", *each) for each in found)
    raise_problems(problems)


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
            yield (
                f"asks for {name!r}, which prompt {lacking} of {source} does not have",
                "Give it a default, or fill the column.",
            )
