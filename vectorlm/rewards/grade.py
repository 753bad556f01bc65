"""A grade: the mean of a reward over questions, and how far chance may have moved it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Grade:
    """What one reward gave the answers to some questions."""

    mean: float
    """The mean reward; NaN where no answer has one."""
    mean_error: float
    """Its standard error; NaN with fewer than two questions."""
    accuracy: float
    """The share of answers with a reward of 1, which stands for a right answer."""
    accuracy_error: float
    """Its standard error."""
    pass_at: Mapping[int, float]
    """By k, the chance that one of k answers is right: powers of two up to the fewest answers to a question."""
    num_questions: int
    """Questions that have an answer with a reward."""
    num_unscored: int
    """Answers that the reward returned None for, which count nowhere."""


def grade(rewards: Sequence[Sequence[float]]) -> Grade:
    r"""Grade the rewards of each question's answers, NaN where there is none.

    The answers to one question are not independent, so a question counts once, with the mean of its answers:
    standard error = standard deviation of these means / sqrt(questions).
    *Source*: Miller 2024, arXiv 2411.00640 (several answers to a question). Of n answers with c right ones, pass@k is
    estimated without bias by :math:`1 - \binom{n - c}{k} / \binom{n}{k}`; Chen et al. 2021, arXiv 2107.03374.
    """
    scored = [[each for each in answers if not math.isnan(each)] for answers in rewards]
    num_unscored = sum(map(len, rewards)) - sum(map(len, scored))
    scored = [answers for answers in scored if answers]
    mean, mean_error = _mean_and_error([statistics.fmean(answers) for answers in scored])
    accuracy, accuracy_error = _mean_and_error(
        [statistics.fmean(each == 1.0 for each in answers) for answers in scored]
    )
    counts = [(len(answers), sum(each == 1.0 for each in answers)) for answers in scored]
    pass_at, k = {}, 2
    while counts and k <= min(n for n, _ in counts):
        pass_at[k] = statistics.fmean(1 - math.comb(n - right, k) / math.comb(n, k) for n, right in counts)
        k *= 2
    return Grade(mean, mean_error, accuracy, accuracy_error, pass_at, len(scored), num_unscored)


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return (values[0] if values else math.nan), math.nan
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
