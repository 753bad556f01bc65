"""The report of runs: one HTML page that needs no other file and no network."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from vectorlm.report.plots import filled_panels
from vectorlm.report.profile import PHASES, PhaseTimes
from vectorlm.report.runs import RunFolder, Series, differences, names_of, read_lines
from vectorlm.report.timeline import PHASES as TIMELINE
from vectorlm.report.timeline import last_steps

TEMPLATE = Path(__file__).with_name("report.html")
MAX_POINTS = 300
"""Points of a curve; of more, each is the mean of its neighbours."""
MAX_STEPS, MAX_ROWS = 20, 50
"""Steps whose samples are shown, spread over the run, and rows of each."""
MAX_TEXT = 500
"""Characters of a prompt or an answer."""
MAX_WORST = 50


def write_report(runs: Sequence[RunFolder], output: Path) -> None:
    """Write the page; the texts of long runs are sampled, as the page says."""
    data = {
        "made": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        "limits": {"points": MAX_POINTS, "steps": MAX_STEPS, "rows": MAX_ROWS, "text": MAX_TEXT},
        "panels": [
            {
                "title": panel.title,
                "lookFor": panel.look_for,
                "unit": panel.unit,
                "curves": panel.curves,
                "shares": panel.shares,
                "fromZero": panel.from_zero,
                "divisor": panel.divisor,
            }
            for panel in filled_panels(runs)
        ],
        "phases": {**PHASES, "other": ""},
        "timelineLabels": {name: label for name, (label, _) in TIMELINE.items()},
        "differences": {
            name: [_cut(value) for value in values] for name, values in differences(runs).items()
        },
        "runs": [_describe(run, name) for run, name in zip(runs, names_of(runs), strict=True)],
    }
    # In a script element nothing but "</" could end it.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace(
        "<", "\\u003c"
    )
    title = ", ".join(names_of(runs))
    page = (
        TEMPLATE.read_text(encoding="utf-8")
        .replace("$TITLE", escape(title, quote=False))
        .replace("$DATA", text)
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8")


def _describe(run: RunFolder, name: str) -> dict[str, Any]:
    times = PhaseTimes()
    for line in run.metrics:
        times.add(line)
    rollouts = run.path / "rollouts.jsonl"
    return {
        "name": name,
        "path": str(run.path),
        "steps": max((line["step"] for line in run.metrics), default=0),
        "config": {path: _cut(value) for path, value in run.config.items()},
        "versions": run.versions,
        "series": {metric: _thin(run.series(metric)) for metric in run.metric_names},
        "phases": times.rows(),
        "timeline": _timeline(run.path / "timeline.jsonl"),
        "samples": _sampled(run.samples_path, _answer),
        "rollouts": _sampled(rollouts, _rollout),
        "worst": _worst_prompts(rollouts),
    }


def _thin(points: Series) -> list[list[float | None]]:
    """Return the points with values of four digits; of many, the mean of each of `MAX_POINTS` stretches."""
    width = max(-(-len(points) // MAX_POINTS), 1)
    found: list[list[float | None]] = []
    for start in range(0, len(points), width):
        part = points[start : start + width]
        values = [y for _, y in part if math.isfinite(y)]
        mean = float(f"{sum(values) / len(values):.4g}") if values else None
        found.append([part[-1][0], mean])
    return found


def _timeline(path: Path) -> list[dict[str, Any]]:
    """Return the last steps, in seconds since the first of them began."""
    lines = last_steps(path)
    origin = min((start for line in lines for _, start, _ in line["trainer"]), default=0.0)
    return [
        {
            "step": line["train_step"],
            "trainer": [[name, round(a - origin, 4), round(b - origin, 4)] for name, a, b in line["trainer"]],
            "engine": [
                [round(max(a - origin, 0), 4), round(b - origin, 4)] for a, b in line["engine"] if b > origin
            ],
        }
        for line in lines
    ]


def _sampled(path: Path, row_of: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Return the first rows of some steps, spread over the run with its first and last, and how many rows there are."""
    counts: dict[int, int] = {}
    for line in read_lines(path):
        counts[line["train_step"]] = counts.get(line["train_step"], 0) + 1
    steps = sorted(counts)
    last = len(steps) - 1
    chosen = {steps[round(index * last / (MAX_STEPS - 1))] for index in range(MAX_STEPS)} if steps else set()
    left = dict.fromkeys(chosen, MAX_ROWS)
    rows = []
    for line in read_lines(path):
        step = line["train_step"]
        if left.get(step, 0) > 0:
            left[step] -= 1
            rows.append({"step": step, **row_of(line)})
    return {"rows": rows, "numRows": sum(counts.values()), "numSteps": len(steps)}


def _answer(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of an answer to a held-out question."""
    reward = (line.get("rewards") or [None])[0]
    answer = line["options"][0] if line["options"] else ""
    return {"prompt": _text(line["prompt"]), "text": _text(answer), "reward": reward}


def _rollout(line: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "prompt": _text(line["prompt"]),
        "text": _text(line["completion"]),
        "reward": _rounded(line["reward"]),
        "advantage": _rounded(line["advantage"]),
        "columns": _columns(line),
    }


def _worst_prompts(path: Path) -> list[dict[str, Any]]:
    """Return the prompts with the lowest mean reward over all rollouts; of equals, those that were tried most."""
    found: dict[str, list[Any]] = {}
    for line in read_lines(path):
        if line["reward"] is not None:
            known = found.setdefault(_text(line["prompt"]), [0, 0.0, 0, "", ""])
            known[0], known[1] = known[0] + 1, known[1] + line["reward"]
            known[2:] = line["train_step"], _text(line["completion"]), _columns(line)
    ranked = sorted(found.items(), key=lambda item: (item[1][1] / item[1][0], -item[1][0]))
    return [
        {
            "prompt": prompt,
            "num": num,
            "mean": _rounded(total / num),
            "step": step,
            "text": text,
            "columns": columns,
        }
        for prompt, (num, total, step, text, columns) in ranked[:MAX_WORST]
    ]


def _columns(line: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {_cut(value)}" for name, value in line.get("columns", {}).items())


def _text(value: Any) -> str:
    """Return a prompt or an answer as text; chat messages one below the other."""
    if isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        value = "\n".join(f"{each.get('role', '')}: {each.get('content', '')}" for each in value)
    return _cut(value, MAX_TEXT)


def _cut(value: Any, width: int = 200) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= width else text[: width - 1] + "…"


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
