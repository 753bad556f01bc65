"""Tool calls in the formats of several model families, schemas, and replies to calls that fail."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vectorlm.errors import ConfigError
from vectorlm.rl.environments.environment import value_of
from vectorlm.rl.environments.tools import ToolCall, call_tool, parse_calls, schemas_of

ADD = ToolCall("add", {"a": 1, "b": 2})
WRITTEN = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (f"<tool_call>\n{WRITTEN}\n</tool_call>", "", [ADD]),
        (f"I add.\n<tool_call>{WRITTEN}</tool_call>\n<tool_call>{WRITTEN}</tool_call>", "I add.", [ADD, ADD]),
        # The text ends before the call does.
        (f"<tool_call>{WRITTEN}", "", [ADD]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ADD]),
        (
            '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "stop"}',
            "",
            [ADD, ToolCall("stop", {})],
        ),
        (WRITTEN, "", [ADD]),
        (f"```json\n{WRITTEN}\n```", "", [ADD]),
        (f"[{WRITTEN}, {WRITTEN}]", "", [ADD, ADD]),
        (
            '{"function": {"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}, "type": "function"}',
            "",
            [ADD],
        ),
        ("The sum is 3.", "The sum is 3.", []),
        ('{"answer": 3}', '{"answer": 3}', []),
        ("", "", []),
        # Answers in JSON with the key `name` are not calls.
        *(
            (answer, answer, [])
            for answer in (
                '{"name": "Bob", "age": 3}',
                '```json\n{"city": "Rome", "name": "Bob"}\n```',
                '[{"name": "Bob", "age": 3}, {"name": "Ann", "age": 4}]',
                '{"people": [{"name": "Bob"}]}',
            )
        ),
        ('[{"name": "stop", "type": "function"}]', "", [ToolCall("stop", {})]),
        # The name is a tool's, and the arguments are misplaced: the tool reports the missing ones.
        ('{"name": "add", "args": {"a": 1}}', "", [ToolCall("add", {})]),
    ],
)
def test_calls_of_every_family_are_read(text, said, calls):
    assert parse_calls(text, ["add"]) == (said, calls)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>add 1 and 2</tool_call>", "this call is not JSON"),
        ("<tool_call></tool_call>", "this call is empty"),
        ('<tool_call>{"name": 3}</tool_call>', 'a call needs a "name"'),
        ('{"name": "add", "arguments": {"a": 1', "this call is not JSON"),
        ('{"name": "add", "arguments": [1]}', "the arguments must be an object"),
        ('{"name": "add", "arguments": "{1"}', "the arguments are not JSON"),
        ('{"name": "add", "arguments": {"a": ' + "1" * 4301 + "}}", "this call is not JSON"),
        (json.dumps({"name": "add", "arguments": '{"a": ' + "1" * 4301}), "the arguments are not JSON"),
        (json.dumps({"name": "add", "arguments": "[" * 1100}), "the arguments are not JSON"),
        # The parser could read it, but no template or process could pass it on.
        ('{"name": "add", "arguments": ' + '{"a":' * 400 + "1" + "}" * 401, "this call is not JSON"),
        (
            '{"name": "add", "arguments": {"a": "\\ud800"}}',
            "this call is not JSON: it contains half of a surrogate pair",
        ),
    ],
)
def test_what_begins_like_a_call_and_is_none_is_answered(text, error):
    _, (call,) = parse_calls(text)
    assert call.error.startswith(error)
    message, is_error = asyncio.run(call_tool(call, {}, value_of))
    assert is_error
    assert message["role"] == "tool"
    assert message["content"].startswith(f"error: {error}")


@given(st.text(), st.sampled_from(["", "<tool_call>", '{"name": ', "<|python_tag|>[", "```json\n{"]))
def test_no_text_is_fatal(text, prefix):
    for call in parse_calls(prefix + text)[1]:
        json.dumps(asyncio.run(call_tool(call, {}, value_of))[0])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), json_values, max_size=3)), min_size=1)
)
def test_calls_come_back_as_they_were_written(calls):
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    expected = [ToolCall(name, arguments) for name, arguments in calls]
    assert parse_calls("; ".join(written))[1] == expected
    if not any("tool_call>" in call for call in written):
        assert parse_calls("".join(f"<tool_call>\n{call}\n</tool_call>\n" for call in written))[1] == expected


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def later(a: int) -> dict:
    await asyncio.sleep(0)
    return {"a": a}


@pytest.mark.parametrize(
    ("call", "content"),
    [
        (ToolCall("add", {"a": 1}), "3"),
        (ToolCall("later", {"a": 1}), '{"a": 1}'),
        (ToolCall("add", {"a": 1, "c": 1}), "error: TypeError: add() got an unexpected keyword argument 'c'"),
        (ToolCall("sub", {}), "error: there is no tool 'sub', only add, later"),
    ],
)
def test_a_tool_is_called_and_its_errors_are_answered(call, content):
    answer, is_error = asyncio.run(call_tool(call, {"add": add, "later": later}, value_of))
    assert (answer["content"], is_error) == (content, content.startswith("error"))


def exits():
    exec("exit()")


def interrupts():
    raise KeyboardInterrupt


def gives_up():
    raise asyncio.CancelledError


def keys():
    return {(1, 2): 3}


def half():
    return b"caf\xe9".decode("utf-8", "surrogateescape")


def quotes_half():
    raise ValueError(half())


def turns():
    found = []
    found.append(found)
    return found


def large():
    return 10**5000


class Unsayable(Exception):
    def __str__(self):
        raise KeyError


def unsayable():
    raise Unsayable


def screenshot():
    return [{"type": "image", "image": Image.new("RGB", (4, 4), "red")}, {"type": "text", "text": "red"}]


def bare_image():
    return Image.new("RGB", (4, 4))


def image_of_verl():
    return {"image": [Image.new("RGB", (4, 4))], "text": "red"}


def missing_image():
    return [{"type": "image", "image": "nowhere.png"}]


def test_a_tool_shows_images():
    answer, is_error = asyncio.run(call_tool(ToolCall("tool", {}), {"tool": screenshot}, value_of))
    assert not is_error
    assert answer["role"] == "tool"
    image, text = answer["content"]
    assert image["image"].open().getpixel((0, 0)) == (255, 0, 0)
    assert text == {"type": "text", "text": "red"}


@pytest.mark.parametrize(
    ("tool", "content"),
    [
        (bare_image, "error: TypeError: a tool must return images as parts"),
        (image_of_verl, "error: TypeError: a tool must return images as parts"),
        (missing_image, "error: ImageError: the image 'nowhere.png' cannot be read"),
        (exits, "error: SystemExit: None"),
        (interrupts, "error: KeyboardInterrupt: "),
        (gives_up, "error: CancelledError: "),
        (keys, "error: TypeError: keys must be str"),
        (half, "error: ValueError: it contains half of a surrogate pair"),
        (quotes_half, "error: ValueError: caf\\udce9"),
        (turns, "error: ValueError: Circular reference"),
        (large, "error: ValueError: Exceeds the limit"),
        (unsayable, "error: Unsayable: "),
    ],
)
def test_however_a_tool_fails_the_policy_is_told(tool, content):
    answer, is_error = asyncio.run(call_tool(ToolCall("tool", {}), {"tool": tool}, value_of))
    assert is_error
    assert answer["content"].startswith(content)


def test_a_tool_is_cancelled_with_the_call():
    async def cancelled():
        waits = asyncio.create_task(
            call_tool(ToolCall("waits", {}), {"waits": lambda: asyncio.sleep(60)}, value_of)
        )
        await asyncio.sleep(0)
        waits.cancel()
        await waits

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def untyped(a):
    """Add.

    Args:
        a: A number.
    """


def silent(a: int) -> int:
    return a


def test_schemas_are_those_of_transformers_and_a_tool_without_types_is_named_with_its_line():
    (schema,) = schemas_of([add], "env.py:Env")
    assert schema["function"]["parameters"]["required"] == ["a"]
    for tool, message in ((untyped, "missing a type hint"), (silent, "no docstring")):
        line = tool.__code__.co_firstlineno
        with pytest.raises(
            ConfigError, match=rf"the tool '{tool.__name__}' of env.py:Env .*{message}.*py:{line}\)"
        ):
            schemas_of([tool], "env.py:Env")
    with pytest.raises(ConfigError, match="has the tool 'add', a str: a tool must be a function"):
        schemas_of(["add"], "env.py:Env")


@pytest.mark.parametrize("form", ["{}", "[{}]", "```json\n{}\n```", "<|python_tag|>{}", "{}; {}"])
def test_a_tag_in_an_argument_of_plain_json_is_part_of_the_argument(form):
    for argument in ("<tool_call>", "</tool_call>", '<tool_call>{"name": "b", "arguments": {}}</tool_call>'):
        call = json.dumps({"name": "a", "arguments": {"text": argument}})
        written = form.replace("{}", call)
        assert parse_calls(written) == ("", [ToolCall("a", {"text": argument})] * form.count("{}"))
        # Text beside the JSON: the form of Hermes.
        assert parse_calls(f"I call it. {written}")[1] != [ToolCall("a", {"text": argument})]
    answer = json.dumps({"name": "Bob", "note": "<tool_call>"})
    assert parse_calls(answer) == (answer, [])
