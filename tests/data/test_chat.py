"""Rendering messages with the chat template, and the tokens that count in the loss."""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from kit.letters import letter_tokenizer, make, spell
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vectorlm.data.chat import Chat
from vectorlm.data.encoding import encode, encode_behind
from vectorlm.data.prompts import read_prompts
from vectorlm.data.tokenise import NO_END
from vectorlm.errors import ConfigError, DatasetError

PLAIN = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
)
# This template drops all assistant messages but the last.
FORGETFUL = (
    "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def say(*turns):
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[turn[0]], "content": turn[1:]} for turn in turns]


def chat_rows(rows, template=PLAIN, **options):
    Path("raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset, summary = make(load_path="raw.jsonl", tokenizer=letter_tokenizer(template=template), **options)
    return [(spell(row["input_ids"]), spell(row["labels"])) for row in dataset], summary


TWO_TURNS = say("ux", "ayz", "uv", "aw")
WHOLE = "u:x$\na:yz$\nu:v$\na:w$\n"


def test_messages_are_rendered_with_the_template_and_nothing_around_them():
    rows, summary = chat_rows([{"messages": TWO_TURNS}])
    assert rows == [(WHOLE, WHOLE)]
    assert (summary.tokens, summary.loss_tokens) == (len(WHOLE), len(WHOLE) - 1)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_only_what_the_assistant_says_counts_up_to_the_end_of_its_turn(template):
    rows, _ = chat_rows([{"messages": TWO_TURNS}], template, assistant_only_loss=True)
    assert rows == [(WHOLE, ".......yz$........w$.")]


SYSTEM = "{% if messages[0].role != 'system' %}s:b${{ '\\n' }}{% endif %}"
SPOKEN = {
    "begins": (PLAIN, ("ayz", "ux", "aw"), "a:yz$\nu:x$\na:w$\n", "..yz$........w$."),
    "begins after a system prompt": (
        SYSTEM + PLAIN,
        ("axz", "ux"),
        "s:b$\na:xz$\nu:x$\n",
        ".......xz$......",
    ),
    "begins, marked": (SYSTEM + MARKED, ("axz", "ux"), "s:b$\na:xz$\nu:x$\n", ".......xz$......"),
    "marks in a comment": ("{# {% generation %} #}" + PLAIN, ("ux", "ay"), "u:x$\na:y$\n", ".......y$."),
    "a thought is begun": (PLAIN.replace("a:{", "a:<t>{"), ("ux", "ay"), "u:x$\na:y$\n", ".......y$."),
    "and one answers like it": (
        PLAIN.replace("a:{", "a:<t>{"),
        ("ux", "a<b"),
        "u:x$\na:<b$\n",
        ".......<b$.",
    ),
    "and one has it": (PLAIN.replace("a:{", "a:<t>{"), ("ux", "a<t>y"), "u:x$\na:<t>y$\n", "..........y$."),
}


@pytest.mark.parametrize(("template", "turns", "tokens", "counted"), SPOKEN.values(), ids=SPOKEN)
def test_headers_and_system_prompts_do_not_count(template, turns, tokens, counted):
    rows, _ = chat_rows([{"messages": say(*turns)}], template, assistant_only_loss=True)
    assert rows == [(tokens, counted)]


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_row_in_which_the_assistant_says_nothing_is_skipped_and_counted(num_proc):
    rows = [{"messages": say("ux")}, {"messages": []}, {"messages": TWO_TURNS}, {"messages": say("uq", "a")}]
    made, summary = chat_rows(rows, assistant_only_loss=True, num_proc=num_proc)
    assert [tokens for tokens, _ in made] == [WHOLE]
    assert summary.skipped == {
        "no text of the assistant": (2, "raw.jsonl:1"),
        "no messages": (1, "raw.jsonl:2"),
    }


def test_a_template_that_renders_the_beginning_differently_later_is_refused_by_name():
    assert chat_rows([{"messages": TWO_TURNS}], FORGETFUL)[0]
    with pytest.raises(DatasetError) as caught:
        chat_rows(
            [{"messages": say("ux", "ay")}, {"messages": TWO_TURNS}], FORGETFUL, assistant_only_loss=True
        )
    assert "raw.jsonl:2" in str(caught.value)
    assert "{% generation %}" in str(caught.value)


def test_a_tokenizer_without_a_template_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        chat_rows([{"messages": TWO_TURNS}], template=None)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("ab", None),
        ([{"content": "ab"}], 0),
        ([{"role": "user", "content": None}], 0),
        ([*say("ux"), {"role": "user", "content": {"a": 1}}], 1),
        ([{"role": "user", "content": [{"type": "image"}]}], None),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{1"}}]}], 0),
    ],
)
def test_what_are_not_messages_is_refused_by_its_row(value, number):
    where = r"raw\.jsonl:2" if number is None else rf"raw\.jsonl:2: message {number}"
    with pytest.raises(DatasetError, match=where):
        chat_rows([{"messages": TWO_TURNS}, {"messages": value}])


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"messages": TWO_TURNS}, {"seperator": ":"}),
        ({"messages": TWO_TURNS}, {"pre_pend": "x"}),
        ({"text": "ab"}, {"assistant_only_loss": True}),
        ({"prompt": "ab", "completion": "cd"}, {"seperator": "b"}),
    ],
)
def test_a_setting_that_the_form_of_rows_does_not_read_is_refused(row, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        chat_rows([row], **options)


def test_messages_of_a_saved_dataset_lose_the_keys_that_are_null_there():
    rows = [
        {"chat": [{"role": "user", "content": "x", "tool_calls": None}]},
        {"chat": [{"role": "assistant", "content": "y", "tool_calls": ["t"]}]},
    ]
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.tool_calls is defined %}!{% endif %}{% endfor %}"
    )
    Dataset.from_list(rows).save_to_disk("raw")
    dataset, _ = make(data_field="chat", tokenizer=letter_tokenizer(template=template))
    assert [spell(ids) for ids in dataset["input_ids"]] == ["x", "y!"]


