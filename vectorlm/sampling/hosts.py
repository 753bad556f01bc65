"""The ranks that own a sampler, and what all ranks do together around them."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from vectorlm.errors import EngineError, RankMismatch, VectorLMError
from vectorlm.ranks.meeting import Meeting
from vectorlm.ranks.topology import Topology

Result = TypeVar("Result")
Outcome = tuple[Any, Exception | None]


class Hosts:
    """The ranks that own a sampler: the first of each node, or with data parallel engines several of each.

    The engines of a node share one arena, which the node's first host makes.
    """

    def __init__(self, topology: Topology, meeting: Meeting, engines_per_node: int = 1) -> None:
        """Spread the hosts evenly over the ranks of each node, which `engines_per_node` divides."""
        per_node = topology.local_world_size
        self._topology = topology
        self._meeting = meeting
        self.ranks_per_engine: int = per_node // engines_per_node
        """Ranks, and on CUDA devices, that each engine may count as its own."""
        self.ranks: tuple[int, ...] = tuple(range(0, topology.world_size, self.ranks_per_engine))
        """The hosts, in order."""
        self.first_of_node: tuple[int, ...] = tuple(range(0, topology.world_size, per_node))
        """Per node, the host that makes the arena."""

    @property
    def own_a_sampler(self) -> bool:
        """Whether this rank is a host."""
        return self._topology.rank in self.ranks

    def agree(self, place: str, arguments: Any, summary: str) -> None:
        """Check that every rank came with the same arguments, and name those that did not.

        Raises:
            RankMismatch: A rank brought other arguments than rank 0.
        """
        digest = hashlib.blake2b(repr(arguments).encode()).hexdigest()
        notes = self._meeting.gather(place, (digest, summary))
        odd = [rank for rank, note in enumerate(notes) if note[0] != notes[0][0]]
        if odd:
            others = "; ".join(f"rank {rank}: {notes[rank][1]}" for rank in odd)
            raise RankMismatch(
                f"{place} needs the same arguments on every rank, but rank {', '.join(map(str, odd))} differs from "
                f"rank 0. Rank 0: {notes[0][1]}; {others}."
            )

    def each(
        self, place: str, work: Callable[[], Result], hosts: tuple[int, ...] | None = None
    ) -> list[Result]:
        """Do `work` on every host (or some of them); give all results, or the first error, to every rank."""
        hosts = self.ranks if hosts is None else hosts
        outcome = outcome_of(work) if self._topology.rank in hosts else None
        return first_error_or([self._meeting.share(place, outcome, root=host)[0] for host in hosts])

    def together(self, place: str, work: Callable[[], Result]) -> list[Result]:
        """Do `work` on every rank; give all results, or the first error, to every rank."""
        return first_error_or(self._meeting.gather(place, outcome_of(work)))


def outcome_of(work: Callable[[], Any]) -> Outcome:
    """Return what `work` returned or raised; an error from outside the library's tree brings its traceback."""
    try:
        return work(), None
    except Exception as error:
        if isinstance(error, VectorLMError):
            return None, error
        return None, EngineError(f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}")


def first_error_or(outcomes: list[Outcome]) -> list[Any]:
    """Return all results, or raise the first error."""
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]
