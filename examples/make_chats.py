"""Make data for the examples with turns and tools: chats for a warm-up, questions, and a tiny random Llama.

Run ``python examples/make_chats.py --output_dir data/chats --seed 0``; the same arguments write the same files again.
The folder then holds

- ``model/``: random weights, and a tokenizer whose chat template writes tools and their calls in the Hermes format;
- ``chats.jsonl``: chats of a weak assistant. With a calculator, it adds all numbers in one of three chats, and answers
  too early in the others. In games it guesses at random;
- ``sums.jsonl`` and ``games.jsonl``: questions for `calculator_chat.py` and games for `guessing_game.py`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from guessing_game import HIGHEST, LOWEST, asked
from make_countdown import build_model, build_tokenizer

PHRASES = ("<user>", "<assistant>", "<tool>", "<tool_call>", "</tool_call>", " + ", " to ", "Tools: ", "add",
           '{"name": "', '", "arguments": {"a": ', ', "b": ', "}}")  # fmt: skip
CHAT_TEMPLATE = """{{ bos_token }}{% if tools %}Tools: \
{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}
{%- for message in messages %}<{{ message.role }}>
{%- if message.role == "assistant" %}{% generation %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
{{ eos_token }}{% endgeneration %}
{%- else %}{{ message.content }}{{ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def chat_with_calculator(numbers: Sequence[int], num_calls: int, draw: random.Random) -> dict[str, Any]:
    """Return a chat that adds numbers with `num_calls` calls and then answers, even if numbers are left."""
    messages = [{"role": "user", "content": question(numbers)}]
    total = numbers[0]
    for number in numbers[1 : 1 + num_calls]:
        call = {"name": "add", "arguments": {"a": total, "b": number}}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
        )
        total += number
        messages.append({"role": "tool", "content": str(total)})
    answer = total if num_calls else draw.randrange(30, 100)
    return {
        "messages": [*messages, {"role": "assistant", "content": str(answer)}],
        "tools": json.dumps(TOOLS),
    }


def question(numbers: Sequence[int]) -> str:
    """Return the user's question."""
    return " + ".join(map(str, numbers))


def random_game(number: int, draw: random.Random) -> dict[str, Any]:
    """Return a game of at most three guesses, which may be outside the range that is left."""
    lowest, highest = LOWEST, HIGHEST
    messages: list[dict[str, str]] = []
    for _ in range(3):
        guess = draw.randint(LOWEST, HIGHEST)
        messages += [
            {"role": "user", "content": asked(lowest, highest)},
            {"role": "assistant", "content": str(guess)},
        ]
        if guess == number:
            break
        if guess < number:
            lowest = max(lowest, guess + 1)
        else:
            highest = min(highest, guess - 1)
    return {"messages": messages, "tools": None}


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("data/chats"))
    parser.add_argument("--num_chats", type=int, default=8192)
    parser.add_argument("--num_questions", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw, folder = random.Random(args.seed), args.output_dir

    def numbers() -> list[int]:
        return [draw.randrange(10, 34) for _ in range(3)]

    def number() -> int:
        return draw.randint(LOWEST, HIGHEST)

    chats = []
    for _ in range(args.num_chats // 4):
        chats += [chat_with_calculator(numbers(), num_calls, draw) for num_calls in range(3)]
        chats.append(random_game(number(), draw))
    sums = [
        {"prompt": [{"role": "user", "content": question(summands)}], "answer": sum(summands)}
        for summands in (numbers() for _ in range(args.num_questions))
    ]
    prompt = [{"role": "user", "content": asked(LOWEST, HIGHEST)}]
    games = [{"prompt": prompt, "number": number()} for _ in range(args.num_questions)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("chats", chats), ("sums", sums), ("games", games)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = build_tokenizer(PHRASES, CHAT_TEMPLATE)
    build_model(tokenizer, args.seed).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    print(f"{folder}: {len(chats)} chats, {len(sums)} sums, {len(games)} games")


if __name__ == "__main__":
    main()
