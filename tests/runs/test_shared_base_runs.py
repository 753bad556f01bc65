"""Runs whose trainer and engine share one base in memory, compared with runs that have two."""

import contextlib
import io

import pytest
import torch.distributed.checkpoint as dcp
from kit.rank_processes import forked, save_tiny_llama
from kit.rl_runs import ONE_AT_A_TIME, config_of, cut_after_step_2, lines, numbers, save_files
from kit.sft_runs import are_equal
from kit.tiny_engine import TINY_ENGINE
from safetensors.torch import load_file, save_file

from vectorlm.runs.reinforcement import reinforce
from vectorlm.sampling.engine import SamplingEngine

LORA = [
    "train_parameters.lora_peft_config={r: 4, target_modules: [q_proj, v_proj, down_proj]}",
    "train_parameters.optimizer.lr=0.02",
    "rl.kl_coef=0.1",
    *ONE_AT_A_TIME,
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    files = save_files(tmp_path_factory.mktemp("shared"))
    save_tiny_llama(files / "model", hidden_size=64, tied=True)
    return files


def reinforce_and_listen(config, folder=None):
    """Train, with an engine of the model in `folder` if given; return the printed text."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        if folder is None:
            reinforce(config)
        else:
            with SamplingEngine(folder, **{**TINY_ENGINE, **config.engine_arguments(False)}) as engine:
                reinforce(config, engine=engine)
    return said.getvalue()


def train(files, output, share, *overrides, world_size=2):
    rewards = "{" + ", ".join(f"'{files}/rewards.py:{name}': 1.0" for name in ("letters", "vowels")) + "}"
    given = [*LORA, f"rl.rewards={rewards}", f"train_parameters.share_base={share}", *overrides]
    said, *_ = forked(reinforce_and_listen, config_of(files, output, overrides=given), world_size=world_size)
    assert ("in memory twice" if share == "false" else "of the base are in memory once") in said
    return output


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """Return the folder of a run on two ranks that share the base with their engine."""
    return train(files, tmp_path_factory.mktemp("whole") / "run", "true")


def require_equal_runs(some, others):
    adapters = (load_file(run / "final-model" / "adapter_model.safetensors") for run in (some, others))
    assert are_equal(*adapters)
    assert numbers(some) == numbers(others)
    assert lines(some / "rollouts.jsonl") == lines(others / "rollouts.jsonl")
    assert sum(line.get("policy/grad_norm", 0.0) > 0 for line in numbers(some)) > 1, "nothing was trained"


@pytest.mark.slow
def test_a_run_with_one_base_is_bit_for_bit_the_run_with_two(files, whole, tmp_path):
    require_equal_runs(whole, train(files, tmp_path / "apart", "false"))


@pytest.mark.slow
def test_a_killed_run_goes_on_with_one_base_and_its_checkpoints_hold_adapters_alone(files, whole, tmp_path):
    (path, *_) = whole.glob("checkpoints/step-*")
    names = dcp.FileSystemReader(path / "shards").read_metadata().state_dict_metadata
    assert all("lora_" in name for name in names if name.startswith("policy.model"))
    cut_after_step_2(whole, tmp_path / "cut")
    require_equal_runs(whole, train(files, tmp_path / "cut", "null"))


@pytest.mark.slow
def test_handles_of_parameters_and_updates_in_flight_work_as_well(files, tmp_path):
    pulled = ["engine.transport=pull", "engine.receiver=packed"]
    alone = train(files, tmp_path / "alone", "true", *pulled, world_size=1)
    require_equal_runs(alone, train(files, tmp_path / "apart", "false", *pulled, world_size=1))
    overlap = "rl.async={max_staleness: 1, placement: shared}"
    train(files, tmp_path / "overlap", "true", overlap, world_size=1)


@pytest.mark.parametrize("share", ["true", pytest.param("null", marks=pytest.mark.slow)])
def test_an_engine_with_other_weights_is_refused_or_leaves_two_bases(files, tmp_path, share):
    other = save_tiny_llama(tmp_path / "other", hidden_size=64, tied=True)
    tensors = load_file(other / "model.safetensors")
    save_file(
        {name: tensor * 2 for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"}
    )
    overrides = [*LORA, "rl.max_steps=1", f"train_parameters.share_base={share}"]
    config = config_of(files, tmp_path / "run", overrides=overrides)
    if share == "true":
        with pytest.raises(AssertionError, match=r"ConfigError: .*share_base=true"):
            forked(reinforce_and_listen, config, other, world_size=1)
    else:
        (said,) = forked(reinforce_and_listen, config, other, world_size=1)
        assert "share_base: the base is in memory twice" in said
