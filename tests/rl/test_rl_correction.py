"""The correction inside a step: presets by hand, rejection, refused settings, and equal results on any split."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from kit.batches import batch_of
from kit.rank_processes import on_ranks
from kit.sft_runs import are_equal
from tiny_rl import assert_alike, build, random_rows

from vectorlm.algorithms.groups import leave_one_out_advantages
from vectorlm.algorithms.registry import algorithm_names, get_algorithm
from vectorlm.rl.metrics import correction_effect
from vectorlm.rl.prepare import apply_correction, correction_of, weights_in_update
from vectorlm.rl.settings import NO_CORRECTION, PRESETS, CorrectionSettings
from vectorlm.runs.preflight.rl import correction_problems

# Ratios of trainer and engine, by token; their products over a row are 8, 1/16, 1 and 32.
RATIOS = [[4.0, 2.0], [0.25, 0.25], [8.0, 0.125], [None, 32.0]]
COMBINED = ("ppo", "grpo", "rloo", "gspo", "cispo", "reinforce")


def rows_of(ratios):
    """Return a group with these ratios, and the trainer's log-probabilities."""
    mask = torch.tensor([[ratio is not None for ratio in row] for row in ratios])
    old = torch.tensor([[math.log(ratio or 1.0) for ratio in row] for row in ratios])
    return batch_of(mask, torch.tensor([[1.0, 0.0, 0.0, 1.0]]), torch.full(mask.shape, -4.0)), old - 4.0


def settings(preset="off", **overrides):
    return CorrectionSettings(preset=preset, overrides=overrides)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("tis", [[2, 2], [0.25, 0.25], [2, 0.125], [0, 2]]),
        ("icepop", [[4, 2], [0, 0], [0, 0], [0, 0]]),
        # The geometric means are sqrt 8, 1/4, 1 and 32.
        ("seq_mask_tis", [[0, 0], [0, 0], [2, 0.125], [0, 0]]),
        ("mis", [[0, 0], [0, 0], [8, 0.125], [0, 0]]),
        ("geometric", [[2, 2], [0.5, 0.5], [1, 1], [0, 2]]),
        ("decoupled", [[4, 2], [0.25, 0.25], [5, 0.125], [0, 5]]),
    ],
)
def test_presets_by_hand(preset, expected):
    rows, old = rows_of(RATIOS)
    corrected, weights = apply_correction(correction_of(settings(preset), get_algorithm("grpo")), rows, old)
    expected = torch.tensor(expected, dtype=torch.float32)
    torch.testing.assert_close(weights, expected)
    assert torch.equal(corrected.mask, expected > 0)
    metrics = correction_effect(rows, corrected, weights)
    assert metrics["correction/rejected_tokens"] == pytest.approx(1 - (expected > 0).sum().item() / 7)
    assert metrics["correction/weight_max"] == expected.max()


def test_every_preset_is_a_choice_of_the_config_and_off_does_nothing():
    choices = CorrectionSettings.__dataclass_fields__["preset"].type
    assert all(repr(name)[1:-1] in choices for name in PRESETS)
    rows, old = rows_of(RATIOS)
    corrected, weights = apply_correction(correction_of(settings(), get_algorithm("grpo")), rows, old)
    assert weights is None
    assert torch.equal(corrected.mask, rows.mask)


def test_a_completion_that_is_rejected_whole_leaves_its_groups_baseline():
    rows, old = rows_of(RATIOS)
    corrected, _ = apply_correction(correction_of(settings(veto=0.2), get_algorithm("rloo")), rows, old)
    assert corrected.valid.tolist() == [[True, True, False, True]]
    advantages = leave_one_out_advantages(corrected.rewards, corrected.valid)
    assert advantages.tolist() == [[0.5, -1.0, 0.0, 0.5]]
    # A gate on tokens rejects every token outside its bounds, but no other token of the completion.
    gate = settings(gate="ratio", gate_low=0.2, gate_high=5.0)
    corrected, _ = apply_correction(correction_of(gate, get_algorithm("rloo")), rows, old)
    assert corrected.mask.tolist() == [[True, True], [True, True], [False, False], [False, False]]
    gate = settings(gate="k2", gate_high=1.0)
    corrected, _ = apply_correction(correction_of(gate, get_algorithm("rloo")), rows, old)
    assert corrected.mask.tolist() == [[True, True], [True, True], [False, False], [False, False]]


