"""`chat_template` and `chat_template_kwargs` of a config reach all chats of a run."""

import copy
import json
import pickle

import pytest
from kit.letters import letter_tokenizer
from kit.rank_processes import forked
from kit.rl_runs import config_of, save_files
from kit.sft_runs import lines
from transformers import AutoTokenizer

from vectorlm import SamplingEngine
from vectorlm.data.encoding import encode, encode_reply, marked_spans, with_template
from vectorlm.errors import ConfigError
from vectorlm.runs.reinforcement import reinforce

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}{{ mark }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'zz' if thinks else 'y' }}{% endif %}"
)
CHAT = [{"role": "user", "content": "abc"}]


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text(TEMPLATE)
    return str(path)


@pytest.mark.parametrize(
    "how", [lambda tokenizer: tokenizer, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))]
)
def test_prompts_replies_and_marks_of_training_have_the_variables(template, how):
    tokenizer = how(with_template(letter_tokenizer(), template, {"thinks": True, "mark": "!"}))
    assert tokenizer.decode(encode(CHAT, lambda: tokenizer)) == "abc!zz"
    replies = [{"role": "user", "content": "d"}]
    assert tokenizer.decode(encode_reply(CHAT, replies, tokenizer.encode("x"), tokenizer)) == "!d!zz"
    chat = [*CHAT, {"role": "assistant", "content": "xyz"}]
    assert marked_spans(tokenizer, chat, None) == [(4, 7)]


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"think": True}, "'thinks'"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"tools": []}, r"'tools': \[\.\.\.\]"),
        ({"x": 1}, "x"),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_refused(template, variables, named):
    with pytest.raises(ConfigError, match=named):
        with_template(letter_tokenizer(), template, variables)


def test_a_template_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "latin.jinja").write_bytes(b"\xff")
    for name in ("absent.jinja", "latin.jinja"):
        with pytest.raises(ConfigError, match=name):
            with_template(letter_tokenizer(), str(tmp_path / name), {})


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_samples_and_evaluates_with_the_template_and_keeps_it(tmp_path, template, world_size):
    files = save_files(tmp_path)
    rows = [{"prompt": [{"role": "user", "content": letter}], "wanted": letter} for letter in "abcdefgh"]
    (files / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"chat_template={template}",
        "chat_template_kwargs={thinks: true}",
        "rl.rollout.save_tokens=true",
        "rl.max_steps=1",
        "train_parameters.checkpointing_enabled=false",
    ]
    output = tmp_path / "run"
    forked(reinforce, config_of(files, output, overrides=overrides), world_size=world_size)
    tokenizer = AutoTokenizer.from_pretrained(files / "model")
    asked = {tokenizer.decode(row["prompt_token_ids"]) for row in lines(output / "rollouts.jsonl")}
    assert asked
    assert {text[1:] for text in asked} == {" z z"}
    assert AutoTokenizer.from_pretrained(output / "final-model").chat_template == TEMPLATE


@pytest.mark.slow
def test_an_engine_of_an_own_loop_has_the_template(tmp_path, template):
    files = save_files(tmp_path)
    how = {"chat_template": template, "chat_template_kwargs": {"thinks": True}}
    with SamplingEngine(
        files / "model", dtype="float32", kv_cache_memory_bytes=1 << 24, max_model_len=32, **how
    ) as engine:
        (output,) = engine.generate([CHAT], {"max_tokens": 1})
        assert engine.tokenizer.decode(output.prompt_token_ids) == "a b c z z"
