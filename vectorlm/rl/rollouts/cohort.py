"""The groups that a step begins, and the rounds in which dynamic sampling takes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from vectorlm.rl.rollout import Rollout, RolloutGroup
from vectorlm.rl.rollouts.sampler import SampledGroup
from vectorlm.types import PromptRecord, RewardResult


@dataclass(eq=False)
class PendingGroup:
    """A group from its beginning until a step has trained on it."""

    position: int
    """The position of its prompt among all prompts of the run, or of a stored group among these."""
    version: int
    """The version that the engine held when it was begun."""
    sampled: SampledGroup | None = None
    scored: RolloutGroup | None = None
    is_gone: bool = False
    """Whether a step has taken it, or it was dropped for its age."""

    @property
    def is_dropped(self) -> bool:
        """Whether dynamic sampling has dropped it; False while that is not known."""
        return self.scored is not None and self.scored.is_dropped

    def state(self) -> dict[str, Any]:
        """Return a finished group as plain values, without its prompt, which the position tells."""
        assert self.sampled is not None
        sampled = asdict(
            self.sampled,
            dict_factory=lambda items: {name: each for name, each in items if name != "prompt_record"},
        )
        return {"position": self.position, "version": self.version, "sampled": sampled}

    @classmethod
    def restored(cls, state: Mapping[str, Any], record: PromptRecord) -> PendingGroup:
        """Return the group of a `state`."""

        def rollout(saved: Mapping[str, Any]) -> Rollout:
            branches = tuple(map(rollout, saved["branches"]))
            return Rollout(prompt_record=record, **{**saved, "branches": branches})

        saved = state["sampled"]
        greedy = None if saved["greedy"] is None else rollout(saved["greedy"])
        results = {name: [RewardResult(**each) for each in found] for name, found in saved["results"].items()}
        sampled = SampledGroup([rollout(each) for each in saved["rollouts"]], greedy, results)
        return cls(state["position"], state["version"], sampled)


@dataclass(eq=False)
class Cohort:
    """Groups that a step began, and those that dynamic sampling began for the dropped ones of them.

    Dynamic sampling goes in rounds, each of as many groups as are missing. But a group is begun as soon as a later
    round is certain to need it, while others of the rounds before are still in flight.
    """

    size: int
    """Groups of the first round."""
    max_rounds: int
    stored_share: float = 0.0
    """Share of the groups of each round that are stored ones."""
    fresh: list[PendingGroup] = field(default_factory=list)
    stored: list[PendingGroup] = field(default_factory=list)

    @property
    def rounds(self) -> list[tuple[int, int]]:
        """The fresh and the stored groups of each round, as far as it is certain: the others may all be kept."""
        dropped = [[each.is_dropped for each in kind] for kind in (self.fresh, self.stored)]
        rounds: list[tuple[int, int]] = []
        num_missing = self.size
        places = [0, 0]
        while num_missing and len(rounds) < self.max_rounds:
            num_stored = round(num_missing * self.stored_share)
            rounds.append((num_missing - num_stored, num_stored))
            num_missing = 0
            for kind, count in enumerate(rounds[-1]):
                num_missing += sum(dropped[kind][places[kind] : places[kind] + count])
                places[kind] += count
        return rounds

    @property
    def num_needed(self) -> tuple[int, int]:
        """The fresh and the stored groups that the rounds take; more may have been begun, as shares are rounded."""
        rounds = self.rounds
        return sum(fresh for fresh, _ in rounds), sum(stored for _, stored in rounds)

    def needed(self) -> Iterator[PendingGroup]:
        """Walk through the groups that the rounds take and that are begun, in the order of the rounds."""
        kinds = iter(self.fresh), iter(self.stored)
        for counts in self.rounds:
            for kind, count in zip(kinds, counts, strict=True):
                yield from islice(kind, count)
