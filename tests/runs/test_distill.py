"""Whole runs that learn from a teacher, with vLLM."""

import json

import pytest
import torch
from kit.rank_processes import forked, save_tiny_llama
from kit.rl_runs import config_of, is_documented, lines, save_files

from vectorlm.runs.reinforcement import reinforce
from vectorlm.train.load import load_model


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder with a student, and a teacher of another size with padded embeddings."""
    folder = save_files(tmp_path_factory.mktemp("distill"))
    torch.manual_seed(1)
    teacher = save_tiny_llama(folder / "teacher", hidden_size=128, vocab_size=64)
    model = load_model(teacher)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    model.save_pretrained(teacher)
    return folder


@pytest.mark.slow
def test_a_run_without_rewards_comes_nearer_to_its_teacher(files, tmp_path):
    overrides = [
        f"rl.teacher={{model: {files}/teacher}}",
        "rl.rewards={}",
        "rl.group_size=1",
        "rl.prompts_per_step=16",
        "rl.max_steps=10",
        "train_parameters.optimizer.lr=3.0e-3",
    ]
    config = config_of(files, tmp_path / "alone", "on_policy_distillation", overrides)
    forked(reinforce, config)
    metrics = lines(tmp_path / "alone" / "metrics.jsonl")
    names = {name for line in metrics for name in line if name != "step"}
    assert [name for name in sorted(names) if not is_documented(name)] == []
    divergences = [line["teacher/kl"] for line in metrics[1:]]
    assert sum(divergences[-3:]) < 0.8 * sum(divergences[:3])
    rollouts = lines(tmp_path / "alone" / "rollouts.jsonl")
    assert any(abs(row["advantage"]) > 0.1 for row in rollouts)
    assert {row["reward"] for row in rollouts} == {0.0}


@pytest.mark.slow
def test_adapters_learn_from_rewards_and_a_teacher_while_the_engine_samples(files, tmp_path):
    overrides = [
        f"rl.teacher={{model: {files}/teacher, kind: full, beta: 0.5, coef: 2.0}}",
        "rl.async={max_staleness: 1}",
        "rl.max_steps=8",
        "rl.sampling_params={max_tokens: 8, temperature: 0.8}",
        "train_parameters.optimizer.lr=1.0e-2",
        "train_parameters.lora_peft_config={r: 8, target_modules: [q_proj, v_proj, up_proj, down_proj]}",
        "engine.lora_mode=merged",
    ]
    config = config_of(files, tmp_path / "beside", "grpo", overrides)
    reinforce(config)
    metrics = lines(tmp_path / "beside" / "metrics.jsonl")[1:]
    names = {name for line in metrics for name in line if name != "step"}
    assert [name for name in sorted(names) if not is_documented(name)] == []
    losses = [line["teacher/loss"] for line in metrics]
    assert sum(losses[-2:]) < 0.95 * sum(losses[:2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sampled", "full"])
def test_a_run_learns_from_itself_with_another_prompt(files, tmp_path, kind):
    """The teacher's prompt has the letter that the policy should write."""
    rows = [{"prompt": letter * 3, "told": f"{letter} is all: {letter * 12}"} for letter in "abcdefgh"]
    (files / "told.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"rl.prompts={files}/told.jsonl",
        f"rl.teacher={{model: self, prompt_column: told, kind: {kind}}}",
        "rl.rewards={}",
        "rl.group_size=2",
        "rl.max_steps=3",
        "train_parameters.optimizer.lr=3.0e-3",
    ]
    config = config_of(files, tmp_path / "self", "on_policy_distillation", overrides)
    forked(reinforce, config)
    metrics = lines(tmp_path / "self" / "metrics.jsonl")[1:]
    names = {name for line in metrics for name in line if name != "step"}
    assert [name for name in sorted(names) if not is_documented(name)] == []
    assert all(line["policy/grad_norm"] > 0 for line in metrics)
    assert any(abs(line["teacher/kl"]) > 1e-4 for line in metrics)
