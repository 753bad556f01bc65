"""Checks of `update`, `sleep`, `wake_up` and `close`, and of trainers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from vectorlm.errors import ChecksumMismatch, EngineError, RankMismatch, VectorLMError, WeightMismatch
from vectorlm.ranks.engine_ranks import gather
from vectorlm.ranks.topology import Topology
from vectorlm.sampling.contract import Trainer
from vectorlm.sampling.testing.subject import GREEDY, PROMPTS, SAMPLED, EngineUnderTest, raises
from vectorlm.sampling.weights.arena import Arena, plain_slots
from vectorlm.sampling.weights.inspection import checksum
from vectorlm.sampling.weights.module_source import ModuleSource
from vectorlm.sampling.weights.plan import Layout, dtype_of

LONG = {**GREEDY, "max_tokens": 40}


def an_update_brings_its_version_and_other_answers(subject: EngineUnderTest) -> None:
    """The report and the answers show the update."""
    for seed in (1, 2):
        before = [completions[0].text for completions in subject.engine.sample(PROMPTS, GREEDY)]
        trained, _ = subject.models(seed)
        report = subject.engine.update(trained, step := subject.next_step)
        assert (report.version, report.skipped) == (step, False)
        assert subject.engine.version == step
        answers = subject.engine.sample(PROMPTS, GREEDY)
        assert answers[0][0].versions[0] == step
        assert [completions[0].text for completions in answers] != before


def an_updated_engine_answers_as_a_fresh_one(subject: EngineUnderTest) -> None:
    """Tokens and log-probabilities equal the output of an engine started with the new weights, bit for bit."""
    if subject.fresh is None:
        return
    trained, plain = subject.models(20)
    subject.engine.update(trained, subject.next_step)
    with subject.saved(plain) as folder, subject.fresh(folder) as fresh:
        for parameters in ({**GREEDY, "logprobs": 0}, {**SAMPLED, "logprobs": 0}):
            ours, expected = (engine.sample(PROMPTS, parameters) for engine in (subject.engine, fresh))
            for (completion,), (other,) in zip(ours, expected, strict=True):
                assert completion.token_ids == other.token_ids
                assert completion.sampler_logprobs == other.sampler_logprobs


def the_same_step_moves_nothing(subject: EngineUnderTest) -> None:
    """An unchanged model is sent once; another model is always sent."""
    trained, _ = subject.models(3)
    subject.engine.update(trained, step := subject.next_step)
    before = subject.engine.sample(PROMPTS, GREEDY)
    report = subject.engine.update(trained, step)
    assert (report.skipped, report.num_bytes, report.version) == (True, 0, step)
    assert subject.engine.sample(PROMPTS, GREEDY) == before
    assert not subject.engine.update(subject.models(4)[0], step).skipped


def a_negative_step_is_refused(subject: EngineUnderTest) -> None:
    """-1 is the checkpoint's version."""
    trained, _ = subject.models()
    version = subject.engine.version
    with raises(ValueError, saying="-1"):
        subject.engine.update(trained, -1)
    assert subject.engine.version == version


def another_model_is_refused_and_the_engine_keeps_its_weights(subject: EngineUnderTest) -> None:
    """The error names the tensor; nothing has changed."""
    trained, _ = subject.models(5)
    subject.engine.update(trained, step := subject.next_step)
    before = subject.engine.sample(PROMPTS, GREEDY)
    trained.get_output_embeddings().register_parameter("bias", torch.nn.Parameter(torch.zeros(3)))
    with raises(WeightMismatch, saying="bias"):
        subject.engine.update(trained, step + 1)
    assert subject.engine.version == step
    assert subject.engine.sample(PROMPTS, GREEDY) == before
    assert subject.engine.update(subject.models(5)[0], step).version == step
    assert subject.engine.sample(PROMPTS, GREEDY) == before


def weights_that_do_not_arrive_are_noticed(subject: EngineUnderTest) -> None:
    """If tensors and checksums differ, the engine samples nothing until the next update."""
    trained, _ = subject.models(5)
    source, step = _Miscounted(trained, subject.topology), subject.next_step
    with raises(ChecksumMismatch):
        subject.engine.update(source, step)  # type: ignore[arg-type]
    with raises(VectorLMError):
        subject.engine.sample(PROMPTS, GREEDY)
    subject.engine.update(trained, step)
    assert len(subject.engine.sample(PROMPTS, GREEDY)) == 3


def an_update_is_refused_while_requests_are_in_flight(subject: EngineUnderTest) -> None:
    """This is the default; the requests end normally."""
    trained, _ = subject.models(6)
    subject.engine.update(trained, step := subject.next_step)
    expected, other = subject.engine.sample(PROMPTS, LONG), subject.models(7)[0]
    with subject.kept_busy():
        handle = subject.engine.submit(PROMPTS, LONG)
        with raises(EngineError, saying="in flight"):
            subject.engine.update(other, step + 1)
        with raises(ValueError, saying="in_flight='later'"):
            subject.engine.update(other, step + 1, in_flight="later")  # type: ignore[arg-type]
    assert subject.engine.version == step
    assert handle.result() == expected
    subject.engine.poll()


def an_update_that_drains_waits_for_requests_in_flight(subject: EngineUnderTest) -> None:
    """All tokens of these requests come from the old weights."""
    trained, _ = subject.models(6)
    subject.engine.update(trained, step := subject.next_step)
    other = subject.models(7)[0]
    handle = subject.engine.submit(PROMPTS, LONG)
    subject.engine.update(other, step + 1, in_flight="drain")
    assert subject.engine.version == step + 1
    for (completion,) in handle.result():
        assert set(completion.versions) == {step}
    subject.engine.poll()


