"""Groups under way while the ranks train: how old they may be, and what becomes of those that are late."""

import random

import pytest
import torch
from gatherers import gatherer as gatherer_of

from vectorlm.data.questions import Question
from vectorlm.rl.feed import Feed
from vectorlm.rl.metrics import METRICS, rollout_metrics
from vectorlm.rollout.prompts import PromptOrder
from vectorlm.telemetry.timers import Timer
from vectorlm.types import Completion

PROMPTS, GROUP = 4, 2


class Handle:
    def __init__(self, prompts, params, version):
        self.prompts, self.params, self.begun, self.ended = prompts, params, version, None
        self.is_cancelled = False

    def cancel(self):
        self.is_cancelled = True

    def result(self):
        return [
            [answer(prompt, params, index, self.begun, self.ended) for index in range(params["n"])]
            for prompt, params in zip(self.prompts, self.params, strict=True)
        ]


def answer(prompt, params, index, begun, ended):
    text = "abc"[(params["seed"] + index) % 3] * 2 if "seed" in params else "greedy"
    ids = tuple(map(ord, text))
    versions = (begun, *(ended,) * (len(ids) - 1))
    return Completion((1,), ids, (-0.5,) * len(ids), versions, text, "stop")


class Engine:
    """Finishes requests in the order that `choose` says, which gets those under way at each poll."""

    def __init__(self, choose=list):
        self.choose, self.version, self.under_way, self.most = choose, 0, [], 0

    def submit(self, prompts, params):
        self.forget_cancelled()
        self.under_way.append(Handle(prompts, params, self.version))
        self.most = max(self.most, len(self.under_way))
        return self.under_way[-1]

    def forget_cancelled(self):
        self.under_way = [handle for handle in self.under_way if not handle.is_cancelled]

    def poll(self):
        self.forget_cancelled()
        finished = self.choose(self.under_way)
        self.under_way = [handle for handle in self.under_way if handle not in finished]
        for handle in finished:
            handle.ended = self.version
        return finished

    def sample(self, prompts, params):
        handle = self.submit(prompts, params)
        self.under_way.remove(handle)
        handle.ended = self.version
        return handle.result()


def gatherer(engine, reward=lambda text: float(text[0] == "a"), **more):
    return gatherer_of(engine, reward, group_size=GROUP, num_groups=PROMPTS, num_questions=23, **more)


def prompts_of(gathered):
    return [group[0].question.prompt for group in gathered.groups]


def texts_of(gathered):
    return [[rollout.text for rollout in group] for group in gathered.groups]


def newest_first(under_way):
    return under_way[-1:]


def a_few(dice):
    return lambda under_way: [each for each in under_way if dice.random() < 0.15]


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("needs_greedy", [False, True])
def test_without_staleness_the_rollouts_are_those_of_a_synchronous_run(drops, needs_greedy):
    options = {"drops_constant_groups": drops, "max_rounds": 3, "needs_greedy": needs_greedy}
    engine = Engine(newest_first)
    feed = Feed(gatherer(engine, **options), max_staleness=0, overdue="wait")
    alone = gatherer(Engine(), **options)
    for step in range(6):
        engine.version = alone.collector.engine.version = step
        found, expected = feed.gather(step, Timer()), alone.gather(step, Timer())
        assert prompts_of(found) == prompts_of(expected)
        assert found.groups == expected.groups
        assert torch.equal(found.rewards, expected.rewards)
        if needs_greedy:
            assert torch.equal(found.greedy_rewards, expected.greedy_rewards)
        mine, theirs = (rollout_metrics(each, step) for each in (found, expected))
        assert mine == pytest.approx(theirs)
        assert engine.under_way == []


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("overdue", ["wait", "drop"])
@pytest.mark.parametrize("drops", [False, True])
def test_nothing_is_older_than_it_may_be_in_whatever_order_it_finishes(max_staleness, overdue, drops):
    for seed in range(10):
        engine = Engine(a_few(random.Random(seed)))
        feed = Feed(
            gatherer(engine, drops_constant_groups=drops), max_staleness=max_staleness, overdue=overdue
        )
        seen, num_dropped, oldest = [], 0.0, 0
        for step in range(20):
            engine.version = step
            found = feed.gather(step, Timer())
            metrics = rollout_metrics(found, step) | feed.metrics(step)
            assert len(found.groups) == PROMPTS or (drops and len(found.groups) < PROMPTS)
            if found.groups:
                oldest = max(oldest, int(metrics["staleness/token_max"]))
            seen += [group[0].token_ids for group in found.groups]
            num_dropped += metrics["queue/dropped"]
            assert metrics["queue/in_flight"] + metrics["queue/finished"] <= max_staleness * PROMPTS
            assert set(metrics) <= set(METRICS) | {f"reward/mine/{each}" for each in ("mean", "std")}
        assert oldest <= max_staleness
        if max_staleness:
            assert oldest > 0, "nothing overlapped"
        assert engine.most <= (max_staleness + 1) * PROMPTS
        assert (num_dropped > 0) == (overdue == "drop" and max_staleness > 0) or num_dropped == 0


