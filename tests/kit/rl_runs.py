"""Tiny reinforcement learning runs with a real engine, for the tests of whole runs."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

from kit.metrics_page import METRICS
from kit.rank_processes import save_tiny_llama
from kit.sft_runs import lines
from vectorlm.runs.config.load import load_config
from vectorlm.runs.config.value import raise_problems
from vectorlm.runs.preflight.rl import rl_problems
from vectorlm.runs.preflight.settings import step_problems
from vectorlm.runs.reinforcement import reinforce
from vectorlm.train.checkpoint.state import CheckpointStore

REWARD = """
import random

DICE = random.Random(0)

def vowels(text, **columns):
    return sum(text.count(letter) for letter in "aeiou") / 8

def shuffled(completions, **columns):
    rewards = [vowels(text) for text in completions]
    DICE.shuffle(rewards)
    return rewards

def letters(text, wanted, **columns):
    return sum(text.count(letter) for letter in wanted) / 8

def fails(text):
    raise KeyError("no such answer")
"""
CONFIG = """
model: {model}
train_parameters:
  output_dir: {output}
  max_seq_len: 64
  seed: 3
  optimizer: {{lr: 1.0e-3}}
  lr_scheduler_type: constant
  checkpointing_enabled: True
  sampler:
    sample_frequency: 2
    prompts: {questions}
    reward: {rewards}:letters
    sampling_params: {{temperature: 1.0, max_tokens: 8, seed: 7}}
    engine: {{max_model_len: 64, kv_cache_memory_bytes: 16777216}}
rl:
  algorithm: {algorithm}
  max_steps: 4
  prompts: {questions}
  prompts_per_step: 4
  group_size: 4
  sampling_params: {{max_tokens: 8}}
  rewards: {{"{rewards}:letters": 1.0}}
  max_tokens_per_micro_batch: 128
  save_every: 2
"""

# Batching of requests and the prefix cache may change the last bit of a log-probability.
ONE_AT_A_TIME = (
    "engine.max_num_seqs=1",
    "engine.enable_prefix_caching=False",
)


def save_files(folder):
    """Save model, questions and rewards for a run."""
    save_tiny_llama(folder / "model", hidden_size=64)
    prompt_records = [{"prompt": letter * 3, "wanted": letter} for letter in "abcdefgh"]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompt_records))
    (folder / "rewards.py").write_text(REWARD)
    return folder


def check_rl(config):
    """Raise `ConfigError` with every problem of the section ``rl``, even if other sections are incomplete."""
    raise_problems([*rl_problems(config, config.rl), *step_problems(config)])


def config_of(files, output, algorithm="grpo", overrides=()):
    text = CONFIG.format(
        model=files / "model",
        output=output,
        questions=files / "questions.jsonl",
        rewards=files / "rewards.py",
        algorithm=algorithm,
    )
    path = files / f"{Path(output).name}.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def is_documented(name):
    first, *_, last = parts = name.split("/")
    patterns = {name, f"{first}/<name>", f"{first}/<name>/{last}", "/".join([*parts[:-1], "<name>"])}
    return not METRICS.isdisjoint(patterns | {re.sub(r"_at_\d+$", "_at_K", name)})


AT_ONCE = {"rollout/in_flight_max", "rollout/asking_max"}
"""Metrics of concurrency, which depend on the duration of rewards."""


def numbers(folder):
    """Return the metrics of a run that do not depend on time."""
    return [
        {
            name: value
            for name, value in line.items()
            if not name.startswith(("time/", "perf/")) and "_s" not in name and name not in AT_ONCE
        }
        for line in lines(folder / "metrics.jsonl")
    ]


def cut_after_step_2(whole, output):
    """Copy a run with the metrics and rollouts of all steps, but without models and checkpoints after step 2."""
    shutil.copytree(whole, output)
    for path in (output / "final-model", *output.glob("checkpoints/step-*")):
        if not path.name.endswith("-00000002"):
            shutil.rmtree(path)


def stop_after_step_2(config):
    """Run until the checkpoint of step 2 exists, then kill this process."""
    save = CheckpointStore.save

    def save_and_die(self, step, *rest):
        save(self, step, *rest)
        if step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    CheckpointStore.save = save_and_die
    reinforce(config)
