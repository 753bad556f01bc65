"""Accelerate's environment variables: they become settings, or contradict a config."""

import pytest
from kit.config_texts import MINIMAL

from vectorlm.errors import ConfigError
from vectorlm.runs.config.load import load_config
from vectorlm.runs.preflight.accelerate import accelerate_overrides

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_MIXED_PRECISION": "no",
    "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "RANK": "0",
}


@pytest.fixture
def config(write_config):
    path = write_config(MINIMAL)
    return lambda *overrides: load_config(path, [f"train_parameters.{change}" for change in overrides])


def test_settings_that_the_config_leaves_out_are_accelerate_s(config, write_config):
    overrides = accelerate_overrides(config(), FSDP, 1)
    model = load_config("my.yaml", overrides).train_parameters.model
    assert (model.sharding_strategy, model.use_activation_checkpointing) == ("SHARD_GRAD_OP", True)
    assert (model.cpu_offload, model.use_mp) == (False, None)


def test_equal_settings_agree_and_others_are_refused_with_both_names(config):
    both = config("sharding_strategy=SHARD_GRAD_OP", "cpu_offload=false", "use_activation_checkpointing=true")
    assert accelerate_overrides(both, FSDP, 1) == []
    with pytest.raises(ConfigError, match="FSDP_SHARDING_STRATEGY=SHARD_GRAD_OP") as caught:
        accelerate_overrides(config("sharding_strategy=NO_SHARD", "cpu_offload=true"), FSDP, 1)
    assert "2 problems" in str(caught.value)
    assert "train_parameters.cpu_offload=true (--set train_parameters.cpu_offload=true)" in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "strategy"),
    [
        ({"FSDP_SHARDING_STRATEGY": "3"}, "NO_SHARD"),
        ({"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}, "SHARD_GRAD_OP"),
        ({"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}, "FULL_SHARD"),
    ],
)
def test_both_versions_of_its_fsdp_name_a_strategy(config, variables, strategy):
    (found,) = [text for text in accelerate_overrides(config(), FSDP | variables, 1) if "strategy" in text]
    assert found == f"train_parameters.sharding_strategy='{strategy}'"


def test_fsdp2_says_nothing_of_shards_within_a_node(config):
    variables = FSDP | {"FSDP_VERSION": "2"}
    hybrid = config("sharding_strategy=HYBRID_SHARD")
    assert [text for text in accelerate_overrides(hybrid, variables, 1) if "strategy" in text] == []


def test_mixed_precision_is_honoured_where_it_was_chosen(config):
    bf16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert accelerate_overrides(config(), bf16, 1) == ["train_parameters.use_mp=true"]
    assert accelerate_overrides(config("use_mp=true"), bf16, 1) == []
    with pytest.raises(ConfigError, match=r"train_parameters.use_mp=false .*ACCELERATE_MIXED"):
        accelerate_overrides(config("use_mp=false"), bf16, 1)


@pytest.mark.parametrize(
    "variables",
    [
        {"ACCELERATE_USE_DEEPSPEED": "true"},
        {"ACCELERATE_MIXED_PRECISION": "fp16"},
        {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"},
        {"FSDP_IGNORED_MODULES": "lm_head"},
        {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD_ZERO2"},
    ],
)
def test_what_there_is_not_here_is_refused_by_its_name(config, variables):
    (name,) = variables
    with pytest.raises(ConfigError, match=name):
        accelerate_overrides(config(), FSDP | variables, 1)


def test_processes_that_accelerate_did_not_start_are_noticed(config):
    on_cpu = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}
    with pytest.raises(ConfigError, match="--world_size"):
        accelerate_overrides(config(), on_cpu, 1)
    assert accelerate_overrides(config(), on_cpu, 2) == []


def test_without_accelerate_its_variables_mean_nothing(config):
    assert accelerate_overrides(config(), {"FSDP_OFFLOAD_PARAMS": "true", "MASTER_ADDR": "a"}, 1) == []
