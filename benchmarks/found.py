"""Save the finished runs of a long benchmark, and resume it after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from report import circumstances


def read_found(folder: Path) -> list[dict[str, Any]]:
    """Return the results of runs that finished at this commit."""
    path, commit = folder / "found.jsonl", circumstances()["commit"]
    runs = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [run for run in runs if run.pop("commit") == commit]


def add_found(folder: Path, run: dict[str, Any]) -> None:
    """Save the result of a run with the current commit."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "found.jsonl").open("a") as lines:
        lines.write(json.dumps(run | {"commit": circumstances()["commit"]}) + "\n")
