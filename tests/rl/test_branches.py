"""Branches of a rollout: separate rows that learn with its advantage and change no baseline."""

from dataclasses import replace

import pytest
import torch
from kit.pages import ROOT, blocks
from kit.rank_processes import on_ranks
from tiny_rl import (
    assert_alike,
    build,
    distributions,
    gradients,
    leave_reference,
    one_step,
    random_groups,
    random_rewards,
    scored,
)

from vectorlm.algorithms.groups import group_advantages, scaled_as_groups, turn_advantages
from vectorlm.algorithms.registry import algorithm_names, get_algorithm
from vectorlm.rl.prepare import apply_correction
from vectorlm.rl.rollout import Rollout, RolloutGroup, make_batch
from vectorlm.rl.settings import PRESETS, Correction, KLSettings
from vectorlm.types import PromptRecord

MEAN = {"reduction": "token_mean"}


def cut(rollout):
    """Move the first trained tokens of a rollout to a branch; return the rollout with that branch."""
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
    # Every token is trained on once.
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
    """The finish reasons of its branches make no difference."""
    groups = []
    for group in random_groups():
        parted = [cut(rollout) for rollout in group]
        ended = [tuple(replace(row, finish_reason=reason) for row in rollout.branches) for rollout in parted]
        groups.append([replace(rollout, branches=rows) for rollout, rows in zip(parted, ended, strict=True)])
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
    """Return the rewards of rollouts [P, 4] after the penalty, and the sums of their token rewards."""
    kl = KLSettings(kl_coef=0.3, kl_in="reward", kl_kind="k1")
    run, found = leave_reference(build(topology, folder, algorithm, kl=kl, has_reference=True)), []
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


@pytest.mark.slow
def test_a_rollout_in_two_rows_is_learned_from_as_in_one(folder):
    """Whole rollouts get GRPO's advantages, and the loss is a mean over tokens."""
    ((whole, _),) = on_ranks(1, train_both, folder, keep)
    for world_size in (1, 2):
        for found in on_ranks(world_size, train_both, folder, cut):
            torch.testing.assert_close(found, [whole, whole], rtol=2e-4, atol=2e-6)


def keep(rollout):
    return rollout


@pytest.mark.parametrize("algorithm", ["ppo", "online_dpo"])
def test_what_compares_pairs_or_values_places_takes_the_first_row_alone(algorithm):
    assert rows_of(algorithm, cut).owners is None


def test_a_pair_whose_better_or_worse_half_has_no_token_is_not_trained_on():
    spec, tokens = get_algorithm("online_dpo"), {"token_ids": (3,) * 3, "sampler_logprobs": (-1.0,) * 3}

    def rollout(version, is_own=True):
        mask = (is_own,) * 3
        return replace(random_groups()[0][0], **tokens, versions=(version,) * 3, policy_mask=mask)

    def rows_of(*groups, **how):
        return make_batch(scored(groups, torch.tensor([[1.0, 0.0]] * len(groups))), spec, **how)

    old, fresh, empty = rollout(0), rollout(5), rollout(5, is_own=False)
    for half in ([old, fresh], [fresh, old], [empty, fresh], [fresh, empty]):
        assert rows_of(half, oldest_version=4) is None
        batch = rows_of(half, [fresh, fresh], oldest_version=4)
        assert batch.mask.any(dim=1).tolist() == [False, False, True, True]
        assert batch.valid.tolist() == [[False, False], [True, True]]
    assert rows_of([old, fresh]).valid.all()


def advantages_of_rollouts(topology, folder, algorithm):
    """Return the advantages of whole rollouts [P, 4] in four batches; the first two must be equal, and the last two."""
    run, rejects = build(topology, folder, algorithm), random_rewards()
    rejects[0, 1] = torch.nan
    whole, cut_up, unscored = (
        make_batch(scored([list(map(change, group)) for group in random_groups()], rewards), run.spec)
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


def is_cut_up(name):
    """Return whether an algorithm trains on branches and gives the same result if a rollout is cut up.

    `otb` has a baseline for each position, and `clip_cov` draws other tokens if rows are arranged differently.
    """
    spec = get_algorithm(name)
    return spec.level != "group" and not spec.needs_critic and name not in ("otb", "clip_cov")


ALGORITHMS = [name for name in algorithm_names() if is_cut_up(name)]


def train_twice(topology, folder, algorithm, max_tokens, **more):
    """Make two optimizer steps on whole and on cut-up rollouts; the second one is off-policy."""
    found = []
    for change in (keep, cut):
        more |= {"max_tokens_per_micro_batch": max_tokens, "num_epochs": 2, "num_mini_batches": 1}
        run = build(topology, folder, algorithm, lr=0.5, has_reference=True, **more)
        metrics = run.update(run.prepare(rows_of(algorithm, change)), kl_coef=0.1)
        found.append((run.weights(), metrics))
    return found


def train_all(topology, folder, algorithms, reductions):
    clips = {"clip_low": 3e-4, "clip_high": 4e-4}
    runs = {name: train_twice(topology, folder, name, 64) for name in algorithms}
    for how in reductions:
        runs[how] = train_twice(topology, folder, "gspo", 64, hyperparameters={**clips, "reduction": how})
    return runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithms", "reductions"),
    [
        (("gmpo", "vespo"), ("sequence_mean_token_mean", "sequence_sum_fixed")),
        pytest.param(ALGORITHMS, ("token_mean", "sequence_mean_token_sum"), marks=pytest.mark.long),
    ],
)
def test_a_rollout_counts_once_however_many_rows_it_has(folder, algorithms, reductions):
    """The rows of a rollout are in several micro-batches and on two ranks; losses and reductions stay the same."""
    runs = on_ranks(2, train_all, folder, algorithms, reductions)[0]
    for name, (whole, parted) in runs.items():
        try:
            assert_alike(parted, whole)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    assert runs[reductions[0]][0][1]["policy/clip_fraction"] > 0


