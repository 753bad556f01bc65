"""Correction for off-policy rollouts: values by hand, a float64 loop, and a problem small enough to enumerate."""

import itertools
import math
import warnings
from functools import partial

import pytest
import torch

from vectorlm.algorithms.correction import correction_metrics, importance_weights, rejection_mask

LEVELS = ("token", "sequence", "geometric")
INF, NAN = math.inf, math.nan


def rows(*ratios):
    """Return old and sampler log-probabilities of rows with these ratios, and their mask; None is a masked token."""
    mask = torch.tensor([[ratio is not None for ratio in row] for row in ratios])
    logs = torch.tensor([[math.log(ratio or 1.0) for ratio in row] for row in ratios], dtype=torch.float64)
    sampler = torch.full_like(logs, -1.5)
    return sampler + logs, sampler, mask


OLD, SAMPLER, MASK = rows([2.0, 0.5, 4.0], [None, 0.25, 1.0])


@pytest.mark.parametrize(
    ("level", "mode", "low", "high", "expected"),
    [
        ("token", "truncate", None, None, [[2, 0.5, 4], [0, 0.25, 1]]),
        ("token", "truncate", 0.5, 2.0, [[2, 0.5, 2], [0, 0.5, 1]]),
        ("token", "mask", 0.4, 3.0, [[2, 0.5, 0], [0, 0, 1]]),
        ("token", "mask", None, 3.0, [[2, 0.5, 0], [0, 0.25, 1]]),
        ("sequence", "truncate", None, None, [[4, 4, 4], [0, 0.25, 0.25]]),
        ("sequence", "truncate", 0.5, 3.0, [[3, 3, 3], [0, 0.5, 0.5]]),
        ("sequence", "mask", 0.5, 5.0, [[4, 4, 4], [0, 0, 0]]),
        ("geometric", "truncate", None, 1.5, [[1.5] * 3, [0, 0.5, 0.5]]),
        ("geometric", "mask", 0.6, 2.0, [[2, 0.5, 4], [0, 0, 0]]),
    ],
)
def test_weights_by_hand(level, mode, low, high, expected):
    weights, kept = importance_weights(OLD, SAMPLER, MASK, level=level, mode=mode, low=low, high=high)
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(weights, expected)
    assert torch.equal(kept, expected > 0), "what is kept has a weight, what is dropped has none"


def loop_weights(old, sampler, mask, level, mode, low, high):
    """Compute the weights token by token, from the table in the docstring of `importance_weights`."""
    found = [[0.0] * len(row) for row in old.tolist()]
    for b, t in itertools.product(range(len(found)), range(len(found[0]))):
        if not mask[b, t]:
            continue
        logs = [float(old[b, k] - sampler[b, k]) for k in range(len(found[0])) if mask[b, k]]
        token = math.exp(float(old[b, t] - sampler[b, t]))
        compared = {
            "token": token,
            "sequence": math.exp(sum(logs)),
            "geometric": math.exp(sum(logs) / len(logs)),
        }[level]
        if mode == "truncate":
            found[b][t] = min(max(compared, low), high)
        elif low <= compared <= high:
            found[b][t] = token if level == "geometric" else compared
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_weights_against_a_loop(level, mode):
    generator = torch.Generator().manual_seed(1)
    old = -torch.rand(6, 7, generator=generator, dtype=torch.float64)
    sampler = -torch.rand(6, 7, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 7, generator=generator) < 0.7
    mask[2] = False
    weights, _ = importance_weights(old, sampler, mask, level=level, mode=mode, low=0.7, high=1.4)
    torch.testing.assert_close(weights, loop_weights(old, sampler, mask, level, mode, 0.7, 1.4))
    single, _ = importance_weights(
        old.float(), sampler.float(), mask, level=level, mode=mode, low=0.7, high=1.4
    )
    assert single.dtype == torch.float32


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("normalise", [False, True])
def test_equal_logprobs_give_weights_of_exactly_one(level, mode, normalise):
    old = -torch.rand(3, 5) * 30
    mask = torch.rand(3, 5) < 0.8
    weights, kept = importance_weights(
        old, old.clone(), mask, level=level, mode=mode, low=0.5, high=2.0, normalise=normalise
    )
    assert torch.equal(weights, mask.float())
    assert torch.equal(kept, mask)


