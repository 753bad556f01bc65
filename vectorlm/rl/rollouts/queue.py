"""The queue of groups in flight, shared by all ranks."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vectorlm.rl.rollout import Rollout
from vectorlm.rl.rollouts.actor import Actor, ConcurrencyLimit, Outcome
from vectorlm.rl.rollouts.sampler import GroupSampler, SampledGroup, Task
from vectorlm.sampling.engine import WAIT_S, SamplingEngine

FIRST_LIMIT = 64
"""Initial concurrency limit of an engine whose limit follows its throughput."""
MOST = ("in_flight", "asking", "room")


class GroupQueue:
    """Samples groups: one actor per engine takes groups from a shared queue.

    Its methods are collective, and return the same values on all ranks.
    """

    def __init__(self, engine: SamplingEngine, sampler: GroupSampler) -> None:
        """Start this rank's actor, if the rank has an engine; all ranks call this."""
        max_num_seqs = engine.wait_until_ready().max_num_seqs
        self._ranks = engine.engine_ranks
        self._num_submitted = 0
        self._open: set[int] = set()
        self._most: tuple[int, ...] = (0, 0, 0)
        self._actor: Actor | None = None
        # All ranks count names, also ranks without an engine.
        name = engine.next_name()
        if engine.local is not None:
            # As many groups as the engine has sequences: its batch stays full while a few rollouts of every group
            # take longer. Rollouts that wait for their environment do not count: slow environments get more groups.
            asked, size = sampler.settings.rollouts_per_engine, sampler.settings.group_size
            limit = ConcurrencyLimit(max_num_seqs * size if asked == "auto" else asked)
            if asked == "auto" and (sampler.open_environment or sampler.agents):
                # This limit follows the throughput. Single turns have a fixed limit: they must repeat bit for bit.
                limit = ConcurrencyLimit(max(min(max_num_seqs, FIRST_LIMIT), size), max_num_seqs * size)
            self._actor = Actor(
                engine.local,
                sampler,
                draw=self._draw(f"rollouts of {name}"),
                # A copy, because the rank's own thread may encode at the same time.
                tokenizer=functools.cache(lambda: copy.deepcopy(engine.tokenizer)),
                limit=limit,
            )

    def submit(self, tasks: Sequence[Task]) -> Sequence[int]:
        """Submit groups and return their numbers."""
        numbers = range(self._num_submitted, self._num_submitted + len(tasks))
        self._num_submitted += len(tasks)
        self._open |= set(numbers)
        if self._actor is not None:
            # An engine starts at most its share, because no other engine can take a group that it has started.
            share = -(-len(self._open) // len(self._ranks.ranks))
            self._actor.submit(dict(zip(numbers, tasks, strict=True)), self._open, share)
        return numbers

    def poll(self, timeout_s: float, at_least: int = 1) -> dict[int, SampledGroup]:
        """Return the groups that finished on any rank, by their numbers.

        Waits up to `timeout_s` seconds for `at_least` groups; the ranks synchronise every `WAIT_S` seconds.

        Raises:
            VectorLMError: A rollout raised it.
        """
        deadline_s = time.monotonic() + timeout_s
        here: dict[int, Outcome] = {}

        def look() -> tuple[int, tuple[int, ...], bool]:
            nonlocal here
            most: tuple[int, ...] = (0, 0, 0)
            if self._actor is not None:
                self._actor.wait(at_least, min(max(deadline_s - time.monotonic(), 0.0), WAIT_S))
                here, most = self._actor.take()
            return len(here), most, time.monotonic() >= deadline_s

        while self._open:
            notes = self._ranks.on_all_ranks("rollouts", look)
            of_all = map(sum, zip(*(most for _, most, _ in notes), strict=True))
            self._most = tuple(map(max, self._most, of_all))
            # Rank 0 decides for all ranks, because their clocks differ.
            if any(count for count, *_ in notes) or notes[0][2]:
                break
        else:
            return {}
        outcomes = dict(here)
        for rank, (count, *_) in enumerate(notes):
            if count and len(notes) > 1:
                outcomes |= self._of_rank(rank, here)
        found: dict[int, SampledGroup] = {}
        for number, outcome in sorted(outcomes.items()):
            if number in self._open:
                self._open.discard(number)
                if isinstance(outcome, Exception):
                    raise outcome
                found[number] = outcome
        return found

    def sample(self, tasks: Sequence[Task]) -> list[Sequence[Rollout]]:
        """Return the rollouts of each group, in order; if one group fails, the others are cancelled."""
        numbers = self.submit(tasks)
        found: dict[int, Sequence[Rollout]] = {}
        try:
            while len(found) < len(numbers):
                found |= {number: group.rollouts for number, group in self.poll(WAIT_S).items()}
        except BaseException:
            self.cancel(numbers)
            raise
        return [found[number] for number in numbers]

    def cancel(self, numbers: Sequence[int]) -> None:
        """Cancel groups in flight."""
        self._open -= set(numbers)
        if numbers and self._actor is not None:
            self._actor.cancel(numbers)

    def metrics(self) -> dict[str, float]:
        """Return the maxima of rollouts in flight, of sequences in the engines and of the concurrency limits."""
        most, self._most = self._most, (0, 0, 0)
        return {f"rollout/{name}_max": float(value) for name, value in zip(MOST, most, strict=True)}

    def close(self) -> None:
        """Cancel all groups of this rank; not collective."""
        if self._actor is not None:
            self._actor.close()

    def _draw(self, name: str) -> Callable[[], int]:
        if len(self._ranks.ranks) == 1:
            # With one engine, no other rank draws from the queue.
            return itertools.count().__next__
        return functools.partial(self._ranks.collectives.ticket, name)

    def _of_rank(self, rank: int, here: Mapping[int, Outcome]) -> Mapping[int, Outcome]:
        """Return on every rank the outcomes that finished on `rank`."""
        is_mine = rank == self._ranks.topology.rank
        packed = [np.frombuffer(pickle.dumps(here), np.uint8)] if is_mine else []
        _, (received,) = self._ranks.collectives.broadcast_object("rollouts", None, packed, root=rank)
        found: Mapping[int, Outcome] = here if is_mine else pickle.loads(received.tobytes())
        return found