def row(logprob=-1.0, branches=(), version=0, prompt=(5, 6), mask=(True,) * 4, **more):
    tokens, logprobs, versions = (10, 11, 12, 13), (logprob,) * 4, (version,) * 4
    record = PromptRecord("q", {})
    return Rollout(record, prompt, tokens, mask, logprobs, versions, "x", "stop", branches=branches, **more)


def group_of(*rollouts, rewards=(1.0, 0.0, 0.0, 1.0)):
    values = torch.tensor(rewards)
    return RolloutGroup(rollouts, values, {"r": values}, reward_weights={"r": 1.0})


def advantages_by_row(rows, algorithm="grpo"):
    """Return the advantage of each row, which its trained tokens share; None for a row without trained tokens."""
    spec = get_algorithm(algorithm)
    found = rows.with_branches(spec.advantages(rows.for_baselines(), spec.settings))
    for values, mask in zip(found, rows.mask, strict=True):
        assert not mask.any() or values[mask].unique().numel() == 1
    return [
        float(values[mask][0]) if mask.any() else None for values, mask in zip(found, rows.mask, strict=True)
    ]


TWICE = (row(prompt=(7, 8)), row(prompt=(9, 9)))
EXPECTED = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]]))[0].tolist()


@pytest.mark.parametrize("preset", ["seq_mask_tis", "mis", "icepop"])
def test_a_rollout_whose_own_row_is_rejected_goes_on_in_its_branches(preset):
    rows = make_batch([group_of(row(-3.0, TWICE), row(), row(), row())], get_algorithm("grpo"))
    left, _ = apply_correction(Correction(**PRESETS[preset]), rows, torch.full(rows.mask.shape, -1.0))
    assert advantages_by_row(left) == pytest.approx([None, *EXPECTED[1:], EXPECTED[0], EXPECTED[0]])
    # The first branch represents the rollout, until it is rejected too.
    assert left.valid.tolist() == [[False, True, True, True, True, False]]
    rejected = torch.zeros_like(rows.mask)
    rejected[4] = True
    assert advantages_by_row(left.without(rejected)) == pytest.approx(
        [None, *EXPECTED[1:], None, EXPECTED[0]]
    )
    rejected[5] = True
    without = left.without(rejected)
    assert not without.valid[0, [0, 4, 5]].any()
    others = group_advantages(torch.tensor([[0.0, 0.0, 1.0]]))[0].tolist()
    assert advantages_by_row(without) == pytest.approx([None, *others, None, None])


def test_a_rollout_whose_own_row_is_too_old_goes_on_in_its_branch():
    young = row(version=5, prompt=(7, 8))
    rollouts = (row(branches=(young,)), *[row(version=5)] * 3)
    rows = make_batch([group_of(*rollouts)], get_algorithm("grpo"), oldest_version=4)
    assert advantages_by_row(rows) == pytest.approx([None, *EXPECTED[1:], EXPECTED[0]])


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "reinforce_pp", "opo", "reinforce", "gmpo"])
def test_a_rollout_whose_last_answer_is_empty_learns_in_its_branches(algorithm):
    def of(first):
        groups = [group_of(first, row(), row(), row()), group_of(*[row()] * 4, rewards=(0.2, 0.9, 0.1, 0.4))]
        return advantages_by_row(make_batch(groups, get_algorithm(algorithm)), algorithm)

    silent, whole = of(row(mask=(False,) * 4, branches=TWICE[:1])), of(row())
    # Rows 0 to 3 belong to the first group and row 4 is the branch; the rows of the second group and a filler follow.
    assert silent[0] is None
    assert [silent[4], *silent[1:4], *silent[5:9]] == pytest.approx(whole, rel=1e-5)