@pytest.mark.parametrize("level", LEVELS)
def test_normalised_weights_have_mean_one(level):
    weights, kept = importance_weights(OLD, SAMPLER, MASK, level=level, normalise=True)
    if level == "token":
        mean = weights[kept].mean()
    else:
        mean = torch.stack([row[keep].mean() for row, keep in zip(weights, kept, strict=True)]).mean()
    assert mean.item() == pytest.approx(1.0)


def test_weights_carry_no_gradient():
    old = OLD.clone().requires_grad_()
    for level in LEVELS:
        assert not importance_weights(old, SAMPLER, MASK, level=level)[0].requires_grad
    kept = rejection_mask(old, SAMPLER, MASK, divergence="k3", bound=1.0)
    assert not kept.requires_grad


def test_log_probabilities_that_are_no_numbers():
    old = torch.tensor([[-1.0, NAN, -1.0], [-INF, -1.0, -1.0], [-1.0, -INF, -1.0], [-1.0, -1.0, -1.0]])
    sampler = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -INF, -1.0], [-1.0, -INF, -1.0], [-1.0, -1.0, -1.0]])
    mask = torch.ones(4, 3, dtype=torch.bool)
    weights, kept = importance_weights(old, sampler, mask, high=2.0)
    # NaN, and -inf on both sides, are dropped. Impossible tokens have the weight e^-20 if it is the trainer that
    # excludes them, else the upper bound.
    assert weights.isfinite().all()
    assert kept.tolist() == [[True, False, True], [True, True, True], [True, False, True], [True, True, True]]
    assert weights[1].tolist() == pytest.approx([math.exp(-20), 2.0, 1.0])
    for level in ("sequence", "geometric"):
        weights, kept = importance_weights(old, sampler, mask, level=level)
        assert weights.isfinite().all()
        assert kept.any(dim=1).tolist() == [False, True, False, True]
    gate = rejection_mask(old, sampler, mask, divergence="tv", level="mean", bound=1.0)
    assert gate.any(dim=1).tolist() == [False, True, False, True]
    metrics = correction_metrics(old, sampler, mask)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["correction/unknown"] == 2


def test_log_ratios_are_summed_up_before_they_are_bounded():
    """Some tokens have ratios beyond e^20 in a row with a ratio near 1. The formulas give the expected values."""
    logs = torch.tensor([[30.0, -28.0, 0.0], [-45.0, 21.0, 23.0]], dtype=torch.float64)
    sampler = torch.full_like(logs, -46.0)
    old, mask = sampler + logs, torch.ones(2, 3, dtype=torch.bool)
    weights, _ = importance_weights(old, sampler, mask, level="sequence")
    assert weights[:, 0].tolist() == pytest.approx([math.exp(2), math.exp(-1)])
    weights, _ = importance_weights(old, sampler, mask, level="geometric")
    assert weights[:, 0].tolist() == pytest.approx([math.exp(2 / 3), math.exp(-1 / 3)])
    # The sums of squares, divided by two, are 842 and 1497.5.
    for bound, expected in ((841, [False, False]), (843, [True, False]), (1498, [True, True])):
        gate = rejection_mask(old, sampler, mask, divergence="k2", level="sum", bound=bound)
        assert gate.any(dim=1).tolist() == expected
    metrics = correction_metrics(old, sampler, mask)
    assert metrics["correction/k1"] == pytest.approx(-1 / 6)
    assert metrics["correction/ratio_max"] == pytest.approx(math.exp(20))
    assert metrics["correction/out_of_band_sequences"] == 1.0
    assert metrics["correction/ppl_ratio"] == pytest.approx(math.exp(-1 / 6))


def test_a_token_that_the_trainer_has_left_diverges_by_its_whole_log_ratio():
    sampler, old = torch.tensor([[math.log(0.5)]]).double(), torch.tensor([[-40.0]]).double()
    exact = 0.5 * (math.log(0.5) + 40.0) + 0.5 * (math.log(0.5) - math.log1p(-math.exp(-40.0)))
    for bound, passes in ((exact - 1e-6, False), (exact + 1e-6, True)):
        gate = rejection_mask(old, sampler, torch.ones(1, 1), divergence="bernoulli_kl", bound=bound)
        assert gate.item() == passes