def test_overrides_replace_values_of_the_preset():
    correction = correction_of(settings("tis", high=3.0, normalise=True), get_algorithm("grpo"))
    assert (correction.level, correction.high, correction.normalise) == ("token", 3.0, True)


def test_bypass_weighs_only_losses_without_a_ratio_of_their_own():
    for name in algorithm_names():
        spec = get_algorithm(name)
        correction = correction_of(settings("bypass"), spec)
        assert (correction.level is None) == spec.has_ratio
    own = correction_of(settings("bypass", high=5.0, low=0.1), get_algorithm("reinforce"))
    assert (own.bypass, own.level, own.high, own.low) == (True, "token", 5.0, 0.1)
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    sampler, mask = torch.tensor([[-1.0, -4.0]]), torch.ones(1, 2, dtype=torch.bool)
    bypass = correction_of(settings("bypass"), get_algorithm("reinforce"))
    weights = weights_in_update(bypass, logprobs, sampler, mask)
    assert weights.tolist() == [[1.0, 2.0]]
    assert not weights.requires_grad
    tis = correction_of(settings("tis"), get_algorithm("reinforce"))
    assert weights_in_update(tis, logprobs, sampler, mask) is None


@pytest.mark.parametrize(
    ("algorithm", "given", "refused"),
    [
        ("grpo", {"preset": "bypass", "level": "token"}, "level"),
        ("gspo", {"preset": "tis", "bypass": True}, "level"),
        ("online_dpo", {"preset": "tis"}, "preset"),
        ("best_of_k", {"preset": "bypass"}, "preset"),
        ("rloo", {"preset": "bypass", "veto": 0.1}, "bypass"),
        ("rloo", {"preset": "bypass", "mode": "mask"}, "bypass"),
        ("rloo", {"preset": "icepop", "bypass": True}, "bypass"),
        ("proximal_rloo", {"preset": "tis"}, "level"),
        ("proximal_rloo", {"preset": "mis"}, "level"),
        ("grpo", {"level": "token", "low": 0.5, "high": 0.9}, "low"),
        ("grpo", {"gate": "k3"}, "gate_high"),
        ("grpo", {"gate": "ratio"}, "gate_low"),
        ("grpo", {"gate": "k3", "gate_high": 0.1, "gate_low": 0.1}, "gate_low"),
        ("grpo", {"gate": "ratio", "gate_high": 2.0, "gate_level": "max"}, "gate_level"),
    ],
)
def test_what_makes_no_sense_is_refused(algorithm, given, refused):
    problems = correction_problems(settings(**given), get_algorithm(algorithm))
    assert [name for name, *_ in problems] == [refused]


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "off"])
@pytest.mark.parametrize("algorithm", COMBINED)
def test_every_preset_goes_with_every_policy_gradient(algorithm, preset):
    assert not list(correction_problems(settings(preset), get_algorithm(algorithm)))


def train(topology, folder, algorithm, preset, max_tokens, drift):
    """Make two optimizer steps on completions of a sampler at distance `drift` from the trainer (0: equal)."""
    more = {"max_tokens_per_micro_batch": max_tokens, "num_epochs": 1}
    run = build(topology, folder, algorithm, correction=preset, **more)
    plain = replace(run, settings=replace(run.settings, correction=NO_CORRECTION))
    rows = random_rows(algorithm)
    old = plain.prepare(rows).old_logprobs
    noise = torch.randn(old.shape, generator=torch.Generator().manual_seed(5))
    rows = replace(rows, sampler_logprobs=torch.where(rows.mask, old - drift * noise, 0.0))
    batch = run.prepare(rows)
    metrics = batch.metrics | run.update(batch, step=3)
    return run.weights(), metrics


def train_all(topology, folder, max_tokens, drift, pairs):
    return {pair: train(topology, folder, *pair, max_tokens, drift) for pair in pairs}


