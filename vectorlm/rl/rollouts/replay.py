"""Read and write stored rollouts of this or another policy, to train on them."""

from __future__ import annotations

import base64
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vectorlm.data.encoding import is_messages
from vectorlm.data.images import picture_of
from vectorlm.data.prompts import read_rows
from vectorlm.errors import DatasetError
from vectorlm.rl.prompts import PromptOrder
from vectorlm.rl.rollout import Rollout, RolloutGroup
from vectorlm.train.recorder import Timer
from vectorlm.types import PromptRecord

Group = list[Rollout]
RULE = "every line must have the format that a run with rl.rollout.save_tokens: True writes."


def record_of(rollout: Rollout) -> dict[str, Any]:
    """Return the further fields of a rollout that `read_rollouts` needs, as JSON values."""
    measured = {"columns": dict(rollout.prompt_record.columns), "measured": dict(rollout.measured)}
    return measured | row_of(rollout)


def row_of(rollout: Rollout) -> dict[str, Any]:
    """Return the tokens of a rollout's main row, and their data, as JSON values."""
    return {
        "prompt_token_ids": list(rollout.prompt_token_ids),
        "token_ids": list(rollout.token_ids),
        "policy_mask": [int(value) for value in rollout.policy_mask],
        "sampler_logprobs": list(rollout.sampler_logprobs),
        "versions": list(rollout.versions),
        "turn_ends": list(rollout.turn_ends),
        "turn_rewards": list(rollout.turn_rewards),
        "messages": rollout.messages,
        "turn_texts": list(rollout.turn_texts),
        "policy_contents": list(rollout.policy_contents),
        **({"pictures": list(rollout.pictures)} if rollout.pictures else {}),
        **({} if rollout.routes is None else {"routes": written_routes(rollout.routes)}),
    }


def written_routes(routes: np.ndarray) -> dict[str, Any]:
    """Return routes as JSON values, with their bytes in little-endian order."""
    data = routes.astype(routes.dtype.newbyteorder("<")).tobytes()
    text = base64.b64encode(data).decode("ascii")
    return {"dtype": routes.dtype.name, "shape": list(routes.shape), "base64": text}


def read_routes(written: Mapping[str, Any] | None) -> np.ndarray | None:
    """Return the routes from the values of `written_routes`; None for None.

    Raises:
        ValueError: The bytes do not fit the shape, or the dtype is not supported.
    """
    if written is None:
        return None
    if written["dtype"] not in ("uint8", "uint16") or len(written["shape"]) != 3:
        raise ValueError("routes must be uint8 or uint16, of three dimensions")
    data = base64.b64decode(written["base64"], validate=True)
    found = np.frombuffer(data, np.dtype(written["dtype"]).newbyteorder("<"))
    return found.astype(written["dtype"]).reshape(written["shape"])


def read_rollouts(path: str | Path, reads: Collection[str] = ()) -> list[Group]:
    """Read the groups in the ``rollouts.jsonl`` of a run with ``rl.rollout.save_tokens``.

    Adjacent lines with the same ``train_step`` and ``group`` form a group. `reads` names the arguments that the reward
    functions take.

    Raises:
        DatasetError: A line is not readable, or lacks an argument that a reward function takes.
    """
    if not Path(path).is_file():
        raise DatasetError(
            f"rl.rollout.path={str(path)!r}: the file does not exist. Give the rollouts.jsonl of a run."
        )
    groups: list[Group] = []
    place: tuple[int, int] | None = None
    for here, rollout in read_rows(path, lambda row: _placed_rollout_of(row, reads), RULE):
        if here != place:
            groups.append([])
            place = here
        groups[-1].append(rollout)
    if not groups:
        raise DatasetError(
            f"rl.rollout.path={str(path)!r}: the file must hold at least one rollout. Give the rollouts.jsonl of a run."
        )
    return groups


def replay_order(groups: Sequence[Group], group_size: int, seed: int) -> PromptOrder[Group]:
    """Return the stored groups in a random order that `seed` determines; all must have `group_size` rollouts."""
    for index, group in enumerate(groups):
        if len(group) != group_size:
            raise DatasetError(
                f"rl.group_size={group_size}: group {index} of rl.rollout.path has {len(group)} completions, and the "
                "two numbers must be equal. Change rl.group_size, or give another file."
            )
    return PromptOrder(groups, seed)