# Qwen2.5's template writes the arguments of calls as objects, and DeepSeek's as text.
ARGUMENTS = {"objects": "{{ c.function.arguments | tojson }}", "texts": "{{ '' + c.function.arguments }}"}


@pytest.mark.parametrize("wants", ARGUMENTS)
@pytest.mark.parametrize("written", ['{"x": 1, "unit": null}', {"x": 1, "unit": None}])
@pytest.mark.parametrize("content", ["yo ", [{"type": "text", "text": "y"}, {"type": "text", "text": "o "}]])
@pytest.mark.parametrize("only_assistant", [True, False])
def test_every_form_of_a_message_of_openai_s_becomes_the_same_text(wants, written, content, only_assistant):
    template = PLAIN.replace(
        "m.content",
        "m['content'] | trim }}{% for c in m.tool_calls %}" + ARGUMENTS[wants] + "{% endfor %}{{ ''",
    )
    call = {"type": "function", "function": {"name": "add", "arguments": written}}
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": content, "tool_calls": [call]},
    ]
    rows, _ = chat_rows([{"messages": messages}], template, assistant_only_loss=only_assistant)
    assert rows[0][0] == 'u:yo$\na:yo{"x": 1, "unit": null}$\n'


def test_nulls_that_a_table_adds_to_arguments_are_left_out():
    calls = [{"function": {"name": "f", "arguments": item}} for item in ({"x": 1}, {"y": 2})]
    rows = [{"messages": [{"role": "assistant", "content": "", "tool_calls": calls}]}]
    Dataset.from_list(rows).save_to_disk("raw")
    template = (
        "{% for m in messages %}{% for c in m.tool_calls %}"
        + ARGUMENTS["objects"]
        + "{% endfor %}{% endfor %}"
    )
    dataset, _ = make(tokenizer=letter_tokenizer(template=template))
    assert spell(dataset[0]["input_ids"]) == '{"x": 1}{"y": 2}'


