"""Algorithms by name, and one's own."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batches import batch_of
from random_batch import random_batch

from vectorlm.algorithms import (
    AlgorithmSpec,
    Hyperparameters,
    LossInputs,
    algorithm_names,
    get_algorithm,
    register,
)
from vectorlm.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
NAMES = [
    *("ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "proximal_rloo"),
    *("reinforce", "reinforce_pp", "remax", "online_dpo", "best_of_k", "copg", "on_policy_distillation"),
    *("gmpo", "gdpo", "pass_at_k", "opo", "gpg", "otb", "lite_ppo"),
    *("clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "vespo"),
]


def test_the_algorithms_that_there_are():
    assert algorithm_names() == sorted(NAMES)
    page = (ROOT / "docs/rl.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == set(algorithm_names())
    choosing = (ROOT / "docs/choosing.md").read_text().partition("## All of them")[2]
    firsts = re.findall(r"^\| (`[^|]*`) \|", choosing, re.M)
    assert {name for first in firsts for name in re.findall(r"`(\w+)`", first)} == set(algorithm_names())


@pytest.mark.parametrize("name", NAMES)
def test_a_row_names_its_source_and_settings_that_exist(name):
    spec = get_algorithm(name)
    assert spec.source
    assert set(spec.settings) <= set(Hyperparameters.__dataclass_fields__)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"'gpro' is not known: use one of best_of_k, .* or file.py:NAME"):
        get_algorithm("gpro")


def test_settings_that_nothing_would_read_are_refused():
    with pytest.raises(
        ValueError, match=r"'mine' has settings that are not hyperparameters: clip_hgih, lr\. They may be"
    ):
        replace(get_algorithm("grpo"), name="mine", settings={"clip_hgih": 0.3, "lr": 1.0, "clip_low": 0.1})


def test_a_taken_name_is_refused():
    with pytest.raises(ValueError, match="'grpo' exists already"):
        register(get_algorithm("grpo"))


def test_the_example_of_ones_own():
    spec = get_algorithm(f"{ROOT}/examples/my_algorithm.py:MEDIAN")
    mask = torch.tensor([[True, False], [True, True], [True, True]])
    rewards = torch.tensor([[1.0, 0.0, 0.5]])
    advantages = spec.advantages(batch_of(mask, rewards), Hyperparameters())
    assert advantages.tolist() == [[0.5, 0.0], [-0.5, -0.5], [0.0, 0.0]]
    logprobs = torch.full((3, 2), -2.0)
    inputs = LossInputs(logprobs, logprobs, None, advantages, rewards[0], mask, 3)
    assert spec.loss(inputs, Hyperparameters()).tolist() == [[1.0, 0.0], [-1.0, -1.0], [0.0, 0.0]]
    lines = (ROOT / "examples/my_algorithm.py").read_text().splitlines()
    assert len([line for line in lines if line and not line.startswith(('"', "from"))]) <= 10


def test_something_else_is_no_algorithm(tmp_path):
    (tmp_path / "mine.py").write_text("X = 3\n")
    with pytest.raises(ConfigError, match="is a int: it must be an AlgorithmSpec"):
        get_algorithm(f"{tmp_path}/mine.py:X")


def test_a_spec_is_plain_data():
    spec = AlgorithmSpec(name="x", advantages=lambda s, k: s.token_rewards, loss=lambda i, k: i.advantages)
    assert (spec.level, spec.reduction, spec.needs_critic, dict(spec.settings)) == (
        "token",
        "token_mean",
        False,
        {},
    )


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("grpo", {"clip_low", "clip_high", "dual_clip", "importance_sampling_level", "scale_rewards"}),
        ("ppo", {"gamma", "lam", "clip_low", "clip_high", "dual_clip", "importance_sampling_level"}),
        ("cispo", {"clip_low", "clip_high", "importance_sampling_level", "scale_rewards"}),
        (
            "sapo",
            {"temperature_positive", "temperature_negative", "importance_sampling_level", "scale_rewards"},
        ),
        ("gmpo", {"clip_low", "clip_high", "scale_rewards"}),
        ("gdpo", {"clip_low", "clip_high", "dual_clip", "importance_sampling_level"}),
        ("pass_at_k", {"clip_low", "clip_high", "dual_clip", "importance_sampling_level", "pass_k"}),
        (
            "clip_cov",
            {"clip_low", "clip_high", "dual_clip", "importance_sampling_level", "scale_rewards"}
            | {"covariance_share", "covariance_low", "covariance_high"},
        ),
        ("kl_cov", {"scale_rewards", "covariance_share", "covariance_kl_coef"}),
        ("dppo_tv", {"scale_rewards", "divergence_bound"}),
        (
            "vespo",
            {"scale_rewards", "shape_positive", "rate_positive", "shape_negative", "rate_negative"},
        ),
        ("otb", set()),
        ("remax", set()),
        ("proximal_rloo", {"clip_low", "clip_high"}),
        ("online_dpo", {"beta", "label_smoothing", "preference"}),
        ("best_of_k", set()),
        ("copg", {"beta"}),
    ],
)
def test_an_algorithm_reads_the_settings_of_its_formula(name, read):
    spec = get_algorithm(name)
    of_loop = {"dynamic_sampling"}
    of_loop |= {"reduction"} if name not in ("gmpo", "proximal_rloo", "online_dpo", "copg") else set()
    of_loop |= {"whiten_advantages"} if name not in ("online_dpo", "best_of_k", "copg") else set()
    assert spec.settings_read(spec.hyperparameters()) == read | of_loop


def test_a_function_that_fails_on_the_example_counts_as_reading_all():
    spec = replace(get_algorithm("grpo"), name="mine", loss=lambda inputs, hparams: 1 / 0)
    assert spec.settings_read(Hyperparameters()) == set(Hyperparameters.__dataclass_fields__)


def test_the_configs_values_win_over_the_algorithms_own():
    spec = get_algorithm("gspo")
    assert (spec.hyperparameters().clip_low, spec.hyperparameters().reduction) == (
        3e-4,
        "sequence_mean_token_mean",
    )
    given = spec.hyperparameters({"clip_low": 0.1, "reduction": "token_mean"})
    assert (given.clip_low, given.clip_high, given.reduction) == (0.1, 4e-4, "token_mean")


@pytest.mark.parametrize(("name", "rows"), [("grpo", 1), ("copg", 6), ("online_dpo", 2), ("best_of_k", 1)])
def test_rows_of_a_group_meet_where_the_loss_is_of_groups(name, rows):
    assert get_algorithm(name).rows_per_loss(6) == rows


def two_groups():
    """Two groups of two completions, as a loss gets them; the last row has no token."""
    policy, reference, advantages, mask = (each[1:] for each in random_batch())
    rewards = torch.tensor([1.0, 0.25, 0.0, 0.5], dtype=torch.float64)
    return LossInputs(policy, policy.detach() - 0.1, reference, advantages, rewards, mask, 2)


def sums(inputs, logprobs):
    return [sum(row[kept].tolist()) for row, kept in zip(logprobs, inputs.mask, strict=True)]


def test_a_preference_is_between_the_sums_over_two_completions():
    inputs, hparams = two_groups(), Hyperparameters(beta=0.3)
    spec = get_algorithm("online_dpo")
    losses, metrics = spec.loss(inputs, hparams), spec.observe(inputs, hparams)
    policy, reference = (sums(inputs, each) for each in (inputs.policy_logprobs, inputs.reference_logprobs))
    for pair, (chosen, rejected) in enumerate([(0, 1), (2, 3)]):
        better, worse = (0.3 * (policy[row] - reference[row]) for row in (chosen, rejected))
        assert losses[pair].item() == pytest.approx(math.log(1 + math.exp(worse - better)))
        assert {name: each[pair].item() for name, each in metrics.items()} == {
            "preference/chosen_reward": pytest.approx(better),
            "preference/rejected_reward": pytest.approx(worse),
            "preference/margin": pytest.approx(better - worse),
            "preference/accuracy": float(better > worse),
            "preference/chosen_logprob": pytest.approx(policy[chosen]),
            "preference/rejected_logprob": pytest.approx(policy[rejected]),
        }


def test_copg_compares_the_completions_of_a_group_that_have_tokens():
    inputs = two_groups()
    policy, reference = (sums(inputs, each) for each in (inputs.policy_logprobs, inputs.reference_logprobs))
    first, second = (inputs.rewards[row].item() - 0.3 * (policy[row] - reference[row]) for row in (0, 1))
    losses = get_algorithm("copg").loss(inputs, Hyperparameters(beta=0.3))
    assert losses.tolist() == pytest.approx([(first - second) ** 2 / 0.6, 0.0])


def test_proximal_rloo_takes_the_advantage_of_a_completion_from_its_tokens():
    inputs = two_groups()
    of_rows = torch.tensor([0.5, -2.0, 1.0, 3.0], dtype=torch.float64)
    inputs = replace(inputs, advantages=torch.where(inputs.mask, of_rows[:, None], 0.0))
    losses = get_algorithm("proximal_rloo").loss(inputs, Hyperparameters(clip_low=0.1, clip_high=0.3))
    for row, advantage in enumerate([0.5, -2.0, 1.0, 0.0]):
        ratio = math.exp(0.1 * inputs.mask[row].sum().item())
        clipped = min(max(ratio, 0.9), 1.3)
        assert losses[row].item() == pytest.approx(-min(ratio * advantage, clipped * advantage))
