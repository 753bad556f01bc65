"""Rollouts kept in a file, of this policy or any other, to train on again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vectorlm.data.questions import Question
from vectorlm.errors import DatasetError
from vectorlm.rollout.prompts import PromptOrder
from vectorlm.rollout.rollout import Rollout

Group = list[Rollout]


def record_of(rollout: Rollout) -> dict[str, Any]:
    """Return what `read_rollouts` needs of a rollout, as JSON values, besides its ``prompt`` and ``completion``."""
    return {
        "columns": dict(rollout.question.columns),
        "prompt_token_ids": list(rollout.prompt_token_ids),
        "token_ids": list(rollout.token_ids),
        "policy_mask": [int(each) for each in rollout.policy_mask],
        "sampler_logprobs": list(rollout.sampler_logprobs),
        "versions": list(rollout.versions),
    }


def read_rollouts(path: str | Path, setting: str = "rl.rollout.path") -> list[Group]:
    """Read the groups that a run with ``rl.rollout.save_tokens`` has left in its ``rollouts.jsonl``.

    Args:
        path: The file; lines of one group stand next to each other, with the same ``train_step`` and ``group``.
        setting: What an error calls it.

    Raises:
        DatasetError: The file is missing or empty, or a line lacks something.
    """
    if not Path(path).is_file():
        raise DatasetError(f"{setting}={str(path)!r} is not a file: name the rollouts.jsonl of a run.")
    groups: list[Group] = []
    place: tuple[Any, Any] | None = None
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rollout = _rollout_of(row)
            here = (row["train_step"], row["group"])
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(
                f"{path}:{number} is no rollout to train on ({type(error).__name__}: {error}): it needs what a run "
                "with rl.rollout.save_tokens: True writes."
            ) from error
        if here != place:
            groups.append([])
            place = here
        groups[-1].append(rollout)
    if not groups:
        raise DatasetError(f"{setting}={str(path)!r} is empty: it must hold at least one rollout.")
    return groups


class Replay:
    """Gives stored groups, in an order drawn from the seed, pass after pass.

    The only state is `position`: a run that resumes sets it and goes on.
    """

    def __init__(self, groups: Sequence[Group], group_size: int, seed: int) -> None:
        """Take the groups.

        Args:
            groups: At least one.
            group_size: Completions that every group must have.
            seed: What the order of each pass is drawn from.

        Raises:
            DatasetError: A group has another size.
        """
        for index, group in enumerate(groups):
            if len(group) != group_size:
                raise DatasetError(
                    f"group {index} of rl.rollout.path has {len(group)} completions, and rl.group_size={group_size}: "
                    "replay groups of the size that is trained on."
                )
        self._order: PromptOrder[Group] = PromptOrder(groups, seed)

    @property
    def position(self) -> int:
        """Groups that were taken before."""
        return self._order.position

    @position.setter
    def position(self, value: int) -> None:
        self._order.position = value

    def take(self, count: int) -> list[Group]:
        """Return the next groups."""
        return self._order.take(count)


def _rollout_of(row: Mapping[str, Any]) -> Rollout:
    lengths = {len(row[name]) for name in ("token_ids", "policy_mask", "sampler_logprobs", "versions")}
    if len(lengths) != 1:
        raise ValueError("token_ids, policy_mask, sampler_logprobs and versions differ in length")
    return Rollout(
        Question(row["prompt"], row["columns"]),
        tuple(row["prompt_token_ids"]),
        tuple(row["token_ids"]),
        tuple(bool(each) for each in row["policy_mask"]),
        tuple(row["sampler_logprobs"]),
        tuple(row["versions"]),
        row["completion"],
        row["finish_reason"],
        row["num_turns"],
        is_replayed=True,
    )