@pytest.mark.slow
def test_where_engine_and_trainer_agree_no_preset_changes_a_bit(folder):
    algorithms = ("ppo", "gspo", "reinforce")
    pairs = [(algorithm, preset) for algorithm in algorithms for preset in PRESETS]
    (found,) = on_ranks(1, train_all, folder, 2000, 0.0, pairs)
    for algorithm in algorithms:
        weights, metrics = found[algorithm, "off"]
        for preset in PRESETS:
            others, other_metrics = found[algorithm, preset]
            # Bypass weighs with the policy, which moves within the batch.
            if preset == "bypass" and not get_algorithm(algorithm).has_ratio:
                continue
            assert are_equal(weights, others), (algorithm, preset)
            assert other_metrics["policy/loss"] == metrics["policy/loss"]
            if preset != "bypass":
                assert other_metrics["correction/ess"] == 1.0


@pytest.mark.slow
def test_ranks_and_micro_batches_change_nothing_with_weights_and_rejections(folder):
    presets = {"ppo": "tis", "grpo": "mis", "rloo": "bypass", "gspo": "seq_mask_tis", "cispo": "icepop"}
    pairs = list((presets | {"vespo": "geometric"}).items())
    (wide,) = on_ranks(1, train_all, folder, 2000, 0.7, pairs)
    others = on_ranks(2, train_all, folder, 60, 0.7, pairs)
    for pair in pairs:
        for other in others:
            assert_alike(other[pair], wide[pair])
        assert wide[pair][1].get("correction/ess", 0.0) < 1, pair


def first_step(topology, folder, algorithm, preset):
    """Make one optimizer step on completions of another sampler; return its batch, its metrics and the log-ratios."""
    more = {"num_epochs": 1, "num_mini_batches": 1, "entropy_coef": 0.0}
    run = build(topology, folder, algorithm, correction=preset, **more)
    rows = random_rows(algorithm)
    old = build(topology, folder, algorithm).prepare(rows).old_logprobs
    noise = torch.randn(rows.mask.shape, generator=torch.Generator().manual_seed(5))
    rows = replace(rows, sampler_logprobs=torch.where(rows.mask, old - 0.3 * noise, 0.0))
    batch = run.prepare(rows)
    return batch, run.update(batch), 0.3 * noise


@pytest.mark.parametrize("preset", ["tis", "geometric"])
def test_vespo_fades_by_the_ratio_to_the_sampler(folder, preset):
    """Compute the formula in float64 at the first step, where the ratio to the trainer is 1."""
    for batch, metrics, logs in on_ranks(2, first_step, folder, "vespo", preset):
        losses = []
        for mask, log, advantages, logprobs in zip(
            batch.rows.mask, logs, batch.advantages.double(), batch.old_logprobs.double(), strict=True
        ):
            if not mask.any():
                continue
            log = log[mask].double()
            log_w = log.clamp(max=math.log(2)).sum() if preset == "tis" else log.mean()
            k, rate = (2.0, 3.0) if advantages[mask][0] >= 0 else (3.0, 2.0)
            fade = (k * log_w + rate * (1 - log_w.exp())).exp()
            losses.append(-fade * advantages[mask] * logprobs[mask])
        assert metrics["policy/loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("preset", ["tis", "bypass"])
def test_the_optimal_token_baseline_knows_the_weights_of_the_losses(folder, preset):
    """Compute the weights by the formula and the advantages of two groups by a loop, in float64."""
    for batch, _, logs in on_ranks(1, first_step, folder, "otb", preset):
        rows, norms = batch.rows, batch.rows.gradient_norms.double()
        weights = logs.double().exp().clamp(max=2.0)
        for start, t in itertools.product((0, 8), range(rows.mask.shape[1])):
            there = [row for row in range(start, start + 4) if rows.mask[row, t]]
            if len(there) < 2:
                continue
            energy = [
                (norms * weights.square())[row, : t + 1][rows.mask[row, : t + 1]].sum() for row in there
            ]
            ahead = [rows.token_rewards[row, t:].double().sum() for row in there]
            baseline = sum(e * g for e, g in zip(energy, ahead, strict=True)) / sum(energy)
            for row, g in zip(there, ahead, strict=True):
                assert batch.advantages[row, t].item() == pytest.approx(float(g - baseline), abs=1e-5)
