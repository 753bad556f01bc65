"""Encoding of text, chat messages and token ids by one function, following the chat template.

The turns of a chat use the templates of five families: the trainer sees exactly the tokens that the engine saw.
"""

import enum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from vectorlm.data.encoding import (
    chat_of,
    encode,
    encode_all,
    encode_reply,
    plain_message,
    render_chat,
    without_thoughts,
)
from vectorlm.data.prompts import as_list
from vectorlm.errors import EngineError

USER, SYSTEM = {"role": "user", "content": "2 + 2"}, {"role": "system", "content": "Be brief."}
THOUGHT = {"role": "assistant", "content": "<think>two twos</think>4"}
CHATML = """{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA = """{{- bos_token }}{%- for message in messages %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
GEMMA = """{{- bos_token }}{%- for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (message.role == 'assistant') != (loop.index0 % 2 == 1) %}{{ raise_exception('order') }}{% endif %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}"""
MISTRAL = """{{- bos_token }}{%- for message in messages %}
{%- if message.role == 'assistant' %}{{- message.content + eos_token }}
{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}{{- '[INST]' + message.content + '[/INST]' }}{% endif %}{% endfor %}"""
THINKING = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
ENDS = {
    "chatml": (CHATML, "<|im_end|>"),
    "llama": (LLAMA, "<|eot_id|>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "mistral": (MISTRAL, "</s>"),
    "thinking": (THINKING, "<|im_end|>"),
}
SPECIAL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
SPECIAL += ["<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]


class Letters(enum.StrEnum):
    AB = "ab"


def tokenizer_of(template=None):
    """Return a tokenizer that writes a BOS before every text, as Llama's and Gemma's do."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = ["the answer is a number\n\nuser assistant model system think response"] * 20
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(words, trainer)
    bpe.add_special_tokens(SPECIAL)
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (
            CHATML,
            [SYSTEM, USER],
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            LLAMA,
            [USER],
            "<s><|start_header_id|>user<|end_header_id|>\n\n2 + 2<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (GEMMA, [USER], "<s><start_of_turn>user\n2 + 2<end_of_turn>\n<start_of_turn>model\n"),
        (
            MISTRAL,
            [USER, {"role": "assistant", "content": "4"}, USER],
            "<s>[INST]2 + 2[/INST]4</s>[INST]2 + 2[/INST]",
        ),
        (
            THINKING,
            [USER, THOUGHT, USER],
            "<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\n2 + 2<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
    ],
    ids=ENDS,
)
def test_messages_become_the_tokens_of_their_template_without_a_second_bos(template, messages, expected):
    tokenizer = tokenizer_of(template)
    ids = encode(messages, lambda: tokenizer)
    assert tokenizer.decode(ids) == expected
    assert ids == tokenizer.encode(expected, add_special_tokens=False)


@pytest.mark.parametrize(
    "content", [[{"type": "image_url", "image_url": {}}], ["2 + 2"], {"text": "2 + 2"}, 4]
)
def test_content_that_is_not_text_is_refused(content):
    tokenizer = tokenizer_of(CHATML)
    with pytest.raises(ValueError, match=r"content|no image"):
        encode([{"role": "user", "content": content}], lambda: tokenizer)
    with pytest.raises(ValueError, match="no `type`"):
        plain_message({"role": "user", "content": [{"image": "a.png"}]})
    # A tool may return any JSON value, and some templates write it as it is.
    assert plain_message({"role": "tool", "content": {"a": None}}) == {"role": "tool", "content": {"a": None}}


@pytest.mark.parametrize("begun", ["So, ", [{"type": "text", "text": "So, "}]])
def test_a_completion_is_a_message_or_goes_on_with_the_one_that_has_begun(begun):
    assert chat_of([USER], "4") == [USER, {"role": "assistant", "content": "4"}]
    prompt = [USER, {"role": "assistant", "content": begun}]
    assert chat_of(prompt, "4") == [USER, {"role": "assistant", "content": "So, 4"}]
    assert chat_of("2 + 2", "4") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("9", "9"),
        ("<think>Point 1.</think> 9", " 9"),
        ("a<think>1</think>b<THINKING>2\n</THINKING>c[THINK]3[/THINK]d<seed:think>4</seed:think>e", "abcde"),
        ("8 <think>it is 9, because", "8 "),
        # The template opened the thought.
        ("it is 9</think>8", "8"),
        ("<think>I write <think> first</think>8", "8"),
        ("<think>a<think>b</think>c</think>8", "8"),
        ("I think <b>8</b> [1]", "I think <b>8</b> [1]"),
    ],
)
def test_thoughts_are_no_part_of_an_answer_even_if_they_never_end(text, answer):
    assert without_thoughts(text) == answer


def test_text_gets_the_tokenizers_special_tokens_and_ids_need_no_tokenizer():
    tokenizer = tokenizer_of()
    ids = tokenizer.encode("ab")
    assert tokenizer.decode(ids) == "<s>ab"
    texts = ["ab", {"prompt": "ab"}, Letters.AB]
    assert encode_all(as_list(texts), lambda: tokenizer) == [ids] * 3
    given = [
        ids,
        tuple(ids),
        np.array(ids),
        {"prompt_token_ids": ids},
        {"prompt": "ab", "prompt_token_ids": ids},
    ]
    encoded = encode_all(as_list(given), pytest.fail)
    assert encoded == [ids] * 5
    assert {type(token) for item in encoded for token in item} == {int}


def test_a_prompt_with_images_beside_it_is_told_where_they_belong():
    with pytest.raises(TypeError, match=r"'images'.*parts of messages"):
        as_list([{"prompt": "ab", "images": ["a.png"]}])


def test_a_bos_that_the_text_begins_with_is_not_doubled_and_that_is_said():
    tokenizer = tokenizer_of()
    plain = encode("ab", lambda: tokenizer)
    with pytest.warns(UserWarning, match="<s>"):
        assert encode("<s>ab", lambda: tokenizer) == plain
    with pytest.warns(UserWarning, match="<s>"):
        assert encode("<s><s>ab", lambda: tokenizer) == [plain[0], *plain]


TOKENIZERS = {name: (tokenizer_of(template), end) for name, (template, end) in ENDS.items()}
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).filter(
    lambda text: text == text.strip() and not any(item in text for item in SPECIAL)
)
thoughts = st.builds(lambda thought, text: f"<think>\n{thought}\n</think>\n\n{text}", texts, texts)


@pytest.mark.parametrize("name", ENDS)
@given(
    asked=texts,
    turns=st.lists(
        st.tuples(texts | thoughts, st.sampled_from(["user", "tool"]), texts), min_size=1, max_size=4
    ),
    wrote_end=st.booleans(),
)
def test_the_ids_are_the_engines_and_the_templates_own_where_it_rewrites_nothing(
    name, asked, turns, wrote_end
):
    tokenizer, end = TOKENIZERS[name]
    messages = [{"role": "user", "content": asked}]
    ids = seen = encode(messages, lambda: tokenizer)
    for said, role, answer in turns:
        role = "user" if name == "gemma" else role
        written = tokenizer.encode(said + end * wrote_end, add_special_tokens=False)
        replies = [{"role": role, "content": answer}]
        between = encode_reply(messages, replies, written, tokenizer)
        # The next request to the engine begins with all tokens that it has read and written.
        seen = [*seen, *written]
        ids = [*ids, *written, *between]
        assert ids[: len(seen)] == seen
        seen = list(ids)
        messages = [*messages, {"role": "assistant", "content": said}, *replies]
    rewrites = name == "thinking" and any("</think>" in said for said, _, _ in turns)
    if not rewrites:
        assert ids == encode(messages, lambda: tokenizer)
    text = render_chat(tokenizer, messages, tokenize=False, add_generation_prompt=True)
    assert (tokenizer.decode(ids) == text) or rewrites


def test_several_replies_and_an_answer_that_had_begun():
    tokenizer, _ = TOKENIZERS["chatml"]
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Well,"}]
    replies = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    written = tokenizer.encode(" yes<|im_end|>", add_special_tokens=False)
    found = tokenizer.decode(
        [*encode(begun, lambda: tokenizer), *written, *encode_reply(begun, replies, written, tokenizer)]
    )
    whole = [begun[0], {"role": "assistant", "content": "Well, yes"}, *replies]
    assert found == render_chat(tokenizer, whole, tokenize=False, add_generation_prompt=True)


# A short form of Phi-3's and Qwen2's templates: they do not render roles without a branch.
OF_THREE_ROLES = """{%- for message in messages %}{% if message.role in ('system', 'user', 'assistant') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}{% endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.mark.parametrize("role", ["developer", "tool"])
def test_messages_that_the_template_leaves_out_are_refused(role):
    """Otherwise the policy would answer without these messages, and nobody would notice."""
    left_out = {"role": role, "content": "42"}
    written, chatml = [1], TOKENIZERS["chatml"][0]
    tokenizer = tokenizer_of(OF_THREE_ROLES)
    match = f"role '{role}'"
    for chat in ([SYSTEM, left_out, USER], [USER, left_out], [left_out, USER, THOUGHT]):
        assert encode(chat, lambda: chatml)
        with pytest.raises(EngineError, match=match):
            encode(chat, lambda: tokenizer)
    for replies in ([left_out], [USER, left_out]):
        assert encode_reply([USER], replies, written, chatml)
        with pytest.raises(EngineError, match=match):
            encode_reply([USER], replies, written, tokenizer)
    # An empty message does not show whether the template renders its role.
    assert encode([{**left_out, "content": ""}, USER], lambda: tokenizer)


def test_a_template_that_refuses_messages_is_an_error_that_names_the_prompt():
    tokenizer = tokenizer_of(GEMMA)
    with pytest.raises(EngineError, match=r"prompt 1 .*System role not supported"):
        encode_all([[USER], [SYSTEM, USER]], lambda: tokenizer)


def test_a_template_that_leaves_the_assistant_out_is_refused():
    tokenizer = tokenizer_of(
        "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
    )
    with pytest.raises(EngineError, match="chat template"):
        encode_reply([{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}], [1], tokenizer)
