"""The policy's update: equal results however its rows are split over ranks and micro-batches, and expected formulas."""

import math
import os
import sys
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from kit.rank_processes import on_ranks
from tiny_rl import (
    BY_KIND,
    SOME,
    assert_alike,
    build,
    distributions,
    gradients,
    one_step,
    random_rewards,
    random_rows,
)
from torch.overrides import TorchFunctionMode

from vectorlm.algorithms.groups import group_advantages
from vectorlm.algorithms.registry import get_algorithm
from vectorlm.algorithms.support import Support
from vectorlm.errors import ConfigError, NonFiniteLoss
from vectorlm.rl.prepare import apply_correction
from vectorlm.rl.settings import PRESETS, Correction, KLSettings
from vectorlm.rl.update import Updater
from vectorlm.train.load import load_model
from vectorlm.train.optimizer_step import Schedule


def train(topology, folder, algorithm, max_tokens, packs=True, **more):
    """Make two optimizer steps on one batch; return the weights and the metrics."""
    kl_coef = 0.1 if algorithm == "grpo" else 0.0
    more |= {"max_tokens_per_micro_batch": max_tokens, "num_epochs": 1}
    more |= {"has_reference": kl_coef > 0, "packs": packs}
    run = build(topology, folder, algorithm, **more)
    assert (run.models.why_padded is None) is packs
    metrics = run.update(run.prepare(random_rows(algorithm), kl_coef), 3, kl_coef)
    return run.weights(), metrics


def train_all(topology, folder, max_tokens, algorithms, packs=True, shared_by=1):
    topology = replace(topology, context_parallel=shared_by)
    return {name: train(topology, folder, name, max_tokens, packs) for name in algorithms}


@pytest.mark.parametrize("algorithms", BY_KIND)
def test_ranks_micro_batches_and_padding_change_nothing(folder, algorithms):
    """Compare one rank and one micro-batch with two ranks and many, in separate, shared and padded passes."""
    (wide,) = on_ranks(1, train_all, folder, 2000, algorithms)
    others = on_ranks(2, train_all, folder, 60, algorithms)
    if algorithms is SOME:
        others += on_ranks(2, train_all, folder, 60, SOME[:3], True, 2)
        others += on_ranks(2, train_all, folder, 60, SOME[:3], False)
    start = load_model(folder).state_dict()
    for name in algorithms:
        for other in others:
            if name in other:
                assert_alike(other[name], wide[name])
        assert any(not torch.equal(wide[name][0][key], tensor) for key, tensor in start.items()), name


def train_truncated(topology, folder, max_tokens, packs=True):
    support = Support(top_p=0.9, top_k=30, min_p=0.1)
    return train(topology, folder, "grpo", max_tokens, packs, support=support, correction="tis")


def test_truncated_sampling_is_the_same_on_ranks_in_micro_batches_and_padded(folder):
    (wide,) = on_ranks(1, train_truncated, folder, 2000)
    for other in on_ranks(2, train_truncated, folder, 60, False):
        assert_alike(other, wide)
    assert 0 < wide[1]["sampler/outside_support"] < 1


def one_grpo_step(topology, folder):
    run = one_step(topology, folder, "grpo", entropy_coef=0.0)
    batch = run.prepare(random_rows("grpo"))
    return *run.descend(batch), batch.old_logprobs


def one_truncated_step(topology, folder):
    run, rows = one_step(topology, folder, "grpo", support=Support(top_k=20)), random_rows("grpo")
    return run.update(run.prepare(rows)), rows


def test_tokens_outside_the_support_are_counted_and_finite(folder):
    ((metrics, rows),) = on_ranks(1, one_truncated_step, folder)
    _, says = distributions(folder)
    outside = []
    for row, place in rows.mask.nonzero().tolist():
        logprobs = says[row][place - 1]
        outside.append((logprobs > logprobs[rows.input_ids[row, place]]).sum().item() >= 20)
    assert 0 < sum(outside) < len(outside)
    assert metrics["sampler/outside_support"] == pytest.approx(sum(outside) / len(outside))
    assert metrics["policy/entropy"] < math.log(21)
    assert metrics["policy/ratio_max"] == 1


