"""Grade answers: mean reward, accuracy, standard errors, pass@k and maj@k."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vectorlm.types import RewardResult


@dataclass(frozen=True)
class Grade:
    """Statistics of one reward over the answers to some questions."""

    mean: float
    """The mean reward; NaN if no answer has a reward."""
    mean_error: float
    """Standard error of `mean`; NaN with fewer than two questions."""
    accuracy: float
    """The share of correct answers, by `RewardResult.is_right`."""
    accuracy_error: float
    """Standard error of `accuracy`."""
    pass_at: Mapping[int, float]
    """Probability that at least one of k answers is correct, by k."""
    majority_at: Mapping[int, float]
    """Probability that the majority of k answers is correct, by k; empty if the reward logged no `answer`."""
    num_questions: int
    """Number of questions that have an answer with a reward."""
    num_unscored: int
    """Number of answers for which the reward returned None; all statistics ignore them."""


def grade(results: Sequence[Sequence[RewardResult]], at_k: Sequence[int] = ()) -> Grade:
    r"""Grade the results of a reward for the answers to every question; a reward of NaN is no reward.

    Values that the reward logs as `answer` are the votes of maj@k. `at_k` are the k of pass@k and maj@k; empty means 2,
    4, 8 and so on. A question counts for a k if at least k of its answers have a reward.

    The answers to one question are not independent. Therefore a question counts once, with the mean of its answers:
    standard error = standard deviation of these means / sqrt(questions).
    *Source*: Miller 2024, arXiv 2411.00640 (several answers to a question).

    For n answers of which c are right, an estimate of pass@k without bias is
    :math:`1 - \binom{n - c}{k} / \binom{n}{k}`. *Source*: Chen et al. 2021, arXiv 2107.03374.

    maj@k is a mean over the same choices of k answers: 1 if the answer with the most votes is right, 1/t if t answers
    are tied and one of them is right, and 0 without a vote. *Source*: Wang et al. 2022, arXiv 2203.11171.
    """
    scored = [[result for result in question if not math.isnan(result.reward)] for question in results]
    num_unscored = sum(map(len, results)) - sum(map(len, scored))
    scored = [question for question in scored if question]
    mean, mean_error = _mean_and_error(
        [statistics.fmean(result.reward for result in question) for question in scored]
    )
    accuracy, accuracy_error = _mean_and_error(
        [statistics.fmean(result.is_right for result in question) for question in scored]
    )
    most = max(map(len, scored), default=0)
    ks = [k for k in at_k or (2**power for power in range(1, most.bit_length())) if k <= most]
    counts = [(len(question), sum(result.is_right for result in question)) for question in scored]
    pass_at = {
        k: statistics.fmean(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts if n >= k)
        for k in ks
    }
    votes = [[(result.logged.get("answer"), result.is_right) for result in question] for question in scored]
    majority_at = {}
    if any(vote is not None for question in votes for vote, _ in question):
        majority_at = {
            k: statistics.fmean(_majority_at(k, voted) for voted in votes if len(voted) >= k) for k in ks
        }
    return Grade(mean, mean_error, accuracy, accuracy_error, pass_at, majority_at, len(scored), num_unscored)


def weighted_sums(
    scored: Sequence[Sequence[Sequence[RewardResult]]], weights: Sequence[float]
) -> list[list[RewardResult]]:
    """Return the weighted sum of every answer's rewards, without rewards of None, as in training.

    The sum is NaN if a reward with a weight failed or if all of them are None, and 0 if all weights are 0.
    """

    def total(found: Sequence[RewardResult]) -> RewardResult:
        counted = [(weight, result) for weight, result in zip(weights, found, strict=True) if weight]
        has_failed = any(result.error is not None for _, result in counted)
        known = [weight * result.reward for weight, result in counted if not math.isnan(result.reward)]
        return RewardResult(math.nan if has_failed or (counted and not known) else sum(known))

    return [
        [total(answer) for answer in zip(*question, strict=True)] for question in zip(*scored, strict=True)
    ]


def _majority_at(k: int, votes: Sequence[tuple[Hashable, bool]]) -> float:
    """Return the mean over all choices of k votes; a vote is an answer and whether it is correct."""
    right: dict[Hashable, list[bool]] = {}
    for vote, is_right in votes:
        if vote is not None:
            right.setdefault(vote, []).append(is_right)
    num_silent = len(votes) - sum(map(len, right.values()))
    total = 0.0
    for answer, are_right in right.items():
        for num_votes in range(1, min(len(are_right), k) + 1) if any(are_right) else ():
            # Number of choices of other votes, by how many answers tie with this one and by the number of votes.
            ways = np.zeros((k // num_votes + 1, k + 1))
            ways[0] = [math.comb(num_silent, num) for num in range(k + 1)]
            for count in (len(others) for other, others in right.items() if other != answer):
                before, ways = ways, np.zeros_like(ways)
                for num in range(min(count, num_votes) + 1):
                    tied = int(num == num_votes)
                    ways[tied:, num:] += math.comb(count, num) * before[: len(ways) - tied, : k + 1 - num]
            shares = ways[:, k - num_votes] / np.arange(1, len(ways) + 1)
            total += statistics.fmean(are_right) * math.comb(len(are_right), num_votes) * float(shares.sum())
    return total / math.comb(len(votes), k)


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return (values[0] if values else math.nan), math.nan
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