def test_rows_without_tokens_and_rows_of_one():
    mask = torch.tensor([[False, False], [False, True]])
    old, sampler = torch.zeros(2, 2), torch.tensor([[-9.0, -9.0], [-9.0, -math.log(2)]])
    for level in LEVELS:
        weights, kept = importance_weights(old, sampler, mask, level=level, mode="mask", low=0.5, high=3.0)
        assert weights.tolist() == [[0, 0], [0, pytest.approx(2.0)]]
        assert torch.equal(kept, mask)
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    assert not importance_weights(old, sampler, nothing, normalise=True)[0].any()
    assert not rejection_mask(old, sampler, nothing, veto=0.1).any()
    metrics = correction_metrics(old, sampler, nothing)
    assert metrics["correction/ess"] == metrics["correction/ratio_mean"] == 1.0
    assert metrics["correction/k1"] == metrics["correction/out_of_band"] == 0.0


def test_the_expectation_is_the_trainers_and_bounds_trade_it_for_variance():
    """Two tokens of three words have nine completions: enumerating them gives exact moments without sampling."""
    generator = torch.Generator().manual_seed(3)
    size = 3

    def policy():
        first = torch.log_softmax(torch.randn(size, generator=generator, dtype=torch.float64), 0)
        second = torch.log_softmax(torch.randn(size, size, generator=generator, dtype=torch.float64), 1)
        return first, second

    (new_first, new_second), (old_first, old_second) = policy(), policy()
    pairs = list(itertools.product(range(size), repeat=2))
    trainer = torch.stack([torch.stack([new_first[a], new_second[a, b]]) for a, b in pairs])
    sampler = torch.stack([torch.stack([old_first[a], old_second[a, b]]) for a, b in pairs])
    probability, wanted = sampler.sum(1).exp(), trainer.sum(1).exp()
    reward = torch.randn(len(pairs), generator=generator, dtype=torch.float64)
    mask = torch.ones_like(trainer, dtype=torch.bool)

    def moments(**how):
        weights, _ = importance_weights(trainer, sampler, mask, **how)
        estimate = weights[:, 0] * reward
        mean = (probability * estimate).sum()
        return mean, (probability * (estimate - mean).square()).sum()

    truth = (wanted * reward).sum()
    mean, variance = moments(level="sequence")
    torch.testing.assert_close(mean, truth)
    uncorrected = (probability * reward).sum()
    assert (uncorrected - truth).abs() > 0.05
    # Each tighter bound has less variance, and a bias because it cuts weights off.
    cut_off = []
    for high in (4.0, 2.0, 1.0):
        cut_mean, cut_variance = moments(level="sequence", high=high)
        weights = (wanted / probability).clamp(max=high)
        torch.testing.assert_close(cut_mean, (probability * weights * reward).sum())
        assert cut_variance < variance
        variance = cut_variance
        cut_off.append((cut_mean - truth).abs().item())
    assert cut_off[0] < cut_off[-1]


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        ("k2", [0.5 * math.log(2) ** 2, 0.0]),
        ("k3", [2 - 1 - math.log(2), 0.0]),
        ("tv", [0.25, 0.0]),
        ("bernoulli_kl", [0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5), 0.0]),
    ],
)
def test_divergences_by_hand(divergence, expected):
    """The sampler gave the token 1/4, the trainer gives it 1/2."""
    old, sampler = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.5]]).log()
    mask = torch.ones(1, 2, dtype=torch.bool)

    def kept(bound, level):
        return rejection_mask(old, sampler, mask, divergence=divergence, level=level, bound=bound).tolist()[0]

    value = expected[0]
    assert kept(value + 1e-6, "token") == [True, True]
    assert kept(value - 1e-6, "token") == [False, True]
    for level, of_row in (("sum", value), ("mean", value / 2), ("max", value)):
        assert kept(of_row + 1e-6, level) == [True, True]
        assert kept(of_row - 1e-6, level) == [False, False]


@pytest.mark.parametrize("divergence", ["k2", "k3", "tv", "bernoulli_kl"])
def test_equal_tokens_pass_a_bound_of_zero(divergence):
    old = -torch.rand(20, 50) * 12
    mask = torch.ones_like(old, dtype=torch.bool)
    assert rejection_mask(old, old.clone(), mask, divergence=divergence, bound=0.0).all()


