"""Settings of an algorithm, including the settings of a user's own algorithm."""

import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
from kit.config_texts import RL, refusal
from kit.rl_runs import check_rl

from vectorlm.algorithms.settings import GRPOSettings
from vectorlm.errors import ConfigError
from vectorlm.runs.config.load import config_from_keywords, load_config, save_config

MINE = """\
from dataclasses import dataclass

from vectorlm.algorithms import AlgorithmSpec, TokenSettings
from vectorlm.settings import PositiveFloat


@dataclass(frozen=True, kw_only=True)
class MarginSettings(TokenSettings):
    margin: PositiveFloat = 0.5


MARGIN = AlgorithmSpec(
    name="margin",
    settings=MarginSettings(reduction="sequence_mean_token_sum"),
    advantages=lambda batch, hparams: batch.spread((batch.rewards > hparams.margin).float()),
    loss=lambda inputs, hparams: -inputs.policy_logprobs * inputs.advantages,
)
"""
OWN = "rl.algorithm=mine.py:MARGIN"


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(RL)
    (tmp_path / "mine.py").write_text(MINE)
    return lambda *overrides: load_config("my.yaml", overrides)


def test_a_misspelt_setting_of_ones_own_algorithm_is_asked_back(load):
    with pytest.raises(
        ConfigError, match=r"unknown setting 'rl.algorithm.magrin' .* Did you mean 'rl.algorithm.margin'\?"
    ):
        load(OWN, "rl.algorithm.magrin=0.2")


def test_a_config_wins_over_where_the_algorithm_starts(load):
    start = GRPOSettings(reduction="sequence_mean_token_mean")
    assert load().rl.algorithm.settings == start
    given = load(
        "rl.algorithm.clip_high=0.3", "rl.algorithm.dynamic_sampling=true", "rl.algorithm.clip_low=null"
    ).rl.algorithm.settings
    assert given == GRPOSettings(reduction=start.reduction, clip_high=0.3, dynamic_sampling=True)
    gspo = load("rl.algorithm=gspo", "rl.algorithm.clip_low=0.1").rl.algorithm.settings
    assert (gspo.clip_low, gspo.clip_high, gspo.importance_sampling_level) == (0.1, 4e-4, "sequence")


@pytest.mark.parametrize(
    ("overrides", "key", "rows"),
    [
        (["rl.algorithm.pass_k=2"], "rl.algorithm.pass_k=2", ["grpo has no such setting", "pass_at_k"]),
        (
            ["rl.algorithm.beta=0.0"],
            "rl.algorithm.beta=0.0",
            ["grpo has no such setting", "copg, online_dpo", "rl.kl_coef?"],
        ),
        (
            ["rl.algorithm=gmpo", "rl.algorithm.reduction=token_mean"],
            "rl.algorithm.reduction",
            ["gmpo has no such", "dapo"],
        ),
        (
            ["rl.algorithm=best_of_k", "rl.algorithm.whiten_advantages=true"],
            "rl.algorithm.whiten_advantages",
            ["ppo"],
        ),
        (
            [OWN, "rl.algorithm.clip_low=0.1"],
            "rl.algorithm.clip_low=0.1",
            ["mine.py:MARGIN has no such setting", "grpo"],
        ),
        (
            ["rl.algorithm.dual_clip=1.0"],
            "rl.algorithm.dual_clip=1.0",
            ["must be a finite number > 1, or null."],
        ),
        (
            ["rl.algorithm=online_dpo", "rl.algorithm.label_smoothing=0.5"],
            "rl.algorithm.label_smoothing",
            ["< 0.5"],
        ),
        (["rl.algorithm=gpro"], "rl.algorithm='gpro'", ["is not known", "--set rl.algorithm=gpro"]),
        ([OWN, "rl.algorithm.margin=-1"], "rl.algorithm.margin=-1", ["must be a finite number > 0"]),
        (["rl.algorithm.margin=1"], "'rl.algorithm.margin'", ["unknown setting"]),
    ],
)
def test_what_an_algorithm_does_not_have_is_refused_with_the_rows_that_do(load, overrides, key, rows):
    text = refusal("my.yaml", *overrides)
    assert key in text
    assert [row for row in rows if row not in text] == []


