"""Make data for self-play of Nim: random games for a warm-up, positions, and a tiny random Llama.

Run ``python examples/make_nim.py --output_dir data/nim --seed 0``; the same arguments write the same files again. The
folder then holds

- ``model/``: random weights and a tokenizer, as in `make_chats.py`;
- ``chats.jsonl``: games of two players who move at random;
- ``games.jsonl`` and ``held_out.jsonl``: positions to play against older policies, and against the fixed opponent.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from make_chats import CHAT_TEMPLATE, PHRASES
from make_countdown import build_model, build_tokenizer
from nim import MOST

FEWEST_STICKS, MOST_STICKS = 1, 15


def random_game(num_left: int, draw: random.Random) -> dict[str, Any]:
    """Return a game in which both players move at random, as a chat of the player who begins."""
    messages: list[dict[str, str]] = []
    while num_left:
        left = num_left - draw.randint(1, min(MOST, num_left))
        messages += [
            {"role": "user", "content": str(num_left)},
            {"role": "assistant", "content": str(left)},
        ]
        num_left = left - draw.randint(1, min(MOST, left)) if left else 0
    return {"messages": messages}


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("data/nim"))
    parser.add_argument("--num_chats", type=int, default=2048)
    parser.add_argument("--num_games", type=int, default=2048)
    parser.add_argument("--num_held_out", type=int, default=192)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw, folder = random.Random(args.seed), args.output_dir

    def positions(opponent: str, num_games: int) -> list[dict[str, Any]]:
        rows = []
        for game in range(num_games):
            # All positions are equally frequent.
            sticks = FEWEST_STICKS + game % (MOST_STICKS - FEWEST_STICKS + 1)
            prompt = [{"role": "user", "content": str(sticks)}]
            rows.append({"prompt": prompt, "sticks": sticks, "opponent": opponent, "game": game})
        return rows

    files = {
        "chats": [random_game(draw.randint(FEWEST_STICKS, MOST_STICKS), draw) for _ in range(args.num_chats)],
        "games": positions("self", args.num_games),
        "held_out": positions("fixed", args.num_held_out),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = build_tokenizer(PHRASES, CHAT_TEMPLATE)
    build_model(tokenizer, args.seed).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    print(f"{folder}: " + ", ".join(f"{len(rows)} {name}" for name, rows in files.items()))


if __name__ == "__main__":
    main()
