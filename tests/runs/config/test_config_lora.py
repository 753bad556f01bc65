from pathlib import Path

import pytest
from peft import LoraConfig

from vectorlm.runs.config.load import load_config
from vectorlm.sampling.weights.lora_factors import engine_arguments, largest_rank, refused_options


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"enable_lora": True, "max_lora_rank": 8}),
        ({"r": 9}, {"enable_lora": True, "max_lora_rank": 16}),
        ({"r": 4, "rank_pattern": {"q_proj": 65}}, {"enable_lora": True, "max_lora_rank": 128}),
        ({"target_modules": "all-linear"}, {"enable_lora": True, "max_lora_rank": 8}),
        (
            {"r": 512, "target_modules": ["v_proj", "self_attn.q_proj"]},
            {"enable_lora": True, "max_lora_rank": 512, "lora_target_modules": ["q_proj", "v_proj"]},
        ),
    ],
)
def test_the_engine_gets_room_for_the_largest_rank_and_for_no_other_layers(options, expected):
    assert engine_arguments(options) == expected


@pytest.mark.parametrize("mode", ["adapter", "merged"])
def test_pefts_own_defaults_pass(mode):
    options = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM").to_dict()
    assert list(refused_options(options, mode)) == []
    assert largest_rank(options) == 4


def test_an_option_that_peft_may_add_one_day_is_refused_when_it_is_on():
    assert [
        problem[0] for problem in refused_options({"use_new_idea": True, "use_old_idea": False}, "merged")
    ] == ["use_new_idea"]


def test_the_config_in_the_repository_asks_for_nothing_that_the_engine_cannot_follow():
    config = load_config(Path(__file__).parents[3] / "configs" / "countdown_lora.yaml")
    train = config.train_parameters
    assert list(refused_options(train.lora_peft_config, config.engine.lora_mode)) == []
    assert engine_arguments(train.lora_peft_config)["max_lora_rank"] == 32
