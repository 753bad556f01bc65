"""The phases of a step, which metrics name ``time/<phase>_s``, and the seconds that a run spent in each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

GREY = -1


class Phase(NamedTuple):
    """A phase, as pictures and tables name it."""

    meaning: str
    colour: int | None = None
    """Its place in `panels.COLOURS`, or `GREY`; None where timelines do not have it."""


PHASES = {
    "start": Phase("wait for the engine to load"),
    "forward": Phase("forward passes"),
    "backward": Phase("backward passes"),
    "optimizer": Phase("loss over ranks, gradient norm, optimizer step"),
    "held_out": Phase("loss on held-out text"),
    "publish": Phase("hot swap of the weights", 3),
    "sample": Phase("the engine computes", 0),
    "generate": Phase("wait for completions", GREY),
    "score": Phase("rewards", 1),
    "assess": Phase("forward passes of old policy, reference, critic, teacher", 6),
    "update": Phase("optimizer steps on the batch", 2),
    "evaluate": Phase("evaluation", 4),
    "evaluate/publish": Phase("evaluation: hot swap"),
    "evaluate/sample": Phase("evaluation: sampling"),
    "evaluate/score": Phase("evaluation: rewards, tasks of the harness, files"),
    "save": Phase("checkpoints", 5),
    "other": Phase("everything else: data, logging, export"),
}
"""In the order of a step. The engine measures `sample`, beside the others; the parts of `evaluate` add up to it."""


class PhaseTimes:
    """Adds up the seconds of each phase over the metrics of steps."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def add(self, values: Mapping[str, Any]) -> None:
        """Add what a line of metrics says."""
        found = {phase: values.get(f"time/{phase}_s") or 0.0 for phase in PHASES}
        if whole := found.pop("evaluate"):
            publish, sample = values.get("weights/update_s") or 0.0, values.get("sampler/generate_s") or 0.0
            found["evaluate/publish"], found["evaluate/sample"] = publish, sample
            found["evaluate/score"] = max(whole - publish - sample, 0.0)
        for phase, seconds in found.items():
            self._seconds[phase] += seconds

    def rows(self, whole_s: float | None = None) -> list[tuple[str, float, float]]:
        """Return the phases that took any time with their seconds and shares; with `whole_s` the rest as well."""
        found = {phase: seconds for phase, seconds in self._seconds.items() if seconds}
        total = sum(found.values())
        if whole_s is not None and whole_s > total:
            found["other"], total = whole_s - total, whole_s
        return [(phase, seconds, seconds / total) for phase, seconds in found.items()]