def stuck(prompt):
    """Return an order in which the requests of one prompt never finish until they are let go."""
    return lambda under_way: [each for each in under_way if each.prompts != [prompt] or prompt in LET_GO]


LET_GO: set[str] = set()


@pytest.fixture(autouse=True)
def hold():
    LET_GO.clear()


def first_prompt():
    return PromptOrder([Question(f"q{index}") for index in range(23)], 0).at(0).prompt


def test_a_late_group_is_dropped_and_another_begun_in_its_place():
    engine = Engine(stuck(first_prompt()))
    feed = Feed(gatherer(engine), max_staleness=1, overdue="drop")
    for step in range(3):
        engine.version = step
        found = feed.gather(step, Timer())
        assert first_prompt() not in prompts_of(found)
        assert len(found.groups) == PROMPTS
        # Admitted at version 0: step 1 is the last that may train on it.
        assert feed.metrics(step)["queue/dropped"] == float(step == 1)
    assert not any(handle.prompts == [first_prompt()] for handle in engine.under_way)


def test_a_late_group_may_be_trained_on_all_the_same():
    engine = Engine(stuck(first_prompt()))
    feed = Feed(gatherer(engine), max_staleness=1, overdue="correct")
    for step in range(4):
        engine.version = step
        assert first_prompt() not in prompts_of(feed.gather(step, Timer()))
    LET_GO.add(first_prompt())
    engine.version = 4
    found = feed.gather(4, Timer())
    assert prompts_of(found)[0] == first_prompt()
    assert rollout_metrics(found, 4)["staleness/token_max"] == 4.0
    assert rollout_metrics(found, 4)["staleness/sequence_max"] == 4.0


def test_a_run_that_resumes_samples_again_what_was_not_trained_on():
    engine = Engine(stuck(first_prompt()))
    feed = Feed(gatherer(engine), max_staleness=2, overdue="wait")
    trained = [prompts_of(feed.gather(0, Timer()))]
    state = feed.state()
    resumed_engine = Engine()
    resumed_engine.version = 1
    resumed = Feed(gatherer(resumed_engine), max_staleness=2, overdue="wait")
    resumed.load_state(state)
    assert resumed.state() == state
    for step in range(1, 6):
        resumed_engine.version = step
        trained.append(prompts_of(resumed.gather(step, Timer())))
    assert trained[1][0] == first_prompt()
    flat = [prompt for batch in trained for prompt in batch]
    assert len(flat[:23]) == len(set(flat[:23])) == 23, (
        "every question is asked once before any is asked again"
    )


class Tool:
    def __init__(self, **columns):
        self.count = 0

    def respond(self, text):
        self.count += 1
        return f"[{self.count}]"


def test_conversations_go_on_beside_each_other():
    engine = Engine(newest_first)
    collector = {"make_environment": Tool, "max_turns": 3}
    feed = Feed(gatherer(engine, collector=collector), max_staleness=0, overdue="wait")
    alone = gatherer(Engine(), collector=collector)
    found, expected = feed.gather(0, Timer()), alone.gather(0, Timer())
    assert texts_of(found) == texts_of(expected)
    assert {rollout.num_turns for group in found.groups for rollout in group} == {3}


def test_a_step_whose_groups_are_all_the_same_ends():
    feed = Feed(
        gatherer(Engine(), lambda text: 1.0, drops_constant_groups=True, max_rounds=2),
        max_staleness=1,
        overdue="wait",
    )
    found = feed.gather(0, Timer())
    assert found.groups == []
    assert found.sampled.num_sampled_groups == 4 * PROMPTS