def test_an_algorithm_of_ones_own_declares_no_setting_called_name(load):
    with open("mine.py", "a") as file:
        file.write("from dataclasses import replace\n")
        file.write(
            "@dataclass(frozen=True, kw_only=True)\nclass Taken(TokenSettings):\n    name: str = 'mine'\n"
        )
        file.write("TAKEN = replace(MARGIN, settings=Taken())\n")
    assert "'name'" in refusal("my.yaml", "rl.algorithm=mine.py:TAKEN")


@pytest.mark.parametrize(
    ("settings", "overrides", "key"),
    [
        ('reduction="sum_over_length"', [], "rl.algorithm.reduction='sum_over_length'"),
        ("margin=-1.0", [], "rl.algorithm.margin=-1.0"),
        ('margin="0.5"', [], "rl.algorithm.margin='0.5'"),
        ("margin=None", [], "rl.algorithm.margin=null"),
        ("dynamic_sampling=1", [], "rl.algorithm.dynamic_sampling=1"),
        # Values of the config replace defaults.
        ("margin=-1.0", ["rl.algorithm.margin=1.0"], None),
        ("margin=1", ["rl.algorithm.margin=null"], None),
    ],
)
def test_the_defaults_of_an_algorithm_of_ones_own_are_checked_as_values_of_a_config(
    load, settings, overrides, key
):
    with open("mine.py", "a") as file:
        file.write(
            f"from dataclasses import replace\nWRONG = replace(MARGIN, settings=MarginSettings({settings}))\n"
        )
    wrong = ["rl.algorithm=mine.py:WRONG", *overrides]
    if key is None:
        load(*wrong)
    else:
        assert key in refusal("my.yaml", *wrong)


def test_a_setting_of_a_type_that_yaml_has_not_is_the_algorithms_own_affair(load):
    with open("mine.py", "a") as file:
        file.write("import torch\nfrom dataclasses import replace\n")
        file.write(
            "@dataclass(frozen=True, kw_only=True)\nclass Held(TokenSettings):\n    held: torch.Tensor = None\n"
        )
        file.write("HELD = replace(MARGIN, settings=Held())\n")
    assert load("rl.algorithm=mine.py:HELD").rl.algorithm.settings.held is None


def test_null_stands_for_the_algorithms_own_value_also_where_it_has_none(load):
    assert load("rl.algorithm.pass_k=null") == load()


def test_settings_of_ones_own_algorithm_are_keywords(load):
    given = {
        "model": "m",
        "output_dir": "o",
        "max_seq_len": 8,
        "lr": 1e-5,
        "prompts_per_step": 1,
        "max_steps": 1,
    }
    for how in (
        {"algorithm": "mine.py:MARGIN", "rl": {"prompts": ["a"]}},
        {"rl": {"algorithm": "mine.py:MARGIN"}},
    ):
        config = config_from_keywords({**given, **how, "margin": 0.75, "clip_high": None}, "rl")
        assert config.rl.algorithm.settings.margin == 0.75


def test_an_algorithm_of_ones_own_has_settings_of_its_own(load):
    config = load(OWN, "rl.algorithm.margin=0.75")
    assert (config.rl.algorithm.settings.margin, config.rl.algorithm.settings.reduction) == (
        0.75,
        "sequence_mean_token_sum",
    )
    check_rl(config)
    save_config(config, "saved.yaml")
    assert load_config("saved.yaml") == config


def test_settings_of_ones_own_travel_to_ranks_that_have_not_read_the_file(load):
    Path("config.pickle").write_bytes(cloudpickle.dumps(load(OWN, "rl.algorithm.margin=0.75")))
    code = "import pickle; print(pickle.load(open('config.pickle', 'rb')).rl.algorithm.settings.margin)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0.75\n"
