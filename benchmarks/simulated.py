"""Engines and a trainer on a simulated clock, driven by the library's own source of rollouts."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from vectorlm.rl.prompts import PromptOrder
from vectorlm.rl.rollout import RolloutGroup, kept_groups
from vectorlm.rl.rollouts.sampler import SampledGroup, Task
from vectorlm.rl.rollouts.source import RolloutSource
from vectorlm.rl.settings import AsyncSettings, CollectSettings
from vectorlm.train.recorder import Timer
from vectorlm.types import PromptRecord

SKIPPED, STEPS = 10, 60
"""Number of steps until the queue has filled, and number of counted steps after them."""


@dataclass(frozen=True)
class Costs:
    """Times of engine and trainer on their devices."""

    step_s: Callable[[float], float]
    """Seconds of a decoding step of one engine, by the number of sequences in it."""
    admit_s: float
    """Seconds of an engine for each new sequence: its prompt and the overhead of its request."""
    train_s: Callable[[float], float]
    """Seconds of all the trainer's work on a batch, by its number of tokens."""
    swap_s: float
    """Seconds for which a weight update stops the engines and the trainer."""
    num_engines: int = 1
    max_num_seqs: int = 512
    both_at_once: float = 1.0
    """Factor by which engine and trainer slow down while both compute."""


@dataclass(frozen=True)
class Work:
    """The groups that a run samples; dynamic sampling drops some of them."""

    groups: Sequence[tuple[tuple[int, ...], bool]]
    """For each group: tokens of each completion, and whether all its rewards are equal."""
    prompts_per_step: int
    prompt_tokens: int
    rounds: int = 1


class Clock:
    """The time of the simulation, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0


class Handle:
    """The sequences of one group."""

    def __init__(self, number: int, lengths: Sequence[int]) -> None:
        self.number, self.lengths, self.left = number, lengths, len(lengths)


class Engine:
    """A simulated engine: every step adds a token to all running sequences, of which there is a maximum number."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self.now, self.tokens, self.slowdown = costs, 0.0, 0, 1.0
        self.running: list[tuple[int, int, Handle]] = []
        self.waiting: list[tuple[int, int, Handle]] = []
        self.busy_s = 0.0

    @property
    def load(self) -> int:
        """Return the number of running and waiting sequences."""
        return len(self.running) + len(self.waiting)

    def next_end(self) -> float:
        """Return the time at which the next sequence ends if none is added."""
        self._admit()
        if not self.running:
            return float("inf")
        return self.now + (self.running[0][0] - self.tokens) * self._step_s()

    def advance(self, until: float, finished: list[Handle]) -> None:
        """Compute whole steps up to about `until`; add the handles whose last sequence has ended to `finished`."""
        while self.now < until:
            self._admit()
            if not self.running:
                self.now = until
                return
            step_s = self._step_s()
            steps = min(self.running[0][0] - self.tokens, max(1, round((until - self.now) / step_s)))
            self.tokens += steps
            self.now += steps * step_s
            self.busy_s += steps * step_s
            while self.running and self.running[0][0] <= self.tokens:
                handle = heapq.heappop(self.running)[2]
                handle.left -= 1
                if not handle.left:
                    finished.append(handle)

    def _step_s(self) -> float:
        return self.costs.step_s(len(self.running)) * self.slowdown

    def _admit(self) -> None:
        num_free = self.costs.max_num_seqs - len(self.running)
        admitted, self.waiting = self.waiting[:num_free], self.waiting[num_free:]
        for length, number, handle in admitted:
            heapq.heappush(self.running, (self.tokens + length, number, handle))
        took = len(admitted) * self.costs.admit_s * self.slowdown
        self.now += took
        self.busy_s += took