def test_the_gradient_is_that_of_the_papers_formula_row_by_row(folder):
    """This is GRPO at its first step; the loop takes a plain softmax over each row without padding, in float64."""
    ((gradient, metrics, old),) = on_ranks(1, one_grpo_step, folder)
    assert old is None, "one optimizer step needs no forward pass for the old log-probabilities"
    model, says = distributions(folder)
    rows = random_rows("grpo")
    advantages = group_advantages(random_rewards()).flatten().double()
    per_row = []
    for row, mask in enumerate(rows.mask):
        own = [says[row][place - 1, rows.input_ids[row, place]] for place in mask.nonzero()[:, 0].tolist()]
        if own:
            per_row.append(-advantages[row] * torch.stack(own).mean())
    torch.stack(per_row).mean().backward()
    assert_gradient(gradient, model)
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item()
    assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)


def assert_gradient(found, model):
    """Compare a float32 gradient with the float64 gradient of the model."""
    torch.testing.assert_close(found, gradients(model), rtol=1e-3, atol=2e-6, check_dtype=False)


def penalty_step(topology, folder, kl_coef, hyperparameters=None, **more):
    """Make one step of a penalty or bonus alone; return gradient, metrics, reference log-probabilities and rows."""
    run = one_step(topology, folder, "reinforce", has_reference=True, hyperparameters=hyperparameters, **more)
    batch = run.prepare(random_rows("reinforce"))
    noise = torch.randn(batch.advantages.shape, generator=torch.Generator().manual_seed(5))
    batch = replace(
        batch,
        advantages=torch.zeros_like(batch.advantages),
        reference_logprobs=batch.reference_logprobs + 0.3 * noise,
    )
    return *run.descend(batch, kl_coef), batch.reference_logprobs, batch.rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reduction", "entropy_coef", "share", "weighs"),
    [
        ("token_mean", 0.0, 1.0, False),
        ("token_mean", 0.5, 0.3, False),
        ("sequence_mean_token_mean", 0.5, 0.3, False),
        ("sequence_sum_fixed", 0.5, 0.3, False),
        ("sequence_mean_token_sum", 0.0, 1.0, True),
    ],
)
def test_penalty_and_bonus_are_reduced_as_the_loss_is(folder, reduction, entropy_coef, share, weighs):
    """Compute the k3 penalty, and the entropy of the tokens that the policy learns from, row by row in float64.

    The importance weights have a gradient too: with r = 1, k3 grad log policy + grad k3.
    """
    settings = {"hyperparameters": {"reduction": reduction}, "top_entropy_quantile": share}
    settings["kl"] = KLSettings(kl_coef=0.5, kl_importance_weights=weighs)
    on_rank = partial(penalty_step, entropy_coef=entropy_coef, **settings)
    gradient, metrics, reference, rows = on_ranks(2, on_rank, folder, 0.5)[0]
    model, says = distributions(folder)
    negative = [
        (says[row][place - 1].exp() * says[row][place - 1]).sum().detach()
        for row, place in rows.mask.nonzero().tolist()
    ]
    bound = torch.stack(negative).quantile(share)
    per_row = []
    for row, mask in enumerate(rows.mask):
        values = []
        for place in mask.nonzero()[:, 0].tolist():
            logprobs = says[row][place - 1]
            mine = logprobs[rows.input_ids[row, place]]
            d = reference[row, place].double() - mine
            ratio = (mine - mine.detach()).exp() if weighs else 1.0
            bonus = (logprobs.exp() * logprobs).sum()
            values.append(0.5 * ratio * (d.exp() - d - 1) + entropy_coef * bonus * (bonus <= bound))
        if values:
            per_row.append(torch.stack(values))
    loss = {
        "token_mean": torch.cat(per_row).mean(),
        "sequence_mean_token_mean": torch.stack([row.mean() for row in per_row]).mean(),
        "sequence_mean_token_sum": torch.stack([row.sum() for row in per_row]).mean(),
        "sequence_sum_fixed": torch.stack([row.sum() for row in per_row]).sum() / (len(per_row) * 9),
    }[reduction]
    loss.backward()
    assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert_gradient(gradient, model)


