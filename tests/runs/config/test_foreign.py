"""Setting names of other libraries: the error gives our name."""

import re

import pytest
from kit.config_texts import RL, refusal

from vectorlm.algorithms.registry import ROWS
from vectorlm.packages import fields_of
from vectorlm.runs.config.setting import all_settings
from vectorlm.runs.config.value import FOREIGN, describe

PLACES = sorted({place for foreign in FOREIGN.values() for place in foreign.places})


@pytest.mark.parametrize("place", PLACES)
def test_every_place_exists(place):
    parent, _, name = place.rpartition(".")
    settings = all_settings()
    if place in settings:
        return
    assert parent == "engine" or describe(settings[parent].hint).startswith("a mapping")
    if parent.endswith("sampling_params"):
        assert name in fields_of("sampling_params.py", "SamplingParams")
    elif parent == "engine" and name != "url":
        assert name in fields_of("engine/arg_utils.py", "EngineArgs")
    else:
        # The first two are arguments of wandb.init, the last one of the inference `server`.
        assert place in ("wandb_config.name", "wandb_config.project", "engine.url")


def test_no_name_is_answered_that_means_something_here():
    at_home = {path.rpartition(".")[2] for path in all_settings()}
    assert FOREIGN.keys() & at_home == {
        # These names exist in one section; their notes explain the difference in another section.
        *(
            "assistant_only_loss",
            "beta",
            "gradient_accumulation_steps",
            "logging_steps",
            "max_steps",
            "top_k",
            "warmup_steps",
        )
    }


@pytest.mark.parametrize(
    ("setting", "answer"),
    [
        ("rl.num_generations=8", "'rl.group_size'"),
        ("rl.max_completion_length=256", "'rl.sampling_params.max_tokens'"),
        ("rl.num_completions_to_print=2", "'rl.show_every'"),
        ("rl.zzzz=1", "docs/config.md"),
        ("rl.push_to_hub=true", "'push_to_hub'"),
        ("rl.kv_cache_memory_bytes=1024", "'engine.kv_cache_memory_bytes'"),
        ("train_parameters.learning_rate=1e-6", "'train_parameters.optimizer.lr'"),
        ("beta=0.04", "'rl.kl_coef' or 'rl.algorithm.beta'"),
        ("rl.temperature=0.9", "'rl.sampling_params.temperature'"),
        ("rl.repetition_penalty=1.1", "'rl.sampling_params.repetition_penalty'"),
        ("rl.gamma=0.9", "'rl.algorithm.gamma'"),
        ("rl.cliprange=0.2", "'rl.algorithm.clip_low'"),
        ("rl.critic.learning_rate=1e-5", "'rl.critic.lr'"),
        ("train_parameters.metric_for_best_model=eval_loss", "'train_parameters.best_metric'"),
        ("train_parameters.completion_only_loss=true", "dataset_preprocess.separator"),
    ],
)
def test_an_unknown_setting_of_trl_is_answered_with_its_name_here(write_config, setting, answer):
    text = refusal(write_config(RL), setting)
    assert f"'{setting.partition('=')[0]}' (--set {setting})" in text
    assert answer in text


@pytest.mark.parametrize(
    ("setting", "choice"),
    [
        ("rl.algorithm.scale_rewards=true", "group"),
        ("rl.algorithm.scale_rewards=false", "none"),
        ("rl.kl_kind=low_var_kl", "k3"),
    ],
)
def test_a_value_of_another_library_is_answered_with_its_name_here(write_config, setting, choice):
    assert f"Did you mean '{choice}'?" in refusal(write_config(RL), setting)


def test_repetition_penalty_is_answered_with_the_algorithms_that_accept_it(write_config):
    words = re.findall(r"\w+", refusal(write_config(RL), "rl.repetition_penalty=1.1"))
    assert {spec.name for spec in ROWS if spec.name in words} == {
        spec.name for spec in ROWS if not spec.samples_from_policy
    }


def test_a_file_of_trls_names_is_answered_line_by_line(write_config):
    lines = ["num_generations: 8", "max_completion_length: 256", "learning_rate: 1.0e-6", "num_iterations: 2"]
    wanted = [
        "rl.group_size",
        "rl.sampling_params.max_tokens",
        "train_parameters.optimizer.lr",
        "rl.num_epochs",
    ]
    found = refusal(write_config(RL + "\n".join(lines) + "\n")).splitlines()[1:]
    assert all(f"'{place}'" in line for place, line in zip(wanted, found, strict=True))


