"""Metrics of a batch, compared with values worked by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kit.rank_processes import on_ranks
from tiny_rl import build, random_groups, random_rewards, scored

from vectorlm.algorithms.kl import AdaptiveKL
from vectorlm.algorithms.registry import get_algorithm
from vectorlm.rl.loop import RLLoop
from vectorlm.rl.metrics import SpeedMeter, batch_metrics, rollout_metrics
from vectorlm.rl.rollout import TrainBatch, make_batch
from vectorlm.rl.rollouts.logger import _advantages as logged_advantages
from vectorlm.rl.settings import KLSettings


def test_numbers_of_rollouts_by_hand():
    groups, rewards = random_groups(), random_rewards()
    rewards[3] = 0.1  # The float32 mean of these rewards is not 0.1.
    first, *others = scored(groups, rewards)
    found = [replace(first, errors=("one", "two")), *others]
    metrics = rollout_metrics(found, step=3)
    known = rewards[~rewards.isnan()]
    assert metrics["reward/mean"] == pytest.approx(known.mean().item())
    assert metrics["reward/mine/std"] == pytest.approx(known.std(correction=0).item())
    assert metrics["reward/unscored"] == 1.0
    assert metrics["reward/errors"] == 2.0
    assert metrics["reward/constant_groups"] == pytest.approx(0.2)
    lengths = [rollout.num_policy_tokens for group in groups for rollout in group]
    assert metrics["completion/length_mean"] == pytest.approx(sum(lengths) / 20)
    assert metrics["completion/length_max"] == max(lengths)
    cut = [rollout.is_truncated for group in groups for rollout in group]
    assert metrics["completion/truncated"] == pytest.approx(sum(cut) / 20)
    assert metrics["staleness/token_max"] == 3.0


def test_dropped_groups_are_counted_and_have_no_age():
    kept, *dropped = scored(random_groups(), random_rewards())
    young = [replace(rollout, versions=(2,) * len(rollout.versions)) for rollout in kept.rollouts]
    old = [replace(group, is_dropped=True) for group in dropped]
    metrics = rollout_metrics([replace(kept, rollouts=young), *old], step=3)
    assert metrics["rollout/groups"] == 1.0
    assert metrics["rollout/sampled_groups"] == 5.0
    assert metrics["staleness/token_max"] == 1.0


def test_nothing_sampled_is_no_error():
    assert rollout_metrics([], 0)["rollout/groups"] == 0.0


def test_completions_without_a_reward_do_not_narrow_the_spread_of_their_group():
    rewards = random_rewards()
    rewards[0] = torch.tensor([0.0, torch.nan, 1.0, torch.nan])
    rewards[1] = torch.tensor([0.3, torch.nan, torch.nan, torch.nan])
    rewards[2] = torch.nan
    metrics = rollout_metrics(scored(random_groups(), rewards), step=0)
    spreads = [0.5**0.5, rewards[3].std().item(), rewards[4].std().item()]
    assert metrics["reward/group_std"] == pytest.approx(sum(spreads) / 3)


def trained_of(groups, rewards, **more):
    """Return the metrics of a batch, and the logged advantage of each rollout."""
    rows = make_batch(scored(groups, rewards), get_algorithm("grpo"), **more)
    advantages = torch.where(rows.mask, torch.arange(len(rows.mask))[:, None] + 1.0, 0.0)
    batch = TrainBatch(rows, advantages, None, None, None)
    return batch_metrics(batch), logged_advantages(batch)


def test_completions_that_the_loss_leaves_out_are_in_no_mean_of_trained_ones():
    groups, rewards = random_groups(), random_rewards()
    metrics, advantages = trained_of(groups, rewards, drop_truncated=True)
    kept = [
        (p, g)
        for p, group in enumerate(groups)
        for g, rollout in enumerate(group)
        if not rollout.is_truncated and not rewards[p, g].isnan()
    ]
    assert 0 < len(kept) < 19
    assert metrics["reward/trained_mean"] == pytest.approx(sum(rewards[at].item() for at in kept) / len(kept))
    assert sorted(advantages) == kept


def forked(rollout):
    """Return a rollout with two further rows; the second is truncated and has new tokens of version 7."""
    branch = replace(rollout, finish_reason="stop", prompt_token_ids=(3, 4, 5))
    shared = replace(
        branch,
        token_ids=(*rollout.token_ids, 9, 8),
        policy_mask=(*[False] * len(rollout.token_ids), True, True),
        sampler_logprobs=(*rollout.sampler_logprobs, -1.0, -1.0),
        versions=(*rollout.versions, 7, 7),
        finish_reason="length",
        turn_ends=(len(rollout.token_ids), len(rollout.token_ids) + 2),
        num_turns=2,
    )
    return replace(rollout, finish_reason="stop", branches=(branch, shared))


def test_all_rows_of_a_rollout_are_counted():
    plain = random_groups()
    groups = [list(map(forked, group)) for group in plain]
    rewards = random_rewards()
    metrics = rollout_metrics(scored(groups, rewards), step=7)
    before = rollout_metrics(scored(plain, rewards), step=7)
    for name in ("completion/length_mean", "completion/length_max"):
        assert metrics[name] == 2 * before[name] + 2
    assert metrics["rollout/turns_mean"] == 3
    assert metrics["rollout/rows_mean"] == 3
    assert before["rollout/rows_mean"] == 1
    assert metrics["completion/truncated"] == 1
    assert "completion/terminated_length_mean" not in metrics
    num_old = sum(2 * sum(rollout.policy_mask) for group in plain for rollout in group)
    assert metrics["staleness/token_mean"] == pytest.approx(7 * num_old / (num_old + 2 * 20))
    assert metrics["staleness/mixed_sequences"] == 1
    trained, advantages = trained_of(groups, rewards)
    assert trained["reward/trained_mean"] == pytest.approx(rewards.nanmean().item())
    # Rows 0, 4 and 5 belong to the first rollout, whose advantage is the mean over all of its tokens.
    lengths = [sum(row.policy_mask) for row in groups[0][0].rows]
    expected = sum(place * length for place, length in zip((1, 5, 6), lengths, strict=True)) / sum(lengths)
    assert advantages[0, 0] == pytest.approx(expected)


@pytest.mark.parametrize(("changes", "length"), [({}, 6.0), ({"drop_truncated": True}, 4.0)])
def test_the_divergence_per_completion_counts_only_trained_completions(changes, length):
    def group_of(lengths, is_dropped=False):
        first = random_groups()[0][0]
        rollouts = [
            replace(
                first,
                **{"token_ids": (3,) * n, "policy_mask": (True,) * n, "sampler_logprobs": (-1.0,) * n},
                **{"versions": (0,) * n, "finish_reason": "length" if n == 8 else "stop"},
            )
            for n in lengths
        ]
        return replace(scored([rollouts], torch.tensor([[0.0, 1.0]]))[0], is_dropped=is_dropped)

    groups = [group_of((4, 8)), group_of((1, 1), is_dropped=True)]
    rows = make_batch(groups, get_algorithm("grpo"), **changes)
    batch = TrainBatch(rows, torch.zeros(rows.mask.shape), None, None, None)
    loop = RLLoop.__new__(RLLoop)
    loop.models = SimpleNamespace(reference=object())
    loop.settings = SimpleNamespace(kl=KLSettings(kl_coef=0.1, kl_target=1.0))
    loop.source, loop.step, loop.kl_controller = SimpleNamespace(group_size=2), 1, AdaptiveKL(0.1, length, 2)
    # The divergence per completion is a tenth above the target.
    assert loop._follow(rollout_metrics(groups, 0) | {"reference/kl": 1.1}, batch) == {
        "reference/kl_coef": 0.1
    }
    assert loop.kl_controller.value == pytest.approx(0.1 * 1.1)


def speeds_of(topology, folder, groups):
    models = build(topology, folder, "grpo").models
    times = {"time/step_s": 2.0, "time/generate_s": 1.0}
    return [
        SpeedMeter(models, overlaps_sampling=overlaps).speeds(times, {"time/stall_s": 0.0}, groups)
        for overlaps in (False, True)
    ]


def test_tokens_seen_are_of_all_rows(folder):
    groups = scored([list(map(forked, group)) for group in random_groups()], random_rewards())
    ((found, overlapping),) = on_ranks(1, speeds_of, folder, groups)
    rows = [row for group in groups for rollout in group.rollouts for row in rollout.rows]
    read, generated = (
        sum(len(row.prompt_token_ids) for row in rows),
        sum(sum(row.policy_mask) for row in rows),
    )
    assert found["perf/tokens_seen"] == read + generated
    assert found["perf/generated_tokens_per_s"] == generated
    # The ranks waited for one of two seconds, but the engine sampled during both.
    assert overlapping["perf/generated_tokens_per_s"] == generated / 2
    assert found["perf/tokens_per_s"] == (read + generated) / 2
