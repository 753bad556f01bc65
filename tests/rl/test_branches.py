"""Branches of a rollout are rows of their own, learn with its advantage, and change no baseline."""

from dataclasses import replace

import pytest
import torch
from pages import ROOT, blocks
from rank_processes import on_ranks
from tiny_rl import build, random_groups, random_rewards, scored

from vectorlm.algorithms import get_algorithm
from vectorlm.rl.batch import make_batch
from vectorlm.rl.settings import KLSettings

MEAN = {"reduction": "token_mean"}


def cut(rollout):
    """Return a rollout whose first tokens are trained on in a branch, and the others in itself."""
    if len(rollout.token_ids) < 4:
        return rollout
    own = tuple(chosen and place >= 3 for place, chosen in enumerate(rollout.policy_mask))
    parts = ("token_ids", "policy_mask", "sampler_logprobs", "versions")
    branch = replace(rollout, **{name: getattr(rollout, name)[:3] for name in parts})
    return replace(rollout, policy_mask=own, branches=(branch,))


def rows_of(algorithm, change):
    groups = [[change(rollout) for rollout in group] for group in random_groups()]
    return make_batch(scored(groups, random_rewards()), get_algorithm(algorithm))


def test_branches_lie_behind_the_rollouts_of_their_group():
    rows = rows_of("grpo", cut)
    num_groups, num_rows = rows.rewards.shape
    assert num_rows > 4
    assert rows.owners.view(num_groups, num_rows)[:, :4].tolist() == [
        [group * num_rows + column for column in range(4)] for group in range(num_groups)
    ]
    assert not rows.valid[:, 4:].any()
    whole = rows_of("grpo", lambda rollout: rollout)
    # Each token is trained on once.
    assert rows.mask.sum() == whole.mask.sum()
    for row in torch.nonzero(rows.mask.any(dim=1))[:, 0].tolist():
        owner = int(rows.owners[row])
        place = torch.nonzero(rows.mask[row])[:, 0]
        assert torch.equal(rows.input_ids[row, place], rows.input_ids[owner, place])


