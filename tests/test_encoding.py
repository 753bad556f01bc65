"""Text, chat messages and token ids become token ids by one function, as each chat template says."""

import ast
import enum
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import vectorlm
from vectorlm.encoding import as_list, encode, encode_all, shown_prompt
from vectorlm.errors import EngineError

USER, SYSTEM = {"role": "user", "content": "2 + 2"}, {"role": "system", "content": "Be brief."}
THOUGHT = {"role": "assistant", "content": "<think>two twos</think>4"}
ANSWER = {"role": "assistant", "content": "4"}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('there is no system role') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
STRIPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


class Letters(enum.StrEnum):
    AB = "ab"


def make_tokenizer(template=None):
    """Return a tokenizer of bytes that writes a BOS before every text, as Llama's and Gemma's do."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    marks = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"]
    bytewise.add_special_tokens([*marks, "<|start_header_id|>", "<|end_header_id|>"])
    bytewise.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bytewise.token_to_id("<s>"))]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=bytewise, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (
            CHATML,
            [SYSTEM, USER],
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            LLAMA_3,
            [USER],
            "<s><|start_header_id|>user<|end_header_id|>\n\n2 + 2<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (GEMMA, [USER], "<start_of_turn>user\n2 + 2<end_of_turn>\n<start_of_turn>model\n"),
        (
            WITH_BOS,
            [USER, {"role": "assistant", "content": "4"}, USER],
            "<s>[INST] 2 + 2 [/INST] 4</s>[INST] 2 + 2 [/INST]",
        ),
        (
            STRIPS_THINKING,
            [USER, THOUGHT, USER],
            "<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\n2 + 2<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n",
        ),
    ],
    ids=["ChatML", "Llama 3", "Gemma", "with BOS", "strips thinking"],
)
def test_messages_become_the_tokens_of_their_template_without_a_second_bos(template, messages, expected):
    tokenizer = make_tokenizer(template)
    ids = encode(messages, lambda: tokenizer)
    assert tokenizer.decode(ids) == expected
    assert ids == tokenizer.encode(expected, add_special_tokens=False)


def test_keys_that_are_null_do_not_reach_the_template():
    """A table gives every message the keys of all others."""
    template = (
        "{% for m in messages %}{{ m.role }}{% if m.name is defined %}:{{ m.name }}{% endif %} {{ m.content }}"
        "{% for call in m.tool_calls %} {{ call.name }}{% endfor %}\n{% endfor %}"
    )
    tokenizer = make_tokenizer(template)
    from_table = {**USER, "name": None, "tool_calls": None}
    assert encode([from_table], lambda: tokenizer) == encode([USER], lambda: tokenizer)


def test_an_answer_that_has_begun_is_left_open():
    tokenizer = make_tokenizer(CHATML)
    begun = [USER, {"role": "assistant", "content": "The sum is"}]
    expected = "<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\nThe sum is"
    assert tokenizer.decode(encode(begun, lambda: tokenizer)) == expected


def test_a_template_that_refuses_messages_is_an_error_that_names_the_prompt():
    tokenizer = make_tokenizer(GEMMA)
    with pytest.raises(EngineError, match=r"prompt 1 cannot be encoded: .*there is no system role"):
        encode_all([[USER], [SYSTEM, USER]], lambda: tokenizer)


def test_text_gets_the_tokenizers_special_tokens_and_ids_need_no_tokenizer():
    tokenizer = make_tokenizer()
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
    assert {type(token) for each in encoded for token in each} == {int}


def test_people_are_shown_the_last_message_and_the_number_of_tokens():
    assert [shown_prompt(each) for each in ("ab", [SYSTEM, USER], [5, 6])] == ["ab", "2 + 2", "(2 tokens)"]


def test_one_place_calls_chat_templates():
    package = Path(vectorlm.__file__).parent
    calls = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "apply_chat_template"
    ]
    assert calls == ["encoding.py"]


def test_a_bos_that_the_text_begins_with_is_not_doubled_and_that_is_said():
    tokenizer = make_tokenizer()
    plain = encode("ab", lambda: tokenizer)
    with pytest.warns(UserWarning, match="begins with <s>, which is not doubled"):
        assert encode("<s>ab", lambda: tokenizer) == plain
    with pytest.warns(UserWarning, match="not doubled"):
        assert encode("<s><s>ab", lambda: tokenizer) == [plain[0], *plain]
