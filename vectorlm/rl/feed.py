"""Rollouts that are sampled while the ranks train, none of them older than it may be."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vectorlm.data.questions import Question
from vectorlm.rl.gather import Gathered, Gatherer, join
from vectorlm.rollout.conversation import Conversation
from vectorlm.rollout.rollout import Rollout
from vectorlm.telemetry.timers import Timer
from vectorlm.types import Completion, Handle

Overdue = Literal["wait", "correct", "drop"]
POLL_S = 0.002
"""How often a step that waits looks for finished completions."""


@dataclass(eq=False)
class Entry:
    """One group, from its admission until it is trained on."""

    question: Question
    position: int
    """Its place among all that the run asks."""
    version: int
    """The weights that the engine held when it was admitted."""
    num_replaced: int
    """How many groups of equal rewards it takes the place of, one after the other."""
    conversation: Conversation
    waits_for: dict[str, Handle] = field(default_factory=dict)
    """Requests under way: of the ``group``, and of its ``greedy`` completion."""
    greedy: list[Rollout] = field(default_factory=list)
    scored: Gathered | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing of it is under way."""
        return not self.waits_for


class Feed:
    """Keeps groups under way in the engine; its calls are collective.

    A group that is admitted while the engine holds version v is trained on at step v + `max_staleness` at the latest,
    so a step's batch may hold no token that is older. Whatever is finished may be trained on, the oldest first; groups
    that are not go on while the ranks train, through as many updates of the weights as it takes. For that
    (max_staleness + 1) P groups are under way or waiting at most.
    """

    def __init__(self, gatherer: Gatherer, *, max_staleness: int, overdue: Overdue) -> None:
        """Begin with nothing under way.

        Args:
            gatherer: Knows the questions, the rewards, and the size of a step.
            max_staleness: Steps by which a trained token's weights may lag behind those being trained.
            overdue: What becomes of groups that are still being written at the last step that may train on them.
                `wait`: the step waits for them. `correct`: they are trained on later, older than the bound. `drop`:
                they are taken back, once the batch is full without them.
        """
        self._gatherer, self._collector = gatherer, gatherer.collector
        self._max_staleness, self._overdue = max_staleness, overdue
        self._entries: list[Entry] = []
        self._reissued: list[int] = []
        self._num_dropped = 0

    @property
    def group_size(self) -> int:
        """G."""
        return self._gatherer.group_size

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: groups that were not trained on are sampled again."""
        pending = [*self._reissued, *(entry.position for entry in self._entries)]
        return self._gatherer.state() | {"pending": sorted(pending)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned, with nothing under way."""
        self._gatherer.load_state(state)
        self._reissued = list(state["pending"])

    def gather(self, step: int, timer: Timer) -> Gathered:
        """Return the rollouts of `step`, whose weights the engine holds; the others go on.

        Raises:
            RewardError: A reward function failed, and that is to stop the run.
            RolloutError: An environment failed.
            EngineError: The engine failed.
        """
        seen: list[Gathered] = []
        with timer.span("time/generate_s"):
            for _ in range((self._max_staleness + 1) * self._gatherer.num_groups - len(self._entries)):
                self._begin(step, num_replaced=0)
        while True:
            with timer.span("time/generate_s"):
                self._listen()
            if self._gatherer.drops_constant_groups:
                with timer.span("time/score_s"):
                    seen += self._sift(step)
            if self._has_enough(step):
                break
            with timer.span("time/generate_s"):
                time.sleep(POLL_S)
        taken = self._due()
        with timer.span("time/score_s"):
            # Together: a reward function may want to see a whole batch.
            self._score([entry for entry in taken if entry.scored is None])
        self._entries = [entry for entry in self._entries if entry not in taken]
        self._drop_late(step)
        found = [entry.scored for entry in taken if entry.scored is not None]
        # Where all were dropped, what is left of them is a batch of no groups.
        gathered = join(found or [self._gatherer.with_differences(seen[0])])
        return replace(gathered, sampled=join(seen)) if seen else gathered

    def metrics(self, step: int) -> dict[str, float]:
        """Describe what is left in the engine and in the queue once the batch of `step` has been taken."""
        running = [entry for entry in self._entries if not entry.is_finished]
        return {
            "queue/in_flight": float(len(running)),
            "queue/finished": float(len(self._entries) - len(running)),
            "queue/in_flight_lag_max": float(max((step - entry.version for entry in running), default=0)),
            "queue/dropped": float(self._num_dropped),
        }

    def _begin(self, step: int, num_replaced: int) -> None:
        order = self._gatherer.order
        if self._reissued:
            position = self._reissued.pop(0)
            question = order.at(position)
        else:
            position = order.position
            (question,) = order.take(1)
        conversation = self._collector.begin([question], position)
        entry = Entry(question, position, step, num_replaced, conversation)
        self._entries.append(entry)
        self._ask(entry)
        if self._gatherer.needs_greedy:
            ask = self._collector.ask_greedy([question])
            entry.waits_for["greedy"] = self._collector.engine.submit(*ask)

    def _ask(self, entry: Entry) -> None:
        ask = entry.conversation.ask()
        if ask is not None:
            entry.waits_for["group"] = self._collector.engine.submit(*ask)

    def _listen(self) -> None:
        """Hear what the engine has finished, and let conversations go on."""
        finished = self._collector.engine.poll()
        for entry in self._entries:
            for what, handle in list(entry.waits_for.items()):
                if any(handle is each for each in finished):
                    del entry.waits_for[what]
                    self._hear(entry, what, handle.result())

    def _hear(self, entry: Entry, what: str, answers: list[list[Completion]]) -> None:
        if what == "greedy":
            entry.greedy = self._collector.heard_greedy([entry.question], answers)
        else:
            entry.conversation.hear(answers)
            self._ask(entry)

    def _sift(self, step: int) -> list[Gathered]:
        """Score what has finished since, and put others in the place of groups of equal rewards."""
        fresh = [entry for entry in self._entries if entry.is_finished and entry.scored is None]
        self._score(fresh)
        for entry in fresh:
            assert entry.scored is not None
            if not self._gatherer.with_differences(entry.scored).groups:
                self._entries.remove(entry)
                if entry.num_replaced + 1 < self._gatherer.max_rounds:
                    self._begin(step, entry.num_replaced + 1)
        return [entry.scored for entry in fresh if entry.scored is not None]

    def _score(self, entries: list[Entry]) -> None:
        if entries:
            groups = [group for entry in entries for group in entry.conversation.groups]
            greedy = [rollout for entry in entries for rollout in entry.greedy]
            for entry, scored in zip(entries, self._gatherer.scored(groups, greedy).split(), strict=True):
                entry.scored = scored

    def _due(self) -> list[Entry]:
        """Return what would be trained on now: of what is finished, the groups that were admitted first."""
        finished = [entry for entry in self._entries if entry.is_finished]
        oldest = sorted(finished, key=lambda entry: (entry.version, entry.position))
        return sorted(oldest[: self._gatherer.num_groups], key=lambda entry: entry.position)

    def _has_enough(self, step: int) -> bool:
        if self._overdue == "wait" and not self._leaves_room(step):
            return False
        is_idle = all(entry.is_finished for entry in self._entries)
        return is_idle or len(self._due()) == self._gatherer.num_groups

    def _leaves_room(self, step: int) -> bool:
        """Return whether, with what would be taken now, every other group can be trained on before it is too old."""
        due = self._due()
        lasts = [entry.version + self._max_staleness for entry in self._entries if entry not in due]
        return all(
            sum(other <= last for other in lasts) <= (last - step) * self._gatherer.num_groups
            for last in set(lasts)
        )

    def _drop_late(self, step: int) -> None:
        """Take back what no later step may train on."""
        late = []
        if self._overdue == "drop":
            late = [entry for entry in self._entries if entry.version + self._max_staleness <= step]
        for entry in late:
            for handle in entry.waits_for.values():
                handle.cancel()
            self._entries.remove(entry)
        self._num_dropped = len(late)
