"""Runs in exact mode: engine and trainer have the same bits under all settings, or the run stops."""

import json
import math

import pytest
import torch
from kit.rank_processes import forked
from kit.rl_runs import config_of, lines, save_files
from test_reinforce import GAME, TWO_WAYS

from vectorlm.errors import ConfigError, ExactnessError
from vectorlm.runs.preflight.checked import preflight
from vectorlm.runs.reinforcement import reinforce

EXACT = [
    "train_parameters.exact=True",
    "rl.max_steps=2",
    "evaluation.prompts=null",
    "evaluation.rewards=null",
]
LORA = "{r: 4, target_modules: [q_proj, v_proj, down_proj]}"
MODES = {
    "two ranks": (2, ["rl.max_steps=3"]),
    "two engines": (2, ["engine.data_parallel_size=2"]),
    "mini-batches": (1, ["rl.num_mini_batches=2", "rl.num_epochs=2"]),
    "LoRA": (2, [f"train_parameters.lora_peft_config={LORA}", "rl.kl_coef=0.1", "rl.max_steps=3"]),
    "cut sampling": (
        1,
        ["rl.sampling_params={max_tokens: 8, temperature: 0.8, top_p: 0.9, top_k: 30, min_p: 0.02}"],
    ),
    "grammar": (1, ["rl.sampling_params={max_tokens: 8, structured_outputs: {regex: '[b-k]{2,5}'}}"]),
    "padded": (1, ["train_parameters.pack_rows=False"]),
    "recomputed": (2, ["train_parameters.use_activation_checkpointing=True", "rl.correction.preset=tis"]),
    "cached prompts": (1, ["engine.max_num_batched_tokens=64", "engine.max_num_seqs=8"]),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return save_files(tmp_path_factory.mktemp("exact"))


def exact_of(files, output, overrides=()):
    rewards = f"rl.rewards={{'{files}/rewards.py:vowels': 1.0}}"
    return config_of(files, output, overrides=[*EXACT, rewards, *overrides])


def gaps(output):
    return [
        line[f"sampler/logprob_gap_{kind}"]
        for line in lines(output / "metrics.jsonl")[1:]
        for kind in ("max", "mean")
    ]


@pytest.fixture(scope="module")
def plain(files, tmp_path_factory):
    """Return the folder of a run on one rank that keeps its rollouts."""
    output = tmp_path_factory.mktemp("plain") / "plain"
    overrides = ["rl.rollout.save_tokens=True"]
    forked(reinforce, exact_of(files, output, overrides=overrides), world_size=1)
    return output


@pytest.mark.slow
def test_no_log_probability_differs_by_one_bit(plain):
    assert gaps(plain) == [0.0] * 4
    metrics = lines(plain / "metrics.jsonl")[1:]
    assert [line["policy/ratio_max"] for line in metrics] == [1.0, 1.0]
    assert all(line["policy/grad_norm"] > 0 for line in metrics)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_runs_are_exact_in_every_mode(files, tmp_path, mode, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "1")
    world_size, overrides = MODES[mode]
    forked(reinforce, exact_of(files, tmp_path / "run", overrides=overrides), world_size=world_size)
    found = gaps(tmp_path / "run")
    assert len(found) >= 4
    assert set(found) == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize("game", ["environment", "agent"])
def test_turns_and_branches_are_exact(files, tmp_path, game):
    (tmp_path / "game.py").write_text(GAME if game == "environment" else TWO_WAYS)
    name = f"{tmp_path}/game.py:Vowels" if game == "environment" else f"openai:{tmp_path}/game.py:agent"
    overrides = [f"rl.environment={name}"]
    forked(reinforce, exact_of(files, tmp_path / "run", overrides=overrides), world_size=1)
    assert set(gaps(tmp_path / "run")) == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize(("mini_batches", "world_size"), [(1, 1), (4, 1), (1, 2)])
def test_a_stored_log_probability_with_another_last_bit_stops_the_run(
    files, plain, tmp_path, mini_batches, world_size
):
    rows = [row for row in lines(plain / "rollouts.jsonl") if row["train_step"] == 1]
    changed = rows[-1]["sampler_logprobs"]
    wrong = float(torch.nextafter(torch.tensor(changed[2]), torch.tensor(-math.inf)))
    overrides = [
        "rl.rollout.source=file",
        f"rl.rollout.path={tmp_path}/rollouts.jsonl",
        "rl.max_steps=1",
        f"rl.num_mini_batches={mini_batches}",
    ]

    def train(output):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "rollouts.jsonl").write_text(text)
        forked(reinforce, exact_of(files, tmp_path / output, overrides=overrides), world_size=world_size)

    train("again")
    assert gaps(tmp_path / "again") == [0.0, 0.0]
    right, changed[2] = changed[2], wrong
    with pytest.raises(Exception, match="exact") as raised:
        train("wrong")
    assert "ExactnessError" in str(raised.value) or isinstance(raised.value, ExactnessError)
    for part in (repr(rows[-1]["prompt"])[1:-1], "position 2", f"{right:.8e}", f"{wrong:.8e}"):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("train_parameters.dtype", "bfloat16"),
        ("train_parameters.use_mp", "True"),
        ("train_parameters.compile", "True"),
        ("engine.receiver", "packed"),
        ("engine.inference", "transformers"),
        ("engine.dtype", "bfloat16"),
        ("engine.block_size", "64"),
        ("engine.tensor_parallel_size", "1"),
        ("rl.async.max_staleness", "1"),
    ],
)
def test_the_check_refuses_settings_that_are_not_exact(files, tmp_path, setting, value):
    config = exact_of(files, tmp_path / "run", overrides=[f"{setting}={value}"])
    with pytest.raises(ConfigError, match="exact") as refused:
        preflight(config, 1)
    assert setting in str(refused.value)


@pytest.mark.parametrize(
    "parameter",
    ["top_p: 0.9", "top_k: 5", "bad_words: ['a']", "min_tokens: 2", "structured_outputs: {regex: 'b'}"],
)
def test_the_check_refuses_exact_losses_of_all_tokens_if_the_engine_truncates(files, tmp_path, parameter):
    overrides = [f"rl.sampling_params={{max_tokens: 8, temperature: 0.8, {parameter}}}"]
    config = exact_of(files, tmp_path / "run", overrides=[*overrides, "rl.algorithm=best_of_k"])
    with pytest.raises(ConfigError, match="exact") as refused:
        preflight(config, 1)
    assert f"rl.sampling_params.{parameter.partition(':')[0]}" in str(refused.value)
    if parameter[:3] == "top":
        preflight(exact_of(files, tmp_path / "run", overrides=overrides), 1)


def test_the_check_refuses_other_families_and_takes_auto_for_live(files, tmp_path):
    config = exact_of(files, tmp_path / "run")
    assert config.engine.receiver == "live"
    preflight(config, 2)
    overrides = ["rl.algorithm=best_of_k", "rl.sampling_params={max_tokens: 8, temperature: 0.8, top_p: 1.0}"]
    preflight(exact_of(files, tmp_path / "run", overrides=overrides), 1)
    description = json.loads((files / "model/config.json").read_text())
    other = tmp_path / "model"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(description | {"model_type": "qwen2_moe"}))
    with pytest.raises(ConfigError, match="exact needs a model of one of the families"):
        preflight(exact_of(files, tmp_path / "other", overrides=[f"model={other}"]), 1)
