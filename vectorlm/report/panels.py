"""Panels and phases: how pictures, pages and tables group the metrics and the times of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

COLOURS = ("#2f6fb0", "#e07b28", "#2a9461", "#c23b4e", "#8059b3", "#8a6a4f", "#d06aa8", "#6b7480")
"""Colours of the curves of a panel, or of compared runs; readable with red-green blindness."""


class Panel(NamedTuple):
    """A plot of a few related metrics."""

    title: str
    look_for: str
    unit: str
    curves: dict[str, str]
    """Labels by metric."""
    shares: bool = False
    """Whether the values are shares, from 0 to 1."""
    divisor: float = 1.0
    from_zero: bool = False
    """Whether the axis begins at 0, which makes small changes look small."""
    logarithmic: bool = False
    always_named: bool = False
    """Whether a single curve has a legend too."""
    pattern: str = ""
    """Regular expression for metrics: if several metrics match, they are the curves, labelled by its group."""


PANELS = (
    Panel(
        "Loss",
        "should fall; held out rising again is overfitting",
        "nats per token",
        {"train/loss": "train", "eval/loss": "held out"},
    ),
    Panel(
        "Pairs told apart",
        "should rise; half is a coin toss",
        "share of pairs",
        {"train/pair_accuracy": "train", "eval/pair_accuracy": "held out"},
        shares=True,
    ),
    Panel("Reward", "should rise, noisily", "mean of the completions", {"reward/mean": "sampled"}),
    Panel(
        "Rewards by name",
        "should not fall while another one rises",
        "mean of the completions",
        {},
        pattern="reward/(.+)/mean",
    ),
    Panel(
        "Rewards by source",
        "each should rise; a flat one is too easy or too hard",
        "mean of the completions",
        {},
        pattern="source/(.+)/reward/mean",
    ),
    Panel(
        "Right answers",
        "should rise with the reward or as the loss falls",
        "share of held-out questions",
        {
            "eval/accuracy": "held out",
            **{f"eval/{kind}_at_{k}": f"{kind}@{k}" for k in (4, 16, 64) for kind in ("pass", "maj")},
        },
        shares=True,
    ),
    Panel(
        "Difficulty",
        "should climb as the reward holds",
        "level of the curriculum",
        {"curriculum/level": "level"},
        from_zero=True,
    ),
    Panel(
        "KL divergence",
        "small and steady; a jump comes before a collapse",
        "nats per token",
        {
            "policy/kl": "from the rollouts' policy",
            "reference/kl": "from the reference",
            "teacher/kl": "from the teacher",
        },
        always_named=True,
    ),
    Panel(
        "Entropy",
        "falls slowly; near 0 the policy stops exploring",
        "nats per token",
        {"policy/entropy": "policy"},
    ),
    Panel(
        "Length of completions",
        "a climb to the limit means endless answers",
        "tokens",
        {"completion/length_mean": "mean", "completion/length_max": "longest"},
        from_zero=True,
    ),
    Panel(
        "Samples without signal",
        "near 100% the policy learns nothing",
        "share",
        {
            "reward/constant_groups": "groups with equal rewards",
            "completion/truncated": "truncated completions",
            "policy/clip_fraction": "clipped tokens",
        },
        shares=True,
    ),
    Panel(
        "Gradient norm",
        "before clipping; look at the data of a spike",
        "norm",
        {"train/grad_norm": "model", "policy/grad_norm": "policy", "critic/grad_norm": "critic"},
        from_zero=True,
    ),
    Panel(
        "Learning rate",
        "as the schedule says",
        "learning rate",
        {"train/learning_rate": "model", "policy/learning_rate": "policy", "critic/learning_rate": "critic"},
    ),
    Panel(
        "Throughput",
        "should be flat; dips are other work on the machine",
        "tokens per second",
        {"train/tokens_per_s": "trained", "perf/tokens_per_s": "sampled and trained"},
        from_zero=True,
    ),
    Panel(
        "Memory of a rank",
        "should be flat; an endless climb is a leak",
        "GiB",
        {"perf/memory_max_bytes": "rank"},
        divisor=2.0**30,
        from_zero=True,
    ),
)
"""The panels of ``run.png``."""
SAMPLE_SIZE = Panel(
    "Effective sample size",
    "100% where engine and trainer agree",
    "share of what was sampled",
    {"correction/ess": "tokens", "correction/ess_sequences": "completions"},
    shares=True,
    always_named=True,
)
LOGPROB_GAP = Panel(
    "Gap of log-probabilities",
    "should be flat; a climb means stale or broken weights",
    "nats",
    {"sampler/logprob_gap_mean": "mean", "sampler/logprob_gap_max": "largest"},
    logarithmic=True,
    always_named=True,
)
STALENESS = Panel(
    "Staleness",
    "at most rl.async.max_staleness; 0 without it",
    "steps behind the trainer",
    {"staleness/token_mean": "mean of the tokens", "staleness/token_max": "oldest token"},
    from_zero=True,
)
ALL_PANELS = (*PANELS, SAMPLE_SIZE, LOGPROB_GAP, STALENESS)


def short(value: float) -> str:
    """Write a number in few characters: 1.5k, 20M, 0.003, 2e-5."""
    if value and not 1e-3 <= abs(value) < 1e15:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


GREY = -1


class Phase(NamedTuple):
    """A phase of a step, with its name in pictures and tables."""

    meaning: str
    colour: int | None = None
    """Index in `COLOURS`, or `GREY`; None if timelines do not show the phase."""


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
"""Phases in the order of a step. The engine measures `sample`; the parts of `evaluate` add up to `evaluate`."""


class PhaseTimes:
    """The seconds of each phase, added up over steps."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def add(self, values: Mapping[str, Any]) -> None:
        """Add the times in a line of metrics."""
        found = {phase: values.get(f"time/{phase}_s") or 0.0 for phase in PHASES}
        if whole := found.pop("evaluate"):
            # Sampling that overlaps with training takes longer than the evaluation that began it.
            for part, name in (("publish", "weights/update_s"), ("sample", "sampler/generate_s")):
                found[f"evaluate/{part}"] = min(values.get(name) or 0.0, whole)
                whole -= found[f"evaluate/{part}"]
            found["evaluate/score"] = whole
        for phase, seconds in found.items():
            self._seconds[phase] += seconds

    def rows(self, whole_s: float | None = None) -> list[tuple[str, float, float]]:
        """Return name, seconds and share of all phases that took time; with `whole_s` the remaining time too."""
        found = {phase: seconds for phase, seconds in self._seconds.items() if seconds}
        total = sum(found.values())
        if whole_s is not None and whole_s > total:
            found["other"], total = whole_s - total, whole_s
        return [(phase, seconds, seconds / total) for phase, seconds in found.items()]

    def table(self, whole_s: float, num_steps: int) -> str:
        """Return seconds, share and milliseconds per step of every phase, one phase per line."""
        lines = [f"{'time by phase':<18}{'s':>9}{'share':>7}{'ms/step':>10}"]
        for phase, seconds, share in [*self.rows(whole_s), ("all", whole_s, 1.0)]:
            meaning = PHASES[phase].meaning if phase in PHASES else ""
            milliseconds = 1e3 * seconds / max(num_steps, 1)
            lines.append(
                f"  {phase:<16}{seconds:>9.2f}{share:>7.0%}{milliseconds:>10.1f}  {meaning}".rstrip()
            )
        return "\n".join(lines)
