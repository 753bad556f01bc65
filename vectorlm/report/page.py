"""Write one self-contained HTML page about runs."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from html import escape
from io import BytesIO
from operator import itemgetter
from pathlib import Path
from typing import Any

from vectorlm.data.encoding import shown_content
from vectorlm.data.images import ImageError, is_image, picture_of
from vectorlm.report.panels import ALL_PANELS, PHASES
from vectorlm.report.plots import filled_panels, last_steps
from vectorlm.report.runs import RunFolder, Series, differences, names_of, read_lines

TEMPLATE = Path(__file__).with_name("page.html")
MAX_POINTS = 300
"""Largest number of points per curve; longer curves show their extremes."""
MAX_STEPS, MAX_ROWS = 20, 50
"""Number of steps with samples, spread over the run, and rows per step."""
MAX_TEXT = 500
"""Largest number of characters of a prompt or an answer."""
MAX_WORST = 50
MAX_PICTURES, PICTURE_SIZE = 300, 96
"""Largest number of pictures, and pixels of the longer side."""
OF_ANSWER = ("train_step", "prompt", "options")
OF_ROLLOUT = ("train_step", "prompt", "completion", "reward", "advantage")
"""Keys of a line; lines without them come from another program."""


def write_page(runs: Sequence[RunFolder], output: Path, reload_s: float | None = None) -> None:
    """Write the page; it reloads every `reload_s` seconds (None: never) and shows a sample of a long run's texts."""
    names = names_of(runs)
    described = [_describe(run, name) for run, name in zip(runs, names, strict=True)]
    data = {
        "made": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S"),
        "reloadS": reload_s,
        "limits": {"points": MAX_POINTS, "steps": MAX_STEPS, "rows": MAX_ROWS, "text": MAX_TEXT},
        "panels": [panel._asdict() for panel in filled_panels(runs, ALL_PANELS)],
        "phases": {name: phase._asdict() for name, phase in PHASES.items()},
        "differences": {
            name: [_cut(value) for value in values] for name, values in differences(runs).items()
        },
        "runs": described,
        "pictures": _thumbnails(runs, described),
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # Only "</" could end a script element.
    parts = {"$TITLE": escape(", ".join(names), quote=False), "$DATA": text.replace("<", "\\u003c")}
    # In one pass: a run may be called $DATA.
    page = re.sub(r"\$(TITLE|DATA)", lambda found: parts[found[0]], TEMPLATE.read_text(encoding="utf-8"))
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f".{output.name}.unfinished")
    # Lone surrogates become escapes, as in JSON.
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
        "samples": _sampled(run.samples_path, _answer, OF_ANSWER),
        "rollouts": _sampled(rollouts, _rollout, OF_ROLLOUT),
        "worst": _worst_prompts(rollouts),
    }


