"""Whole runs that keep the best checkpoint, the last ones and a model of each epoch, and runs that stop early."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from kit.rank_processes import on_ranks, save_tiny_llama
from kit.sft_runs import WITH_CHECKPOINTS, are_equal, lines, make_config, weights_of

from vectorlm import FakeEngine
from vectorlm.cli import main
from vectorlm.errors import CheckpointError, RewardError, RolloutError
from vectorlm.ranks import launcher
from vectorlm.runs.config.load import load_config
from vectorlm.runs.fine_tuning import finetune
from vectorlm.runs.preflight.resume import find_resumption, say_finished
from vectorlm.runs.reinforcement import reinforce
from vectorlm.train.loop import FineTuningLoop

LOSSES = (9.0, 3.0, 1.0, 2.0, 0.5, 2.5, 2.0, 1.5, 1.0, 1.0, 1.0, 1.0, 1.0)
"""Losses of a run's evaluations; the best one is in the middle."""


# Dropout makes the weights depend on every rank's random generator.
TINY_LLAMA = {"dropout": 0.2}


def config_of(inputs, output, **changes):
    return make_config(inputs, output, WITH_CHECKPOINTS, **{"epochs": 2, **changes})


def train(topology, config, dies_at=None):
    """Train with the losses above; kill rank 0 during step `dies_at`."""
    optimize = FineTuningLoop.optimize

    def optimize_or_die(loop, micro_batches):
        if loop.step + 1 == dies_at and topology.is_main:
            os.kill(os.getpid(), signal.SIGKILL)
        return optimize(loop, micro_batches)

    FineTuningLoop.optimize = optimize_or_die
    FineTuningLoop.held_out_losses = lambda loop: {"eval/loss": LOSSES[loop.step]}
    finetune(config, topology)


def metrics_of(output):
    exact = ("step", "train/loss", "train/grad_norm", "eval/loss", "eval/stopped_early")
    return [{name: line[name] for name in exact if name in line} for line in lines(output / "metrics.jsonl")]


def steps_of(output):
    return sorted(int(path.name[-8:]) for path in (output / "checkpoints").iterdir())


def exported(output, step, folder):
    assert main(["export", str(output / f"checkpoints/step-{step:08d}"), "--output", str(folder)]) == 0
    return weights_of(folder)


KEEPS = {
    "keep_best": True,
    "final_model": "best",
    "early_stopping_patience": 3,
    "epoch_models": True,
    "epochs": 4,
}