def test_a_token_that_nearly_cannot_be_told_apart_passes():
    """Rounding makes the sum of two near numbers negative or slightly positive; neither result may reject the token."""
    old = torch.tensor([[-1e-7, -1e-4, -5.0]])
    kept = rejection_mask(old, old + 1e-7, torch.ones(1, 3), divergence="bernoulli_kl", bound=1e-6)
    assert kept.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_near_certain_tokens_are_judged_as_in_double_precision(dtype):
    """The loop computes the divergence of two events in float64, for probabilities up to 1 - 1e-9."""
    rests = [1e-9, 3e-8, 1e-7, 1e-5, 1e-3, 0.3]
    for mine in rests:
        for theirs in rests:
            p, q = 1 - theirs, 1 - mine
            exact = p * (math.log1p(-theirs) - math.log1p(-mine)) + theirs * math.log(theirs / mine)
            old, sampler = (torch.tensor([[math.log1p(-rest)]], dtype=dtype) for rest in (mine, theirs))
            gate = partial(rejection_mask, old, sampler, torch.ones(1, 1), divergence="bernoulli_kl")
            assert gate(bound=exact * 1.001 + 1e-15).all(), (p, q)
            assert exact < 1e-14 or not gate(bound=exact * 0.999).any(), (p, q)


def test_a_certain_token_does_not_cost_its_row():
    old, sampler = torch.zeros(1, 100), torch.full((1, 100), -1.2e-7)
    for pair in ((old, sampler), (sampler, old)):
        for level in ("token", "sum", "mean", "max"):
            mask = torch.ones(1, 100)
            assert rejection_mask(*pair, mask, divergence="bernoulli_kl", level=level, bound=1e-3).all()


