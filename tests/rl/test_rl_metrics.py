"""The metrics of a batch, by hand, and their page."""

from pathlib import Path

import pytest
import torch
from tiny_rl import random_groups, random_rewards

from vectorlm.rl.gather import Gathered
from vectorlm.rl.metrics import render_metrics, rollout_metrics

PAGE = Path(__file__).parent.parent.parent / "docs" / "metrics.md"


def test_the_page_is_what_the_table_renders():
    assert PAGE.read_text() == render_metrics(), "run: python -m vectorlm.rl.metrics > docs/metrics.md"


def test_numbers_of_rollouts_by_hand():
    groups, rewards = random_groups(), random_rewards()
    rewards[3] = 0.1  # whose float32 mean is not 0.1
    metrics = rollout_metrics(Gathered(groups, rewards, {"mine": rewards}, None, 7, 2, None), step=3)
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


def test_nothing_sampled_is_no_error():
    nothing = Gathered([], torch.zeros(0, 4), {"mine": torch.zeros(0, 4)}, None, 12, 0, None)
    assert rollout_metrics(nothing, 0)["rollout/groups"] == 0.0