def far_step(topology, folder, algorithm, hyperparameters=None):
    """Make one step with known ratios to the rollout's policy; return metrics, log-ratios, advantages and mask."""
    more = {"hyperparameters": hyperparameters, "correction": "decoupled"}
    run = build(topology, folder, algorithm, num_epochs=1, num_mini_batches=1, **more)
    batch = run.prepare(random_rows(algorithm))
    generator = torch.Generator().manual_seed(2)
    logs = torch.randn(batch.advantages.shape, generator=generator) * 0.4
    signs = torch.randint(0, 2, batch.advantages.shape, generator=generator) * 2.0 - 1.0
    advantages = torch.where(batch.rows.mask, signs, 0.0)
    batch = replace(batch, old_logprobs=batch.old_logprobs - logs, advantages=advantages)
    return run.update(batch), logs, advantages, batch.rows.mask


@pytest.mark.parametrize(("algorithm", "low", "high"), [("grpo", 0.2, 0.2), ("gspo", 3e-4, 4e-4)])
def test_clip_metrics_count_the_tokens_that_the_clip_keeps_from_learning(folder, algorithm, low, high):
    metrics, logs, advantages, mask = on_ranks(2, far_step, folder, algorithm)[0]
    counts = {"low": 0, "high": 0}
    for row in range(len(mask)):
        own = logs[row][mask[row]].tolist()
        for value, advantage in zip(own, advantages[row][mask[row]].tolist(), strict=True):
            ratio = math.exp(value if algorithm == "grpo" else sum(own) / len(own))
            counts["low"] += ratio < 1 - low and advantage < 0
            counts["high"] += ratio > 1 + high and advantage > 0
    num_tokens = int(mask.sum())
    assert min(counts.values()) > 5
    assert metrics["policy/clip_low"] == pytest.approx(counts["low"] / num_tokens)
    assert metrics["policy/clip_high"] == pytest.approx(counts["high"] / num_tokens)
    assert metrics["policy/clip_fraction"] == pytest.approx(sum(counts.values()) / num_tokens)


def observe_a_shifted_policy(topology, folder):
    run = build(topology, folder, "grpo", lr=0.0, num_mini_batches=1)
    batch = run.prepare(random_rows("grpo"))
    policy = batch.old_logprobs
    shift = 0.7 + 0.5 * torch.randn(policy.shape, generator=torch.Generator().manual_seed(0))
    metrics = run.update(replace(batch, old_logprobs=policy + shift))
    return policy[batch.rows.mask], (policy + shift)[batch.rows.mask], metrics


def test_the_divergence_from_the_policy_of_the_rollout_is_estimated_from_its_own_tokens(folder):
    """With r = policy / old, the expectation of r - 1 - log r over tokens that `old` drew is KL(old || policy)."""
    ((policy, old, metrics),) = on_ranks(1, observe_a_shifted_policy, folder)
    terms = [
        math.exp(new - before) - 1 - (new - before)
        for new, before in zip(policy.tolist(), old.tolist(), strict=True)
    ]
    assert metrics["policy/kl"] == pytest.approx(sum(terms) / len(terms), rel=1e-4)


def masked_steps(topology, folder, algorithm):
    """Make a step with the mask, and a step with an advantage of 0 in place of the mask."""
    found = []
    for bound in (0.3, None):
        run = one_step(topology, folder, algorithm, off_policy_mask=bound, correction="decoupled")
        batch = run.prepare(random_rows(algorithm))
        # Every other completion is off by 0.5 nats per token, the rest by 0.1.
        shift = torch.where(torch.arange(len(batch.advantages)) % 2 == 0, 0.5, 0.1)[:, None]
        sampler = torch.where(batch.rows.mask, batch.old_logprobs + shift, 0.0)
        batch = replace(batch, rows=replace(batch.rows, sampler_logprobs=sampler, weights=None))
        is_masked = (shift > 0.3) & (batch.advantages < 0)
        if bound is None:
            batch = replace(batch, advantages=torch.where(is_masked, 0.0, batch.advantages))
        found.append((run.update(batch), run.weights(), is_masked & batch.rows.mask, batch.rows.mask))
    return found


@pytest.mark.parametrize("algorithm", ["grpo", "gmpo"])
def test_completions_that_the_policy_has_left_do_not_push_it_further_away(folder, algorithm):
    for (metrics, weights, is_masked, mask), (_, expected, *_) in on_ranks(
        2, masked_steps, folder, algorithm
    ):
        assert 0 < is_masked.sum() < mask.sum() / 2
        assert metrics["policy/off_policy_masked"] == pytest.approx(float(is_masked.sum() / mask.sum()))
        torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("algorithm", ["dppo_tv", "dppo_kl"])
