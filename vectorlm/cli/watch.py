"""``vectorlm watch``: a run's progress in the terminal, while it goes on."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vectorlm.checkpoint.folder import is_held
from vectorlm.errors import ConfigError
from vectorlm.ranks.wait import span
from vectorlm.report.live_run import LiveRun, Sample

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

EVERY_S = 1.0
PLAIN_HEIGHT = 40
"""Lines of a frame outside a terminal, at most."""
LABEL_WIDTH, VALUE_WIDTH = 20, 9
SPARKS = "▁▂▃▄▅▆▇█"
SILENT_STEPS, SILENT_S = 5, 30.0
"""A run that writes nothing for this many of its steps, and this long, is called silent."""
CURVES = (
    ("reward/mean", "reward", "{:.3f}"),
    ("train/loss", "loss", "{:.4f}"),
    ("eval/loss", "held-out loss", "{:.4f}"),
    ("eval/accuracy", "held-out right", "{:.1%}"),
    ("policy/kl", "KL to the sampler", "{:.2g}"),
    ("reference/kl", "KL to the reference", "{:.2g}"),
    ("teacher/kl", "KL to the teacher", "{:.2g}"),
    ("policy/entropy", "entropy", "{:.3f}"),
    ("staleness/token_mean", "staleness, steps", "{:.2f}"),
    ("correction/ess", "ESS", "{:.1%}"),
    ("completion/length_mean", "completion, tokens", "{:.1f}"),
    ("completion/truncated", "truncated", "{:.1%}"),
    ("train/learning_rate", "learning rate", "{:.1e}"),
)
"""Metric, label and form of the curves, the most important first."""
DULL_AT_ZERO = ("policy/kl", "staleness/token_mean", "completion/truncated")
"""Shown only where there is any; `policy/kl` is 0 with one optimizer step a batch."""
PHASES = {
    "generate": "sampling",
    "score": "scoring",
    "assess": "preparing",
    "update": "update",
    "publish": "hot swap",
    "evaluate": "evaluation",
    "save": "checkpoint",
    "held_out": "held-out text",
}
"""Phases whose own names say too little."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm watch``."""
    parser.add_argument("folder", metavar="RUN", help="the output_dir of a run")
    help_text = "print how the run is doing once, and end; the default where the output is not a terminal"
    parser.add_argument("--once", action="store_true", help=help_text)


def run(args: argparse.Namespace) -> int:
    """Show the run until it ends, or until Ctrl-C."""
    path = Path(args.folder)
    live_run = open_run(path)
    from rich.console import Console

    # A pipe gets no colours, even under Jupyter, which asks for them. Numbers in samples are not Rich's to colour.
    in_terminal = sys.stdout.isatty()
    console = Console(force_terminal=in_terminal, highlight=False)
    if in_terminal and not args.once:
        with contextlib.suppress(KeyboardInterrupt):
            _follow(live_run, console)
    live_run.read()
    height = console.height if in_terminal else PLAIN_HEIGHT
    for line in frame(live_run, console.width, height - 1, is_running=is_held(path, 0.0)):
        console.print(line, soft_wrap=True)
    return 0


def _follow(live_run: LiveRun, console: Console) -> None:
    """Show the run on the terminal's other screen while it goes on."""
    from rich.live import Live
    from rich.text import Text

    live = Live(console=console, screen=True, auto_refresh=False)
    try:
        # No `with`: Ctrl-C may come while it starts.
        live.start()
        while is_held(live_run.path, 0.0):
            live_run.read()
            lines = frame(live_run, console.width, console.height, is_running=True)
            live.update(Text("\n").join(lines), refresh=True)
            time.sleep(EVERY_S)
    finally:
        live.stop()


def open_run(path: Path) -> LiveRun:
    """Return the run whose output folder is `path`.

    Raises:
        ConfigError: It is no such folder.
    """
    if not path.is_dir():
        raise ConfigError(
            f"{str(path)!r} is not a folder: name the output_dir of a run, and start the run first."
        )
    live_run = LiveRun(path)
    live_run.read()
    if not live_run.has_files and not is_held(path, 0.0):
        runs = sorted(
            {each.parent.name for name in ("config.yaml", "metrics.jsonl") for each in path.glob(f"*/{name}")}
        )
        within = f" There are runs in it: {', '.join(str(path / name) for name in runs[:5])}." if runs else ""
        raise ConfigError(
            f"{str(path)!r} has neither config.yaml nor metrics.jsonl, and no run uses it: name the output_dir of a "
            f"run.{within}"
        )
    return live_run


