"""Whole error messages of several packages: the value, the rule and the fix. All other tests compare only names."""

from pathlib import Path

import pytest
from kit.config_texts import FULL, MINIMAL, RL, refusal

from vectorlm import FakeEngine, launch
from vectorlm.data.prompts import read_prompts
from vectorlm.errors import VectorLMError
from vectorlm.plugin import load_plugin
from vectorlm.rl.micro_batch import Piece, plan_micro_batches
from vectorlm.rl.rewards.registry import get_reward
from vectorlm.rl.rollouts.replay import read_rollouts
from vectorlm.runs.config.load import load_config
from vectorlm.runs.preflight.checked import preflight
from vectorlm.sampling.sampler.scheduler import backend_class

SET = "train_parameters."


def sample(prompt, **parameters):
    with FakeEngine(lambda prompt, version: "a") as engine:
        engine.sample([prompt], parameters)


@pytest.mark.parametrize(
    ("trigger", "text"),
    [
        (
            lambda: load_plugin("math:florr"),
            "'math:florr' does not exist: math has no 'florr'. Did you mean 'floor'?",
        ),
        (
            lambda: load_plugin("mine.py:score"),
            "'mine.py:score' cannot be imported: ZeroDivisionError: division by zero ({here}/mine.py:2). "
            "Correct mine.py.",
        ),
        (lambda: launch(len, world_size=0), "world_size=0 cannot run: it must be at least 1."),
        (
            lambda: read_prompts("asked.jsonl", "rl.prompts"),
            "asked.jsonl:2 is '{{\"question\": \"b\"}}', but every line must be a JSON object with a 'prompt', which "
            "is a text, token ids or messages. (KeyError: 'prompt')",
        ),
        (
            lambda: read_prompts("absent.jsonl", "rl.prompts"),
            "rl.prompts='absent.jsonl' does not exist. Make it first, or list the prompts.",
        ),
        (
            lambda: sample("a", max_tokns=3),
            "this engine cannot honour the sampling parameter 'max_tokns'. Did you mean 'max_tokens'?",
        ),
        (lambda: sample("a", max_tokens=0), "max_tokens=0 is out of range: it must be at least 1, or None."),
        (lambda: sample([1 << 30]), "prompt 0 has token 1073741824: it must be from 0 to 1114111."),
        (
            lambda: backend_class("vlm"),
            "inference='vlm' is not known: it must be one of vllm, transformers, server, or a class as module:Class or "
            "file.py:Class. Did you mean 'vllm'?",
        ),
        (
            lambda: get_reward("count_down"),
            "unknown reward 'count_down': it must be one of boxed, code, countdown, format, ifeval, json_schema, "
            "judge, length, math, reasoning_gym, repetition, or file.py:NAME. Did you mean 'countdown'?",
        ),
        (
            lambda: read_rollouts("absent.jsonl"),
            "rl.rollout.path='absent.jsonl': the file does not exist. Give the rollouts.jsonl of a run.",
        ),
        (
            lambda: plan_micro_batches([Piece((0,), (30,), 0)], 1, 29),
            "rl.max_tokens_per_micro_batch=29 must be at least 30, the tokens of a row. Use 30 or more, or shorter "
            "completions.",
        ),
        (
            lambda: preflight(load_config("my.yaml", ["train_parameters.max_seq_len=257"]), 1),
            "train_parameters.max_seq_len=257 must be at most 256, the model's own limit. Use 256 or less. "
            "(--set train_parameters.max_seq_len=257)",
        ),
    ],
)
def test_an_error_names_the_value_the_rule_and_what_to_do(write_complete, tmp_path, trigger, text):
    write_complete()
    Path("mine.py").write_text("\n1 / 0\n")
    Path("asked.jsonl").write_text('{"prompt": "a"}\n{"question": "b"}\n')
    with pytest.raises(VectorLMError) as caught:
        trigger()
    assert str(caught.value) == text.format(here=tmp_path)


@pytest.mark.parametrize(
    ("text", "override", "expected"),
    [
        (FULL, "epochs=0", "epochs=0 must be an integer >= 1. Use 1, for example."),
        (FULL, "epochs='3'", "epochs='3' must be an integer >= 1. Write 3 without quotes."),
        (
            FULL,
            "output_dir=2024",
            "output_dir=2024 must be a path without variables such as $HOME. Put quotes around it.",
        ),
        (
            FULL,
            "sharding_strategy=full_shard",
            "sharding_strategy='full_shard' must be one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD. Did you "
            "mean 'FULL_SHARD'?",
        ),
        (
            FULL,
            "optimizer.betas=[1, 0]",
            "optimizer.betas=[1, 0] must be a list of two numbers, each >= 0 and < 1. Use [0.9, 0.95], for example.",
        ),
        (FULL, "optimizer=true", "optimizer=true must be a section (`key: value` lines)."),
    ],
)
def test_a_wrong_value_names_value_rule_fix_and_place(write_config, text, override, expected):
    assert refusal(write_config(text), SET + override) == f"{SET}{expected} (--set {SET}{override})"


@pytest.mark.parametrize(
    ("text", "change", "expected"),
    [
        (
            MINIMAL,
            ("epochs: 2", "epochs: 2\n  warmup_ration: 0.1"),
            "unknown setting 'train_parameters.warmup_ration' (my.yaml:6). "
            "Did you mean 'train_parameters.warmup_ratio'?",
        ),
        (
            MINIMAL,
            ("epochs: 2", "epochs: 2\n  epochs: 3"),
            "duplicate setting 'epochs' (my.yaml:6): it was set before at my.yaml:5. Remove one of the two.",
        ),
        (
            MINIMAL,
            ("model: models/tiny\n", "model: [a\n"),
            "not valid YAML: expected ',' or ']', but got ':' (my.yaml:2).",
        ),
        (
            FULL,
            ("'Two plus two is'", "22"),
            "evaluation.prompts[1]=22 must be text. Put quotes around it. (my.yaml:41)",
        ),
        (
            RL,
            ("algorithm: grpo", "algorithm: {name: grpo, beta: 0.04}"),
            "rl.algorithm.beta=0.04 cannot be set: grpo has no such setting (copg, online_dpo have it). Did you mean "
            "rl.kl_coef? (my.yaml:7)",
        ),
    ],
)
def test_a_wrong_file_names_the_line_and_what_to_do(write_config, text, change, expected):
    assert refusal(write_config(text, change)) == expected


def test_all_problems_of_a_file_are_listed(write_config):
    changes = [("max_seq_len", "max_seqlen"), ("epochs: 2", "epochs: 0"), ("  train_bs: 4\n", "")]
    assert refusal(write_config(MINIMAL, *changes)) == (
        "4 problems:\n"
        "  - unknown setting 'train_parameters.max_seqlen' (my.yaml:4). "
        "Did you mean 'train_parameters.max_seq_len'?\n"
        "  - train_parameters.epochs=0 must be an integer >= 1. Use 1, for example. (my.yaml:5)\n"
        "  - missing setting 'train_parameters.max_seq_len' (Longest sequence in tokens, up to the model's "
        "own limit; -1 means this limit) (my.yaml:2). Add it, or give --set train_parameters.max_seq_len=VALUE.\n"
        "  - missing setting 'dataset.train_bs' (Sequences per rank in one training micro-batch) "
        "(my.yaml:8). Add it, or give --set dataset.train_bs=VALUE."
    )
