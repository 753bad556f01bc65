"""The page of runs: one HTML file that needs no other file and no network."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from html import escape
from operator import itemgetter
from pathlib import Path
from typing import Any

from vectorlm.report.panels import ALL_PANELS
from vectorlm.report.plots import filled_panels, last_steps
from vectorlm.report.profile import PHASES
from vectorlm.report.runs import RunFolder, Series, differences, names_of, read_lines

TEMPLATE = Path(__file__).with_name("page.html")
MAX_POINTS = 300
"""Most points of a curve that all are shown; a longer one shows its extremes."""
MAX_STEPS, MAX_ROWS = 20, 50
"""Steps whose samples are shown, spread over the run, and rows of each."""
MAX_TEXT = 500
"""Characters of a prompt or an answer."""
MAX_WORST = 50


def write_page(runs: Sequence[RunFolder], output: Path, reload_s: float | None = None) -> None:
    """Write the page, which loads itself again every `reload_s`; the texts of long runs are sampled, as it says."""
    names = names_of(runs)
    data = {
        "made": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S"),
        "reloadS": reload_s,
        "limits": {"points": MAX_POINTS, "steps": MAX_STEPS, "rows": MAX_ROWS, "text": MAX_TEXT},
        "panels": [panel._asdict() for panel in filled_panels(runs, ALL_PANELS)],
        "phases": {name: phase._asdict() for name, phase in PHASES.items()},
        "differences": {name: [_cut(each) for each in values] for name, values in differences(runs).items()},
        "runs": [_describe(run, name) for run, name in zip(runs, names, strict=True)],
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # In a script element nothing but "</" could end it.
    parts = {"$TITLE": escape(", ".join(names), quote=False), "$DATA": text.replace("<", "\\u003c")}
    # At once: a run may be called $DATA.
    page = re.sub(r"\$(TITLE|DATA)", lambda found: parts[found[0]], TEMPLATE.read_text(encoding="utf-8"))
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f".{output.name}.unfinished")
    # Half a character of UTF-16 becomes its own escape, as JSON writes it.
    unfinished.write_text(page, encoding="utf-8", errors="backslashreplace")
    unfinished.replace(output)


def _describe(run: RunFolder, name: str) -> dict[str, Any]:
    rollouts = run.path / "rollouts.jsonl"
    state, is_well = run.state()
    return {
        "name": name,
        "path": str(run.path),
        "state": state,
        "isWell": is_well,
        "progress": run.progress(),
        "config": {path: _cut(value) for path, value in run.config.items()},
        "versions": run.start.get("versions", {}),
        "series": {metric: _thin(run.series(metric)) for metric in run.metric_names},
        "phases": run.phases(),
        "timeline": _timeline(run.path / "timeline.jsonl"),
        "samples": _sampled(run.samples_path, _answer),
        "rollouts": _sampled(rollouts, _rollout),
        "worst": _worst_prompts(rollouts),
    }


def _thin(points: Series) -> list[list[float | None]]:
    """Return the points with values of four digits; of many, the lowest and the highest in each of equal stretches."""
    width = 1 if len(points) <= MAX_POINTS else -(-2 * len(points) // (MAX_POINTS - 1))
    kept: dict[float, float] = {}
    for start in range(0, len(points), width):
        part = points[start : start + width]
        finite = [point for point in part if math.isfinite(point[1])] or part[-1:]
        kept |= sorted({min(finite, key=itemgetter(1)), max(finite, key=itemgetter(1))})
    return [[step, _rounded(y)] for step, y in (kept | dict(points[-1:])).items()]


def _timeline(path: Path) -> list[dict[str, Any]]:
    """Return the last steps, in seconds since the first of them began."""
    lines = last_steps(path)
    origin = min((start for line in lines for _, start, _ in line["trainer"]), default=0.0)
    return [
        {
            # The page draws these as markup, and a run's folder may be somebody else's.
            "step": int(line["train_step"]),
            "trainer": [
                [name, round(a - origin, 4), round(b - origin, 4)]
                for name, a, b in line["trainer"]
                if name in PHASES
            ],
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
    totals: dict[str, float] = {}
    found: dict[str, dict[str, Any]] = {}
    for line in read_lines(path):
        if line["reward"] is not None:
            # Whole: examples or a system message may fill what is shown of it.
            prompt = json.dumps(line["prompt"])
            totals[prompt] = totals.get(prompt, 0.0) + line["reward"]
            num = found[prompt]["num"] + 1 if prompt in found else 1
            mean = _rounded(totals[prompt] / num)
            last = {"step": line["train_step"], "text": _text(line["completion"]), "columns": _columns(line)}
            found[prompt] = {"prompt": _text(line["prompt"]), "num": num, "mean": mean, **last}
    worst = sorted(found, key=lambda prompt: (totals[prompt] / found[prompt]["num"], -found[prompt]["num"]))
    return [found[prompt] for prompt in worst[:MAX_WORST]]


def _columns(line: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {_cut(value)}" for name, value in line.get("columns", {}).items())


def _text(value: Any) -> str:
    """Return a prompt or an answer as text, of a long one both ends; chat messages one below the other."""
    if isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        value = "\n".join(f"{each.get('role', '')}: {each.get('content', '')}" for each in value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    # A question, and what an answer comes to, are at the end.
    half = MAX_TEXT // 2
    return text if len(text) <= MAX_TEXT else f"{text[:half]}…{text[1 - half :]}"


def _cut(value: Any, width: int = 200) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= width else text[: width - 1] + "…"


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
