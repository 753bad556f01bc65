"""Registry of algorithms by name, including a user's own."""

import math
import re
import subprocess
import sys
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from kit.batches import batch_of
from random_batch import random_batch

import vectorlm.algorithms
from vectorlm.algorithms.batch import LossInputs
from vectorlm.algorithms.registry import algorithm_names, get_algorithm, register
from vectorlm.algorithms.settings import (
    ClipSettings,
    OnlineDPOSettings,
    ReductionSettings,
    ReferenceSettings,
    TokenSettings,
    WhiteningSettings,
)
from vectorlm.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
NAMES = algorithm_names()


def test_the_algorithms_that_there_are():
    page = (ROOT / "docs/algorithms.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_what_takes_a_step_of_one_completion_learns_from_it(name):
    spec = get_algorithm(name)
    batch = replace(
        batch_of([[True, True]], torch.ones(1, 1)), values=torch.zeros(1, 2), greedy_rewards=torch.zeros(1)
    )
    if spec.min_group_size == spec.min_completions == 1 and not spec.needs_teacher:
        assert spec.advantages(batch, spec.settings).any()


def test_reading_the_table_imports_no_torch_and_the_package_has_all_documented_names():
    code = "import sys, vectorlm.algorithms.registry; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    page = (ROOT / "docs/reference/algorithms.md").read_text()
    homes = re.findall(r"^::: (vectorlm\.algorithms\.\w+)\.(\w+)$", page, re.M)
    assert len(homes) > 40
    for module, name in homes:
        assert getattr(vectorlm.algorithms, name) is getattr(import_module(module), name), name


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"rl\.algorithm='gpro'.*best_of_k"):
        get_algorithm("gpro")


def test_a_clipped_ratio_needs_bounds():
    with pytest.raises(ValueError, match="clips='token'"):
        replace(get_algorithm("grpo"), name="mine", settings=TokenSettings())


def test_a_taken_name_is_refused():
    with pytest.raises(ValueError, match="name='grpo'"):
        register(get_algorithm("grpo"))


def test_the_example_of_ones_own():
    spec = get_algorithm(f"{ROOT}/examples/my_algorithm.py:MEDIAN")
    mask = torch.tensor([[True, False], [True, True], [True, True]])
    rewards = torch.tensor([[1.0, 0.0, 0.5]])
    advantages = spec.advantages(batch_of(mask, rewards), spec.settings)
    assert advantages.tolist() == [[0.5, 0.0], [-0.5, -0.5], [0.0, 0.0]]
    logprobs = torch.full((3, 2), -2.0)
    inputs = LossInputs(logprobs, logprobs, None, advantages, rewards[0], mask, 3)
    assert spec.loss(inputs, spec.settings).tolist() == [[1.0, 0.0], [-1.0, -1.0], [0.0, 0.0]]
    lines = (ROOT / "examples/my_algorithm.py").read_text().splitlines()
    assert len([line for line in lines if line and not line.startswith(('"', "from"))]) <= 10


def test_something_else_is_no_algorithm(tmp_path):
    (tmp_path / "mine.py").write_text("X = 3\n")
    with pytest.raises(ConfigError, match=r"rl\.algorithm"):
        get_algorithm(f"{tmp_path}/mine.py:X")


OTHER_VALUES = {
    **{"gamma": 0.5, "lam": 0.5, "clip_low": 0.9, "clip_high": 9.0, "dual_clip": 1.01, "beta": 5.0},
    **{"label_smoothing": 0.3, "preference": "ipo", "pass_k": 1, "divergence_bound": 1e9},
    **{"temperature_positive": 3.0, "temperature_negative": 3.0, "covariance_share": 1e-6},
    **{"covariance_low": 1e8, "covariance_high": 1e-9, "covariance_kl_coef": 3.0},
    **{"shape_positive": 0.5, "rate_positive": 0.5, "shape_negative": 0.5, "rate_negative": 0.5},
}
WIDE = {"covariance_share": 1.0, "covariance_low": 0.0, "covariance_high": 1e9}
"""Settings that let the covariance losses select every token."""


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_of_a_row_changes_a_number(name):
    spec, generator = get_algorithm(name), torch.Generator().manual_seed(0)
    mask, rewards = torch.ones(16, 2, dtype=torch.bool), torch.tensor([[0.0, 1.0]]).repeat(8, 1)

    def draw():
        return torch.randn(16, 2, generator=generator)

    batch = replace(
        batch_of(mask, rewards),
        values=draw(),
        token_rewards=draw(),
        old_logprobs=draw(),
        gradient_norms=torch.ones(16, 2),
        greedy_rewards=torch.zeros(8),
        reward_parts=rewards[None],
        part_weights=torch.ones(1),
    )
    inputs = LossInputs(draw(), draw(), draw(), draw(), rewards.view(-1), mask, 2, mask)

    def numbers(settings):
        marked = None if spec.mark is None else spec.mark(batch, inputs.advantages, settings)
        loss = spec.loss(replace(inputs, marked=marked), settings)
        return torch.cat([spec.advantages(batch, settings).flatten(), loss.flatten()])

    start = spec.settings
    here = {key: value for key, value in {**WIDE, "pass_k": 2}.items() if hasattr(start, key)}
    start = replace(start, **here)
    others = OTHER_VALUES | {
        "scale_rewards": "group" if getattr(start, "scale_rewards", "") == "none" else "none",
        "importance_sampling_level": "token" if name == "gspo" else "sequence",
    }
    of_loop = {"dynamic_sampling", "reduction", "whiten_advantages"}
    for key in {field.name for field in fields(start)} - of_loop:
        assert not torch.equal(numbers(start), numbers(replace(start, **{key: others[key]}))), key


