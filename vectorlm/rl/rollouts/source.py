"""Decide which prompts to sample, and which finished groups each step trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vectorlm.rl.prompts import Curriculum, PromptMixture, PromptOrder
from vectorlm.rl.rewards.scorer import RewardScorer
from vectorlm.rl.rollout import Rollout, RolloutGroup
from vectorlm.rl.rollouts.queue import GroupQueue
from vectorlm.rl.rollouts.sampler import PendingGroup, StepGroups, Task, digest_of
from vectorlm.rl.settings import AsyncSettings
from vectorlm.train.recorder import Timer
from vectorlm.types import PromptRecord

WAIT_S = 0.5
"""Longest wait, in seconds, before the ranks compare which groups have finished."""
ONE_AFTER_THE_OTHER = AsyncSettings(max_staleness=0)


class RolloutSource:
    """Submits groups and hands finished ones to the steps; its calls are collective.

    A group that starts while the engine has version v is trained on at step v + `max_staleness` at the latest; no token
    of a batch is older. Each step takes the finished groups that started first. The engine continues with the other
    groups while the ranks train, across any number of weight updates. At most (max_staleness + 1) P groups are in
    flight or waiting; with `max_staleness` 0, no group is in flight while the ranks train. If updates drain the
    engine, groups are trained on in the order in which they started, even if a later group finishes first.
    """

    def __init__(
        self,
        groups: GroupQueue,
        scorer: RewardScorer,
        prompts: PromptOrder[PromptRecord] | PromptMixture,
        *,
        overlap: AsyncSettings | None = None,
        replay: PromptOrder[list[Rollout]] | None = None,
        replayed_share: float = 0.0,
        curricula: Mapping[str, Curriculum] | None = None,
        origin: str = "",
    ) -> None:
        """Create a source of groups for the prompts in the order of `prompts`.

        Args:
            groups: The queue that samples the groups.
            scorer: Scores finished groups.
            prompts: The order of the prompts, also across passes.
            overlap: How sampling overlaps training; None samples each batch between two training steps.
            replay: Stored groups in a random order.
            replayed_share: Share of the groups of each round that come from `replay`.
            curricula: Curricula by the source of the prompts; each observes every group of its source.
            origin: A text of the rewards, environments, sampling parameters and limits. A resumed run with another text
                samples finished groups again.
        """
        self._origin = origin
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
        """Return the oldest version whose tokens `step` may train on; None if it trains on all tokens."""
        return step - self._overlap.max_staleness if self._overlap.overdue == "mask" else None

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: finished groups, and the positions of groups to sample again.

        If updates drain the engine, drain it now: the resumed run must train on the same groups as this run.
        """
        while self._overlap.update == "drain" and self._running:
            self._receive(WAIT_S)
        replay_position = 0 if self.replay is None else self.replay.position
        pending = self._pending()
        in_flight = [group.position for group in pending if group.sampled is None]
        return {
            "position": self.prompts.position,
            "replay_position": replay_position,
            "pending": sorted([*self._reissued, *in_flight]),
            "origin": self._origin,
            "finished": [
                {**group.state(), "prompt": digest_of(self.prompts.at(group.position))}
                for group in pending
                if group.sampled is not None
            ],
            "curricula": {name: curriculum.state() for name, curriculum in self._curricula.items()},
        }

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Resume from a `state` at `step`; no group may be in flight.

        Finished groups are sampled again if they do not fit the settings of this run, or if their prompts or `origin`
        have changed.
        """
        self.prompts.position = state["position"]
        if self.replay is not None:
            self.replay.position = state["replay_position"]
        # A curriculum without a saved state starts from its beginning.
        for name, saved in state.get("curricula", {}).items():
            if name in self._curricula:
                self._curricula[name].load_state(saved)
        # Checkpoints of earlier versions have no finished groups.
        saved_groups = state.get("finished", ()) if state.get("origin") == self._origin else ()
        finished = [
            PendingGroup.restored(saved, record)
            for saved in saved_groups
            if digest_of(record := self.prompts.at(saved["position"])) == saved.get("prompt")
        ]
        fitting = self._fitting(finished, step)
        again = {saved["position"] for saved in state.get("finished", ())}
        again -= {group.position for group in fitting}
        self._reissued = sorted([*state.get("pending", ()), *again])
        self._steps = [StepGroups(len(fitting), self._max_rounds, fresh=fitting)]

    def _fitting(self, finished: Sequence[PendingGroup], step: int) -> list[PendingGroup]:
        """Return the groups that `step` and later steps can train on before they are too old, oldest first."""
        fitting: list[PendingGroup] = []
        for group in sorted(finished, key=_age):
            num_steps = self._overlap.max_staleness
            if self._overlap.overdue in ("wait", "drop"):
                num_steps += group.version + 1 - step
            has_size = group.sampled is not None and len(group.sampled.rollouts) == self.group_size
            if has_size and len(fitting) < num_steps * self._num_groups:
                fitting.append(group)
        return fitting

    def collect(self, step: int, timer: Timer) -> list[RolloutGroup]:
        """Return the scored groups of `step`, and the groups that dynamic sampling dropped.

        The engine must hold the weights of `step`; `timer` records the times of sampling and scoring.

        Raises:
            RewardError: A reward function failed, and the settings stop the run in this case.
            RolloutError: An environment failed.
        """
        with timer.span("time/generate_s"):
            num_free = (self._overlap.max_staleness + 1) * self._num_groups - len(self._pending())
            self._steps.append(StepGroups(num_free, self._max_rounds, self._replayed_share))
            self._submit_needed(step)
            self._receive(0.0)
        while True:
            finished = [
                group for group in self._pending() if group.sampled is not None and group.scored is None
            ]
            if self._drops and finished:
                with timer.span("time/score_s"):
                    self._score(finished)
                self._submit_needed(step)
            if self._has_enough(step):
                break
            with timer.span("time/generate_s"):
                self._receive(WAIT_S)
        taken = self._oldest_finished()
        if unscored := [group for group in taken if group.scored is None]:
            with timer.span("time/score_s"):
                self._score(unscored)
        found = self._remove(taken)
        for name, curriculum in self._curricula.items():
            curriculum.observe([group for group in found if group.source == name], self.prompts.position)
        self._cancel_late(step)
        self._steps = [
            step_groups
            for step_groups in self._steps
            if not all(group.is_gone for group in step_groups.needed())
        ]
        return found

    def metrics(self, step: int) -> dict[str, float]:
        """Return metrics of the groups that are in flight or waiting after `collect(step)`."""
        metrics = self._groups.metrics()
        levels = {name: float(curriculum.level) for name, curriculum in self._curricula.items()}
        if levels:
            metrics["curriculum/level"] = sum(levels.values()) / len(levels)
            metrics |= {f"curriculum/level/{name}": level for name, level in levels.items() if name}
        if self._overlap.max_staleness:
            pending = self._pending()
            running = [group for group in pending if group.sampled is None]
            metrics["queue/in_flight"] = float(len(running))
            metrics["queue/finished"] = float(len(pending) - len(running))
            lags = (step - group.version for group in running)
            metrics["queue/in_flight_lag_max"] = float(max(lags, default=0))
            metrics["queue/dropped"] = float(self._num_late)
        return metrics

    def _pending(self) -> list[PendingGroup]:
        """Return the groups in flight, and the finished groups that no step has trained on yet."""
        needed = (group for step_groups in self._steps for group in step_groups.needed())
        return [group for group in needed if not (group.is_gone or group.is_dropped)]

    def _submit_needed(self, step: int) -> None:
        """Submit the groups that the steps need and that were not submitted yet."""
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
        """Receive finished groups; wait up to `timeout_s` for as many as the step still needs."""
        num_missing = 1 if self._drops else self._num_groups - len(self._oldest_finished())
        for number, sampled in self._groups.poll(timeout_s, max(num_missing, 1)).items():
            self._running.pop(number).sampled = sampled

    def _score(self, groups: Sequence[PendingGroup]) -> None:
        sampled = [group.sampled for group in groups if group.sampled is not None]
        for group, scored in zip(groups, self._scorer.score(sampled), strict=True):
            group.scored = scored

    def _remove(self, taken: Sequence[PendingGroup]) -> list[RolloutGroup]:
        """Remove `taken` and dropped groups from their steps; return them in the order of the rounds."""
        removed = []
        for step_groups in self._steps:
            needed = list(step_groups.needed())
            removed += [
                group for group in needed if not group.is_gone and (group.is_dropped or group in taken)
            ]
            if self.replay is not None:
                self._put_back([group for group in step_groups.fresh if group not in needed], self.prompts)
                self._put_back([group for group in step_groups.stored if group not in needed], self.replay)
        if self.replay is None:
            # With overlap, a step trains on groups that several steps submitted.
            removed.sort(key=lambda group: group.position)
        for group in removed:
            group.is_gone = True
        return [group.scored for group in removed if group.scored is not None]

    def _put_back(self, unneeded: Sequence[PendingGroup], order: PromptOrder[Any] | PromptMixture) -> None:
        """Cancel unneeded groups, and put back their prompts for the next step."""
        order.position -= len(unneeded)
        self._cancel(unneeded)

    def _cancel(self, groups: Sequence[PendingGroup]) -> None:
        for group in groups:
            group.is_gone = True
        numbers = [number for number, group in self._running.items() if group in groups]
        for number in numbers:
            del self._running[number]
        self._groups.cancel(numbers)

    def _oldest_finished(self) -> list[PendingGroup]:
        """Return the finished groups that started first, at most as many as a step trains on."""
        groups = self._pending()
        if self._overlap.update != "drain":
            # A finished group does not wait for an older one.
            groups = [group for group in groups if group.sampled is not None]
        oldest = sorted(groups, key=_age)[: self._num_groups]
        return [group for group in oldest if group.sampled is not None]

    def _has_enough(self, step: int) -> bool:
        if all(group.sampled is not None for group in self._pending()):
            return True
        if self._overlap.overdue == "wait" and not self._can_postpone_others(step):
            return False
        return len(self._oldest_finished()) == self._num_groups

    def _can_postpone_others(self, step: int) -> bool:
        """Return whether every group that this step does not take can be trained on before it is too old."""
        taken = self._oldest_finished()
        last_steps = [
            group.version + self._overlap.max_staleness for group in self._pending() if group not in taken
        ]
        return all(
            sum(other <= last for other in last_steps) <= (last - step) * self._num_groups
            for last in set(last_steps)
        )

    def _cancel_late(self, step: int) -> None:
        """Cancel groups that are too old for any later step."""
        late = []
        if self._overlap.overdue == "drop":
            late = [group for group in self._pending() if group.version + self._overlap.max_staleness <= step]
        self._cancel(late)
        self._num_late = len(late)


def _age(group: PendingGroup) -> tuple[int, int]:
    """Return a key that sorts groups by the version that they started with."""
    return group.version, group.position
