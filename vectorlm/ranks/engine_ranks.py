"""Work that ranks do together: on all ranks, or on the ranks that own an engine."""

from __future__ import annotations

import hashlib
import os
import re
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from vectorlm.errors import EngineError, RankMismatch, VectorLMError
from vectorlm.ranks.collectives import Collectives, ranks_text
from vectorlm.ranks.topology import Topology

ADDRESS = re.compile(" at 0x[0-9a-f]+")
Result = TypeVar("Result")
CallResult = tuple[Any, Exception | None]
"""The result of a call, or the error that it raised; the one form in which errors cross to another process."""


class EngineRanks:
    """The ranks that own an engine: the first of each node, or several per node with data-parallel engines."""

    def __init__(self, topology: Topology, collectives: Collectives, engines_per_node: int = 1) -> None:
        """Spread the engine ranks evenly over the ranks of each node, which `engines_per_node` divides."""
        per_node = topology.local_world_size
        self.topology, self.collectives = topology, collectives
        self.ranks_per_engine: int = per_node // engines_per_node
        """Number of ranks per engine; on CUDA also the number of devices that an engine may use."""
        self.ranks: tuple[int, ...] = tuple(range(0, topology.world_size, self.ranks_per_engine))
        self.first_of_node: tuple[int, ...] = tuple(range(0, topology.world_size, per_node))
        """The first engine rank of each node, whose engine creates the arena."""

    @property
    def owns_an_engine(self) -> bool:
        """Whether this rank is an engine rank."""
        return self.topology.rank in self.ranks

    def check_same_args(self, place: str, arguments: Any, summary: str) -> None:
        """Raise `RankMismatch` on every rank if the arguments of a rank differ from rank 0's."""
        text = repr(arguments)
        digest = hashlib.blake2b(text.encode()).hexdigest()
        notes = self.collectives.all_gather_object(place, (digest, summary))
        odd = [rank for rank, note in enumerate(notes) if note[0] != notes[0][0]]
        if odd:
            # All ranks reach this collective, because they have the same notes.
            texts = self.collectives.all_gather_object(f"compare the arguments of {place}", text)
            pairs = enumerate(zip(texts[0], texts[odd[0]], strict=False))
            first = max(next((place for place, (one, other) in pairs if one != other), 0) - 30, 0)
            others = "; ".join(f"rank {rank}: {notes[rank][1]}" for rank in odd)
            raise RankMismatch(
                f"{place} needs the same arguments on every rank, but rank {', '.join(map(str, odd))} differs from "
                f"rank 0. Rank 0: {notes[0][1]}; {others}. The first difference: "
                f"{texts[odd[0]][first : first + 60]!r} on rank {odd[0]}, {texts[0][first : first + 60]!r} on rank 0."
            )

    def on_engine_ranks(
        self, place: str, work: Callable[[], Result], engine_ranks: tuple[int, ...] | None = None
    ) -> list[Result]:
        """Do `work` on all or some engine ranks; return all results or raise the first error, on every rank."""
        engine_ranks = self.ranks if engine_ranks is None else engine_ranks
        mine = capture(work) if self.topology.rank in engine_ranks else None
        broadcast = self.collectives.broadcast_object
        return results_or_first_error([broadcast(place, mine, root=rank)[0] for rank in engine_ranks])

    def on_all_ranks(self, place: str, work: Callable[[], Result]) -> list[Result]:
        """Do `work` on every rank; return all results, or raise the first error, on every rank."""
        return results_or_first_error(self.collectives.all_gather_object(place, capture(work)))


def comparable(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as texts for `require_equal`, without addresses of functions, which differ between ranks."""
    return {name: ADDRESS.sub("", repr(value)) for name, value in settings.items()}


def require_equal(texts: Sequence[Mapping[str, str]]) -> None:
    """Raise `RankMismatch` if a rank's settings differ from rank 0's; the error lists names and both values."""
    ranks_with: dict[str, list[int]] = defaultdict(list)
    for rank, theirs in enumerate(texts):
        names = [name for name in {**texts[0], **theirs} if theirs.get(name) != texts[0].get(name)]
        other = (f"{name}={theirs.get(name)} instead of {texts[0].get(name)}" for name in names)
        ranks_with[", ".join(other)].append(rank)
    ranks_with.pop("")
    if ranks_with:
        others = "; ".join(
            f"{ranks_text(ranks)} started with settings that differ from rank 0's: {text}"
            for text, ranks in ranks_with.items()
        )
        raise RankMismatch(f"{others}. Start every rank with the same settings, files and versions.")


def gather(topology: Topology, value: Any) -> list[Any]:
    """Return the values of all ranks, by rank, on every rank; a single rank needs no process group."""
    if topology.world_size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * topology.world_size
    dist.all_gather_object(values, value)
    return values


def portable(error: BaseException, where: str = "") -> VectorLMError:
    """Return an error that every process can unpickle: this library's own, or one with the traceback in its text.

    An error class of the user's code becomes its nearest base class of this library, which all processes can import.
    """
    kinds = (kind for kind in type(error).__mro__ if issubclass(kind, VectorLMError))
    known = next((kind for kind in kinds if kind.__module__.startswith("vectorlm.")), EngineError)
    is_text = all(isinstance(argument, str) for argument in error.args)
    if isinstance(error, VectorLMError) and known is type(error) and is_text:
        return error
    heading = f"In {where}:\n" if where else ""
    trace = "".join(traceback.format_exception(error))
    return known(f"{type(error).__name__}: {error}\n\n{heading}{trace}").of_rank(getattr(error, "rank", None))


def capture(work: Callable[[], Any], where: str = "") -> CallResult:
    """Return the result of `work` or its error, made `portable`.

    `where` names a process that is not a rank; without it the error names the rank.
    """
    try:
        return work(), None
    except Exception as error:
        found = portable(error, where)
        return None, found if where else found.of_rank(int(os.environ.get("RANK", 0)))


def results_or_first_error(call_results: Sequence[CallResult]) -> list[Any]:
    """Return all results, or raise the first error."""
    for _, error in call_results:
        if error is not None:
            raise error
    return [result for result, _ in call_results]
