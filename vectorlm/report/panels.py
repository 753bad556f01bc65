"""The panels of a run: which metrics belong in one picture, and what to look for in it."""

from __future__ import annotations

from typing import NamedTuple

COLOURS = ("#2f6fb0", "#e07b28", "#2a9461", "#c23b4e", "#8059b3", "#8a6a4f", "#d06aa8", "#6b7480")
"""For the curves of a panel or, where runs are compared, for the runs; told apart with red-green blindness too."""


class Panel(NamedTuple):
    """A few metrics that belong in one picture."""

    title: str
    look_for: str
    unit: str
    curves: dict[str, str]
    """Labels by metric."""
    shares: bool = False
    """The values are shares, from 0 to 1."""
    divisor: float = 1.0
    from_zero: bool = False
    """The axis begins at 0, so that a wobble looks like one."""
    logarithmic: bool = False
    always_named: bool = False
    """A single curve gets a legend too."""
    pattern: str = ""
    """A regular expression: the metrics that match it are the curves, labelled by its group, if there are several."""


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
        "one that falls as another rises is traded for it",
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
        "Entropy", "falls slowly; near 0 nothing new is tried", "nats per token", {"policy/entropy": "policy"}
    ),
    Panel(
        "Length of completions",
        "a climb to the limit means endless answers",
        "tokens",
        {"completion/length_mean": "mean", "completion/length_max": "longest"},
        from_zero=True,
    ),
    Panel(
        "What teaches little",
        "near 100% nothing is learned",
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
"""Those of ``run.png``."""
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
    "below rl.async.max_staleness; 0 without it",
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
