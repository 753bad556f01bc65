"""Algorithms by name, and one's own."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batches import batch_of

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
    *("reinforce", "reinforce_pp", "remax", "online_dpo", "best_of_k", "copg"),
]


def test_the_algorithms_that_there_are():
    assert algorithm_names() == sorted(NAMES)
    page = (ROOT / "docs/rl.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == set(algorithm_names())


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