@pytest.mark.slow
def test_a_run_stops_early_ends_with_its_best_model_and_when_killed_ends_the_same(inputs, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    on_ranks(2, train, config_of(inputs, whole, **KEEPS))
    # The evaluations after steps 5, 6 and 7 are no better than the evaluation after step 4.
    metrics = metrics_of(whole)
    assert [line["step"] for line in metrics] == list(range(8))
    assert [line.get("eval/stopped_early") for line in metrics] == [None, *6 * [0.0], 1.0]
    assert steps_of(whole) == [4, 6, 7]
    best, last = (exported(whole, step, tmp_path / f"of-{step}") for step in (4, 7))
    assert are_equal(weights_of(whole / "final-model"), best)
    assert not are_equal(best, last)

    config = config_of(inputs, cut, **KEEPS)
    assert on_ranks(2, train, config, 7, check=False)[0] is None
    assert not (cut / "final-model").exists()
    on_ranks(2, train, config)
    assert metrics_of(cut) == metrics
    assert steps_of(cut) == [4, 6, 7]
    assert are_equal(weights_of(cut / "final-model"), best)
    assert are_equal(exported(cut, 7, tmp_path / "of-7-again"), last)


def test_a_run_that_stopped_early_is_finished_until_it_may_be_more_patient(inputs, tmp_path):
    output = tmp_path / "run"
    on_ranks(1, train, config_of(inputs, output, early_stopping_patience=1))
    assert [line["step"] for line in metrics_of(output)] == [0, 1, 2, 3]
    other = {"best_metric": "eval/perplexity", "best_metric_mode": "max"}
    for changes, is_finished in (
        *(({}, True), ({"epochs": 3}, True), (other, False)),
        ({"early_stopping_patience": 3}, False),
    ):
        config = config_of(inputs, output, **{"early_stopping_patience": 1, **changes})
        found = find_resumption(config, 1)
        assert (found.step, found.is_finished) == (3, is_finished), changes
    assert "train_parameters.early_stopping_patience" in say_finished(config, found)
    on_ranks(1, train, config)
    assert [line["step"] for line in metrics_of(output)] == list(range(8))


@pytest.mark.slow
def test_each_epoch_ends_with_a_model(inputs, tmp_path):
    output = tmp_path / "run"
    changes = {"keep_checkpoints": 9, "save_frequency": 1, "gradient_accumulation_steps": 2}
    on_ranks(1, train, config_of(inputs, output, epoch_models=True, **changes))
    assert steps_of(output) == [3, 6]
    for epoch in (1, 2):
        found = weights_of(output / f"epoch-{epoch}-model")
        assert are_equal(found, exported(output, 3 * epoch, tmp_path / f"of-{epoch}"))
        assert f"step: {3 * epoch}\n" in (output / f"epoch-{epoch}-model" / "README.md").read_text()
    assert are_equal(found, weights_of(output / "final-model"))


@pytest.mark.slow
@pytest.mark.parametrize(("frequency", "num_kept", "steps"), [(0.34, 9, [1, 2, 3, 4, 5, 6]), (2, 2, [4, 6])])
def test_checkpoints_come_at_a_share_of_an_epoch_or_every_n_steps(
    inputs, tmp_path, frequency, num_kept, steps
):
    output = tmp_path / "run"
    # One rank has 21 rows in batches of eight, and an epoch has three steps.
    changes = {"save_frequency": frequency, "keep_checkpoints": num_kept, "gradient_accumulation_steps": 2}
    on_ranks(1, train, config_of(inputs, output, **changes))
    assert steps_of(output) == steps


RL = """
model: {inputs}/model
train_parameters:
  output_dir: {output}
  max_seq_len: 64
  optimizer: {{lr: 1.0e-3}}
  lr_scheduler_type: constant
  checkpointing_enabled: True
  keep_best: True
  final_model: best
  early_stopping_patience: 2
  sampler:
    {{sample_frequency: 1, prompts: [abc], reward: "{inputs}/rewards.py:right", sampling_params: {{max_tokens: 4}}}}
rl:
  algorithm: grpo
  max_steps: 9
  prompts: [abc, bcd, cde, def]
  prompts_per_step: 2
  group_size: 2
  sampling_params: {{max_tokens: 8}}
  rewards: {{"{inputs}/rewards.py:right": 1.0}}
  reward_workers: 0
"""
RIGHT = """
def right(completion, prompt):
    return float("x" in completion)
"""


def answer(prompt, version):
    """Return a right answer only with the weights of step 2."""
    return "xy" if version == 2 else "ab"


def by_rewards(inputs, output, *changes):
    (inputs / "rewards.py").write_text(RIGHT)
    save_tiny_llama(inputs / "model-of-bytes", vocab_size=128)
    path = Path(f"{output}.yaml")
    path.write_text(RL.format(inputs=inputs, output=output))
    config = load_config(path, [f"model={inputs}/model-of-bytes", *changes])
    with FakeEngine(answer, sampling_params={"max_tokens": 4}) as engine:
        reinforce(config, engine=engine)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["rl.async=null", "rl.async={max_staleness: 1}"])
def test_reinforcement_learning_keeps_the_most_accurate_model_and_stops_when_it_gets_no_better(
    inputs, tmp_path, overlap
):
    output = tmp_path / "run"
    config = by_rewards(inputs, output, overlap)
    assert [line["step"] for line in metrics_of(output)] == [0, 1, 2, 3, 4]
    assert steps_of(output) == [2, 4]
    best = exported(output, 2, tmp_path / "of-2")
    assert are_equal(weights_of(output / "final-model"), best)
    assert "| `eval/accuracy` | 1 | 2 |" in (output / "final-model" / "README.md").read_text()
    assert find_resumption(config, 1).is_finished


def test_a_run_without_a_single_reward_writes_its_model_and_fails(inputs, tmp_path):
    (inputs / "mute.py").write_text("def none(text):\n    return None\n")
    mute = f"rl.rewards={{'{inputs}/mute.py:none': 1.0}}"
    with pytest.raises(RewardError, match="final-model"):
        by_rewards(inputs, tmp_path / "run", mute, "rl.max_steps=2")
    assert (tmp_path / "run" / "final-model" / "model.safetensors").is_file()


def test_a_run_whose_reward_returns_nothing_ends_after_three_steps(inputs, tmp_path):
    """A run that is resumed in between ends after the same step."""
    output = tmp_path / "run"
    (inputs / "forgetful.py").write_text("def forgot(text):\n    text.count('x')\n")
    mute = (f"rl.rewards={{'{inputs}/forgetful.py:forgot': 1.0}}", "rl.save_every=1")
    for _ in ("from the start", "from the checkpoint of step 2"):
        with pytest.raises(RewardError, match="'forgot'"):
            by_rewards(inputs, output, *mute)
        assert [line["step"] for line in metrics_of(output)] == [0, 1, 2, 3]
        assert steps_of(output) == [1, 2]
    assert not (output / "final-model").exists()