@pytest.mark.parametrize("divergence", ["k2", "k3", "tv", "bernoulli_kl"])
@pytest.mark.parametrize("level", ["token", "sum", "mean", "max"])
def test_what_lies_outside_the_mask_decides_nothing(divergence, level):
    """Masked tokens affect neither tokens nor rows: the bound is just above the divergence of the unmasked tokens."""
    generator = torch.Generator().manual_seed(0)
    old, sampler = (-3 * torch.rand(4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    full = torch.ones(4, 5, dtype=torch.bool)
    for bound in (0.02, 0.2, 1.0):
        gate = {"divergence": divergence, "level": level, "bound": bound, "veto": 0.2}
        alone = rejection_mask(old, sampler, full, **gate)
        wide = [torch.full((4, 9), -20.0, dtype=torch.float64), torch.full((4, 9), -0.1, dtype=torch.float64)]
        mask = torch.zeros(4, 9, dtype=torch.bool)
        for padded, inside in zip([*wide, mask], [old, sampler, full], strict=True):
            padded[:, 3:8] = inside
        found = rejection_mask(*wide, mask, **gate)
        assert torch.equal(found[:, 3:8], alone)
        assert not found[:, :3].any()
        assert not found[:, 8:].any()


def test_a_veto_drops_the_row_that_holds_the_token():
    kept = rejection_mask(OLD, SAMPLER, MASK, veto=0.3)
    assert kept.tolist() == [[True, True, True], [False, False, False]]
    assert torch.equal(rejection_mask(OLD, SAMPLER, MASK), MASK)
    old, sampler, mask = rows([2.0, None, 4.0], [2.0, 1.0, 4.0])
    assert rejection_mask(old, sampler, mask, veto=1.5).tolist() == [[True, False, True], [False] * 3], (
        "what is outside the mask vetoes nothing, whatever the bound"
    )
    # A ratio equal to the bound passes.
    old, sampler, mask = rows([1.0, 2.0], [0.5, 2.0])
    assert rejection_mask(old, sampler, mask, veto=1.0).tolist() == [[True, True], [False, False]]


def test_metrics_by_hand():
    """The token ratios are 2, 1/2, 4 in the first row and 1/4, 1 in the second; the row ratios are 4 and 1/4."""
    found = correction_metrics(OLD, SAMPLER, MASK, low=0.4, high=3.0)
    mean, square = (2 + 0.5 + 4 + 0.25 + 1) / 5, (4 + 0.25 + 16 + 0.0625 + 1) / 5
    logs = [math.log(2) * k for k in (1, -1, 2, -2, 0)]
    expected = {
        "ratio_mean": mean,
        "ratio_min": 0.25,
        "ratio_max": 4.0,
        "out_of_band": 2 / 5,
        "out_of_band_sequences": 1.0,
        "ess": mean**2 / square,
        "ess_sequences": (4.25 / 2) ** 2 / ((16 + 0.0625) / 2),
        "chi2": square - 1,
        "chi2_sequences": (16 + 0.0625) / 2 - 1,
        "k1": -sum(logs) / 5,
        "k3": mean - 1 - sum(logs) / 5,
        "ppl_ratio": math.exp(-(math.log(4) / 3 - math.log(4) / 2) / 2),
        "unknown": 0.0,
    }
    assert found == {f"correction/{name}": pytest.approx(value) for name, value in expected.items()}


def test_k1_and_k3_are_the_divergence_of_the_sampler_from_the_trainer():
    """The tokens' frequencies are the sampler's probabilities 3/4 and 1/4; the trainer's probabilities are 1/2."""
    sampler, old = torch.tensor([[0.75, 0.75, 0.75, 0.25]]).log(), torch.full((1, 4), 0.5).log()
    found = correction_metrics(old, sampler, torch.ones(1, 4))
    divergence = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    # The log-probabilities are float32.
    assert found["correction/k1"] == pytest.approx(divergence, rel=1e-5)
    assert found["correction/k3"] == pytest.approx(divergence, rel=1e-5)
    assert "correction/pearson" not in found, "the trainer's probabilities are constant"


def test_a_ratio_on_a_bound_is_within_the_band():
    found = correction_metrics(OLD, OLD.clone(), MASK, low=1.0, high=1.0)
    assert found["correction/out_of_band"] == found["correction/out_of_band_sequences"] == 0.0


def test_one_token_has_no_correlation_and_causes_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = correction_metrics(OLD[:1, :1], SAMPLER[:1, :1], MASK[:1, :1])
    assert "correction/pearson" not in found
    assert found["correction/ratio_mean"] == pytest.approx(2.0)


def test_a_row_without_tokens_changes_no_metric():
    wider = [torch.cat([logprobs, logprobs[:1]]) for logprobs in (OLD, SAMPLER)]
    mask = torch.cat([MASK, torch.zeros_like(MASK[:1])])
    assert correction_metrics(*wider, mask) == correction_metrics(OLD, SAMPLER, MASK)


def test_the_correlation_is_of_probabilities():
    old, sampler = torch.tensor([[0.1, 0.5, 0.9]]).log(), torch.tensor([[0.2, 0.4, 0.6]]).log()
    assert correction_metrics(old, sampler, torch.ones(1, 3))["correction/pearson"] == pytest.approx(1.0)
    assert correction_metrics(old, sampler.flip(1), torch.ones(1, 3))["correction/pearson"] == pytest.approx(
        -1.0
    )


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (importance_weights, {"level": "word"}, "level"),
        (importance_weights, {"mode": "drop"}, "mode"),
        (importance_weights, {"low": 1.5}, "low"),
        (importance_weights, {"high": 0.5}, "high"),
        (importance_weights, {"low": -0.5}, "low"),
        (rejection_mask, {"divergence": "k4", "bound": 1.0}, "divergence"),
        (rejection_mask, {"divergence": "k3", "bound": 1.0, "level": "row"}, "level"),
        (rejection_mask, {"divergence": "k3"}, "bound"),
        (rejection_mask, {"divergence": "k3", "bound": -1.0}, "bound"),
    ],
)
def test_wrong_arguments(function, arguments, name):
    with pytest.raises(ValueError, match=name):
        function(OLD, SAMPLER, MASK, **arguments)


def test_the_sum_that_rejects_a_row_is_its_own():
    old, sampler, mask = rows([1.0, 1.0], [4.0, 4.0])
    kept = rejection_mask(old, sampler, mask, divergence="k2", level="sum", bound=1.0)
    assert kept.tolist() == [[True, True], [False, False]]


def test_two_tokens_have_a_correlation_and_the_default_band_is_from_a_half_to_two():
    _, sampler, mask = rows([2.5, 1.0])
    sampler = sampler + torch.tensor([[0.0, 1.0]])
    found = correction_metrics(sampler + torch.tensor([[2.5, 1.0]]).log(), sampler, mask)
    assert found["correction/out_of_band"] == 0.5
    assert found["correction/pearson"] == pytest.approx(1.0)
