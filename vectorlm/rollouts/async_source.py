"""Rollouts that are sampled while the ranks train, none of them older than `max_staleness` allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vectorlm.rl.collector import WAIT_S, PendingGroups, RolloutCollector
from vectorlm.rl.rollout import RolloutGroup
from vectorlm.rl.settings import AsyncSettings
from vectorlm.train.recorder import Timer


@dataclass(eq=False)
class QueuedGroup:
    """A group that a later step may train on than the one that began it."""

    position: int
    """The position of its prompt among all prompts of the run."""
    version: int
    """The version that the engine held at the first request."""
    num_replaced: int
    """Groups of equal rewards that were dropped before, and that this one replaces."""
    work: PendingGroups
    """This group alone."""

    @property
    def scored(self) -> RolloutGroup | None:
        """The scored group, once it is."""
        return self.work.scored[0] if self.work.scored else None


class AsyncRolloutSource:
    """A `RolloutSource` that keeps groups in flight in the engine; its calls are collective.

    A group that starts while the engine holds version v is trained on at step v + `max_staleness` at the latest, so no
    token of a batch is older. Finished groups are trained on, the oldest first; the others go on while the ranks
    train, through any number of weight updates. At most (max_staleness + 1) P groups are in flight or waiting.
    """

    def __init__(self, collector: RolloutCollector, settings: AsyncSettings) -> None:
        self._collector, self._settings = collector, settings
        self._num_groups = collector.sampler.settings.prompts_per_step
        self._pending: list[QueuedGroup] = []
        self._reissued: list[int] = []
        self._num_late = 0

    @property
    def group_size(self) -> int:
        """Return G."""
        return self._collector.group_size

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: groups that were not trained on are sampled again."""
        positions = [*self._reissued, *(entry.position for entry in self._pending)]
        return self._collector.state() | {"pending": sorted(positions)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned, with nothing in flight."""
        self._collector.load_state(state)
        self._reissued = list(state.get("pending", ()))

    def collect(self, step: int, timer: Timer) -> list[RolloutGroup]:
        """Return the rollouts of `step`, and the groups that dynamic sampling dropped meanwhile; the others go on."""
        dropped: list[RolloutGroup] = []
        with timer.span("time/generate_s"):
            room = (self._settings.max_staleness + 1) * self._num_groups - len(self._pending)
            self._begin(step, [0] * room)
            self._receive(0.0)
        while True:
            if self._collector.drops_constant_groups and (finished := _unscored(self._pending)):
                with timer.span("time/score_s"):
                    dropped += self._replace_constant_groups(finished, step)
            if self._has_enough(step):
                break
            with timer.span("time/generate_s"):
                self._receive(WAIT_S)
        taken = self._oldest_finished()
        if finished := _unscored(taken):
            with timer.span("time/score_s"):
                # Together: a reward function may want to see a whole batch.
                self._collector.score_pending([entry.work for entry in finished])
        self._pending = [entry for entry in self._pending if entry not in taken]
        self._cancel_late(step)
        return [entry.scored for entry in taken if entry.scored is not None] + dropped

    def metrics(self, step: int) -> dict[str, float]:
        """Describe what stays in the engine and in the queue once the batch of `step` has been taken."""
        running = [entry for entry in self._pending if not entry.work.is_finished]
        return {
            "queue/in_flight": float(len(running)),
            "queue/finished": float(len(self._pending) - len(running)),
            "queue/in_flight_lag_max": float(max((step - entry.version for entry in running), default=0)),
            "queue/dropped": float(self._num_late),
        }

    def _begin(self, step: int, num_replaced: Sequence[int]) -> None:
        """Begin a group for each of `num_replaced`."""
        prompts, sampler = self._collector.prompts, self._collector.sampler
        begun = []
        for count in num_replaced:
            if self._reissued:
                position = self._reissued.pop(0)
                prompt_record = prompts.at(position)
            else:
                position = prompts.position
                (prompt_record,) = prompts.take(1)
            work = PendingGroups([prompt_record], sampler.begin([prompt_record], position))
            begun.append(QueuedGroup(position, step, count, work))
        self._pending += begun
        self._collector.submit([entry.work for entry in begun])

    def _receive(self, timeout_s: float) -> None:
        self._collector.receive([entry.work for entry in self._pending], timeout_s)

    def _replace_constant_groups(self, finished: Sequence[QueuedGroup], step: int) -> list[RolloutGroup]:
        """Score what has finished; replace groups of equal rewards, and return those."""
        self._collector.score_pending([entry.work for entry in finished])
        dropped, replaced = [], []
        for entry in finished:
            if entry.scored is not None and entry.scored.is_dropped:
                dropped.append(entry.scored)
                self._pending.remove(entry)
                if entry.num_replaced + 1 < self._collector.sampler.settings.max_sampling_rounds:
                    replaced.append(entry.num_replaced + 1)
        self._begin(step, replaced)
        return dropped

    def _oldest_finished(self) -> list[QueuedGroup]:
        """Return the finished groups that started first, at most one step's number, in the order of the prompts."""
        finished = [entry for entry in self._pending if entry.work.is_finished]
        oldest = sorted(finished, key=lambda entry: (entry.version, entry.position))
        return sorted(oldest[: self._num_groups], key=lambda entry: entry.position)

    def _has_enough(self, step: int) -> bool:
        if self._settings.overdue == "wait" and not self._leaves_room(step):
            return False
        is_idle = all(entry.work.is_finished for entry in self._pending)
        return is_idle or len(self._oldest_finished()) == self._num_groups

    def _leaves_room(self, step: int) -> bool:
        """Return whether every group that is not taken now can be trained on before it is too old."""
        taken = self._oldest_finished()
        last_steps = [
            entry.version + self._settings.max_staleness for entry in self._pending if entry not in taken
        ]
        return all(
            sum(other <= last for other in last_steps) <= (last - step) * self._num_groups
            for last in set(last_steps)
        )

    def _cancel_late(self, step: int) -> None:
        """Cancel what no later step may train on."""
        late = []
        if self._settings.overdue == "drop":
            late = [entry for entry in self._pending if entry.version + self._settings.max_staleness <= step]
        for entry in late:
            for handle in entry.work.handles.values():
                handle.cancel()
            self._pending.remove(entry)
        self._num_late = len(late)


def _unscored(entries: Sequence[QueuedGroup]) -> list[QueuedGroup]:
    return [entry for entry in entries if entry.work.is_finished and entry.scored is None]
