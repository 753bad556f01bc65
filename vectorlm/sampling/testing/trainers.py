"""What a trainer must guarantee to the engines that follow it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from vectorlm.ranks.engine_ranks import gather
from vectorlm.ranks.topology import Topology
from vectorlm.sampling.contract import Trainer
from vectorlm.sampling.weights.arena import Arena
from vectorlm.sampling.weights.checksum import checksum
from vectorlm.sampling.weights.layout import plain_slots
from vectorlm.sampling.weights.plan import Layout, dtype_of


@dataclass
class TrainerUnderTest:
    """What the checks of trainers run on."""

    trainer: Trainer
    batch: Any
    """This rank's batch for `Trainer.step`; its gradient must not be zero."""
    whole: Callable[[], Mapping[str, torch.Tensor]]
    """Returns every tensor of the manifest whole, by its name in it; called on all ranks."""
    topology: Topology = field(default_factory=Topology.from_environment)
    """This rank's place; with several ranks the default process group must exist."""


def the_manifest_is_the_same_everywhere_and_stays(subject: TrainerUnderTest) -> None:
    """An engine is connected once, for all versions."""
    before = tuple(subject.trainer.manifest())
    assert before, "there is nothing to publish"
    assert len({spec.name for spec in before}) == len(before), "names must be unique"
    subject.trainer.step(subject.batch)
    assert tuple(subject.trainer.manifest()) == before
    assert all(theirs == before for theirs in gather(subject.topology, before))


def what_is_published_are_the_weights(subject: TrainerUnderTest) -> None:
    """Every byte of every slot, in the slot's dtype."""
    for dtype in ("float32", "bfloat16"):
        whole = subject.whole()
        with _shared_arena(subject, dtype) as (arena, layout):
            subject.trainer.publish(layout, False)
            _meet(subject)
            for slot in layout.slots:
                expected = whole[slot.name].detach().to("cpu", dtype_of(dtype))
                assert torch.equal(arena.view(slot), expected), f"{slot.name} in {dtype}"


def checksums_of_the_ranks_add_up(subject: TrainerUnderTest) -> None:
    """To the checksum of what was written; without `with_checksums` there are none."""
    with _shared_arena(subject, "float32") as (arena, layout):
        assert list(subject.trainer.publish(layout, False)) == []
        mine = list(subject.trainer.publish(layout, True))
        _meet(subject)
        totals = [sum(parts) % 2**64 for parts in zip(*gather(subject.topology, mine), strict=True)]
        assert totals == [checksum(arena.view(slot), word_bytes=slot.word_bytes) for slot in layout.slots]


def a_step_makes_the_next_version_and_other_weights(subject: TrainerUnderTest) -> None:
    """The metrics are numbers, and the same on every rank."""
    version, before = subject.trainer.version, {k: v.clone() for k, v in subject.whole().items()}
    metrics = dict(subject.trainer.step(subject.batch))
    assert subject.trainer.version == version + 1
    after = subject.whole()
    assert any(not torch.equal(after[name], before[name]) for name in before), "no weight has changed"
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(theirs == metrics for theirs in gather(subject.topology, metrics))


def publishing_changes_nothing(subject: TrainerUnderTest) -> None:
    """The version and the weights stay."""
    version, before = subject.trainer.version, {k: v.clone() for k, v in subject.whole().items()}
    with _shared_arena(subject, "bfloat16") as (_, layout):
        subject.trainer.publish(layout, True)
        _meet(subject)
    assert subject.trainer.version == version
    after = subject.whole()
    assert all(torch.equal(after[name], before[name]) for name in before)


@contextmanager
def _shared_arena(subject: TrainerUnderTest, dtype: str) -> Iterator[tuple[Arena, Layout]]:
    """Make an arena for the subject's tensors, which every rank maps."""
    end, slots = plain_slots(tuple(subject.trainer.manifest()), lambda name: dtype)
    arena = Arena.create(end) if subject.topology.is_main else None
    path = gather(subject.topology, None if arena is None else arena.path)[0]
    shared = Arena.open(path, end) if arena is None else arena
    try:
        yield shared, Layout(path, end, slots)
    finally:
        _meet(subject)


def _meet(subject: TrainerUnderTest) -> None:
    if subject.topology.world_size > 1:
        dist.barrier()
