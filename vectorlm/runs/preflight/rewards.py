"""Whether reward functions can be called with the columns of the prompts; loads the functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vectorlm.rl.rewards.registry import EXTRAS, LOG, OF_TRL, RESERVED, RewardSignature, get_reward
from vectorlm.runs.config.schema import Config
from vectorlm.runs.config.setting import refuse
from vectorlm.settings import nearest
from vectorlm.types import PromptRecord


def reward_problems(
    config: Config,
    prompts: Mapping[str, Sequence[PromptRecord]],
    held_out: Mapping[str, Sequence[PromptRecord]],
) -> Iterator[str]:
    """Yield each parameter of a reward function that nothing supplies.

    Raises:
        ConfigError: A function or its file does not exist.
    """
    # Costs more than a minute: the first call comes after models are loaded and completions sampled.
    for path, value, name, records, place in _uses(config, prompts, held_out):
        for rule, fix in signature_problems(get_reward(name), records, place):
            yield refuse(config, path, rule, fix, value)


def reward_notes(
    config: Config,
    prompts: Mapping[str, Sequence[PromptRecord]],
    held_out: Mapping[str, Sequence[PromptRecord]],
) -> Iterator[str]:
    """Say which parameters of a reward function both a column and the run could fill."""
    for _, _, name, records, place in _uses(config, prompts, held_out):
        kinds = RewardSignature.of(get_reward(name)).kinds
        # Silent: a dataset's own conversation would be scored instead of the one with the completion.
        for each in sorted(
            {column for record in records for column in record.columns} & {*EXTRAS} & {*kinds}
        ):
            gets = "the run's function, not the column" if each == LOG else "the column, not what the run has"
            yield f"{place}: the reward {name} gets as {each!r} {gets}. Rename the column if it should get the other"


def _uses(
    config: Config,
    prompts: Mapping[str, Sequence[PromptRecord]],
    held_out: Mapping[str, Sequence[PromptRecord]],
) -> Iterator[tuple[str, Any, str, Sequence[PromptRecord], str]]:
    """Yield the setting of each reward and its value, the reward's name, and the prompts with their setting."""
    rl = config.rl
    for source, each in ({} if rl is None else rl.by_source).items():
        place = f"rl.sources.{source}" if source else "rl"
        has_own = rl is not None and source and rl.collect.sources[source].rewards
        path = f"{place}.rewards" if has_own else "rl.rewards"
        for name, weight in each.rewards.items() if prompts[source] else ():
            yield f"{path}.{name}", weight, name, prompts[source], f"{place}.prompts"
    sampler = config.train_parameters.sampler
    further = () if sampler is None else sampler.evaluation.further_rewards
    for source, name in [*config.held_out_rewards.items(), *(("", name) for name in further)]:
        asked = f"rl.sources.{source}.held_out" if source else "train_parameters.sampler.prompts"
        path = asked if source else "train_parameters.sampler.reward"
        if records := held_out.get(source):
            yield path, name, name, records, asked


def signature_problems(
    reward: Callable[..., Any], records: Sequence[PromptRecord], source: str
) -> Iterator[tuple[str, str]]:
    """Yield the rule and the fix for each parameter of a reward that these prompts, from `source`, cannot fill."""
    signature = RewardSignature.of(reward)
    columns = {name for record in records for name in record.columns if name not in RESERVED}
    # Silent: it scores without a look at what was sampled.
    if not signature.sees_completion:
        yield "has no parameter for the completion", "Add a parameter `completion`, or `messages`."
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
