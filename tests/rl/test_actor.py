"""Actors: rollouts beside each engine, drawn from one queue, with environments that are waited for side by side."""

import threading
import time

import pytest
from rank_processes import on_ranks

import vectorlm
from vectorlm import FakeEngine
from vectorlm.errors import EngineError, RolloutError
from vectorlm.rl.settings import CollectSettings
from vectorlm.rollouts.queue import GroupQueue
from vectorlm.rollouts.sampler import GroupSampler, Task
from vectorlm.types import PromptRecord


def sampler_of(group_size=2, make_environment=None, **settings):
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
        encode=lambda text: list(map(ord, text)),
        make_environment=make_environment,
    )


def tasks_of(count):
    return [Task(index, PromptRecord(f"q{index}", {"index": index})) for index in range(count)]


def all_of(queue, numbers):
    """Poll until every group is there; return the texts of each, by the groups' numbers."""
    found = {}
    while len(found) < len(numbers):
        found |= queue.poll(10.0)
    return [[rollout.text for rollout in found[number].rollouts] for number in numbers]


def sample_on_rank(topology, data_parallel_size):
    engine = vectorlm.SamplingEngine(
        "scripted",
        inference="vectorlm.backends.scripted:Scripted",
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


class Slow:
    """Takes its time with every reply."""

    def __init__(self, index):
        self.index = index

    def respond(self, text):
        time.sleep(0.2)
        return None if text == "done" else "more"


def test_environments_are_waited_for_side_by_side():
    with FakeEngine(lambda prompt, version: "done" if prompt.endswith("more") else "go") as engine:
        queue = GroupQueue(engine, sampler_of(group_size=8, make_environment=Slow))
        began = time.monotonic()
        texts = all_of(queue, queue.submit(tasks_of(8)))
        took_s = time.monotonic() - began
        queue.close()
    assert texts == [["gomoredone"] * 8] * 8
    # One after the other they would take 25 s; the margin is for a machine with other work.
    assert took_s < 12


def converse_on_rank(topology, breaks):
    asked = []

    class Noting(Slow):
        def respond(self, text):
            asked.append(self.index)
            if breaks == "freezes" and self.index == 3:
                time.sleep(60)
            if breaks == "exits" and self.index == 3:
                raise SystemExit(4)
            if breaks == "raises" and self.index == 3:
                raise OSError("no such tool")
            return super().respond(text)

    with FakeEngine(
        lambda prompt, version: "done" if prompt.endswith("more") else "1+1", topology=topology
    ) as engine:
        queue = GroupQueue(
            engine, sampler_of(group_size=1, make_environment=Noting, environment_timeout_s=1.0)
        )
        try:
            return all_of(queue, queue.submit(tasks_of(4))), asked
        except RolloutError as error:
            return str(error), asked
        finally:
            queue.close()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("breaks", "what"),
    [
        ("freezes", "no answer within 1 s"),
        ("raises", "OSError: no such tool"),
        ("exits", "SystemExit: 4"),
    ],
)
def test_an_environment_that_fails_ends_the_run_on_all_ranks_with_its_prompt_and_turn(
    world_size, breaks, what
):
    for error, _ in on_ranks(world_size, converse_on_rank, breaks):
        assert f"the environment failed: {what} (prompt 'q3', turn 1, after '1+1')" in error


def test_an_environment_lives_beside_one_engine_and_all_ranks_read_its_replies():
    (texts, asked), (texts_too, asked_too) = on_ranks(2, converse_on_rank, None)
    assert texts == texts_too == [["1+1moredone"]] * 4
    assert sorted(asked) == sorted([0, 1, 2, 3] * 2)
    assert asked_too == []


def test_what_the_engine_refuses_is_raised_and_the_rest_goes_on():
    with FakeEngine(lambda prompt, version: "a") as engine:
        queue = GroupQueue(engine, sampler_of())
        engine.fail_next("sample", EngineError("no room"))
        with pytest.raises(EngineError, match="no room"):
            all_of(queue, queue.submit(tasks_of(1)))
        assert all_of(queue, queue.submit(tasks_of(1))) == [["a", "a"]]
        queue.close()


def test_the_room_of_an_engine_bounds_what_asks_it_at_once():
    with FakeEngine(lambda prompt, version: "a") as engine:
        queue = GroupQueue(engine, sampler_of(rollouts_per_engine=4))
        all_of(queue, queue.submit(tasks_of(9)))
        assert queue.metrics()["rollout/in_flight_max"] == 4.0
        queue.close()


def test_a_closed_queue_leaves_no_thread():
    with FakeEngine(lambda prompt, version: "a", num_steps=1000) as engine:
        before = threading.active_count()
        queue = GroupQueue(engine, sampler_of())
        queue.submit(tasks_of(3))
        queue.poll(0.1)
        queue.close()
        assert threading.active_count() == before
        # Nothing of it is left in the engine, which would refuse to sleep.
        engine.sleep()