def requests_in_flight_go_on_with_the_new_weights(subject: EngineUnderTest) -> None:
    """Every token names the version that sampled it. An engine without this feature raises and changes nothing."""
    for in_flight in ("keep", "recompute"):
        trained, _ = subject.models(6)
        subject.engine.update(trained, step := subject.next_step)
        other = subject.models(7)[0]
        handle = subject.engine.submit(PROMPTS, LONG)
        handle.done()
        try:
            subject.engine.update(other, step + 1, in_flight=in_flight)  # type: ignore[arg-type]
        except EngineError:
            assert subject.engine.version == step
        for (completion,) in handle.result():
            assert set(completion.versions) <= {step, subject.engine.version}
            assert list(completion.versions) == sorted(completion.versions)
        subject.engine.poll()


def ranks_must_agree_on_the_step(subject: EngineUnderTest) -> None:
    """Every rank raises, and the engine is unchanged."""
    if subject.topology.world_size == 1:
        return
    version = subject.engine.version
    with raises(RankMismatch, saying="rank 1"):
        subject.engine.update(subject.models()[0], subject.next_step + subject.topology.rank)
    assert subject.engine.version == version


def an_engine_that_sleeps_samples_nothing(subject: EngineUnderTest) -> None:
    """All calls that sample raise."""
    subject.engine.sleep()
    subject.engine.sleep()
    with raises(EngineError, saying="wake_up"):
        subject.engine.sample(PROMPTS, GREEDY)
    with raises(EngineError):
        subject.engine.sample_sharded(PROMPTS, GREEDY)
    with raises(EngineError):
        subject.engine.submit(PROMPTS, GREEDY).result()
    subject.engine.wake_up()
    subject.engine.update(subject.models()[0], subject.next_step)


def weights_that_slept_hold_nothing_until_an_update(subject: EngineUnderTest) -> None:
    """The engine also forgets the step of its weights."""
    trained, _ = subject.models(8)
    subject.engine.update(trained, step := subject.next_step)
    before = subject.engine.sample(PROMPTS, GREEDY)
    subject.engine.sleep()
    subject.engine.wake_up()
    with raises(EngineError, saying="update"):
        subject.engine.sample(PROMPTS, GREEDY)
    assert not subject.engine.update(trained, step).skipped
    assert subject.engine.sample(PROMPTS, GREEDY) == before


def the_cache_may_sleep_alone(subject: EngineUnderTest) -> None:
    """The engine needs no update afterwards."""
    before = subject.engine.sample(PROMPTS, GREEDY)
    subject.engine.sleep(weights=False)
    with raises(EngineError, saying="wake_up"):
        subject.engine.sample(PROMPTS, GREEDY)
    subject.engine.wake_up()
    assert subject.engine.sample(PROMPTS, GREEDY) == before


def weights_wake_for_the_update_and_the_cache_after_it(subject: EngineUnderTest) -> None:
    """This order needs the least memory: the cache wakes last."""
    subject.engine.sleep()
    subject.engine.wake_up(kv_cache=False)
    trained, _ = subject.models(9)
    subject.engine.update(trained, subject.next_step)
    with raises(EngineError, saying="wake_up"):
        subject.engine.sample(PROMPTS, GREEDY)
    subject.engine.wake_up(weights=False)
    assert len(subject.engine.sample(PROMPTS, GREEDY)) == 3


def requests_in_flight_keep_the_engine_awake(subject: EngineUnderTest) -> None:
    """`sleep` is refused until they end."""
    with subject.kept_busy():
        handle = subject.engine.submit(PROMPTS, GREEDY)
        with raises(EngineError):
            subject.engine.sleep()
    assert len(handle.result()) == 3
    subject.engine.poll()


def a_closed_engine_says_so(subject: EngineUnderTest) -> None:
    """Closing twice is allowed; every later call raises. The last check, because it ends the engine."""
    trained, _ = subject.models()
    subject.engine.close()
    subject.engine.close()
    for call in (
        lambda: subject.engine.sample([[2]], GREEDY),
        lambda: subject.engine.sample_sharded([[2]], GREEDY),
        lambda: subject.engine.submit([[2]], GREEDY),
        lambda: subject.engine.poll(),
        lambda: subject.engine.update(trained, subject.next_step),
        lambda: subject.engine.sleep(),
        lambda: subject.engine.wake_up(),
    ):
        with raises(EngineError, saying="closed"):
            call()


class _Miscounted:
    """A source that sends a module's weights with wrong checksums."""

    def __init__(self, *whose: Any) -> None:
        self._source = ModuleSource(*whose)
        self.manifest = self._source.manifest

    def publish(self, layout: Layout, with_checksums: bool) -> list[int]:
        return [total + 1 for total in self._source.publish(layout, with_checksums)]


@dataclass
class TrainerUnderTest:
    """The trainer under test."""

    trainer: Trainer
    batch: Any
    """This rank's batch for `Trainer.step`; its gradient must not be zero."""
    whole: Callable[[], Mapping[str, torch.Tensor]]
    """A function that returns every tensor of the manifest whole, by name; called on all ranks."""
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
    """Every slot has the bytes of its weight, in the slot's dtype."""
    for dtype in ("float32", "bfloat16"):
        whole = subject.whole()
        with _shared_arena(subject, dtype) as (arena, layout):
            subject.trainer.publish(layout, False)
            _meet(subject)
            for slot in layout.slots:
                expected = whole[slot.name].detach().to("cpu", dtype_of(dtype))
                assert torch.equal(arena.view(slot), expected), f"{slot.name} in {dtype}"


def checksums_of_the_ranks_add_up(subject: TrainerUnderTest) -> None:
    """The checksums of all ranks add up to the checksum of the slot. Without `with_checksums` the list is empty."""
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
    """Create an arena for the trainer's tensors, which every rank maps."""
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
