"""The source of a step's rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vectorlm.rl.prompts import Curriculum, PromptMixture, PromptOrder
from vectorlm.rl.rewards.scorer import GroupScorer
from vectorlm.rl.rollout import Rollout, RolloutGroup
from vectorlm.rl.rollouts.queue import GroupQueue
from vectorlm.rl.rollouts.sampler import PendingGroup, StepGroups, Task
from vectorlm.rl.settings import AsyncSettings
from vectorlm.train.recorder import Timer
from vectorlm.types import PromptRecord

WAIT_S = 0.5
"""Longest wait before the ranks look at what they have."""
ONE_AFTER_THE_OTHER = AsyncSettings(max_staleness=0)


class RolloutSource:
    """Submits groups and hands finished ones to the steps; its calls are collective.

    A group that starts while the engine holds version v is trained on at step v + `max_staleness` at the latest, so no
    token of a batch is older. Finished groups are trained on, the oldest first; the others go on while the ranks
    train, through any number of weight updates. At most (max_staleness + 1) P groups are in flight or waiting; with a
    `max_staleness` of 0 nothing is while the ranks train. Where updates drain the engine, groups are trained on in the
    order in which they were begun, whichever finishes first.
    """

    def __init__(
        self,
        groups: GroupQueue,
        scorer: GroupScorer,
        prompts: PromptOrder[PromptRecord] | PromptMixture,
        *,
        overlap: AsyncSettings | None = None,
        replay: PromptOrder[list[Rollout]] | None = None,
        replayed_share: float = 0.0,
        curricula: Mapping[str, Curriculum] | None = None,
    ) -> None:
        """Take `prompts` as they come; `replayed_share` of the groups of each round come from `replay` instead.

        `curricula`, by the sources of the prompts, see every group.
        """
        self._curricula = curricula or {}
        self._groups, self._scorer, self.prompts, self.replay = groups, scorer, prompts, replay
        self._settings, self._drops = scorer.settings, scorer.drops_constant_groups
        self._max_rounds = self._settings.max_sampling_rounds if self._drops else 1
        self._overlap = overlap or ONE_AFTER_THE_OTHER
        self._replayed_share = 0.0 if replay is None else replayed_share
        self._num_groups = self._settings.prompts_per_step
        self._steps: list[StepGroups] = []
        self._running: dict[int, PendingGroup] = {}
        """The groups in flight, by their numbers in the queue."""
        self._reissued: list[int] = []
        self._num_late = 0

    @property
    def group_size(self) -> int:
        """Return G."""
        return self._settings.group_size

    def oldest_version(self, step: int) -> int | None:
        """Return the first version whose tokens `step` may train on, where older ones are left out."""
        return step - self._overlap.max_staleness if self._overlap.overdue == "mask" else None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: finished groups, and the positions of those that are sampled again.

        Where updates drain the engine, it is drained now; that makes the run that resumes the same as this one.
        """
        while self._overlap.update == "drain" and self._running:
            self._receive(WAIT_S)
        replay_position = 0 if self.replay is None else self.replay.position
        pending = self._pending()
        in_flight = [each.position for each in pending if each.sampled is None]
        return {
            "position": self.prompts.position,
            "replay_position": replay_position,
            "pending": sorted([*self._reissued, *in_flight]),
            "finished": [each.state() for each in pending if each.sampled is not None],
            "curricula": {name: each.state() for name, each in self._curricula.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned, with nothing in flight."""
        self.prompts.position = state["position"]
        if self.replay is not None:
            self.replay.position = state["replay_position"]
        self._reissued = list(state.get("pending", ()))
        # A curriculum that the run did not have begins from its start.
        for name, saved in state.get("curricula", {}).items():
            if name in self._curricula:
                self._curricula[name].load_state(saved)
        # Checkpoints of earlier versions have none.
        if finished := state.get("finished"):
            groups = [PendingGroup.restored(each, self.prompts.at(each["position"])) for each in finished]
            self._steps = [StepGroups(len(groups), self._max_rounds, fresh=groups)]

    def collect(self, step: int, timer: Timer) -> list[RolloutGroup]:
        """Return the scored rollouts of `step`, and the groups that dynamic sampling dropped; the others go on.

        The engine holds the weights of `step`; `timer` records sampling and scoring.

        Raises:
            RewardError: A reward function failed, and the run is set to stop then.
            RolloutError: An environment failed.
        """
        with timer.span("time/generate_s"):
            num_free = (self._overlap.max_staleness + 1) * self._num_groups - len(self._pending())
            self._steps.append(StepGroups(num_free, self._max_rounds, self._replayed_share))
            self._begin(step)
            self._receive(0.0)
        while True:
            finished = [each for each in self._pending() if each.sampled is not None and each.scored is None]
            if self._drops and finished:
                with timer.span("time/score_s"):
                    self._score(finished)
                self._begin(step)
            if self._has_enough(step):
                break
            with timer.span("time/generate_s"):
                self._receive(WAIT_S)
        taken = self._oldest_finished()
        if unscored := [each for each in taken if each.scored is None]:
            with timer.span("time/score_s"):
                self._score(unscored)
        found = self._leave(taken)
        for name, curriculum in self._curricula.items():
            curriculum.observe([each for each in found if each.source == name], self.prompts.position)
        self._cancel_late(step)
        self._steps = [each for each in self._steps if not all(group.is_gone for group in each.needed())]
        return found

    def metrics(self, step: int) -> dict[str, float]:
        """Describe what stays in flight and waiting once the batch of `step` has been taken."""
        metrics = self._groups.metrics()
        levels = {name: float(each.level) for name, each in self._curricula.items()}
        if levels:
            metrics["curriculum/level"] = sum(levels.values()) / len(levels)
            metrics |= {f"curriculum/level/{name}": level for name, level in levels.items() if name}
        if self._overlap.max_staleness:
            pending = self._pending()
            running = [each for each in pending if each.sampled is None]
            metrics["queue/in_flight"] = float(len(running))
            metrics["queue/finished"] = float(len(pending) - len(running))
            lags = (step - each.version for each in running)
            metrics["queue/in_flight_lag_max"] = float(max(lags, default=0))
            metrics["queue/dropped"] = float(self._num_late)
        return metrics

    def _pending(self) -> list[PendingGroup]:
        """Return the groups in flight, and those that a step may train on."""
        needed = (group for step_groups in self._steps for group in step_groups.needed())
        return [group for group in needed if not (group.is_gone or group.is_dropped)]

    def _begin(self, step: int) -> None:
        """Submit the groups that the steps need and that are not submitted yet."""
        new: list[tuple[PendingGroup, Task]] = []
        for step_groups in self._steps:
            num_fresh, num_stored = step_groups.num_needed
            for _ in range(num_fresh - len(step_groups.fresh)):
                position = self._reissued.pop(0) if self._reissued else self.prompts.position
                self.prompts.position = max(self.prompts.position, position + 1)
                step_groups.fresh.append(PendingGroup(position, step))
                new.append((step_groups.fresh[-1], Task(position, self.prompts.at(position))))
            for _ in range(num_stored - len(step_groups.stored)):
                assert self.replay is not None
                position = self.replay.position
                (stored,) = self.replay.take(1)
                step_groups.stored.append(PendingGroup(position, step))
                new.append((step_groups.stored[-1], Task(position, stored[0].prompt_record, stored)))
        if new:
            numbers = self._groups.submit([task for _, task in new])
            self._running |= {number: group for (group, _), number in zip(new, numbers, strict=True)}

    def _receive(self, timeout_s: float) -> None:
        """Receive finished groups; wait until there may be enough."""
        num_missing = 1 if self._drops else self._num_groups - len(self._oldest_finished())
        for number, sampled in self._groups.poll(timeout_s, max(num_missing, 1)).items():
            self._running.pop(number).sampled = sampled

    def _score(self, groups: Sequence[PendingGroup]) -> None:
        sampled = [each.sampled for each in groups if each.sampled is not None]
        for group, scored in zip(groups, self._scorer.score(sampled), strict=True):
            group.scored = scored

    def _leave(self, taken: Sequence[PendingGroup]) -> list[RolloutGroup]:
        """Remove `taken` and dropped groups from their steps; return them in the order of the rounds."""
        leaving = []
        for step_groups in self._steps:
            needed = list(step_groups.needed())
            leaving += [each for each in needed if not each.is_gone and (each.is_dropped or each in taken)]
            if self.replay is not None:
                self._put_back([each for each in step_groups.fresh if each not in needed], self.prompts)
                self._put_back([each for each in step_groups.stored if each not in needed], self.replay)
        if self.replay is None:
            # With overlap, a step takes groups that several steps submitted.
            leaving.sort(key=lambda each: each.position)
        for each in leaving:
            each.is_gone = True
        return [each.scored for each in leaving if each.scored is not None]

    def _put_back(self, unneeded: Sequence[PendingGroup], order: PromptOrder[Any] | PromptMixture) -> None:
        """Return unneeded prompts to the next step."""
        order.position -= len(unneeded)
        self._cancel(unneeded)

    def _cancel(self, groups: Sequence[PendingGroup]) -> None:
        for each in groups:
            each.is_gone = True
        numbers = [number for number, each in self._running.items() if each in groups]
        for number in numbers:
            del self._running[number]
        self._groups.cancel(numbers)

    def _oldest_finished(self) -> list[PendingGroup]:
        """Return the finished groups that started first, at most one step's number."""
        groups = self._pending()
        if self._overlap.update != "drain":
            # None waits for one that is older.
            groups = [each for each in groups if each.sampled is not None]
        oldest = sorted(groups, key=lambda each: (each.version, each.position))[: self._num_groups]
        return [each for each in oldest if each.sampled is not None]

    def _has_enough(self, step: int) -> bool:
        if self._overlap.overdue == "wait" and not self._leaves_room(step):
            return False
        is_idle = all(each.sampled is not None for each in self._pending())
        return is_idle or len(self._oldest_finished()) == self._num_groups

    def _leaves_room(self, step: int) -> bool:
        """Return whether every group that is not taken now can be trained on before it is too old."""
        taken = self._oldest_finished()
        last_steps = [
            each.version + self._overlap.max_staleness for each in self._pending() if each not in taken
        ]
        return all(
            sum(other <= last for other in last_steps) <= (last - step) * self._num_groups
            for last in set(last_steps)
        )

    def _cancel_late(self, step: int) -> None:
        """Cancel groups that are too old for any later step."""
        late = []
        if self._overlap.overdue == "drop":
            late = [each for each in self._pending() if each.version + self._overlap.max_staleness <= step]
        self._cancel(late)
        self._num_late = len(late)
