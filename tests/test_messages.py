"""Whole error messages of several rooms: the value, the rule and what to do. All other tests look at names alone."""

from pathlib import Path

import pytest

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
            "judge, length, math, reasoning_gym, repetition, or file.py:NAME of your own. Did you mean 'countdown'?",
        ),
        (
            lambda: read_rollouts("absent.jsonl"),
            "rl.rollout.path='absent.jsonl' is not a file: name the rollouts.jsonl of a run.",
        ),
        (
            lambda: plan_micro_batches([Piece((0,), (30,), 0)], 1, 29),
            "rl.max_tokens_per_micro_batch=29 must be at least 30, the tokens of a row. Use 30 or more, or shorter "
            "completions.",
        ),
        (
            lambda: preflight(load_config("my.yaml", ["train_parameters.max_seq_len=257"]), 1),
            "train_parameters.max_seq_len=257 is beyond the model's limit of 256 tokens. Use 256 or less. "
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