def test_tools_reach_the_template_as_objects_or_as_json():
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    template = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + PLAIN
    rows = [{"messages": say("ux"), "tools": [tool]}, {"messages": say("ux"), "tools": json.dumps([tool])}]
    made, _ = chat_rows([*rows, {"messages": say("ux")}], template)
    assert [tokens for tokens, _ in made] == ["add u:x$\n", "add u:x$\n", "u:x$\n"]


def test_of_a_prompt_and_a_completion_only_the_completion_counts():
    rows, summary = chat_rows([{"prompt": "ab", "completion": "cd"}])
    assert rows == [("^abcd$", "...cd$")]
    assert summary.loss_tokens == 3
    rows, _ = chat_rows([{"prompt": say("ux", "ayz", "uv"), "completion": say("aw")}])
    assert rows == [(WHOLE, "..................w$.")]
    two = {"prompt": say("ux"), "completion": say("ayz", "uv", "aw")}
    assert chat_rows([two])[0] == [(WHOLE, ".......yz$\nu:v$\na:w$.")]
    assert chat_rows([two], assistant_only_loss=True)[0] == [(WHOLE, ".......yz$........w$.")]


def byte_tokenizer(template):
    """Return a byte-level tokenizer that merges white space with the text after it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["</s>", "<|u|>", "<|a|>"]
    trainer = trainers.BpeTrainer(
        special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["user: hi\nassistant: hello\n\n\n   hello   hi\n\n"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=template)


SPACED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
LINED = SPACED.replace(": ", ":\n")
SPACED_MARKED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize("template", [SPACED, LINED, SPACED_MARKED])
@pytest.mark.parametrize("answer", ["hello", "  hello", "\n\nhello", "\n", "   "])
@pytest.mark.parametrize("form", ["messages", "pair"])
def test_prompt_and_answer_are_tokenised_apart_whatever_the_answer_begins_with(template, answer, form):
    tokenizer = byte_tokenizer(template)
    # The messages before an answer that counts as a whole are tokenised as a prompt.
    prompt = say("uhi", "ahello", "uhi") if form == "pair" else say("uhi")
    row = {"messages": [*prompt, *say("a" + answer)]}
    if form == "pair":
        row = {"prompt": prompt, "completion": say("a" + answer)}
    Path("raw.jsonl").write_text(json.dumps(row) + "\n")
    dataset, _ = make(512, tokenizer, load_path="raw.jsonl", assistant_only_loss=form == "messages")
    ids, labels = dataset[0]["input_ids"], dataset[0]["labels"]
    asked = encode(prompt, lambda: tokenizer)
    said = tokenizer.encode(answer + "</s>", add_special_tokens=False)
    assert (ids[: len(asked)], ids[len(asked) : len(asked) + len(said)]) == (asked, said)
    assert [label for label in labels[len(asked) :] if label != -100] == said


def test_the_tokens_of_a_chat_are_those_of_its_whole_text_where_none_lies_across_a_border():
    tokenizer = byte_tokenizer(LINED)
    Path("raw.jsonl").write_text(json.dumps({"messages": say("uhi", "ahello hi", "uhi", "ahi")}) + "\n")
    dataset, _ = make(512, tokenizer, load_path="raw.jsonl", assistant_only_loss=True)
    text = "user:\nhi</s>\nassistant:\nhello hi</s>\nuser:\nhi</s>\nassistant:\nhi</s>\n"
    assert dataset[0]["input_ids"] == tokenizer.encode(text)


NAMED = (
    "{% for m in messages %}<|{{ m.role[0] }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|a|>\n{% endif %}"
)
MARKED_SHORT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}</s>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_the_next_roles_marker_counts_where_the_model_ends_answers_with_it():
    tokenizer = byte_tokenizer(NAMED)
    Path("model").mkdir()
    tokenizer.save_pretrained("model")
    user = tokenizer.convert_tokens_to_ids("<|u|>")
    Path("model/generation_config.json").write_text(json.dumps({"eos_token_id": [0, user]}))
    Path("raw.jsonl").write_text(json.dumps({"messages": say("uhi", "ahello", "uhi", "ahi")}) + "\n")
    tokenizer = AutoTokenizer.from_pretrained("model")
    dataset, _ = make(512, tokenizer, load_path="raw.jsonl", assistant_only_loss=True)
    counted = [label for label in dataset[0]["labels"] if label != -100]
    assert tokenizer.decode(counted) == "hello<|u|>hi"
    pair = {"prompt": say("uhi"), "completion": say("ahello", "uhi", "ahi")}
    Path("raw.jsonl").write_text(json.dumps(pair) + "\n")
    dataset, _ = make(512, tokenizer, load_path="raw.jsonl")
    counted = [label for label in dataset[0]["labels"] if label != -100]
    assert tokenizer.decode(counted) == "hello<|u|>\nhi<|a|>\nhi"


def test_the_end_behind_what_a_template_marks_counts():
    rows, _ = chat_rows([{"messages": TWO_TURNS}], MARKED_SHORT, assistant_only_loss=True)
    assert rows == [("xyz$vw$", ".yz$.w$")]


CALL = {"function": {"name": "add", "arguments": {"x": 1}}}
CALLS = PLAIN.replace("{{ m.content }}", "{{ m.content or '' }}{% if m.tool_calls %}!{% endif %}")


def remarks_of(summary):
    return {remark: num for remark, (num, _) in summary.remarks.items()}


@pytest.mark.parametrize("only_assistant", [True, False])
def test_tool_calls_that_the_template_does_not_render_are_told_and_no_empty_turn_is_learned(only_assistant):
    called = [*say("ux"), {"role": "assistant", "content": "", "tool_calls": [CALL]}, *say("ay")]
    rows = [{"messages": called, "tools": [CALL]}, {"messages": TWO_TURNS}]
    made, summary = chat_rows(rows, assistant_only_loss=only_assistant)
    assert made[0] == ("u:x$\na:$\na:y$\n", "." * 11 + "y$." if only_assistant else "u:x$\n....a:y$\n")
    assert remarks_of(summary) == {
        "the chat template does not render the column 'tools'": 1,
        "the chat template does not render 'tool_calls' of messages": 1,
        "a turn of the assistant is empty, and does not count": 1,
    }
    called[1]["content"] = None
    rows, summary = chat_rows([{"messages": called}], CALLS, assistant_only_loss=True)
    assert rows[0] == ("u:x$\na:!$\na:y$\n", ".......!$...y$.")
    assert not summary.remarks


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_weight_of_0_leaves_a_message_or_a_row_out_of_the_loss(template):
    turns = say("ux", "ayz", "uv", "aw")
    turns[1]["weight"], turns[3]["weight"] = 0, 1
    rows = [{"messages": turns}, {"messages": TWO_TURNS, "weight": 0}, {"messages": TWO_TURNS, "weight": 1}]
    made, summary = chat_rows(rows, template, assistant_only_loss=True)
    assert made == [(WHOLE, "..................w$."), (WHOLE, ".......yz$........w$.")]
    assert summary.skipped == {"a weight of 0": (1, "raw.jsonl:2")}
    assert not summary.remarks
    assert not summary.unread
    assert chat_rows(rows[:1], template)[0] == [(WHOLE, "u:x$\n......u:v$\na:w$\n")]
    turns[1]["weight"] = 0.5
    with pytest.raises(DatasetError, match=r"raw\.jsonl:1 .*weight"):
        chat_rows(rows, template)


CUT = "the chat template changes the text of a message, or removes its reasoning"
APART = "the last answer does not continue the generation prompt of engines"
# R1's distilled models write and request answers in this form.
THINKING = PLAIN.replace("m.content", "m.content.split('</t>')[-1]").replace("a:{%", "a:<t>{%")


@pytest.mark.parametrize(
    ("template", "turns", "remarks"),
    [
        (PLAIN, ("ux", "a <t>why</t>y\n"), []),
        (THINKING, ("ux", "a<t>why</t>y"), [CUT, APART]),
        (THINKING, ("ux", "ay"), [APART]),
        (PLAIN.replace("a:{%", "a:<t>{%"), ("ux", "a<t>why</t>y"), []),
        (FORGETFUL, ("ux", "ay", "uv", "aw"), [CUT]),
        (FORGETFUL, ("ux", "ay"), []),
    ],
)
def test_what_the_template_cuts_out_of_a_message_and_another_beginning_of_answers_are_told(
    template, turns, remarks
):
    _, summary = chat_rows([{"messages": say(*turns)}], template)
    assert list(summary.remarks) == remarks


def test_best_fit_cuts_conversations_apart_unless_it_truncates():
    long = say("ux", "a" + "y" * 12)
    rows = [{"messages": long}, {"messages": say("uq", "aw")}]
    made, summary = chat_rows(rows, packing_type="best_fit", max_seq_len=12)
    assert (len(made), summary.goes_on) == (3, 1)
    assert "cut in the middle of a text: 1 times" in str(summary)
    assert "3 rows of 3 texts or parts of texts" in summary.head()
    made, summary = chat_rows(rows, packing_type="best_fit", max_seq_len=12, truncate=True)
    assert made == [("u:x$\na:yyyyy", "u:x$\na:yyyyy"), ("u:q$\na:w$\n", "u:q$\na:w$\n")]
    assert (summary.truncated, summary.lost_tokens, summary.lost_loss_tokens, summary.goes_on) == (1, 9, 9, 0)


def save_rows(name, rows):
    if name.endswith(".parquet"):
        Dataset.from_list(rows).to_parquet(name)
    else:
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


OF_LISTS = {key: [item[key] for item in TWO_TURNS] for key in ("role", "content")}


@pytest.mark.parametrize("name", ["raw.jsonl", "raw.parquet"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": json.dumps(TWO_TURNS)},
        {"messages": json.dumps(json.dumps(TWO_TURNS, indent=1))},
        {"messages": OF_LISTS},
        {"messages": json.dumps(OF_LISTS)},
        {"prompt": json.dumps(TWO_TURNS[:3]), "completion": json.dumps(TWO_TURNS[3:])},
        {"prompt": json.dumps(TWO_TURNS[:3]), "completion": json.dumps(TWO_TURNS[3])},
    ],
)
def test_messages_may_be_json_text_or_one_object_of_lists(name, row):
    save_rows(name, [row])
    dataset, _ = make(tokenizer=letter_tokenizer(template=PLAIN), load_path=name)
    assert spell(dataset[0]["input_ids"]) == WHOLE
    expected = WHOLE if "messages" in row else "..................w$."
    assert spell(dataset[0]["labels"]) == expected


@pytest.mark.parametrize(
    "rows",
    [
        [{"messages": str(TWO_TURNS)}],
        [{"messages": str(TWO_TURNS).replace("}, {", "}\n {")}],  # numpy prints lists in this form.
        [{"prompt": "ab", "completion": str(TWO_TURNS)}],
        [{"prompt": "ab", "completion": json.dumps(say("ay"))}],
        [{"prompt": "ab", "completion": "c"}, {"prompt": "ab", "completion": json.dumps(say("ay"))}],
        [{"messages": json.dumps([{"from": "human", "value": "x"}])}],
        [{"messages": {"role": ["user"], "content": ["x", "y"]}}],
    ],
)
def test_text_that_looks_like_messages_is_never_trained_on(rows):
    with pytest.raises(DatasetError, match=rf"raw\.jsonl:{len(rows)}"):
        chat_rows(rows)


def test_json_that_is_no_chat_and_the_column_text_stay_text():
    calls = '[{"name": "f", "arguments": {"role": "user"}}]'
    rows, _ = chat_rows([{"prompt": "ab", "completion": calls}, {"prompt": "4", "completion": "[]"}])
    assert [tokens for tokens, _ in rows] == [f"^ab{calls}$", "^4[]$"]
    chat = json.dumps(say("ux"))
    assert chat_rows([{"text": chat}])[0] == [(f"^{chat}$", f".{chat}$")]


@pytest.mark.parametrize(
    "answer",
    [
        '{"from": "Paris", "to": "Rome"}',
        '[{"from": "Paris", "to": "Rome"}, {"from": "Rome", "to": "Oslo"}]',
        '{"role": "cook", "name": "Ann"}',
        '{"role": ["cook", "guard"], "name": ["Ann", "Bo"]}',
        "[{'from': 'Paris', 'to': 'Rome'}]",
    ],
)
def test_structured_answers_with_keys_of_messages_stay_text(answer):
    (row,), _ = chat_rows([{"prompt": "Extract: ", "completion": answer}])
    assert row == (f"^Extract: {answer}$", f"{'.' * 10}{answer}$")
    Path("prompts.jsonl").write_text(json.dumps({"prompt": answer}) + "\n")
    assert [record.prompt for record in read_prompts("prompts.jsonl")] == [answer]


@pytest.mark.parametrize("broken", [{"role": "assistant"}, {"role": "assistant", "text": "x"}])
def test_a_chat_with_one_message_without_content_is_refused(broken):
    with pytest.raises(DatasetError, match=r"raw\.jsonl:1: message 1"):
        chat_rows([{"messages": json.dumps([*say("ux"), broken])}])


def test_generation_marks_are_looked_for_in_the_template_that_a_row_gets():
    templates = {"default": MARKED, "tool_use": "{% for t in tools %}T{% endfor %}" + PLAIN}
    rows = [{"messages": TWO_TURNS}, {"messages": TWO_TURNS, "tools": [CALL]}]
    made, _ = chat_rows(rows, templates, assistant_only_loss=True)
    counted = ".......yz$........w$."
    assert made == [(WHOLE, counted), ("T" + WHOLE, "." + counted)]


def calling(arguments):
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    return [{"messages": [*say("ux"), {"role": "assistant", "content": "", "tool_calls": [call]}]}]


@pytest.mark.parametrize("wants", ARGUMENTS)
def test_arguments_that_were_encoded_twice_are_decoded_twice(wants):
    template = PLAIN.replace(
        "{{ m.content }}", "{% for c in m.tool_calls %}" + ARGUMENTS[wants] + "{% endfor %}"
    )
    for arguments in ({"x": 1}, '{"x": 1}', '"{\\"x\\": 1}"', '"\\"{\\\\\\"x\\\\\\": 1}\\""'):
        assert '{"x": 1}' in chat_rows(calling(arguments), template)[0][0][0]
    assert chat_rows(calling(""), template)


@pytest.mark.parametrize(
    "arguments", [[1, 2], "[1, 2]", "4", '"hello"', {"x": 1e400}, '{"x": 1e400}', '{"x": [NaN]}']
)
def test_arguments_that_are_no_json_object_are_refused_by_row(arguments):
    with pytest.raises(DatasetError, match=r"raw\.jsonl:1: message 1: .*(arguments|number)"):
        chat_rows(calling(arguments))


SCHEMA = {"type": ["string", "null"], "enum": ["a", None], "default": None}
OPTIONAL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": SCHEMA}}}}


def test_nulls_of_a_tool_s_schema_stay_unless_a_table_may_have_added_them():
    template = "{{ tools | tojson }}" + PLAIN
    shown = []
    for tools, name in (
        ([OPTIONAL], "raw.jsonl"),
        (json.dumps([OPTIONAL]), "raw.jsonl"),
        (json.dumps([OPTIONAL]), "raw.parquet"),
        ([OPTIONAL], "raw.parquet"),
    ):
        save_rows(name, [{"messages": TWO_TURNS, "tools": tools}])
        dataset, _ = make(512, letter_tokenizer(template=template), load_path=name)
        shown.append(json.loads(spell(dataset[0]["input_ids"]).removesuffix(WHOLE)))
    assert shown[:3] == [[OPTIONAL]] * 3
    kept = {"type": ["string", "null"], "enum": ["a", None]}
    assert shown[3][0]["function"]["parameters"]["properties"]["x"] == kept


@pytest.mark.parametrize("tools", ["{1", CALL, json.dumps(CALL), "add", [{"maximum": 1e400}]])
def test_tools_that_are_no_list_of_json_are_refused_by_row(tools):
    with pytest.raises(DatasetError, match=r"raw\.jsonl:2: .*"):
        chat_rows([{"messages": TWO_TURNS}, {"messages": TWO_TURNS, "tools": tools}])


def test_a_completion_may_repeat_its_prompt_and_must_else_continue_it():
    for prompt, completion in ((say("ux", "ayz", "uv"), TWO_TURNS), (say("ux", "ayz"), say("uv", "aw"))):
        rows, _ = chat_rows([{"prompt": prompt, "completion": completion}])
        assert rows[0][0] == WHOLE
    for prompt, completion in (
        (say("sb", "ux"), say("ux", "ay")),
        (say("ux"), say("sb", "ux", "ay")),
        (say("ux"), say("uv", "ay")),
        (say("ux", "ay"), say("ux", "az")),
    ):
        with pytest.raises(DatasetError, match=r"raw\.jsonl:1.*'prompt'"):
            chat_rows([{"prompt": prompt, "completion": completion}])


def test_a_completion_that_only_repeats_its_prompt_is_skipped_and_named():
    rows = [
        {"prompt": say("ux"), "completion": say("ux")},
        {"prompt": say("ux"), "completion": say("ux", "ay")},
    ]
    made, summary = chat_rows(rows)
    assert [tokens for tokens, _ in made] == ["u:x$\na:y$\n"]
    assert summary.skipped == {"an empty completion": (1, "raw.jsonl:1")}


def space_tokenizer(template=None):
    """Return a tokenizer like SentencePiece: it puts a space before a text, and joins spaces with the next word."""
    pieces = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", *map(chr, range(33, 127)), "he", "hel", "hell", "hello"]
    merges = [("h", "e"), ("he", "l"), ("hel", "l"), ("hell", "o"), ("▁", "hello"), ("=", "=")]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, "▁hello", "=="])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


@pytest.mark.parametrize("before", ["x=4", "x=", "hell", ""])
def test_a_text_behind_another_begins_without_a_space(before):
    tokenizer = space_tokenizer()
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hello", add_special_tokens=False)) == ["▁hello"]
    assert tokenizer.convert_ids_to_tokens(encode_behind(tokenizer, before, "hello")) == ["hello"]


def pieces_of(tokenizer, row, **options):
    Path("raw.jsonl").write_text(json.dumps(row) + "\n")
    dataset, _ = make(512, tokenizer, load_path="raw.jsonl", **options)
    return [
        tokenizer.convert_ids_to_tokens([item for item in dataset[0][name] if item != -100])
        for name in ("input_ids", "labels")
    ]


@pytest.mark.parametrize(
    ("prompt", "completion", "pieces"),
    [
        # As in TRL: the tokens of prompt and completion together, after the tokens of the prompt.
        ("x=", "4", ["4"]),
        ("x:", "\n hello", ["<0x0A>", "▁hello"]),
        ("x:", " hello", ["▁hello"]),
        ("x=", "hello", ["hello"]),
        ("", "hello", ["▁hello"]),
        # A token crosses the border: the labels are the tokens that a model would write after the prompt.
        ("x: ", "hello", ["hello"]),
        ("x=", "=4", ["=", "4"]),
    ],
)
def test_a_completion_gets_no_space_that_the_data_does_not_have(prompt, completion, pieces):
    tokenizer = space_tokenizer()
    whole, counted = pieces_of(tokenizer, {"prompt": prompt, "completion": completion})
    assert counted == [*pieces, "</s>"]
    assert whole == ["<s>", *tokenizer.tokenize(prompt), *pieces, "</s>"]
    if prompt:
        text = prompt + "|" + completion
        whole, counted = pieces_of(tokenizer, {"text": text}, seperator="|")
        assert whole == ["<s>", *tokenizer.tokenize(text), "</s>"]
    pair = {"prompt": prompt, "chosen": completion, "rejected": completion + "!"}
    both, _ = pieces_of(tokenizer, pair, examples="pairs")
    first = ["<s>", *tokenizer.tokenize(prompt), *pieces]
    assert both == [*first, "</s>", *first, "!", "</s>"]


def test_what_the_assistant_says_gets_no_space_behind_a_token_across_a_border():
    spaced = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    spaced += "{% if add_generation_prompt %}a: {% endif %}"
    tokenizer = space_tokenizer(spaced)
    row = {"messages": say("uhello", "ahello", "uhello", "ahello")}
    whole, counted = pieces_of(tokenizer, row, assistant_only_loss=True)
    assert counted == ["hello", "</s>"] * 2
    turns = ["u", ":", "▁hello", "</s>", "a", ":", "▁", "hello", "</s>"]
    assert whole == ["▁", *turns, *turns]


class Counting:
    """A tokenizer that counts the characters that it reads."""

    def __init__(self, tokenizer):
        self.tokenizer, self.num_read = tokenizer, 0

    def __call__(self, texts, **how):
        self.num_read += sum(map(len, [texts] if isinstance(texts, str) else texts))
        return self.tokenizer(texts, **how)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize("template", [SPACED, SPACED_MARKED])
def test_the_work_of_tokenising_grows_with_the_length_of_a_chat_and_not_with_its_square(template):
    tokenizer = Counting(byte_tokenizer(template))
    chat = say(*["uhi", "ahello"] * 20)
    text = Chat(tokenizer).render("row", chat, None)
    Chat(tokenizer).tokenise("row", chat, None, only_assistant=True)
    assert tokenizer.num_read < 4 * len(text)


def test_a_chat_in_which_the_assistant_says_nothing_is_left_out():
    rows = [{"prompt": say("ux"), "completion": say("a")}, {"prompt": say("ux"), "completion": say("ay")}]
    made, summary = chat_rows(rows)
    assert (len(made), summary.skipped) == (1, {"no text of the assistant": (1, "raw.jsonl:1")})
    _, summary = chat_rows([{"prompt": "x", "completion": ""}, {"prompt": "x", "completion": "y"}])
    assert summary.skipped == {"an empty completion": (1, "raw.jsonl:1")}


def test_a_chat_without_an_end_that_counts_is_told():
    endless = PLAIN.replace("{{ eos_token }}", "")
    _, summary = chat_rows([{"messages": TWO_TURNS}] * 2, endless, assistant_only_loss=True)
    assert remarks_of(summary) == {NO_END: 2}
    _, summary = chat_rows([{"messages": TWO_TURNS}], assistant_only_loss=True)
    assert not summary.remarks


def test_a_template_that_refuses_messages_names_the_row():
    picky = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}" + PLAIN
    )
    with pytest.raises(DatasetError, match=r"raw\.jsonl:2: .*begin with the user"):
        chat_rows([{"messages": TWO_TURNS}, {"messages": say("sx", "uy")}], picky)
