"""Trackers: other programs that take a run's metrics (Weights & Biases, TensorBoard, trackio)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml

from vectorlm.plugin import is_plugin, load_plugin, raised_at

if TYPE_CHECKING:
    from vectorlm.report.metrics import Sink

PACKAGES = {"tensorboard": "tensorboardX", "trackio": "trackio"}
"""The trackers of the setting `trackers` that have a name, and the package that each needs."""


def open_trackers(
    trackers: Mapping[str, Mapping[str, Any] | None],
    output: Path,
    run_config: Mapping[str, Any],
    resume_step: int | None,
) -> list[Sink]:
    """Open the `trackers`, arguments by names in `PACKAGES`, of a run that goes on from `resume_step`, or is new."""
    found: list[Sink] = []
    for name, arguments in trackers.items():
        if is_plugin(name):
            found.append(OwnSink(load_plugin(name)(dict(run_config), **(arguments or {}))))
        elif name == "tensorboard":
            placed = {"logdir": str(output / "tensorboard"), **(arguments or {})}
            found.append(TensorBoardSink(placed, run_config, resume_step))
        else:
            resume = "never" if resume_step is None else "allow"
            named = {"project": "vectorlm", "name": output.resolve().name, "resume": resume}
            found.append(TrackioSink({**named, **(arguments or {})}, run_config))
    return found


class Guarded:
    """A tracker whose errors are shown on the console and end neither a step nor the run."""

    def __init__(self, sink: Sink, say: Callable[[str], None]) -> None:
        self._sink, self._say = sink, say
        self._missed: list[int] = []

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values, or say at the first error that the tracker misses some."""
        try:
            self._sink.write(step, values)
        except (Exception, SystemExit) as error:
            self._missed.append(step)
            if len(self._missed) == 1:
                self._say(f"warning: step {step}: a tracker failed, and the run goes on: {raised_at(error)}")

    def __enter__(self) -> Self:
        self._sink.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._missed:
            self._say(f"warning: a tracker misses {len(self._missed)} steps, which metrics.jsonl has")
        try:
            self._sink.__exit__(*error)
        except (Exception, SystemExit) as failure:
            self._say(f"warning: a tracker could not be closed: {raised_at(failure)}")


class OwnSink:
    """Send the metrics to a tracker of the user's, an object with ``write(metrics, step)`` and ``close()``."""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write a copy of the values."""
        self._tracker.write(dict(values), step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._tracker.close()


class WandbSink:
    """Send the metrics to Weights & Biases; with ``mode: offline`` they stay in a local folder.

    Args:
        settings: Keyword arguments of ``wandb.init``: ``project``, ``name``, ``entity``, ``mode``, ``dir`` ….
        run_config: The resolved config, shown beside the run.
        id_file: Where the id of the run is kept.
        resumes: Whether to go on with the run in `id_file`, so that one run stays one; `settings` win.
    """

    def __init__(
        self, settings: Mapping[str, Any], run_config: Mapping[str, Any], id_file: Path, resumes: bool = False
    ) -> None:
        import wandb

        if resumes and id_file.exists():
            settings = {"id": id_file.read_text(), "resume": "allow", **settings}
        self._run = wandb.init(**settings, config=dict(run_config))
        id_file.write_text(self._run.id)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values; several calls for one step become one row."""
        self._run.log(dict(values), step=step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._run.finish(exit_code=0 if kind is None else 1)


class TensorBoardSink:
    """Write TensorBoard's event files with tensorboardX, whose ``SummaryWriter`` takes the `arguments`.

    TensorBoard hides what an earlier run wrote after `resume_step`.
    """

    def __init__(
        self, arguments: Mapping[str, Any], run_config: Mapping[str, Any], resume_step: int | None = None
    ) -> None:
        from tensorboardX import SummaryWriter

        purge_step = None if resume_step is None else resume_step + 1
        # What waits in its buffer, for two minutes by default, is lost when Ctrl-C ends the process.
        self._writer = SummaryWriter(**{"purge_step": purge_step, "flush_secs": 1, **arguments})
        text = yaml.safe_dump(dict(run_config), sort_keys=False)
        self._writer.add_text("config", "    " + text.replace("\n", "\n    "), resume_step or 0)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write each value as a scalar."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()


class TrackioSink:
    """Send the metrics to trackio, which keeps them here unless `arguments` of its ``init`` name a Space or server."""

    def __init__(self, arguments: Mapping[str, Any], run_config: Mapping[str, Any]) -> None:
        import trackio

        self._trackio = trackio
        self._run = self._trackio.init(**arguments, config=dict(run_config))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values as a row."""
        self._run.log(dict(values), step=step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._trackio.finish()