def test_the_blocked_share_is_a_mean_over_completions(folder, algorithm):
    metrics, logs, advantages, mask = on_ranks(2, far_step, folder, algorithm, {"divergence_bound": 1e-12})[0]
    blocked = (logs * advantages > 0) & mask
    shares = [float(row[kept].float().mean()) for row, kept in zip(blocked, mask, strict=True) if kept.any()]
    assert metrics["policy/blocked_fraction"] == pytest.approx(sum(shares) / len(shares))


def entropy_step(topology, folder):
    run = one_step(topology, folder, "grpo", top_entropy_quantile=0.3, entropy_coef=0.0)
    batch = run.prepare(random_rows("grpo"))
    run.update(batch)
    other = one_step(topology, folder, "grpo", entropy_coef=0.0)
    same_batch = other.prepare(random_rows("grpo"))
    learns = torch.where(batch.learns, same_batch.advantages, 0.0)
    other.update(replace(same_batch, advantages=learns))
    return run.weights(), other.weights(), batch.learns, batch.rows.mask


def test_the_policy_learns_from_the_tokens_of_highest_entropy(folder):
    """The entropies are computed row by row in float64."""
    _, says = distributions(folder)
    for weights, expected, learns, mask in on_ranks(2, entropy_step, folder):
        entropies = {
            (row, place): -(says[row][place - 1].exp() * says[row][place - 1]).sum().item()
            for row, place in mask.nonzero().tolist()
        }
        highest = sorted(entropies, key=entropies.get, reverse=True)[: int(learns.sum())]
        assert set(map(tuple, learns.nonzero().tolist())) == set(highest)
        assert len(highest) / len(entropies) == pytest.approx(0.3, abs=1 / len(entropies))
        torch.testing.assert_close(weights, expected)


def stop_early(topology, folder):
    run = build(topology, folder, "grpo", lr=5.0, max_kl=1e-4, num_epochs=5)
    return run.update(run.prepare(random_rows("grpo")))


def test_a_batch_is_left_once_the_policy_has_moved_far(folder):
    for metrics in on_ranks(2, stop_early, folder):
        assert metrics["policy/stopped_early"] == 1.0
        assert 1 < metrics["policy/optimizer_steps"] < 10


def learn_then_nothing(topology, folder, algorithm):
    """Train once with momentum, then on equal rewards."""
    run = build(topology, folder, algorithm, entropy_coef=0.0)
    for step in filter(None, (run.models.policy_step, run.models.critic_step)):
        step.optimizer.param_groups[0]["momentum"] = 0.9
    run.update(run.prepare(random_rows(algorithm)))
    before = run.weights()
    rows = random_rows(algorithm)
    batch = run.prepare(rows)
    metrics = run.update(replace(batch, advantages=torch.zeros_like(batch.advantages)))
    return before, run.weights(), metrics


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce_pp"])
def test_a_batch_without_anything_to_learn_leaves_the_weights_where_they_are(folder, algorithm):
    for before, after, metrics in on_ranks(2, learn_then_nothing, folder, algorithm):
        assert metrics["policy/optimizer_steps"] == 0
        assert metrics["policy/grad_norm"] == 0
        assert all(torch.equal(before[name], after[name]) for name in before)


def equal_in_some(batch, groups):
    """Return the batch with the advantages of some groups set to 0, as for equal rewards."""
    advantages = batch.advantages.clone()
    for group in groups:
        advantages[group * batch.rows.rows_per_group : (group + 1) * batch.rows.rows_per_group] = 0.0
    return replace(batch, advantages=advantages)


