"""Runs of mixture-of-experts models: route replay, and the load-balancing loss."""

import base64
import shutil

import numpy as np
import pytest
import torch
from kit.mixtures import save_mixture
from kit.rank_processes import forked
from kit.rl_runs import check_rl, config_of, numbers, save_files, stop_after_step_2
from kit.sft_runs import WITH_CHECKPOINTS, lines, make_config
from safetensors.torch import load_file
from test_reinforce import GAME

from vectorlm.errors import ConfigError
from vectorlm.rl.rollouts.replay import read_rollouts
from vectorlm.runs.config.value import raise_problems
from vectorlm.runs.fine_tuning import finetune
from vectorlm.runs.preflight.settings import setting_problems
from vectorlm.runs.reinforcement import reinforce
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.load import load_model
from vectorlm.train.packing import Rows

BASE = (
    "evaluation.prompts=null",
    "evaluation.rewards=null",
    "train_parameters.checkpointing_enabled=False",
    "engine.dtype=bfloat16",
    "rl.max_steps=2",
    "rl.sampling_params={max_tokens: 40, ignore_eos: True}",
    "rl.rollout.save_tokens=True",
    # The entropy bonus keeps every group in the update.
    "rl.entropy_coef=1.0e-9",
)


def files_of(folder, name):
    save_files(folder)
    for file in ("model.safetensors", "config.json", "generation_config.json"):
        (folder / "model" / file).unlink()
    save_mixture(name, folder / "model")
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return files_of(tmp_path_factory.mktemp("mixture"), "Qwen3-MoE")


def run(files, output, *overrides, world_size=1):
    """Train; return the metrics of all steps."""
    config = config_of(files, output, overrides=[*BASE, *overrides])
    forked(reinforce, config, world_size=world_size)
    return lines(output / "metrics.jsonl")[1:]


