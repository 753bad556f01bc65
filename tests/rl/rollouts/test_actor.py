"""Actors: rollouts on every engine, drawn from one queue, with environments that run concurrently."""

import asyncio
import functools
import os
import re
import sys
import threading
from dataclasses import replace

import cloudpickle
import pytest
from kit.letters import Letters
from kit.rank_processes import on_ranks

import vectorlm
from vectorlm import FakeEngine
from vectorlm.errors import EngineError, RolloutError
from vectorlm.ranks.workers.pool import WorkerPool
from vectorlm.rl.environments.environment import Reply
from vectorlm.rl.environments.remote import EnvironmentWorkers, RemoteEnvironment
from vectorlm.rl.rollouts.queue import GroupQueue
from vectorlm.rl.rollouts.sampler import GroupSampler, Task
from vectorlm.rl.settings import CollectSettings
from vectorlm.types import PromptRecord, RewardResult

# Pickling by value spares workers the import of this file and of torch.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def sampler_of(group_size=2, open_environment=None, **settings):
    return GroupSampler(
        settings=CollectSettings(
            prompts=("q",),
            prompts_per_step=4,
            group_size=group_size,
            sampling_params={"max_tokens": 10},
            **settings,
        ),
        seed=5,
        max_model_len=100,
        tokenizer=Letters(),
        open_environment=open_environment,
    )


def tasks_of(count):
    return [Task(index, PromptRecord(f"q{index}", {"index": index})) for index in range(count)]


def all_of(queue, numbers):
    """Poll until every group has finished; return the texts of each group, in the order of `numbers`."""
    found = {}
    while len(found) < len(numbers):
        found |= queue.poll(10.0)
    return [[rollout.text for rollout in found[number].rollouts] for number in numbers]


def sample_on_rank(topology, data_parallel_size):
    engine = vectorlm.SamplingEngine(
        "scripted",
        inference="vectorlm.sampling.backends.scripted:Scripted",
        topology=topology,
        channel="inline",
        answers=lambda prompt, version: f"{prompt}-",
        num_steps=2,
        data_parallel_size=data_parallel_size,
    )
    with engine:
        queue = GroupQueue(engine, sampler_of())
        first = queue.submit(tasks_of(7))
        texts = all_of(queue, first)
        queue.cancel(queue.submit(tasks_of(3)))
        again = all_of(queue, queue.submit(tasks_of(2)))
        assert queue.poll(0.0) == {}
        most = queue.metrics()["rollout/in_flight_max"]
        queue.close()
        return texts, again, most


@pytest.mark.parametrize(("world_size", "num_engines"), [(1, 1), (2, 1), (2, 2)])
def test_every_rank_gets_every_group_whichever_engine_took_it(world_size, num_engines):
    for texts, again, most in on_ranks(world_size, sample_on_rank, num_engines):
        assert texts == [[f"q{index}-"] * 2 for index in range(7)]
        assert again == [["q0-"] * 2, ["q1-"] * 2]
        assert 2 * num_engines <= most <= 14


def submit_after_a_queue(topology):
    with FakeEngine(lambda prompt, version: f"{prompt}-", topology=topology) as engine:
        queue = GroupQueue(engine, sampler_of())
        batches = [engine.submit([prompt]) for prompt in "ab"]
        finished = [handle for _ in batches for handle in engine.poll(5.0)]
        queue.close()
        assert len(finished) == 2
        return [batch.result()[0][0].text for batch in batches]


@pytest.mark.parametrize("world_size", [1, 2])
def test_batches_of_an_engine_with_a_queue_are_the_same_on_all_ranks(world_size):
    assert on_ranks(world_size, submit_after_a_queue) == [["a-", "b-"]] * world_size


class Slow:
    """An environment with slow replies; the question `breaks` makes it raise, and `closed` lists the closed ones."""

    def __init__(self, record, breaks=None, closed=None):
        self.record, self.breaks, self.closed = record, breaks, closed

    async def reset(self):
        return self.record.prompt

    async def step(self, text):
        await asyncio.sleep(0.2)
        if self.record.prompt == self.breaks:
            raise RolloutError(f"no such tool: {self.record.prompt}")
        return {}, Reply("more", done=text == "done")

    async def close(self):
        if self.closed is not None:
            self.closed.append(self.record.prompt)


def say_done(prompt, version):
    return "done" if prompt.endswith("more") else "go"


def converse_on_rank(topology, breaks):
    closed = []
    with FakeEngine(say_done, topology=topology) as engine:
        opened = functools.partial(Slow, breaks=breaks, closed=closed)
        queue = GroupQueue(engine, sampler_of(group_size=1, open_environment=opened))
        try:
            return all_of(queue, queue.submit(tasks_of(4))), closed
        except RolloutError as error:
            return str(error), closed
        finally:
            queue.close()


def test_an_environment_that_fails_ends_the_run_on_all_ranks_and_all_are_closed():
    found = on_ranks(2, converse_on_rank, "q3")
    assert [error for error, _ in found] == ["no such tool: q3"] * 2
    assert sorted(found[0][1]) == ["q0", "q1", "q2", "q3"]


