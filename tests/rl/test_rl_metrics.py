"""The metrics of a batch, by hand."""

from dataclasses import replace

import pytest
from tiny_rl import random_groups, random_rewards, scored

from vectorlm.rl.metrics import rollout_metrics


def test_numbers_of_rollouts_by_hand():
    groups, rewards = random_groups(), random_rewards()
    rewards[3] = 0.1  # whose float32 mean is not 0.1
    first, *others = scored(groups, rewards)
    found = [replace(first, errors=("one", "two")), *others]
    metrics = rollout_metrics(found, step=3)
    known = rewards[~rewards.isnan()]
    assert metrics["reward/mean"] == pytest.approx(known.mean().item())
    assert metrics["reward/mine/std"] == pytest.approx(known.std(correction=0).item())
    assert metrics["reward/unscored"] == 1.0
    assert metrics["reward/errors"] == 2.0
    assert metrics["reward/constant_groups"] == pytest.approx(0.2)
    lengths = [each.num_policy_tokens for group in groups for each in group]
    assert metrics["completion/length_mean"] == pytest.approx(sum(lengths) / 20)
    assert metrics["completion/length_max"] == max(lengths)
    cut = [each.is_truncated for group in groups for each in group]
    assert metrics["completion/truncated"] == pytest.approx(sum(cut) / 20)
    assert metrics["staleness/token_max"] == 3.0


def test_dropped_groups_are_counted_and_have_no_age():
    kept, *dropped = scored(random_groups(), random_rewards())
    fresh = replace(
        kept, rollouts=[replace(each, versions=(2,) * len(each.versions)) for each in kept.rollouts]
    )
    metrics = rollout_metrics([fresh, *(replace(each, is_dropped=True) for each in dropped)], step=3)
    assert metrics["rollout/groups"] == 1.0
    assert metrics["rollout/sampled_groups"] == 5.0
    assert metrics["staleness/token_max"] == 1.0


def test_nothing_sampled_is_no_error():
    assert rollout_metrics([], 0)["rollout/groups"] == 0.0