class Engines:
    """The engines as the queue of the library's source of rollouts; a "rollout" is its number of tokens."""

    def __init__(self, clock: Clock, costs: Costs) -> None:
        self.clock, self.costs, self.count, self.num_groups = clock, costs, 0, 0
        self.engines = [Engine(costs) for _ in range(costs.num_engines)]
        self.finished: list[Handle] = []

    def submit(self, tasks: Sequence[Task]) -> list[int]:
        """Give each sequence to the engine with the fewest sequences."""
        numbers = []
        for task in tasks:
            self.num_groups += 1
            numbers.append(self.num_groups)
            handle = Handle(self.num_groups, task.prompt_record.columns["lengths"])
            for length in handle.lengths:
                engine = min(self.engines, key=lambda candidate: candidate.load)
                engine.now = max(engine.now, self.clock.now) if not engine.load else engine.now
                self.count += 1
                engine.waiting.append((length, self.count, handle))
        return numbers

    def cancel(self, numbers: Sequence[int]) -> None:
        """Do nothing: no case here drops late requests."""

    def metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def poll(self, timeout_s: float, at_least: int = 1) -> dict[int, SampledGroup]:
        """Return finished groups; unless `timeout_s` is 0, let time pass until `at_least` groups have finished."""
        while timeout_s and len(self.finished) < at_least and any(engine.load for engine in self.engines):
            self.advance(self._next_end())
        found, self.finished = self.finished, []
        return {handle.number: SampledGroup(handle.lengths) for handle in found}  # type: ignore[arg-type]

    def _next_end(self) -> float:
        # Slightly later, because rounding could otherwise end the step before it.
        return min(engine.next_end() for engine in self.engines) + 1e-9

    def advance(self, until: float) -> None:
        """Let all engines compute until `until`."""
        for engine in self.engines:
            engine.advance(until, self.finished)
        self.clock.now = max(until, self.clock.now)

    def train(self, seconds: float) -> None:
        """Let the trainer compute for `seconds`, or longer if the engines compute at the same time."""
        if any(engine.load for engine in self.engines):
            seconds *= self.costs.both_at_once
            for engine in self.engines:
                engine.slowdown = self.costs.both_at_once
        self.advance(self.clock.now + seconds)
        for engine in self.engines:
            engine.slowdown = 1.0

    def swap(self, drains: bool) -> None:
        """Stop the engines for new weights, immediately or, with `drains`, after their last sequence."""
        while drains and any(engine.load for engine in self.engines):
            self.advance(self._next_end())
        self.clock.now += self.costs.swap_s
        for engine in self.engines:
            engine.now = max(engine.now, self.clock.now)


@dataclass
class Scorer:
    """A scorer that gives equal rewards to the groups in `dropped`, which has the ids of their lengths."""

    dropped: dict[int, bool]
    settings: CollectSettings
    drops_constant_groups = True

    def score(self, groups: Sequence[Any]) -> list[RolloutGroup]:
        """Score groups, whose rollouts are their lengths."""
        equal, others = torch.ones(2), torch.tensor([0.0, 1.0])
        scored = []
        for group in groups:
            is_dropped = self.dropped[id(group.rollouts)]
            rewards = equal if is_dropped else others
            scored.append(RolloutGroup(group.rollouts, rewards, {}, is_dropped=is_dropped))
        return scored


def simulate(
    costs: Costs, work: Work, max_staleness: int | None, drains: bool = False, num_steps: int = STEPS
) -> dict[str, float]:
    """Return the mean seconds of a step, and the shares of time in which engines and trainer were idle."""
    clock = Clock()
    engines = Engines(clock, costs)
    # Every group needs a separate tuple of lengths, because the scorer compares identities.
    records = [
        PromptRecord("", {"lengths": tuple(lengths), "equal": equal}) for lengths, equal in work.groups
    ]
    settings = CollectSettings(
        prompts=("",),
        prompts_per_step=work.prompts_per_step,
        group_size=len(work.groups[0][0]),
        max_sampling_rounds=work.rounds,
    )
    overlap = None
    if max_staleness:
        overlap = AsyncSettings(max_staleness=max_staleness, update="drain" if drains else "keep")
    dropped = {id(record.columns["lengths"]): record.columns["equal"] for record in records}
    # Also if no group is dropped, because the source then receives finished groups one by one.
    scorer = Scorer(dropped, settings)
    source = RolloutSource(engines, scorer, PromptOrder(records, 0), overlap=overlap)
    ends, waits, busy = [], [], []
    for step in range(SKIPPED + num_steps):
        engines.swap(drains)
        asked_at = clock.now
        groups = source.collect(step, Timer(lambda: clock.now))
        waits.append(clock.now - asked_at)
        tokens = sum(sum(cast("Sequence[int]", group.rollouts)) for group in kept_groups(groups))
        # A prompt is computed once per group.
        tokens += len(kept_groups(groups)) * work.prompt_tokens
        engines.train(costs.train_s(tokens))
        ends.append(clock.now)
        busy.append(statistics.fmean(engine.busy_s for engine in engines.engines))
    span = ends[-1] - ends[SKIPPED - 1]
    return {
        "step_s": span / num_steps,
        "engine_idle": 1 - (busy[-1] - busy[SKIPPED - 1]) / span,
        "trainer_idle": sum(waits[SKIPPED:]) / span,
    }