def descend_with_and_without(topology, folder, algorithm, groups, **more):
    """Return change, metrics and rows with gradient, of an update that may skip `groups` and of one that may not."""
    found = []
    for may_skip in (True, False):
        run = one_step(topology, folder, algorithm, entropy_coef=0.0, **more)
        run = replace(run, spec=replace(run.spec, scales_with_advantage=may_skip))
        rows_of_passes, forward = [], type(run.models.policy).__call__

        def count(policy, rows, *arguments, forward=forward, seen=rows_of_passes):
            seen.append(len(rows.input_ids) if torch.is_grad_enabled() else 0)
            return forward(policy, rows, *arguments)

        batch = equal_in_some(run.prepare(random_rows(algorithm)), groups)
        with mock.patch.object(type(run.models.policy), "__call__", count):
            found.append((*run.descend(batch), sum(rows_of_passes)))
    return found


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "gmpo"])
def test_groups_without_an_advantage_are_not_computed_and_the_gradient_is_the_same(folder, algorithm):
    skipping = on_ranks(2, descend_with_and_without, folder, algorithm, (0, 3))
    for (change, metrics, num_rows), (expected, others, num_all) in skipping:
        assert num_rows < num_all
        assert metrics["policy/skipped_groups"] == 0.4
        assert others["policy/skipped_groups"] == 0.0
        for name, tensor in expected.items():
            torch.testing.assert_close(change[name], tensor, rtol=1e-5, atol=1e-6)
        assert metrics["policy/loss"] == pytest.approx(others["policy/loss"], rel=1e-5, abs=1e-6)
        assert metrics["policy/grad_norm"] == pytest.approx(others["policy/grad_norm"], rel=1e-5)


def test_a_batch_without_any_advantage_makes_no_pass_with_gradient(folder):
    for (change, metrics, num_rows), (_, others, _) in on_ranks(
        2, descend_with_and_without, folder, "grpo", range(5)
    ):
        assert num_rows == 0
        # One group was computed without a gradient, because every step measures the difference to the engine.
        assert 0 < metrics["sampler/logprob_gap_mean"] <= metrics["sampler/logprob_gap_max"]
        assert metrics["sampler/logprob_gap_max"] <= others["sampler/logprob_gap_max"] + 1e-6
        assert metrics.keys() >= {name for name in others if name.startswith("sampler/")}
        assert metrics["policy/skipped_groups"] == 1.0
        assert (
            metrics["policy/loss"] == metrics["policy/grad_norm"] == metrics["balance/micro_batches"] == 0.0
        )
        assert not any(tensor.any() for tensor in change.values())


def metrics_without_mismatch(topology, folder, num_epochs):
    run = build(topology, folder, "best_of_k", num_epochs=num_epochs, num_mini_batches=1)
    run = replace(run, settings=replace(run.settings, logs_mismatch=False))
    batch = run.prepare(random_rows("best_of_k"))
    return batch.metrics | run.update(batch)


@pytest.mark.parametrize("num_epochs", [1, 2])
def test_log_probabilities_of_other_distributions_are_not_compared_with_the_engines(folder, num_epochs):
    for metrics in on_ranks(1, metrics_without_mismatch, folder, num_epochs):
        assert "policy/loss" in metrics
        assert not [name for name in metrics if name.startswith(("sampler/", "correction/"))]


def skipped_with(topology, folder, algorithm, **more):
    run = build(topology, folder, algorithm, **more)
    batch = equal_in_some(run.prepare(random_rows(algorithm)), (0, 3))
    return run.update(batch)["policy/skipped_groups"]


def test_groups_with_another_loss_are_computed(folder):
    cases = {
        "entropy": ("grpo", {"entropy_coef": 0.01}),
        "penalty": ("grpo", {"entropy_coef": 0.0, "has_reference": True}),
        "critic": ("ppo", {"entropy_coef": 0.0}),
        "marked": ("kl_cov", {"entropy_coef": 0.0}),
        "pairs": ("online_dpo", {"entropy_coef": 0.0}),
    }
    for algorithm, more in cases.values():
        (skipped,) = on_ranks(1, partial(skipped_with, folder=folder, algorithm=algorithm, **more))
        assert skipped == 0.0, algorithm