class RecordedGroups:
    """A source of the groups that a run trained on, read from its ``rollouts.jsonl``."""

    def __init__(self, path: Path, last_step: int, max_lag: int | None = None) -> None:
        """Read the steps up to `last_step`; tokens older than `max_lag` steps are left out, as in the run.

        Raises:
            DatasetError: The run did not set ``rl.rollout.save_tokens``.
        """
        self._max_lag = max_lag
        places: dict[tuple[int, int], list[tuple[Rollout, Mapping[str, Any]]]] = {}
        for (place, rollout), row in read_rows(path, lambda row: (_placed_rollout_of(row), row), RULE):
            if place[0] <= last_step:
                places.setdefault(place, []).append((replace(rollout, is_replayed=False), row))
        self._groups: dict[int, list[RolloutGroup]] = {}
        for (step, _), group in places.items():
            self._groups.setdefault(step, []).append(_scored(group))

    @property
    def group_size(self) -> int:
        """Return G."""
        return len(next(iter(self._groups.values()))[0].rollouts)

    def collect(self, step: int, timer: Timer) -> list[RolloutGroup]:
        """Return the groups that step `step` + 1 of the run trained on; empty if it dropped all groups."""
        with timer.span("time/generate_s"), timer.span("time/score_s"):
            return self._groups.get(step + 1, [])

    def metrics(self, step: int) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def oldest_version(self, step: int) -> int | None:
        """Return the oldest version whose tokens `step` trains on; None if it trains on all tokens."""
        return None if self._max_lag is None else step - self._max_lag

    def state(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Do nothing: the step number alone determines the groups."""


def _scored(group: Sequence[tuple[Rollout, Mapping[str, Any]]]) -> RolloutGroup:
    rows = [row for _, row in group]

    def tensor(values: Sequence[float | None]) -> torch.Tensor:
        return torch.tensor([math.nan if value is None else value for value in values])

    by_name = {name: tensor([row["rewards"][name] for row in rows]) for name in rows[0]["rewards"]}
    return RolloutGroup([rollout for rollout, _ in group], tensor([row["reward"] for row in rows]), by_name)


def _placed_rollout_of(
    row: Mapping[str, Any], reads: Collection[str] = ()
) -> tuple[tuple[int, int], Rollout]:
    """Return the step and the group of a rollout, and the rollout."""
    of_turns = {"messages", "environment", *(("completions",) if is_messages(row["prompt"]) else ())}
    lacks_turns = int(row["num_turns"]) > 1 and "messages" not in row
    if lacks_turns and (asked := of_turns.intersection(reads)):
        raise ValueError(
            f"a reward reads {min(asked)!r} of the turns, and files of earlier versions do not have it"
        )
    if int(row["num_turns"]) > 1 and "turn_texts" not in row and reads:
        raise ValueError(
            "rewards read the policy's text, which files of earlier versions do not separate from replies"
        )
    record = PromptRecord(row["prompt"], dict(row["columns"]), row.get("source", ""))
    # Files of earlier versions have no "branches".
    branches = tuple(_rollout_of(branch, record) for branch in row.get("branches", ()))
    measured = {name: math.nan if value is None else value for name, value in row.get("measured", {}).items()}
    rollout = replace(_rollout_of(row, record), branches=branches, measured=measured)
    return (int(row["train_step"]), int(row["group"])), rollout


def _rollout_of(row: Mapping[str, Any], record: PromptRecord) -> Rollout:
    lengths = {len(row[name]) for name in ("token_ids", "policy_mask", "sampler_logprobs", "versions")}
    if len(lengths) != 1:
        raise ValueError("token_ids, policy_mask, sampler_logprobs and versions differ in length")
    logprobs = _numbers(row, "sampler_logprobs", int, float)
    if not all(map(math.isfinite, logprobs)):
        raise ValueError("sampler_logprobs must be finite")
    return Rollout(
        record,
        _numbers(row, "prompt_token_ids", int),
        _numbers(row, "token_ids", int),
        tuple(bool(value) for value in row["policy_mask"]),
        logprobs,
        _numbers(row, "versions", int),
        str(row["completion"]),
        row["finish_reason"],
        int(row["num_turns"]),
        # Files of earlier versions have none of the fields below.
        tuple(row.get("turn_ends", ())),
        tuple(row.get("turn_rewards", ())),
        messages=row.get("messages"),
        turn_texts=tuple(row.get("turn_texts", ())),
        policy_contents=tuple(row.get("policy_contents", ())),
        is_replayed=True,
        pictures=tuple(map(picture_of, row.get("pictures", ()))),
        routes=read_routes(row.get("routes")),
    )


def _numbers(row: Mapping[str, Any], name: str, *kinds: type) -> tuple[Any, ...]:
    """Return a list of numbers of a row; raise TypeError if it is no list, or if an element has no type of `kinds`."""
    if not isinstance(row[name], list) or not all(type(value) in kinds for value in row[name]):
        raise TypeError(f"{name} must be a list of {kinds[-1].__name__}")
    return tuple(row[name])