def frame(live_run: LiveRun, width: int, height: int, *, is_running: bool) -> list[Text]:
    """Return the lines of the dashboard, at most `height`, each at most `width` cells wide."""
    from rich.text import Text

    head = [_title(live_run, is_running), _progress(live_run, width, is_running)]
    room = height - len(head)
    curves = _curves(live_run, width)[: max(2, room // 2 - 1)]
    phases = _phases(live_run, width)[: max(1, room // 4)]
    blocks = [block for block in (curves, phases) if block]
    room -= sum(len(block) + 1 for block in blocks)
    blocks.append(_samples(live_run.samples()[: max(0, room - 2)], width))
    lines = head + [line for block in blocks if block for line in (Text(), *block)]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


def _title(live_run: LiveRun, is_running: bool) -> Text:
    from rich.text import Text

    state, style = _state(live_run, is_running)
    return Text.assemble((f"{live_run.path.resolve().name}  ", "bold"), (state, style))


def _state(live_run: LiveRun, is_running: bool) -> tuple[str, str]:
    """Say what the run does, and in which colour."""
    step, of = live_run.step, live_run.num_steps
    if not is_running:
        if live_run.has_model or (step is not None and step == of):
            return "ended", "green"
        return f"stopped {'before its first step' if step is None else f'after step {step}'}", "red"
    if live_run.start is None:
        return "starting: reading the model, and starting the engine if there is one", "yellow"
    if step is None:
        return "models are loaded: waiting for the first step, or the evaluation before it", "yellow"
    if step == of:
        return "writing the final model", "yellow"
    silent_s = time.time() - (live_run.written_at or 0.0)
    if silent_s > max(SILENT_S, SILENT_STEPS * (live_run.step_s or 0.0)):
        return f"silent for {span(silent_s)}: docs/reliability.md", "red"
    return f"running for {span(time.time() - live_run.start['started_at'])}", "green"


def _progress(live_run: LiveRun, width: int, is_running: bool) -> Text:
    from rich.text import Text

    step, of, step_s = live_run.step, live_run.num_steps, live_run.step_s
    if step is None:
        return Text("no step yet", style="dim")
    parts = [f"step {step} of {of}" if of else f"step {step}"]
    if of and is_running and step_s and step < of:
        parts.append(f"about {span(step_s * (of - step))} left")
    if step_s:
        parts.append(f"{step_s:.2f} s a step")
    speeds = live_run.values("perf/tokens_per_s") or live_run.values("train/tokens_per_s")
    if speeds and speeds[-1] is not None:
        parts.append(f"{speeds[-1]:,.0f} tokens/s")
    text = ", ".join(parts)
    bar = width - len(text) - 2
    filled = round(bar * min(1.0, step / of)) if of and bar >= 8 else 0
    return Text.assemble(
        text, "  ", ("━" * filled, "green"), ("━" * (bar - filled) if filled or of else "", "dim")
    )


def _curves(live_run: LiveRun, width: int) -> list[Text]:
    from rich.text import Text

    lines = []
    for metric, label, form in CURVES:
        values = live_run.values(metric)
        if not values or (metric in DULL_AT_ZERO and not any(values)):
            continue
        last, style = ("not finite", "bold red") if values[-1] is None else (form.format(values[-1]), "")
        curve = sparkline(values, width - LABEL_WIDTH - VALUE_WIDTH - 2)
        value = (f"{last:>{VALUE_WIDTH}}  ", style)
        lines.append(Text.assemble(f"{label:<{LABEL_WIDTH}}", value, (curve, "cyan")))
    return lines


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return a curve of at most `width` characters; a character is a mean over steps, blank where none is finite."""
    width = min(width, len(values))
    means = []
    for column in range(width):
        part = values[column * len(values) // width : (column + 1) * len(values) // width]
        finite = [value for value in part if value is not None]
        means.append(sum(finite) / len(finite) if finite else None)
    known = [mean for mean in means if mean is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    top = len(SPARKS) - 1
    heights = [None if mean is None else (mean - low) / (high - low) if high > low else 0.5 for mean in means]
    return "".join(" " if height is None else SPARKS[round(height * top)] for height in heights)


def _phases(live_run: LiveRun, width: int) -> list[Text]:
    from rich.text import Text

    lines, room = [], width - LABEL_WIDTH - VALUE_WIDTH - 2
    for name, share in live_run.phases().items():
        bar = "█" * round(room * share) or "▏"
        label = PHASES.get(name, name)
        lines.append(Text.assemble(f"{label:<{LABEL_WIDTH}}{share:>{VALUE_WIDTH}.0%}  ", (bar, "blue")))
    return lines


def _samples(samples: Sequence[Sample], width: int) -> list[Text]:
    from rich.cells import cell_len
    from rich.text import Text

    if not samples:
        return []
    lines = [Text(f"samples of step {samples[0].step}", "bold")]
    for sample in samples:
        reward = "" if sample.reward is None else f"{sample.reward:.2f}"
        prompt, completion = _visible(sample.prompt), _visible(sample.completion)
        if cell_len(prompt) > width // 2:
            # Its end leads over to the completion.
            prompt = "…" + prompt[-(width // 3) :]
        style = "green" if sample.reward == 1.0 else ""
        lines.append(Text.assemble((f"{reward:>6}  ", style), (f"{prompt} → ", "dim"), completion))
    return lines


def _visible(text: str) -> str:
    """Return text on one line, without what a terminal would obey."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
