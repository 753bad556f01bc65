"""Texts that a policy may write when it goes astray: their readers may return anything but must not raise."""

import random

DEEP = ("[" * 1100, '{"a":' * 1100, "[" * 400 + "]" * 400, '{"a":' * 90 + "1" + "}" * 90, "(" * 3000)
NUMBERS = (
    "1" * 4301,
    "-" + "9" * 4300,
    "1e999",
    "-1e999",
    "NaN",
    "-Infinity",
    "1e-999",
    "0" * 50,
    "1.5",
    "7",
)
HALVES = ('"\\ud800"', '"\\udcff\\ud800"', '"\ud83d"', '"\\u0000"', '"\0"')
TAGS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "```json\n",
        "```",
    ),
    *(
        "<function=act>",
        "<tool_response>",
        "</tool_response>",
        "<answer>",
        "[/THINK]",
        ";",
        "\0",
        "\n" * 40,
        "\ufffd",
    ),
)
NAMES = ('"act"', '"other"', '"\\ud800"', '""', "3", "null", "[]", '"__class__"')


def wild_text(draw: random.Random) -> str:
    """Draw one text: calls of any shape, whole and cut off, among tags that begin and end anywhere."""

    def value(depth: int = 0) -> str:
        kind = draw.randrange(9 if depth < 4 else 6)
        if kind == 0:
            return draw.choice(NUMBERS)
        if kind == 1:
            return draw.choice(HALVES)
        if kind == 2:
            return draw.choice(DEEP)
        if kind in (3, 4):
            return draw.choice(("null", "true", '"x"', "{}", "[]", '""', "tru", '"un', "'a'"))
        if kind == 5:
            return str(draw.randrange(10))
        if kind == 6:
            return "[" + ", ".join(value(depth + 1) for _ in range(draw.randrange(3))) + "]"
        members = (f"{draw.choice((*NAMES, *HALVES))}: {value(depth + 1)}" for _ in range(draw.randrange(3)))
        return "{" + ", ".join(members) + "}"

    def call() -> str:
        arguments = draw.choice((value(), '{"x": ' + value() + "}", '{"x": 1}'))
        if draw.random() < 0.2:
            arguments = '"' + arguments.replace("\\", "\\\\").replace('"', '\\"') + '"'
        key = draw.choice(("arguments", "parameters", "args", "function"))
        text = (
            '{"name": '
            + draw.choice(NAMES[:2] if draw.random() < 0.6 else NAMES)
            + f', "{key}": {arguments}}}'
        )
        if draw.random() < 0.2:
            text = '{"type": "function", "function": ' + text + "}"
        if draw.random() < 0.3:
            text = "[" + text + ", " + text + "]"
        if draw.random() < 0.5:
            text = "<tool_call>" + text + "</tool_call>"
        return text[: draw.randrange(len(text) + 1)] if draw.random() < 0.2 else text

    pieces = (
        call,
        value,
        lambda: draw.choice(TAGS),
        lambda: draw.choice(("It is 3.", " ", "é", "\U0001f600")),
    )
    return "".join(draw.choice(pieces)() for _ in range(draw.choice((1, 1, 1, 2, 3, 6))))


def wild_texts(seed: int, count: int) -> list[str]:
    """Draw several texts."""
    draw = random.Random(seed)
    return [wild_text(draw) for _ in range(count)]