@pytest.mark.parametrize("name", NAMES)
def test_what_the_loop_reads_is_a_setting_where_it_has_an_effect(name):
    spec = get_algorithm(name)
    assert isinstance(spec.settings, ReductionSettings) == (spec.level == "token")
    learns_size = spec.samples_from_policy and not spec.needs_teacher
    assert isinstance(spec.settings, WhiteningSettings) == learns_size


@pytest.mark.parametrize(("name", "rows"), [("grpo", 1), ("copg", 6), ("online_dpo", 2), ("best_of_k", 1)])
def test_rows_of_a_group_meet_where_the_loss_is_of_groups(name, rows):
    assert get_algorithm(name).rows_per_loss(6) == rows


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_scales_with_the_advantage_where_its_row_says_so(name):
    spec, generator = get_algorithm(name), torch.Generator().manual_seed(0)
    policy, old, reference = (torch.randn(4, 3, generator=generator) for _ in range(3))
    policy.requires_grad_()
    mask, weights = torch.ones(4, 3, dtype=torch.bool), torch.randn(4, generator=generator)
    rewards = torch.tensor([1.0, 0.25, 0.0, 0.5])
    inputs = LossInputs(policy, old, reference, torch.zeros(4, 3), rewards, mask, 2, mask, weights)
    loss = spec.loss(inputs, spec.settings)
    loss.sum().backward()
    assert (not loss.any() and not policy.grad.any()) is spec.scales_with_advantage


def two_groups():
    """Return the inputs of a loss for two groups of two completions; the last row has no token."""
    policy, reference, advantages, mask = (tensor[1:] for tensor in random_batch())
    rewards = torch.tensor([1.0, 0.25, 0.0, 0.5], dtype=torch.float64)
    return LossInputs(policy, policy.detach() - 0.1, reference, advantages, rewards, mask, 2)


def sums(inputs, logprobs):
    return [sum(row[kept].tolist()) for row, kept in zip(logprobs, inputs.mask, strict=True)]


def test_a_preference_is_between_the_sums_over_two_completions():
    inputs, hparams = two_groups(), OnlineDPOSettings(beta=0.3)
    spec = get_algorithm("online_dpo")
    losses, metrics = spec.loss(inputs, hparams), spec.observe(inputs, hparams)
    policy, reference = (
        sums(inputs, logprobs) for logprobs in (inputs.policy_logprobs, inputs.reference_logprobs)
    )
    for pair, (chosen, rejected) in enumerate([(0, 1), (2, 3)]):
        better, worse = (0.3 * (policy[row] - reference[row]) for row in (chosen, rejected))
        assert losses[pair].item() == pytest.approx(math.log(1 + math.exp(worse - better)))
        assert {name: metric[pair].item() for name, metric in metrics.items()} == {
            "preference/chosen_reward": pytest.approx(better),
            "preference/rejected_reward": pytest.approx(worse),
            "preference/margin": pytest.approx(better - worse),
            "preference/accuracy": float(better > worse),
            "preference/chosen_logprob": pytest.approx(policy[chosen]),
            "preference/rejected_logprob": pytest.approx(policy[rejected]),
        }


def test_copg_compares_the_completions_of_a_group_that_have_tokens():
    inputs = two_groups()
    policy, reference = (
        sums(inputs, logprobs) for logprobs in (inputs.policy_logprobs, inputs.reference_logprobs)
    )
    first, second = (inputs.rewards[row].item() - 0.3 * (policy[row] - reference[row]) for row in (0, 1))
    losses = get_algorithm("copg").loss(inputs, ReferenceSettings(beta=0.3))
    assert losses.tolist() == pytest.approx([(first - second) ** 2 / 0.6, 0.0])


def test_proximal_rloo_takes_the_advantage_of_a_completion_from_its_tokens():
    inputs = two_groups()
    of_rows = torch.tensor([0.5, -2.0, 1.0, 3.0], dtype=torch.float64)
    inputs = replace(inputs, advantages=torch.where(inputs.mask, of_rows[:, None], 0.0))
    losses = get_algorithm("proximal_rloo").loss(inputs, ClipSettings(clip_low=0.1, clip_high=0.3))
    for row, advantage in enumerate([0.5, -2.0, 1.0, 0.0]):
        ratio = math.exp(0.1 * inputs.mask[row].sum().item())
        clipped = min(max(ratio, 0.9), 1.3)
        assert losses[row].item() == pytest.approx(-min(ratio * advantage, clipped * advantage))
