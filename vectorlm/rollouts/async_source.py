"""Rollouts that are sampled while the ranks train, none of them older than `max_staleness` allows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vectorlm.rl.collector import RolloutCollector, greedy_rollouts
from vectorlm.rl.conversation import Conversation
from vectorlm.rl.rollout import Rollout, RolloutGroup
from vectorlm.rollouts.settings import AsyncSettings
from vectorlm.train.recorder import Timer
from vectorlm.types import Completion, Handle, PromptRecord

POLL_S = 0.002
"""How often a step that waits polls the engine."""


@dataclass(eq=False)
class PendingGroup:
    """A group from its first request until it is trained on."""

    prompt_record: PromptRecord
    position: int
    """The position of its prompt among all prompts of the run."""
    version: int
    """The version that the engine held at the first request."""
    num_replaced: int
    """Groups of equal rewards that were dropped before, and that this one replaces."""
    conversation: Conversation
    handles: dict[str, Handle] = field(default_factory=dict)
    """Requests in flight: the ``group``, and its ``greedy`` completion."""
    greedy: list[Rollout] = field(default_factory=list)
    scored: RolloutGroup | None = None

    @property
    def is_finished(self) -> bool:
        """Whether no request is in flight."""
        return not self.handles


class AsyncRolloutSource:
    """A `RolloutSource` that keeps groups in flight in the engine; its calls are collective.

    A group that starts while the engine holds version v is trained on at step v + `max_staleness` at the latest, so no
    token of a batch is older. Finished groups are trained on, the oldest first; the others go on while the ranks
    train, through any number of weight updates. At most (max_staleness + 1) P groups are in flight or waiting.
    """

    def __init__(self, collector: RolloutCollector, settings: AsyncSettings) -> None:
        self._collector, self._settings = collector, settings
        self._num_groups = collector.sampler.settings.prompts_per_step
        self._pending: list[PendingGroup] = []
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
            for _ in range((self._settings.max_staleness + 1) * self._num_groups - len(self._pending)):
                self._begin(step, num_replaced=0)
        while True:
            with timer.span("time/generate_s"):
                self._receive()
            if self._collector.drops_constant_groups:
                with timer.span("time/score_s"):
                    dropped += self._replace_constant_groups(step)
            if self._has_enough(step):
                break
            with timer.span("time/generate_s"):
                time.sleep(POLL_S)
        taken = self._oldest_finished()
        with timer.span("time/score_s"):
            # Together: a reward function may want to see a whole batch.
            self._score([entry for entry in taken if entry.scored is None])
        self._pending = [entry for entry in self._pending if entry not in taken]
        self._cancel_late(step)
        return [entry.scored for entry in taken if entry.scored is not None] + dropped

    def metrics(self, step: int) -> dict[str, float]:
        """Describe what stays in the engine and in the queue once the batch of `step` has been taken."""
        running = [entry for entry in self._pending if not entry.is_finished]
        return {
            "queue/in_flight": float(len(running)),
            "queue/finished": float(len(self._pending) - len(running)),
            "queue/in_flight_lag_max": float(max((step - entry.version for entry in running), default=0)),
            "queue/dropped": float(self._num_late),
        }

    def _begin(self, step: int, num_replaced: int) -> None:
        prompts, sampler = self._collector.prompts, self._collector.sampler
        if self._reissued:
            position = self._reissued.pop(0)
            prompt_record = prompts.at(position)
        else:
            position = prompts.position
            (prompt_record,) = prompts.take(1)
        conversation = sampler.begin([prompt_record], position)
        entry = PendingGroup(prompt_record, position, step, num_replaced, conversation)
        self._pending.append(entry)
        self._submit(entry)
        if self._collector.needs_greedy:
            request = sampler.greedy_request([prompt_record])
            entry.handles["greedy"] = self._collector.engine.submit(*request)

    def _submit(self, entry: PendingGroup) -> None:
        request = entry.conversation.next_request()
        if request is not None:
            entry.handles["group"] = self._collector.engine.submit(*request)

    def _receive(self) -> None:
        """Take what the engine has finished, and start the next turns."""
        finished = self._collector.engine.poll()
        for entry in self._pending:
            for name, handle in list(entry.handles.items()):
                if any(handle is each for each in finished):
                    del entry.handles[name]
                    self._take_answers(entry, name, handle.result())

    def _take_answers(self, entry: PendingGroup, name: str, answers: list[list[Completion]]) -> None:
        if name == "greedy":
            entry.greedy = greedy_rollouts([entry.prompt_record], answers)
        else:
            entry.conversation.receive(answers)
            self._submit(entry)

    def _replace_constant_groups(self, step: int) -> list[RolloutGroup]:
        """Score what has finished; replace groups of equal rewards, and return those."""
        fresh = [entry for entry in self._pending if entry.is_finished and entry.scored is None]
        self._score(fresh)
        dropped = []
        for entry in fresh:
            if entry.scored is not None and entry.scored.is_dropped:
                dropped.append(entry.scored)
                self._pending.remove(entry)
                if entry.num_replaced + 1 < self._collector.sampler.settings.max_sampling_rounds:
                    self._begin(step, entry.num_replaced + 1)
        return dropped

    def _score(self, entries: list[PendingGroup]) -> None:
        if entries:
            groups = [group for entry in entries for group in entry.conversation.groups]
            greedy = [rollout for entry in entries for rollout in entry.greedy]
            for entry, scored in zip(entries, self._collector.score(groups, greedy), strict=True):
                entry.scored = scored

    def _oldest_finished(self) -> list[PendingGroup]:
        """Return the finished groups that started first, at most one step's number, in the order of the prompts."""
        finished = [entry for entry in self._pending if entry.is_finished]
        oldest = sorted(finished, key=lambda entry: (entry.version, entry.position))
        return sorted(oldest[: self._num_groups], key=lambda entry: entry.position)

    def _has_enough(self, step: int) -> bool:
        if self._settings.overdue == "wait" and not self._leaves_room(step):
            return False
        is_idle = all(entry.is_finished for entry in self._pending)
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
            for handle in entry.handles.values():
                handle.cancel()
            self._pending.remove(entry)
        self._num_late = len(late)