class Moves(TorchFunctionMode):
    """A mode that counts vectorlm's blocking copies of tensors to a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        names_device = any(isinstance(x, torch.device | str) for x in (*args[1:], kwargs.get("device")))
        if func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda) and names_device:
            is_ours = f"{os.sep}vectorlm{os.sep}" in sys._getframe(1).f_code.co_filename
            self.count += is_ours and not kwargs.get("non_blocking")
        return func(*args, **kwargs)


def moves_of_updates(topology, folder, algorithm):
    counts = []
    for max_tokens in (2000, 60):
        run = build(topology, folder, algorithm, max_tokens_per_micro_batch=max_tokens, num_epochs=1)
        batch = run.prepare(random_rows(algorithm))
        with Moves() as moves:
            run.update(batch)
        counts.append(moves.count)
    return counts


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_no_pass_waits_for_a_copy_to_the_device(folder, algorithm):
    for counts in on_ranks(2, moves_of_updates, folder, algorithm):
        assert counts == [0, 0]


def rates_of_a_run(topology, folder):
    """Train on the second of three batches, which stops early; return the learning rate before each batch."""
    run = build(topology, folder, "grpo", lr=5.0, max_kl=1e-4, num_epochs=2)
    schedule = Schedule("linear", run.models.policy_step.optimizer, num_warmup_steps=0, num_steps=12)
    models = replace(run.models, policy_step=replace(run.models.policy_step, schedule=schedule))
    updater = Updater(models, run.spec, run.settings, topology)
    rates = []
    for number in range(3):
        rates.append(schedule.learning_rate)
        if number == 1:
            updater.update(run.prepare(random_rows("grpo")), step=0)
        updater.follow_run(number + 1)
    return rates


def test_the_learning_rate_follows_the_position_in_the_run(folder):
    """Each of the three batches has two epochs of two mini-batches: 12 steps."""
    for rates in on_ranks(2, rates_of_a_run, folder):
        assert rates == pytest.approx([5.0, 5.0 * 8 / 12, 5.0 * 4 / 12])


def diverge(topology, folder, budget):
    run = build(topology, folder, "grpo", max_tokens_per_micro_batch=budget)
    before = run.weights()

    def update():
        batch = run.prepare(random_rows("grpo"))
        batch.advantages[0] = torch.inf
        run.update(batch, step=7)

    with pytest.raises((NonFiniteLoss, ConfigError)) as caught:
        update()
    after = run.weights()
    return str(caught.value), all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(("budget", "named"), [(64, "step 7"), (9, "rl.max_tokens_per_micro_batch=9")])
def test_a_loss_that_is_not_finite_or_a_row_beyond_the_budget_stops_all_ranks(folder, budget, named):
    for text, is_unchanged in on_ranks(2, diverge, folder, budget):
        assert named in text
        assert is_unchanged


WRONG_SHAPES = {
    "completion": [lambda x: x, lambda x: x.sum(dim=1, keepdim=True), torch.sum],
    "token": [lambda x: x.sum(dim=1), lambda x: x.sum(dim=1, keepdim=True), torch.sum],
    "group": [lambda x: x, lambda x: x.sum(dim=1), torch.sum],
}
"""Changes of a loss per token to a loss of a wrong shape, by the level of the algorithm."""


def losses_of_other_units(topology, folder):
    run, found = one_step(topology, folder, "grpo"), []
    batch = run.prepare(random_rows("grpo"))
    for level, changes in WRONG_SHAPES.items():
        for change in changes:
            spec = replace(run.spec, level=level, loss=lambda x, _, change=change: change(-x.policy_logprobs))
            with pytest.raises(ConfigError) as caught:
                replace(run, spec=spec).update(batch)
            found.append((level, str(caught.value)))
    return found


def test_a_loss_of_another_unit_than_the_row_says_is_refused(folder):
    (found,) = on_ranks(1, losses_of_other_units, folder)
    for level, text in found:
        assert "'grpo'" in text
        assert f"level={level!r}" in text


def weighted_step(topology, folder, algorithm, weights):
    """Make one step whose completions have these weights; return gradient, metrics, rows and weights."""
    run = one_step(topology, folder, algorithm, entropy_coef=0.0)
    run = replace(run, settings=replace(run.settings, correction=Correction(level="sequence", high=2.0)))
    rows = random_rows(algorithm)
    old, count = run.prepare(rows).old_logprobs, rows.mask.sum(dim=1, keepdim=True)
    ratios = weights.repeat(len(count))[: len(count), None]
    batch = run.prepare(replace(rows, sampler_logprobs=old - ratios.log() / count.clamp(min=1)))
    batch = replace(batch, advantages=torch.where(batch.rows.mask, 1.0, 0.0))
    return *run.descend(batch), batch.rows, ratios


@pytest.mark.parametrize("algorithm", ["gmpo", "proximal_rloo"])
def test_a_completion_of_a_small_weight_counts_little(folder, algorithm):
    """Whole completions have weights of 0.25 and 1.5; the expected loss is computed row by row in float64."""
    gradient, metrics, rows, ratios = on_ranks(
        2, weighted_step, folder, algorithm, torch.tensor([0.25, 1.5])
    )[0]
    model, says = distributions(folder)
    losses, values = [], []
    for row, mask in enumerate(rows.mask):
        if places := mask.nonzero()[:, 0].tolist():
            own = torch.stack([says[row][place - 1, rows.input_ids[row, place]] for place in places])
            weight = ratios[row].item()
            losses.append(-weight * (own.mean() if algorithm == "gmpo" else own.sum()))
            values.append(-weight)
    torch.stack(losses).mean().backward()
    assert_gradient(gradient, model)
    assert metrics["policy/loss"] == pytest.approx(sum(values) / len(values), rel=1e-5)


def fill(batch, mask, names):
    """Return a record whose tensors of these names hold 3 outside the mask."""
    found = {name: getattr(batch, name) for name in names if getattr(batch, name) is not None}
    return replace(batch, **{name: torch.where(mask, x, torch.full_like(x, 3)) for name, x in found.items()})


def train_filled(topology, folder, algorithms):
    """Return advantages, metrics and weights, without and with changed numbers outside the mask."""
    found, steps = {}, {"num_mini_batches": 1, "max_tokens_per_micro_batch": 2000, "off_policy_mask": None}
    for name in algorithms:
        pairs = []
        for is_filled in (False, True):
            more = {"hyperparameters": {"whiten_advantages": True}} if name == "gmpo" else {}
            weighs = get_algorithm(name).samples_from_policy
            run = build(topology, folder, name, has_reference=True, **steps, **more)
            if weighs:
                run = replace(
                    run, settings=replace(run.settings, correction=Correction(level="sequence", high=2.0))
                )
            rows = random_rows(name)
            batch = run.prepare(rows, 0.1)
            if is_filled:
                inside = batch.rows.mask
                of_rows = ("sampler_logprobs", "weights", "values")
                of_rows += ("old_logprobs", "gradient_norms", "token_rewards")
                batch = replace(
                    fill(batch, inside, ("old_logprobs", "reference_logprobs", "marked", "teacher_logprobs")),
                    rows=fill(batch.rows, inside, of_rows),
                )
            advantages = run.spec.advantages(batch.rows.for_baselines(), run.settings.hparams)
            metrics = run.update(batch, kl_coef=0.1)
            pairs.append((advantages, metrics, run.weights()))
        found[name] = pairs
    return found


@pytest.mark.parametrize("algorithms", BY_KIND)
def test_what_fills_the_places_outside_the_mask_changes_nothing(folder, algorithms):
    """These are prompts, padding, an environment's words and completions without a reward."""
    (found,) = on_ranks(1, train_filled, folder, algorithms)
    for name, (whole, filled) in found.items():
        assert torch.equal(whole[0], filled[0]), f"the advantages of {name}"
        assert whole[1] == pytest.approx(filled[1], nan_ok=True), f"the metrics of {name}"
        torch.testing.assert_close(filled[2], whole[2], rtol=0, atol=0, msg=f"the weights of {name}")


@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in ("off", "bypass")])
def test_what_fills_the_places_outside_the_mask_changes_no_correction(preset):
    rows = random_rows("grpo")
    generator = torch.Generator().manual_seed(1)
    rows = replace(rows, sampler_logprobs=-1 + torch.randn(rows.mask.shape, generator=generator))
    old, correction = rows.sampler_logprobs.roll(1, 0), Correction(**PRESETS[preset])
    filled = fill(rows, rows.mask, ("sampler_logprobs",))
    gate = {"gate": "k3", "gate_level": "max", "gate_high": 2.0}
    for extra in ({}, {"normalise": True}, {"veto": 0.1}, gate):
        if extra.get("gate") and correction.gate:
            continue
        (left, weights), (others, found) = (
            apply_correction(replace(correction, **extra), batch, torch.where(rows.mask, old, fills))
            for batch, fills in ((rows, 0.0), (filled, 5.0))
        )
        assert torch.equal(left.mask, others.mask)
        assert torch.equal(left.valid, others.valid)
        assert torch.equal(weights[rows.mask], found[rows.mask])
