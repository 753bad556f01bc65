"""Whole runs from Python: functions, lists and settings by keyword."""

import pytest
from rank_processes import save_tiny_llama

import vectorlm
from vectorlm.config import load_config
from vectorlm.config.load import config_from_keywords
from vectorlm.errors import ConfigError

ENGINE = {"max_model_len": 64, "kv_cache_memory_bytes": 16 << 20}
FEW = {
    "max_seq_len": 64,
    "max_steps": 2,
    "prompts_per_step": 2,
    "group_size": 4,
    "sampling_params": {"max_tokens": 8},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("calls") / "model", hidden_size=64)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_functions_and_lists_are_trained_on(folder, tmp_path, monkeypatch, world_size):
    monkeypatch.chdir(tmp_path)
    bonus = 0.25

    def vowels(completion, wanted):
        return bonus + completion.count(wanted) / 8

    prompts = [{"prompt": letter * 3, "wanted": letter} for letter in "aeiou"]
    run = vectorlm.reinforce(
        folder, prompts, [vowels, lambda text: 0.0], world_size=world_size, lr=1e-3, **FEW, engine=ENGINE
    )
    means = [line["reward/vowels/mean"] for line in _lines(run.metrics) if line["step"]]
    assert len(means) == 2
    assert min(means) >= bonus
    assert {line["prompt"][0] for line in _lines(run.rollouts)} <= set("aeiou")
    config = load_config(run.output_dir / "config.yaml")
    assert config.train_parameters.optimizer.lr == 1e-3
    assert sorted(name.rpartition(":")[2] for name in config.rl.reward.rewards) == ["reward_1", "vowels"]
    with vectorlm.HFEngine(str(run.model), dtype="float32") as engine:
        assert len(engine.sample(["aaa"], {"max_tokens": 2})) == 1
    # What is finished stays as it is.
    again = vectorlm.reinforce(
        folder, prompts, [vowels], output_dir=run.output_dir, world_size=world_size, **FEW, engine=ENGINE
    )
    assert _lines(again.metrics)[-1]["step"] == 2


def _lines(table):
    return table if isinstance(table, list) else table.to_dict("records")


def test_texts_in_memory_are_learned(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"text": letter * 20} for letter in "abcdefghijklmnopqrst"]
    run = vectorlm.finetune(folder, rows, max_seq_len=32, epochs=2, train_bs=4, logging_steps=1)
    losses = [line["train/loss"] for line in _lines(run.metrics) if line["step"]]
    assert losses[-1] < losses[0]
    assert (run.model / "model.safetensors").is_file()
    with pytest.raises(ConfigError, match="eval_dataset is missing"):
        vectorlm.finetune(folder, "rows.jsonl", max_seq_len=32)


def test_keywords_are_the_settings_of_a_config():
    config = config_from_keywords(
        {"model": "m", "prompts": ["a"], "rewards": {"countdown": 1}, "algorithm": "grpo", "seed": 3, "lr": 0.5,
         "max_steps": 4, "prompts_per_step": 2,
         "max_seq_len": 32, "output_dir": "o", "clip_high": 0.4, "train_parameters": {"epochs": 2},
         "sampling_params": {"max_tokens": 3}, "engine": {"max_model_len": 9}},
        "rl",
    )  # fmt: skip
    train, rl = config.train_parameters, config.rl
    assert (train.seed, train.optimizer.lr, train.loop.epochs, train.max_seq_len) == (3, 0.5, 2, 32)
    assert (rl.max_steps, rl.collect.prompts, rl.collect.sampling_params) == (4, ("a",), {"max_tokens": 3})
    assert rl.hyperparameters.clip_high == 0.4
    assert train.sampler.engine.engine_args == {"max_model_len": 9}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_generations": 4}, "rl.group_size"),
        ({"group_sise": 4}, "Did you mean 'rl.group_size'"),
        ({"max_steps": "ten"}, "rl.max_steps"),
    ],
)
def test_what_is_wrong_is_said_as_of_a_file(folder, tmp_path, monkeypatch, wrong, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        vectorlm.reinforce(folder, ["a"], len, **{**FEW, **wrong})
    with pytest.raises(ConfigError, match="a reward is a int"):
        vectorlm.reinforce(folder, ["a"], [3], **FEW)