@pytest.mark.parametrize("body", ["1.0 if 'b' in prompt else None", "1 / 0"])
def test_a_run_with_some_rewards_or_failing_calls_goes_on(inputs, tmp_path, body):
    # The file is not in `inputs`, because this process caches modules by path and the ranks are forked from it.
    (tmp_path / "some.py").write_text(f"def some(text, prompt):\n    return {body}\n")
    some = (f"rl.rewards={{'{tmp_path}/some.py:some': 1.0}}", "rl.on_reward_error=skip", "rl.max_steps=4")
    if "/" in body:
        some += (f"train_parameters.sampler.reward={tmp_path}/some.py:some",)
        with pytest.raises(RewardError, match="failed"):
            by_rewards(inputs, tmp_path / "run", *some)
    else:
        by_rewards(inputs, tmp_path / "run", *some)
    last = lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (last["step"], last.get("eval/errors")) == (4, 1 if "/" in body else None)


MUTE_AGENT = """
import json
import urllib.request

def mute(url, key, row):
    body = json.dumps({"model": "policy", "prompt": row["prompt"]}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{url}/completions", body, {"Authorization": f"Bearer {key}"}))
"""


@pytest.mark.slow
def test_an_agent_that_returns_no_reward_is_named_unless_a_function_scores_its_rollouts(inputs, tmp_path):
    (inputs / "agent.py").write_text(MUTE_AGENT)
    by_agent = (f"rl.environment=openai:{inputs}/agent.py:mute", "rl.max_steps=1")
    with pytest.raises(RolloutError, match=r"agent.py:mute' returned no reward"):
        by_rewards(inputs, tmp_path / "run", *by_agent, "rl.rewards={}")
    by_rewards(inputs, tmp_path / "scored", *by_agent)


def test_one_of_two_rewards_that_returns_nothing_is_named(inputs, tmp_path, capsys):
    (inputs / "forgetful.py").write_text("def forgot(text):\n    text.count('x')\n")
    both = f"rl.rewards={{'{inputs}/forgetful.py:forgot': 1.0, '{inputs}/rewards.py:right': 1.0}}"
    by_rewards(inputs, tmp_path / "run", both, "rl.max_steps=4")
    assert "'forgot'" in "".join(capsys.readouterr())


def test_a_resumed_rest_without_a_reward_does_not_say_that_the_run_learned_nothing(inputs, tmp_path):
    by_rewards(inputs, tmp_path / "run", "rl.max_steps=2", "rl.save_every=1")
    for gone in ("checkpoints/step-00000002", "final-model"):
        shutil.rmtree(tmp_path / "run" / gone)
    (inputs / "mute.py").write_text("def none(text):\n    return None\n")
    mute = f"rl.rewards={{'{inputs}/mute.py:none': 1.0}}"
    by_rewards(inputs, tmp_path / "run", mute, "rl.max_steps=2", "rl.save_every=1")
    assert "reward/mean" not in metrics_of(tmp_path / "run")[-1]
    assert (tmp_path / "run" / "final-model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_best_checkpoint_that_was_deleted_is_named_and_the_last_weights_are_exported_instead(
    inputs, tmp_path
):
    output = tmp_path / "run"
    by_rewards(inputs, output)
    for gone in ("checkpoints/step-00000002", "final-model"):
        shutil.rmtree(output / gone)
    # Make it look as if the run had been killed before it exported its model.
    (output / "checkpoints/step-00000004/finished").unlink()
    with pytest.raises(CheckpointError, match=r"final_model='best'.*step-00000002"):
        by_rewards(inputs, output)
    by_rewards(inputs, output, "train_parameters.final_model=last")
    assert are_equal(weights_of(output / "final-model"), exported(output, 4, tmp_path / "of-4"))


@pytest.mark.slow
def test_the_last_step_of_a_run_that_ended_with_its_best_model_is_made_again_as_it_was(
    inputs, tmp_path, capsys, monkeypatch
):
    output = tmp_path / "run"
    # In step 3 all rewards are equal; without a baseline it moves the weights all the same.
    by_rewards(inputs, output, "rl.algorithm=reinforce", "rl.rollout.save_tokens=True")
    assert not are_equal(weights_of(output / "final-model"), exported(output, 4, tmp_path / "of-4"))
    monkeypatch.setattr(launcher, "launch", lambda fn, *args, world_size: [fn(*args)])
    assert main(["replay", str(output), "--step", "4"]) == 0
    assert "  weights              as logged" in capsys.readouterr().out