def _thin(points: Series) -> list[list[float | None]]:
    """Round to four digits; if there are many points, keep the lowest and the highest of each stretch."""
    width = 1 if len(points) <= MAX_POINTS else -(-2 * len(points) // (MAX_POINTS - 1))
    kept: dict[float, float] = {}
    for start in range(0, len(points), width):
        part = points[start : start + width]
        finite = [point for point in part if math.isfinite(point[1])] or part[-1:]
        kept |= sorted({min(finite, key=itemgetter(1)), max(finite, key=itemgetter(1))})
    return [[step, _rounded(y)] for step, y in (kept | dict(points[-1:])).items()]


def _timeline(path: Path) -> list[dict[str, Any]]:
    """Return the spans of the last steps, in seconds since the first of them began."""
    lines = last_steps(path)
    origin = min((start for line in lines for _, start, _ in line["trainer"]), default=0.0)
    return [
        {
            # int: the page inserts the step as markup, and the file may come from somebody else.
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


def _sampled(
    path: Path, row_of: Callable[[Mapping[str, Any]], dict[str, Any]], keys: Collection[str]
) -> dict[str, Any]:
    """Return the first rows of some steps, spread over the run from first to last, and the number of all rows."""
    counts: dict[int, int] = {}
    for line in read_lines(path, keys=keys):
        counts[line["train_step"]] = counts.get(line["train_step"], 0) + 1
    steps = sorted(counts)
    last = len(steps) - 1
    chosen = {steps[round(index * last / (MAX_STEPS - 1))] for index in range(MAX_STEPS)} if steps else set()
    left = dict.fromkeys(chosen, MAX_ROWS)
    rows = []
    for line in read_lines(path, keys=keys):
        step = line["train_step"]
        if left.get(step, 0) > 0:
            left[step] -= 1
            rows.append({"step": step, **row_of(line)})
    return {"rows": rows, "numRows": sum(counts.values()), "numSteps": len(steps)}


def _answer(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of an answer to a held-out question."""
    reward = (line.get("rewards") or [None])[0]
    answer = line["options"][0] if line["options"] else ""
    return {"prompt": _text(line["prompt"]), "text": _text(answer), "reward": reward, **_images(line)}


def _rollout(line: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "prompt": _text(line["prompt"]),
        "text": _text(line["completion"]),
        "reward": _rounded(line["reward"]),
        "advantage": _rounded(line["advantage"]),
        "columns": _columns(line),
        **_images(line),
    }


def _images(line: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of the pictures in a line's chat, if there are some."""
    chat = line.get("messages") or line["prompt"]
    contents = [
        message.get("content")
        for message in (chat if isinstance(chat, list) else ())
        if isinstance(message, Mapping)
    ]
    parts = (part for content in contents if isinstance(content, list) for part in content)
    names = [str(part["image"]) for part in parts if is_image(part) and part.get("image")]
    return {"images": names} if names else {}


def _thumbnails(runs: Sequence[RunFolder], described: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return small copies of the pictures in the runs' rows, as URLs by name; unreadable pictures are left out."""
    found: dict[str, str] = {}
    for run, data in zip(runs, described, strict=True):
        rows = [*data["rollouts"]["rows"], *data["samples"]["rows"], *data["worst"]]
        for name in dict.fromkeys(name for row in rows for name in row.get("images", ())):
            # The run may have been moved, with the pictures that came without a path.
            copy = run.path / "pictures" / name.rpartition("/")[2].removeprefix("sha256:")
            if name in found or len(found) == MAX_PICTURES:
                continue
            with suppress(ImageError):
                small = picture_of(str(copy) if copy.is_file() else name).open()
                small.thumbnail((PICTURE_SIZE, PICTURE_SIZE))
                file = BytesIO()
                small.save(file, format="JPEG", quality=75)
                found[name] = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    return found


def _worst_prompts(path: Path) -> list[dict[str, Any]]:
    """Return the prompts with the lowest mean reward; if means are equal, prompts with more rollouts come first."""
    totals: dict[str, float] = {}
    found: dict[str, dict[str, Any]] = {}
    for line in read_lines(path, keys=OF_ROLLOUT):
        if line["reward"] is not None:
            # The whole prompt: examples or a system message may fill the part that is shown.
            prompt = json.dumps(line["prompt"])
            totals[prompt] = totals.get(prompt, 0.0) + line["reward"]
            num = found[prompt]["num"] + 1 if prompt in found else 1
            mean = _rounded(totals[prompt] / num)
            last = {"step": line["train_step"], "text": _text(line["completion"]), "columns": _columns(line)}
            last |= _images({"prompt": line["prompt"]})
            found[prompt] = {"prompt": _text(line["prompt"]), "num": num, "mean": mean, **last}
    worst = sorted(found, key=lambda prompt: (totals[prompt] / found[prompt]["num"], -found[prompt]["num"]))
    return [found[prompt] for prompt in worst[:MAX_WORST]]


def _columns(line: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {_cut(value)}" for name, value in line.get("columns", {}).items())


def _text(value: Any) -> str:
    """Return a prompt or an answer as text, with one chat message per line; the middle of a long text is cut out."""
    if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
        value = "\n".join(
            f"{message.get('role', '')}: {shown_content(message.get('content', ''))}" for message in value
        )
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    # The question, and the result of an answer, are at the end.
    half = MAX_TEXT // 2
    return text if len(text) <= MAX_TEXT else f"{text[:half]}…{text[1 - half :]}"


def _cut(value: Any, width: int = 200) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= width else text[: width - 1] + "…"


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