def test_a_branch_has_the_return_of_its_whole_rollout_where_turns_have_rewards():
    """An agent's reward belongs to its last turn, and a branch is compared like a first turn."""
    two_turns = {"num_turns": 2, "turn_ends": (2, 4), "turn_rewards": (0.0, 1.0)}
    later = row(prompt=(7, 8), mask=(False, False, True, True), num_turns=2, turn_ends=(2, 4))
    others = [row(turn_ends=(4,), turn_rewards=(reward,)) for reward in (0.5, 0.0, 0.25)]
    rows = make_batch(
        [group_of(row(-3.0, (later,), **two_turns), *others, rewards=(1.0, 0.5, 0.0, 0.25))],
        get_algorithm("grpo"),
    )
    rejected = torch.zeros_like(rows.mask)
    rejected[0] = True
    first = torch.tensor([1.0, 0.5, 0.0, 0.25], dtype=torch.float64)
    alone = torch.zeros(4, dtype=torch.int64)[:, None]
    single = scaled_as_groups(*turn_advantages(first[:, None], alone, alone == 0, 4))[0, :, 0].tolist()
    found = advantages_by_row(rows.without(rejected))
    assert found[0] is None
    assert found[1:] == pytest.approx([*single[1:], single[0]], rel=1e-5)
    # If its own row is kept, the branch has the same baseline, and the standard deviation covers one turn more.
    assert advantages_by_row(rows)[4] > 0


@pytest.mark.parametrize("algorithm", ["rloo", "grpo", "gpg"])
@pytest.mark.parametrize("stale", [{0, 1}, {1}])
def test_returns_of_turns_include_the_rewards_of_turns_that_are_not_trained_on(algorithm, stale):
    """Both rollouts earn 1 in each of three turns, and one of them has turns that are too old."""
    turns = {"num_turns": 3, "turn_ends": (1, 2, 4), "turn_rewards": (1.0,) * 3}
    young = row(version=5, **turns)
    old = replace(young, versions=tuple(0 if place in stale else 5 for place in range(4)))
    spec = get_algorithm(algorithm)
    batch = make_batch([group_of(young, old, rewards=(3.0, 3.0))], spec, oldest_version=4)
    assert batch.mask.sum() == 8 - len(stale)

    def advantages(batch):
        return spec.advantages(batch.for_baselines(), spec.settings)

    assert not advantages(batch).any()
    # A penalty of the last turn lowers the return of all turns.
    penalty = torch.zeros(batch.mask.shape)
    penalty[0, -1] = 0.5
    found = advantages(batch.penalised(penalty))
    assert found[batch.mask].tolist() == pytest.approx(
        [found[0, -1].item()] * 4 + [-found[0, -1].item()] * (4 - len(stale))
    )
    assert found[0, -1] < 0


def gspo_ratio_step(topology, folder):
    """Make one step with a policy that has left the rollouts' policy, with rows in several micro-batches."""
    more = {"max_tokens_per_micro_batch": 16, "entropy_coef": 0.0}
    clips = {"clip_low": 9.0, "clip_high": 9.0}
    run = one_step(topology, folder, "gspo", hyperparameters=clips, **more)
    batch = run.prepare(rows_of("gspo", cut))
    shift = 0.3 * torch.randn(batch.rows.mask.shape, generator=torch.Generator().manual_seed(3))
    batch = replace(batch, old_logprobs=batch.rows.sampler_logprobs + shift)
    return *run.descend(batch), batch


def test_the_ratio_of_gspo_is_of_the_whole_rollout(folder):
    """The expected loss goes rollout by rollout, in float64."""
    gradient, metrics, batch = on_ranks(2, gspo_ratio_step, folder)[0]
    model, says = distributions(folder)
    rows, losses = batch.rows, []
    for owner in rows.owners.unique().tolist():
        group, column = divmod(owner, rows.rewards.shape[1])
        places = [
            (row, place)
            for row in (rows.owners == owner).nonzero()[:, 0].tolist()
            for place in rows.mask[row].nonzero()[:, 0].tolist()
        ]
        if not places:
            continue
        own = torch.stack(
            [says[4 * group + column][place - 1, rows.input_ids[row, place]] for row, place in places]
        )
        old = torch.tensor([batch.old_logprobs[at].item() for at in places], dtype=torch.float64)
        advantage = batch.advantages[places[0]].double()
        ratio = (own - old).mean().exp().detach()
        losses.append(-advantage * (ratio * (own - own.detach()).exp()).mean())
    torch.stack(losses).mean().backward()
    torch.testing.assert_close(gradient, gradients(model), rtol=1e-3, atol=2e-6, check_dtype=False)
    assert metrics["policy/loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)