def test_an_environment_lives_beside_one_engine_and_all_ranks_read_its_replies():
    (texts, closed), (texts_too, closed_too) = on_ranks(2, converse_on_rank, None)
    assert texts == texts_too == [["gomoredone"]] * 4
    assert sorted(closed) == ["q0", "q1", "q2", "q3"]
    assert closed_too == []


class Hangs:
    def step(self, message):
        re.match("(a+)+b", "a" * 40)


class Leaves:
    async def step(self, message):
        os._exit(3)


def fail_on_rank(topology, make):
    with WorkerPool(2) as pool, FakeEngine(say_done, topology=topology) as engine:
        opened = functools.partial(RemoteEnvironment, EnvironmentWorkers(make, pool, 1.0))
        queue = GroupQueue(engine, sampler_of(open_environment=opened))
        try:
            return all_of(queue, queue.submit(tasks_of(2)))
        except RolloutError as error:
            return str(error)
        finally:
            queue.close()


@pytest.mark.parametrize(("make", "reason"), [(Hangs, "1 s"), (Leaves, "exit code 3")])
def test_a_worker_that_hangs_or_dies_with_its_environment_is_told_on_all_ranks(make, reason):
    found = on_ranks(2, fail_on_rank, make)
    assert len(set(found)) == 1
    assert all(part in found[0] for part in (make.__name__, "step", reason, "'q"))


def test_what_the_engine_refuses_is_raised_and_the_rest_goes_on():
    with FakeEngine(lambda prompt, version: "a") as engine:
        queue = GroupQueue(engine, sampler_of())
        engine.fail_next("sample", EngineError("no room"))
        with pytest.raises(EngineError):
            all_of(queue, queue.submit(tasks_of(1)))
        assert all_of(queue, queue.submit(tasks_of(1))) == [["a", "a"]]
        queue.close()


def test_the_room_of_an_engine_bounds_what_asks_it_at_once():
    with FakeEngine(lambda prompt, version: "a") as engine:
        queue = GroupQueue(engine, sampler_of(rollouts_per_engine=4))
        all_of(queue, queue.submit(tasks_of(9)))
        names = ("in_flight", "asking", "room")
        assert queue.metrics() == {f"rollout/{name}_max": 4.0 for name in names}
        queue.close()


def test_a_group_that_is_cancelled_before_it_starts_frees_its_place():
    with FakeEngine(lambda prompt, version: "a") as engine:
        queue = GroupQueue(engine, sampler_of(rollouts_per_engine=2))
        all_of(queue, queue.submit(tasks_of(1)))
        actor = queue._actor

        async def start_and_cancel():
            # In one round of the event loop: no group takes its first step in between.
            actor._extend({1: tasks_of(2)[1]}, {1}, 1)
            assert list(actor._running) == [1]
            await actor._cancel([1])
            return dict(actor._running), actor._num_asking, actor._num_rollouts

        ended = asyncio.run_coroutine_threadsafe(start_and_cancel(), actor._loop).result(10)
        assert ended == ({}, 0, 0)
        queue._num_submitted = 2
        assert all_of(queue, queue.submit(tasks_of(2))) == [["a", "a"]] * 2
        queue.close()


def test_rollouts_that_wait_for_their_environment_are_made_up_for_by_others():
    with FakeEngine(say_done) as engine:
        sampler = sampler_of(group_size=2, open_environment=Slow, rollouts_per_engine=4)
        queue = GroupQueue(engine, sampler)
        all_of(queue, queue.submit(tasks_of(8)))
        metrics = queue.metrics()
        queue.close()
    assert metrics["rollout/in_flight_max"] == 16.0
    # The limit bounds requests, and rollouts that return from their environment add to them.
    assert 4.0 <= metrics["rollout/asking_max"] < 16.0


@pytest.mark.parametrize("is_turn", [False, True])
def test_a_group_is_scored_while_others_are_sampled(is_turn):
    """The engine does not answer the second prompt before the first prompt's group has been scored."""
    scored = threading.Event()

    def answer(prompt, version):
        assert prompt != "q1" or scored.wait(30)
        return "done"

    async def score(rollouts):
        scored.set()
        return {"mine": [RewardResult(float(len(rollout.text))) for rollout in rollouts]}

    with FakeEngine(answer) as engine:
        sampler = replace(
            sampler_of(open_environment=Slow if is_turn else None, rollouts_per_engine=2), score=score
        )
        queue = GroupQueue(engine, sampler)
        numbers, found = queue.submit(tasks_of(2)), {}
        while len(found) < 2:
            found |= queue.poll(10.0)
        queue.close()
    assert [[result.reward for result in found[number].results["mine"]] for number in numbers] == [
        [4.0, 4.0]
    ] * 2


def test_a_closed_queue_leaves_no_thread():
    with FakeEngine(lambda prompt, version: "a", num_steps=1000) as engine:
        before = threading.active_count()
        queue = GroupQueue(engine, sampler_of())
        queue.submit(tasks_of(3))
        queue.poll(0.1)
        queue.close()
        assert threading.active_count() == before
        # `sleep` would refuse if the engine still had a request of the queue.
        engine.sleep()
