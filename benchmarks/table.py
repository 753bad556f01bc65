"""The tables of the README and the pages, made from the result files. Run: python benchmarks/table.py"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
TITLES = {
    "hot_swap": "One hot swap of 142 MB, beside one memcpy of the same bytes (median of 25, taken in turn)",
    "sampling": "Sampling for 64 prompts of 32 tokens, 64 new tokens each (median of 7, taken in turn)",
    "broadcast": "512 completions of 256 tokens with log-probabilities given to two ranks (median of 9)",
    "startup": "From the import to the first token (medians, taken in turn)",
    "countdown": "Right answers to held-out Countdown questions, in percent: mean (range) of three seeds",
    "rl_step": "A step of GRPO beside TRL with vLLM in its process (medians of steps)",
}


PAGES = {
    "README.md": TITLES,
    "docs/correction.md": {
        "correction": "Points of held-out accuracy that 40 steps on Countdown gain: mean (range) of the seeds"
    },
}
"""Which results each page shows."""


def with_tables(text: str, page: str = "README.md") -> str:
    """Return the text of a page with its tables made anew, each with its commit and command."""
    tables = "\n\n".join(_table(name, title) for name, title in PAGES[page].items())
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{tables}\n{END}", text, flags=re.DOTALL)


def _table(name: str, title: str) -> str:
    result = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    columns = list(result["rows"][0])
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)]]
    lines += [[str(row[column]) for column in columns] for row in result["rows"]]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{title}; `{result['command']}` at {result['commit']}:\n\n{table}"


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_tables(path.read_text(), page))