def test_names_that_are_right_in_another_section_are_answered_with_that_section(write_config):
    for name in ("scale_rewards", "top_entropy_quantile", "lr_scheduler_type", "warmup_ratio"):
        place = next(path for path in all_settings() if path.rpartition(".")[2] == name)
        assert f"Did you mean '{place}'?" in refusal(write_config(RL), f"{name}=1")
    # A similar name in the same section, rl.step_reward, has another meaning.
    assert "Did you mean 'rl.algorithm.scale_rewards'?" in refusal(write_config(RL), "rl.scale_rewards=1")


VERL = """
algorithm: {adv_estimator: grpo, gamma: 1.0, kl_ctrl: {kl_coef: 0.001}}
data: {train_files: train.parquet, train_batch_size: 8, image_key: images, shuffle: True, return_raw_chat: True}
actor_rollout_ref:
  model: {path: model}
  actor: {optim: {lr: 1.0e-6}, use_kl_loss: True, clip_ratio_c: 3}
  rollout: {name: vllm, n: 8, gpu_memory_utilization: 0.6}
custom_reward_function: {path: rewards.py, name: compute_score}
trainer: {n_gpus_per_node: 2, total_epochs: 1}
"""


def test_a_file_of_verl_is_translated_setting_by_setting(write_config):
    text = refusal(write_config(RL + VERL))
    for name, place in {
        "algorithm.adv_estimator": "rl.algorithm",
        "algorithm.gamma": "rl.algorithm.gamma",
        "algorithm.kl_ctrl.kl_coef": "rl.kl_coef",
        "data.train_files": "rl.prompts",
        "data.train_batch_size": "rl.prompts_per_step",
        "actor_rollout_ref.model.path": "model",
        "actor_rollout_ref.actor.optim.lr": "train_parameters.optimizer.lr",
        "actor_rollout_ref.actor.use_kl_loss": "rl.kl_in",
        "actor_rollout_ref.actor.clip_ratio_c": "rl.algorithm.dual_clip",
        "actor_rollout_ref.rollout.name": "engine.inference",
        "actor_rollout_ref.rollout.n": "rl.group_size",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "engine.gpu_memory_utilization",
        "custom_reward_function": "rl.rewards",
        "trainer.total_epochs": "rl.num_epochs_over_prompts",
    }.items():
        line = next(line for line in text.splitlines() if f"'{name}'" in line)
        assert f"Did you mean '{place}'" in line
    assert "Give the number of ranks as --world_size." in text
    assert "Name the columns prompt and images" in text
    assert "no setting is like 'data.return_raw_chat'" in text


def test_an_override_of_verl_is_translated(write_config):
    assert "'rl.group_size'" in refusal(write_config(RL), "actor_rollout_ref.rollout.n=8")


@pytest.mark.parametrize(
    ("setting", "answer"),
    [
        ("actor_rollout_ref.rollout.multi_turn.enable=True", "'rl.environment'"),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml", "'rl.environment'"),
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4", "'rl.max_turns'"),
        ("actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent", "'rl.environment'"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs=8", "'engine'"),
        ("reward_model.enable=True", "'rl.reward_models'"),
        ("reward_model.model.path=judge", "'rl.reward_models'"),
        ("reward.reward_model.model_path=judge", "'rl.reward_models'"),
        ("reward.num_workers=8", "'rl.reward_workers'"),
        ("trainer.rollout_data_dir=rollouts", "rollouts.jsonl"),
        ("data.shuffle=True", "every epoch has a new random order"),
        ("algorithm.norm_adv_by_std_in_grpo=True", "Write group for True"),
        ("custom_reward_function.reward_kwargs.scale=2", "file.py:NAME(scale=2)"),
        ("algorithm.rollout_correction.rollout_is=token", "'rl.correction.preset'"),
    ],
)
def test_turns_tools_and_reward_models_of_verl_are_translated(write_config, setting, answer):
    assert answer in refusal(write_config(RL), setting)


def test_a_misspelt_name_of_an_old_section_is_answered_with_it(write_config):
    assert "Did you mean 'train_parameters.sampler'?" in refusal(
        write_config(RL), "train_parameters.samplers.prompts=[a]"
    )


@pytest.mark.parametrize(
    ("setting", "example"),
    [("rl.rewards=a.py:right", "{a.py:right: VALUE}"), ("trackers=[tensorboard]", "{tensorboard: VALUE}")],
)
def test_a_name_in_place_of_a_mapping_is_answered_with_a_mapping(write_config, setting, example):
    assert example in refusal(write_config(RL), setting)
