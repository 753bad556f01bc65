"""Small arithmetic questions as chats, and the reward that scores their answers.

Run ``python examples/small_sums.py --output_dir data/small_sums``; the same arguments write the same files again:
``train.jsonl``, ``held_out.jsonl`` (without training questions) and ``chats.jsonl``, the training questions with their
answers for fine-tuning. In a config the reward is ``examples/small_sums.py:first_number``.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

INSTRUCTION = "Answer with the number only."
NUM_HELD_OUT = 96


def first_number(completion: str, answer: int) -> float:
    """Return 1.0 if the first number in the completion is the answer, else 0.0."""
    found = re.search(r"-?\d+", completion)
    return float(found is not None and found.group() == str(answer))


def questions() -> Iterator[tuple[str, str, int]]:
    """Yield each kind, question and answer: sums, differences, the larger of two, two digits plus one."""
    for a, b in product(range(1, 10), repeat=2):
        yield "sum", f"{a} + {b} = ?", a + b
        yield "difference", f"{max(a, b)} - {min(a, b)} = ?", abs(a - b)
    for a, b in product(range(10, 100), repeat=2):
        if a != b:
            yield "larger", f"Which number is larger, {a} or {b}?", max(a, b)
    for a, b in product(range(10, 100), range(1, 10)):
        yield "two_digits", f"{a} + {b} = ?", a + b


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--num_train", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    by_kind: dict[str, list[tuple[str, int]]] = {}
    for kind, question, answer in dict.fromkeys(questions()):
        by_kind.setdefault(kind, []).append((question, answer))
    held_out, train = [], []
    for kind, all_of_kind in by_kind.items():
        draw.shuffle(all_of_kind)
        # At most a third, because a small kind must keep questions to learn from.
        cut = min(NUM_HELD_OUT // len(by_kind), len(all_of_kind) // 3)
        held_out += [_row(kind, *pair) for pair in all_of_kind[:cut]]
        train += [_row(kind, *draw.choice(all_of_kind[cut:])) for _ in range(args.num_train // len(by_kind))]
    draw.shuffle(train)
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "train.jsonl", train)
    _write(folder / "held_out.jsonl", held_out)
    answered = [
        {"messages": [*row["prompt"], {"role": "assistant", "content": str(row["answer"])}]} for row in train
    ]
    _write(folder / "chats.jsonl", answered)
    print(f"{folder}: {len(train)} questions to learn from, {len(held_out)} held out")


def _row(kind: str, question: str, answer: int) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "answer": answer,
        "kind": kind,
    }


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
