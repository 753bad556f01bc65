"""Turns of a chat by the templates of five families: what the trainer sees is what the engine saw, token for token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from vectorlm.encoding import encode, encode_reply, render_chat
from vectorlm.errors import EngineError

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


def tokenizer_of(template):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = ["the answer is a number\n\nuser assistant model system think response"] * 20
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(words, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", additional_special_tokens=SPECIAL[2:]
    )
    tokenizer.chat_template = template
    return tokenizer


TOKENIZERS = {name: (tokenizer_of(template), end) for name, (template, end) in ENDS.items()}
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).filter(
    lambda text: text == text.strip() and not any(each in text for each in SPECIAL)
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
        # What the engine is asked next begins with all that it has seen and written.
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


def test_a_template_that_leaves_the_assistant_out_is_refused():
    tokenizer = tokenizer_of(
        "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
    )
    with pytest.raises(EngineError, match="leaves out what the assistant says"):
        encode_reply([{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}], [1], tokenizer)
