"""Settings without effect unless another has a value: an error, except if the file itself turns the other one off."""

import pytest
from kit.config_texts import RL

from vectorlm.errors import ConfigError
from vectorlm.runs.config.load import load_config
from vectorlm.runs.config.value import raise_problems
from vectorlm.runs.preflight.rl import rl_problems
from vectorlm.runs.preflight.settings import setting_problems


@pytest.fixture
def check(write_config):
    path = write_config(RL)

    def run(*overrides):
        config = load_config(path, overrides)
        raise_problems([*setting_problems(config, 1), *rl_problems(config, config.rl)])

    return run


@pytest.mark.parametrize(
    ("override", "other"),
    [
        ("rl.critic.lr=0.001", "grpo, which has no critic"),
        ("rl.overlong_penalty=0.5", "rl.overlong_buffer_tokens=0"),
        ("rl.max_sampling_rounds=2", "rl.algorithm.dynamic_sampling=false"),
        ("rl.max_kl=0.1", "one optimizer step per batch"),
        ("rl.correction.gate_high=2.0", "rl.correction.gate=null"),
        ("rl.kl_in='reward'", "rl.kl_coef=0.0"),
        ("train_parameters.epochs=2", "dataset=null"),
        ("train_parameters.gradient_accumulation_steps=4", "dataset=null"),
        ("train_parameters.save_frequency=0.5", "dataset=null"),
        ("train_parameters.early_stopping_min_delta=0.5", "early_stopping_patience=null"),
        ("train_parameters.lr_scheduler_kwargs={'num_cycles': 2}", "lr_scheduler_type=constant_with_warmup"),
    ],
)
def test_a_setting_without_effect_is_refused(check, override, other):
    with pytest.raises(ConfigError) as caught:
        check(override, "train_parameters.lr_scheduler_type=constant_with_warmup")
    assert override in str(caught.value)
    assert other in str(caught.value)


def test_tasks_of_verifiers_have_an_environment(check):
    check("rl.prompts='verifiers:wordle'", "rl.environment_timeout_s=600")
    with pytest.raises(ConfigError, match=r"rl\.environment_timeout_s=600"):
        check("rl.environment_timeout_s=600")


def test_turns_of_agents_are_not_limited(check):
    agents = "rl.environment='openai:agents.py:one'"
    with pytest.raises(ConfigError, match=r"rl\.max_turns=7"):
        check(agents, "rl.max_turns=7")
    check(agents)
    # Prompts of another source have turns.
    sources = ["rl.prompts=null", "rl.sources.a={prompts: [a], environment: 'game.py:Game'}"]
    check(*sources, agents, "rl.sources.b={prompts: [b]}", "rl.max_turns=7")


def test_a_constant_schedule_warms_nothing_up(check):
    with pytest.raises(ConfigError, match="warmup_ratio"):
        check("train_parameters.lr_scheduler_type=constant", "train_parameters.warmup_ratio=0.1")


def test_a_file_may_turn_a_thing_off_and_keep_its_settings(check):
    check("rl.kl_coef=0", "rl.kl_in=reward", "rl.environment=null", "rl.max_turns=3")
    check("rl.algorithm.dynamic_sampling=False", "rl.max_sampling_rounds=2")
    check("rl.correction={preset: off, gate_high: 2.0}")


@pytest.mark.parametrize(
    ("correction", "without"),
    [
        ("{preset: icepop, gate_high: 0.1}", "gate_high=0.1 has no effect with rl.correction.gate=null"),
        ("{preset: tis, gate_level: mean}", "gate_level='mean' has no effect with rl.correction.gate=null"),
        ("{preset: bypass, high: 2.0}", "high=2.0 has no effect with rl.correction.level=null"),
    ],
)
def test_a_preset_is_no_leave_to_set_bounds_of_what_it_lacks(check, correction, without):
    with pytest.raises(ConfigError) as caught:
        check(f"rl.correction={correction}")
    assert without in str(caught.value)
    check("rl.correction={preset: tis, gate: null, gate_high: 0.1}")


def test_rewards_of_the_section_are_refused_if_no_source_takes_them(check):
    sources = ["rl.prompts=null", "rl.sources.one={prompts: [a], rewards: {countdown: 1.0}}"]
    with pytest.raises(ConfigError, match=r"rl\.rewards="):
        check(*sources, "rl.rewards={length: 0.1}")
    check(*sources, "rl.rewards={length: 0.1}", "rl.sources.two={prompts: [b]}")
    check(*sources, "rl.rewards={}")
