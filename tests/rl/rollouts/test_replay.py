"""Reading stored rollouts, and the order of training on them."""

import json
from dataclasses import replace

import pytest
import torch

from vectorlm.errors import DatasetError
from vectorlm.rl.rollout import Rollout, RolloutGroup
from vectorlm.rl.rollouts.logger import RolloutLogger
from vectorlm.rl.rollouts.replay import read_rollouts, replay_order
from vectorlm.types import PromptRecord

TURNS = [{"role": role, "content": role} for role in ("assistant", "user", "assistant")]


def rollout(index, group):
    return Rollout(
        PromptRecord(f"q{group}", {"target": group}),
        (1, 2),
        (3, 4 + index),
        (True, False),
        (-0.1, -0.25),
        (7, -1),
        f"text {index}",
        "stop",
        2,
        messages=[{"role": "user", "content": f"q{group}"}, *TURNS],
        measured={"won": 1.0 + index},
    )


def write(folder, *steps):
    """Write the groups of each step as a run does; return the file."""
    logger = RolloutLogger(folder, show_every=0, saves_tokens=True, say=lambda text: None)
    for step, groups in enumerate(steps):
        logger.write(step, [RolloutGroup(group, torch.zeros(len(group)), {}) for group in groups], None)
    return folder / "rollouts.jsonl"


def test_rollouts_come_back_as_they_were(tmp_path):
    groups = [[rollout(index, group) for index in range(3)] for group in range(4)]
    # The second step has groups with the same numbers.
    found = read_rollouts(write(tmp_path, groups, groups[:1]))
    expected = [[replace(mine, is_replayed=True) for mine in group] for group in [*groups, groups[0]]]
    assert found == expected


def test_the_further_rows_of_an_agent_come_back_too(tmp_path):
    branches = [replace(rollout(5, 0), prompt_token_ids=(9,), versions=(8, -1)), rollout(6, 0)]
    first = replace(rollout(0, 0), branches=tuple(branches), turn_rewards=(0.0, 1.0))
    path = write(tmp_path, [[first, rollout(1, 0)]])
    ((found, other),) = read_rollouts(path)
    assert found == replace(
        first,
        is_replayed=True,
        branches=tuple(replace(mine, is_replayed=True, measured={}) for mine in branches),
    )
    assert other.branches == ()
    # Files of an earlier version have no branches.
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    branch = lines[0]["branches"][0]
    for line in lines:
        del line["branches"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [row.branches for row in read_rollouts(path)[0]] == [(), ()]
    for change in ({"sampler_logprobs": [-0.1]}, {"branches": [{**branch, "versions": [7]}]}):
        path.write_text(json.dumps({**lines[0], **change}) + "\n")
        with pytest.raises(DatasetError):
            read_rollouts(path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, r"rl\.rollout\.path"),
        ("", r"rl\.rollout\.path"),
        ('{"train_step": 1, "group": 0, "prompt": "q"}', "save_tokens"),
        ("nonsense", "nonsense"),
    ],
)
def test_files_that_hold_no_rollouts(tmp_path, text, named):
    path = tmp_path / "rollouts.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DatasetError, match=named):
        read_rollouts(path)


CHAT = [{"role": "user", "content": "q"}]


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize(
    ("reads", "prompt", "num_turns", "is_refused"),
    [
        ({"completion", "messages"}, "q", 2, True),
        ({"completion", "environment"}, "q", 2, True),
        ({"completions", "answer"}, CHAT, 2, True),
        ({"completions", "answer"}, "q", 2, False),
        ({"completion", "messages", "environment"}, CHAT, 1, False),
        ({"completion", "num_turns"}, CHAT, 2, False),
    ],
)
def test_a_file_without_the_turns_that_a_reward_reads_is_refused(
    tmp_path, reads, prompt, num_turns, is_refused, is_old
):
    path = write(tmp_path, [[rollout(0, 0)]])
    row = json.loads(path.read_text()) | {"prompt": prompt, "num_turns": num_turns}
    if is_old:
        del row["messages"], row["measured"]
    path.write_text(json.dumps(row))
    if is_refused and is_old:
        with pytest.raises(DatasetError):
            read_rollouts(path, reads)
    else:
        assert len(read_rollouts(path, reads)) == 1
    assert len(read_rollouts(path)) == 1


def test_every_group_once_per_pass_and_any_place_to_go_on_from():
    groups = [[rollout(0, group), rollout(1, group)] for group in range(5)]
    replay = replay_order(groups, 2, seed=3)
    taken = replay.take(5)
    assert sorted(group[0].prompt_record.prompt for group in taken) == [f"q{index}" for index in range(5)]
    later = replay.take(4)
    again = replay_order(groups, 2, seed=3)
    again.position = 5
    assert again.take(4) == later
    with pytest.raises(DatasetError, match=r"rl\.group_size"):
        replay_order(groups, 4, seed=3)


def test_files_of_several_turns_without_the_policys_own_words_are_refused(tmp_path):
    """Otherwise rewards would read the environment's words as the policy's."""
    path = write(tmp_path, [[rollout(0, 0)]])
    row = json.loads(path.read_text())
    del row["turn_texts"]
    path.write_text(json.dumps(row))
    with pytest.raises(DatasetError):
        read_rollouts(path, {"completion"})
    assert len(read_rollouts(path)) == 1
    path.write_text(json.dumps(row | {"num_turns": 1}))
    assert len(read_rollouts(path, {"completion"})) == 1