@pytest.fixture(scope="module")
def plain(files, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "plain"
    return output, run(files, output)


def routes_of(line):
    written = line["routes"]
    data = base64.b64decode(written["base64"])
    return np.frombuffer(data, np.dtype(written["dtype"]).newbyteorder("<")).reshape(written["shape"])


def own_routes(model, line):
    """Return the experts that the trainer chooses for the tokens of a rollout."""
    ids = torch.tensor([line["prompt_token_ids"] + line["token_ids"]])
    language_model = LanguageModel(model, packs=False)
    with torch.no_grad():
        language_model.logprobs(Rows(ids, torch.ones_like(ids), torch.ones_like(ids) > 0, (0,)))
    return language_model.routers.own_by_row()[0]


@pytest.mark.slow
def test_rollouts_hold_the_routes_and_the_metric_counts_those_that_differ(files, plain):
    output, metrics = plain
    model = load_model(files / "model")
    first = [line for line in lines(output / "rollouts.jsonl") if line["train_step"] == 1]
    differs = []
    for line in first:
        routes, num_tokens = routes_of(line), len(line["prompt_token_ids"]) + len(line["token_ids"])
        assert line["routes"]["dtype"] == "uint8"
        assert routes.shape == (num_tokens - 1, 4, 4)
        own = own_routes(model, line)[: len(routes)]
        differs += (np.sort(own, axis=-1) != np.sort(routes, axis=-1)).any(axis=(1, 2)).tolist()
    assert 0.01 < np.mean(differs) < 0.5
    assert metrics[0]["policy/routes_differ"] == pytest.approx(np.mean(differs), abs=0.003)
    assert all("policy/routes_differ" in line and line["policy/router_aux_loss"] > 0 for line in metrics)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_replay_of_the_engine_narrows_the_gap_that_the_run_measures(files, plain, tmp_path, world_size):
    _, without = plain
    overrides = ["rl.router_replay=engine", "train_parameters.use_activation_checkpointing=True"]
    metrics = run(files, tmp_path / "engine", *overrides, world_size=world_size)
    name = "sampler/logprob_gap_max"
    assert metrics[0][name] < without[0][name] / 3
    # Replaying the routes of a layer does not make the choices of the next layers equal.
    assert 0 < metrics[0]["policy/routes_differ"] < without[0]["policy/routes_differ"]
    assert metrics[0]["policy/ratio_max"] == 1


@pytest.mark.slow
def test_the_old_policy_s_routes_change_no_bit_of_a_single_step(files, plain, tmp_path):
    output, metrics = plain
    found = run(files, tmp_path / "one", "rl.router_replay=old_policy")
    assert [line["policy/loss"] for line in found] == [line["policy/loss"] for line in metrics]
    expected, weights = (
        load_file(path / "final-model/model.safetensors") for path in (output, tmp_path / "one")
    )
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.long
def test_later_steps_keep_the_old_policy_s_routes_on_one_rank_and_two(files, tmp_path):
    # The update's passes have other rows than the pass that recorded the routes.
    several = ("rl.num_epochs=2", "rl.num_mini_batches=2", "rl.max_steps=1", "rl.correction.preset=tis")
    one, two = (
        run(files, tmp_path / f"{size}", "rl.router_replay=old_policy", *several, world_size=size)
        for size in (1, 2)
    )
    free = run(files, tmp_path / "free", *several)
    for name in ("policy/ratio_max", "policy/kl", "policy/routes_differ", "sampler/logprob_gap_max"):
        assert one[0][name] == pytest.approx(two[0][name], rel=0.02)
    assert one[0]["sampler/logprob_gap_max"] == free[0]["sampler/logprob_gap_max"]
    assert one[0]["policy/kl"] != pytest.approx(free[0]["policy/kl"], rel=1e-3)


@pytest.mark.long
def test_turns_in_flight_updates_and_stored_rollouts_keep_their_routes(files, tmp_path):
    (files / "game.py").write_text(GAME)
    played = [
        f"rl.environment={files}/game.py:Vowels",
        "rl.rewards={}",
        "rl.sampling_params={max_tokens: 12, stop: [e, o, x]}",
        "rl.router_replay=engine",
        "rl.async={max_staleness: 1}",
        "rl.max_steps=4",
        "train_parameters.checkpointing_enabled=True",
        "engine.max_num_seqs=2",
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(files, whole, *played)
    for group in read_rollouts(whole / "rollouts.jsonl"):
        for rollout in group:
            num_read = len(rollout.prompt_token_ids) + len(rollout.token_ids) - 1
            assert len(rollout.routes) in (num_read, num_read - 3)  # The last reply was not read.
    # A resumed run trains on the same stored groups.
    config = config_of(files, killed, overrides=[*BASE, *played])
    with pytest.raises(AssertionError, match="died"):
        forked(stop_after_step_2, config, world_size=1)
    forked(reinforce, config, world_size=1)
    assert len(numbers(killed)) == len(numbers(whole))
    stored = [f"rl.rollout={{source: file, path: {whole}/rollouts.jsonl}}", "rl.router_replay=engine"]
    metrics = run(
        files, tmp_path / "stored", *stored, "rl.rewards={}", f"rl.environment={files}/game.py:Vowels"
    )
    assert all("policy/routes_differ" in line for line in metrics)


def refusals(files, *overrides):
    config = config_of(files, files / "out", overrides=[*BASE, *overrides])
    try:
        check_rl(config)
        raise_problems([*setting_problems(config, 1)])
    except ConfigError as error:
        return str(error)
    return ""


def test_preflight_refuses_what_cannot_replay_or_balance(files, tmp_path):
    (tmp_path / "dense").mkdir()
    dense = save_files(tmp_path / "dense")
    assert "rl.router_replay" not in refusals(files, "rl.router_replay=engine")
    assert "rl.router_replay='old_policy'" in refusals(dense, "rl.router_replay=old_policy")
    assert "rl.router_replay='engine'" in refusals(
        files, "rl.router_replay=engine", "engine.inference=server"
    )
    without = ("rl.router_replay=engine", "engine.enable_return_routed_experts=False")
    assert "engine.enable_return_routed_experts=False" in refusals(files, *without)
    coef = "train_parameters.router_aux_loss_coef=0.1"
    assert "router_aux_loss_coef=0.1" in refusals(dense, coef)
    assert "router_aux_loss_coef" not in refusals(files, coef)


@pytest.mark.slow
def test_stored_rollouts_without_routes_are_refused_before_the_run(files, plain, tmp_path):
    output, _ = plain
    text = (output / "rollouts.jsonl").read_text().replace('"routes"', '"others"', 1)
    (tmp_path / "rollouts.jsonl").write_text(text)
    stored = f"rl.rollout={{source: file, path: {tmp_path}/rollouts.jsonl}}"
    with pytest.raises(AssertionError, match="router_replay"):
        run(files, tmp_path / "run", stored, "rl.router_replay=engine")


@pytest.mark.slow
def test_fine_tuning_balances_the_experts_alike_on_one_rank_and_two(inputs, tmp_path):
    folder = shutil.copytree(inputs, tmp_path / "inputs")
    for file in ("model.safetensors", "config.json"):
        (folder / "model" / file).unlink()
    save_mixture("Qwen3-MoE", folder / "model")
    found = {}
    for name, size, settings in (
        ("measured", 1, {}),
        ("one", 1, {"router_aux_loss_coef": 1.0, "gradient_accumulation_steps": 2}),
        ("two", 2, {"router_aux_loss_coef": 1.0}),
    ):
        config = make_config(folder, tmp_path / name, WITH_CHECKPOINTS, **settings)
        forked(finetune, config, world_size=size)
        found[name] = [line["train/router_aux_loss"] for line in lines(tmp_path / name / "metrics.jsonl")[1:]]
    assert found["one"] == pytest.approx(found["two"], rel=1e-4)
    assert found["one"][-1] < found["measured"][-1] - 0.1