def test_opo_weighs_a_rollout_by_all_its_tokens():
    def of_rollouts(change):
        rows, spec = rows_of("opo", change), get_algorithm("opo")
        found = rows.with_branches(spec.advantages(rows.for_baselines(), spec.settings))
        first = rows.with_compared().mask.int().argmax(dim=1, keepdim=True)
        return found.gather(1, first).view(rows.rewards.shape)[:, :4]

    torch.testing.assert_close(of_rollouts(cut), of_rollouts(lambda rollout: rollout))


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_truncated_rollout_is_left_out_with_its_branches(reason):
    """Whatever the answers of its branches ended in."""
    groups = []
    for group in random_groups():
        parted = [cut(each) for each in group]
        branches = [[replace(branch, finish_reason=reason) for branch in each.branches] for each in parted]
        groups.append(
            [replace(each, branches=tuple(mine)) for each, mine in zip(parted, branches, strict=True)]
        )
    rows = make_batch(scored(groups, random_rewards()), get_algorithm("grpo"), drop_truncated=True)
    whole = make_batch(scored(random_groups(), random_rewards()), get_algorithm("grpo"), drop_truncated=True)
    assert rows.mask.sum() == whole.mask.sum()
    num_rows = rows.rewards.shape[1]
    owners = {int(owner) for owner in rows.owners[rows.mask.any(dim=1)]}
    left = {int(row) // 4 * num_rows + int(row) % 4 for row in torch.nonzero(whole.mask.any(dim=1))}
    assert owners == left


def old_logprobs(topology, folder, algorithm):
    run = build(topology, folder, algorithm)
    return [run.prepare(rows_of(algorithm, change)) for change in (keep, cut)]


@pytest.mark.parametrize("algorithm", ["otb", "clip_cov", "grpo"])
def test_the_policy_before_the_update_is_asked_for_branches_too(folder, algorithm):
    ((whole, parted),) = on_ranks(1, old_logprobs, folder, algorithm)
    rows, num_rows = parted.rows, parted.rows.rewards.shape[1]
    places = torch.nonzero(rows.mask)
    assert len(places) == whole.rows.mask.sum()
    owner = rows.owners[places[:, 0]]
    expected = whole.old_logprobs[owner // num_rows * 4 + owner % num_rows, places[:, 1]]
    torch.testing.assert_close(parted.old_logprobs[rows.mask], expected)


def penalised(topology, folder, algorithm):
    """Return what the penalty leaves of the rewards of rollouts [P, 4], and of what their tokens are given."""
    kl = KLSettings(kl_coef=0.3, kl_in="reward", kl_kind="k1")
    run = build(topology, folder, algorithm, kl=kl, has_reference=True)
    with torch.no_grad():
        # A policy that has left its reference.
        for parameter in run.models.policy.model.parameters():
            parameter.mul_(1.2)
    found = []
    for change in (keep, cut):
        rows = run.prepare(rows_of(algorithm, change), 0.3).rows
        given = rows.token_rewards.sum(dim=1).view_as(rows.rewards)
        found.append((rows.rewards[:, :4], given[:, :4]))
    return found


@pytest.mark.parametrize("algorithm", ["rloo", "reinforce_pp", "gmpo"])
def test_a_rollout_is_charged_the_divergence_of_its_branches(folder, algorithm):
    (((whole, given), (parted, given_parted)),) = on_ranks(1, penalised, folder, algorithm)
    torch.testing.assert_close(parted, whole, equal_nan=True)
    torch.testing.assert_close(given_parted, given)
    assert not torch.allclose(whole, random_rewards(), atol=1e-3, equal_nan=True)


def train(topology, folder, algorithm, change, packs):
    run = build(
        topology, folder, algorithm, packs=packs, num_epochs=1, num_mini_batches=1, hyperparameters=MEAN
    )
    batch = run.prepare(rows_of(algorithm, change))
    run.update(batch)
    return run.weights()


def train_both(topology, folder, change):
    return [train(topology, folder, "grpo", change, packs) for packs in (True, False)]


def test_a_rollout_in_two_rows_is_learned_from_as_in_one(folder):
    """GRPO, whose advantages are of whole rollouts and whose loss is a mean over tokens."""
    ((whole, _),) = on_ranks(1, train_both, folder, keep)
    for world_size in (1, 2):
        for found in on_ranks(world_size, train_both, folder, cut):
            torch.testing.assert_close(found, [whole, whole], rtol=2e-4, atol=2e-6)


def keep(rollout):
    return rollout


@pytest.mark.parametrize("algorithm", ["ppo", "online_dpo"])
def test_what_compares_pairs_or_values_places_takes_the_first_row_alone(algorithm):
    assert rows_of(algorithm, cut).owners is None


def advantages_of_rollouts(topology, folder, algorithm):
    """Return the advantages of whole rollouts [P, 4] in batches that must not differ, two by two."""
    run, rejects = build(topology, folder, algorithm), random_rewards()
    rejects[0, 1] = torch.nan
    whole, cut_up, unscored = (
        make_batch(scored([[change(each) for each in group] for group in random_groups()], rewards), run.spec)
        for change, rewards in ((keep, random_rewards()), (cut, random_rewards()), (keep, rejects))
    )
    rejected = torch.zeros_like(whole.mask)
    rejected[1] = True
    found = []
    for rows in (whole, cut_up, unscored, whole.without(rejected)):
        batch = run.prepare(rows)
        first = batch.advantages.gather(1, batch.rows.mask.int().argmax(dim=1, keepdim=True))
        found.append(first.view_as(batch.rows.rewards)[:, :4])
    return found


@pytest.mark.parametrize("name", ["examples/my_algorithm.py:MEDIAN", "my_ranks.py:RANKS"])
def test_an_algorithm_of_ones_own_compares_neither_branches_nor_what_was_rejected(folder, tmp_path, name):
    (tmp_path / "my_ranks.py").write_text(blocks("docs/howto/own_algorithm.md", "python")[0])
    algorithm = f"{ROOT if name.startswith('examples') else tmp_path}/{name}"
    ((whole, cut_up, unscored, rejected),) = on_ranks(1, advantages_of_rollouts, folder, algorithm)
    torch.testing.assert_close(cut_up, whole, rtol=0, atol=0)
    torch.testing.assert_close(rejected, unscored, rtol=0, atol=0)
    assert not torch.equal(whole, unscored)
    assert whole.any()
