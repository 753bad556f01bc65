"""Draw the charts of the talk from measured results, and build the talk's PDF.

python slides/build.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import typst
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vectorlm.algorithms.registry import ROWS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ENGINE, TRAINER, SWAP, GREY = "#2563a8", "#2f8f4e", "#d0342c", "#8a93a0"
INK = "#1c2733"

matplotlib.rcParams.update(
    {
        "font.family": "DejaVu Sans",
        "font.size": 17,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": GREY,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.fonttype": "path",
        # The same data gives the same file.
        "svg.hashsalt": "vectorlm",
    }
)


def read(name: str) -> dict:
    """Read the stored result of a benchmark."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def new(width: float, height: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure of `width` by `height` inches, and its panels from top to bottom."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, 1, squeeze=False)[:, 0]
    return figure, list(axes)


def turns(folder: Path) -> None:
    """Draw the times at which engine and trainer compute, in a recorded synchronous and an asynchronous run."""
    recorded = json.loads(Path(__file__).with_name("timelines.json").read_text())
    figure, axes = new(13, 5.4, rows=2)
    for place, (name, title) in zip(
        axes,
        (
            ("taking turns, 2 ranks", "Synchronous: engine and trainer alternate"),
            ("in flight, k = 2", "Asynchronous: both compute, and weights change while sequences run"),
        ),
        strict=True,
    ):
        draw_turn(place, recorded[name])
        place.set_title(title, loc="left", fontsize=17, fontweight="bold")
    axes[1].set_xlabel("seconds of a recorded run on two CPU cores")
    figure.legend(
        handles=[
            Patch(color=ENGINE, label="vLLM samples"),
            Patch(color=TRAINER, label="FSDP ranks train"),
            Patch(color=SWAP, label="weight update (10 to 20 ms)"),
        ],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    # Typst draws text slightly too high, and would cut off the first title.
    figure.get_layout_engine().set(rect=(0, 0, 1, 0.95))
    figure.savefig(folder / "turns.svg")


def draw_turn(axes: Axes, run: dict) -> None:
    """Draw the spans of engine and trainer, and a line for each swap."""
    end = max(stop for *_, stop in run["trainer"])
    for start, stop in run["engine"]:
        axes.broken_barh([(start, min(stop, end) - start)], (1.08, 0.84), color=ENGINE, linewidth=0)
    for name, start, stop in run["trainer"]:
        if name != "publish":
            axes.broken_barh([(start, stop - start)], (0.08, 0.84), color=TRAINER, linewidth=0)
    for name, start, _ in run["trainer"]:
        if name == "publish":
            axes.axvline(start, color=SWAP, linewidth=3.5)
    axes.set(xlim=(-0.02, end), ylim=(0, 2))
    axes.set_yticks([0.5, 1.5], ["trainer", "engine"])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def swap(folder: Path) -> None:
    """Draw the times of weight updates, and of other ways to change the weights."""
    shown = {
        "memcpy": ("memcpy of the same 142 MB", GREY),
        "live": ("live", SWAP),
        "live, verified": ("live, verified", SWAP),
        "packed": ("packed for oneDNN", SWAP),
        "packed, verified": ("packed, verified (default)", SWAP),
        "vLLM reload_weights, tensors in its own process": (
            "vLLM reload_weights, tensors already there",
            GREY,
        ),
        "full_tensor() per parameter (gather only)": ("gather alone: full_tensor()", GREY),
        "engine restart": ("restart the engine", GREY),
    }
    rows = {row["what"]: row["ms"] for row in read("hot_swap")["rows"]}
    figure, (axes,) = new(13, 5.6)
    for index, (name, (label, colour)) in enumerate(reversed(shown.items())):
        axes.barh(index, rows[name], color=colour, height=0.66)
        axes.text(rows[name] * 1.08, index, f"{rows[name]:,.0f} ms", va="center")
        axes.text(1.85, index, label, va="center", ha="right")
    axes.set(xscale="log", xlim=(2, 40_000), xlabel="milliseconds, logarithmic")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    figure.savefig(folder / "swap.svg")


def steps(folder: Path) -> None:
    """Draw the times of sampling and update in GRPO steps, with TRL's for comparison."""
    settings: dict[str, list[dict]] = {}
    for row in read("rl_step")["rows"]:
        settings.setdefault(row["prompt + completion"], []).append(row)
    order = ["32 + 64, 8 of 8", "32 + long tail, 8 of 8", "128 + 64, 8 of 8", "512 + 128, 16 of 2"]
    figure, (axes,) = new(13, 5.6)
    for index, setting in enumerate(order):
        for place, row in enumerate(settings[setting][:2]):
            sampling, update = float(row["sampling, s"]), float(row["update, s"])
            x = index + (place - 0.5) * 0.4
            of_ours = place == 1
            axes.bar(x, sampling, 0.34, color=ENGINE, alpha=1 if of_ours else 0.4)
            axes.bar(x, update, 0.34, bottom=sampling, color=TRAINER, alpha=1 if of_ours else 0.4)
            label = f"{float(row['times as fast']):.1f} x" if of_ours else "TRL"
            axes.text(
                x, sampling + update + 1, label, ha="center", fontweight="bold" if of_ours else "normal"
            )
    axes.set_xticks(
        range(len(order)),
        [f"{setting.split(',')[0]} tokens\ngroups of {setting.split()[-3]}" for setting in order],
    )
    axes.set_ylabel("seconds a step")
    axes.legend(
        handles=[Patch(color=ENGINE, label="sampling"), Patch(color=TRAINER, label="update")],
        frameon=False,
        loc="upper left",
    )
    figure.savefig(folder / "steps.svg")


def overlap(folder: Path) -> None:
    """Draw seconds per step and steps to a reward, by the bound on staleness."""
    rows = [row for row in read("async")["rows"] if row["lengths"] == "long tail"]
    names = {
        "taking turns on all, 1 rank": "synchronous",
        "one step off": "one step off",
        "in flight, k = 1": "async,\nk = 1",
        "in flight, k = 2": "async,\nk = 2",
        "in flight, k = 4": "async,\nk = 4",
        "in flight, k = 8": "async,\nk = 8",
    }
    found = {row["run"]: row for row in rows}
    figure, (axes,) = new(13, 5.4)
    other = axes.twinx()
    for index, name in enumerate(names):
        row = found[name]
        seconds = float(row["s a step"].split()[0])
        steps = row["steps to reward 0.28"].split()
        count = float(steps[0]) if steps else 0.0
        axes.bar(index - 0.2, seconds, 0.36, color=TRAINER)
        axes.text(index - 0.2, seconds + 0.03, f"{seconds:.2f}", ha="center")
        other.bar(index + 0.2, count, 0.36, color=GREY)
        other.text(index + 0.2, count + 0.5, f"{count:.0f}" if steps else "never", ha="center")
    axes.set_xticks(range(len(names)), list(names.values()))
    axes.set(ylabel="seconds a step", ylim=(0, 3.6))
    other.set(ylabel="steps to reward 0.28", ylim=(0, 44))
    axes.legend(
        handles=[
            Patch(color=TRAINER, label="seconds a step"),
            Patch(color=GREY, label="steps to reward 0.28"),
        ],
        frameon=False,
        loc="upper right",
        ncols=2,
    )
    figure.savefig(folder / "overlap.svg")


def correction(folder: Path) -> None:
    """Draw the gain in accuracy with and without importance weights, by the mismatch of engine and trainer."""
    names = ["none", "bf16", "bf16, noise 0.3", "stale by 2", "stale by 4", "stale by 8"]
    runs = read("correction")["runs"]
    figure, (axes,) = new(13, 5.2)
    for index, name in enumerate(names):
        for preset, shift, colour in (("off", -0.16, GREY), ("tis", 0.16, SWAP)):
            gains = [
                100 * (run["after"] - run["before"])
                for run in runs
                if run["mismatch"] == name and run["correction"] == preset
            ]
            axes.plot([index + shift] * len(gains), gains, "o", color=colour, alpha=0.45, markersize=9)
            mean = sum(gains) / len(gains)
            axes.plot([index + shift - 0.12, index + shift + 0.12], [mean, mean], color=colour, linewidth=5)
    axes.axhline(0, color=INK, linewidth=1)
    axes.set_xticks(
        range(len(names)),
        ["none", "bf16", "bf16 and\nnoise 0.3", "stale\nby 2", "stale\nby 4", "stale\nby 8"],
    )
    axes.set(ylabel="points of accuracy gained")
    axes.legend(
        handles=[
            Patch(color=GREY, label="uncorrected"),
            Patch(color=SWAP, label="truncated importance weights"),
        ],
        frameon=False,
        loc="lower left",
    )
    figure.savefig(folder / "correction.svg")


def main() -> None:
    """Write charts and facts to build/slides, and the talk to slides/vectorlm.pdf."""
    folder = ROOT / "build" / "slides"
    folder.mkdir(parents=True, exist_ok=True)
    for draw in (turns, swap, steps, overlap, correction):
        draw(folder)
    (folder / "facts.json").write_text(json.dumps({"num_algorithms": len(ROWS)}))
    typst.compile(
        str(ROOT / "slides" / "vectorlm.typ"),
        output=str(ROOT / "slides" / "vectorlm.pdf"),
        root=str(ROOT),
        # Only matplotlib's fonts, because machines have different ones.
        font_paths=[str(Path(matplotlib.get_data_path(), "fonts", "ttf"))],
        ignore_system_fonts=True,
    )


if __name__ == "__main__":
    main()
