"""Groups in flight while the ranks train: their age limit, and the handling of late groups."""

import enum
import io
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.metrics_page import METRICS
from kit.scripted_groups import Echo, make_source

from vectorlm.algorithms.registry import get_algorithm
from vectorlm.data.images import Picture, images_of
from vectorlm.rl.environments.environment import to_reply
from vectorlm.rl.metrics import rollout_metrics
from vectorlm.rl.prompts import PromptOrder
from vectorlm.rl.rollout import Rollout, kept_groups, make_batch
from vectorlm.rl.rollouts.sampler import PendingGroup, SampledGroup
from vectorlm.rl.settings import AsyncSettings
from vectorlm.train.recorder import Timer
from vectorlm.types import Completion, PromptRecord, RewardResult

PROMPTS, GROUP = 4, 2
DOT = b"an encoded picture"


class Engine(Echo):
    """An engine that finishes groups in the order of `choose`, which gets the groups in flight at each poll."""

    def __init__(self, choose=list):
        super().__init__(None, choose)
        self.version = 0

    def completion(self, prompt, params, index, group):
        text = "abc"[(params["seed"] + index) % 3] * 2 if "seed" in params else "greedy"
        ids = tuple(map(ord, text))
        versions = (group.version, *(self.version,) * (len(ids) - 1))
        return Completion((1,), ids, (-0.5,) * len(ids), versions, text, "stop")


def is_first_a(text):
    return float(text[0] == "a")


def source_of(engine, max_staleness=None, overdue="wait", reward=is_first_a, update="keep", **more):
    overlap = None
    if max_staleness is not None:
        overlap = AsyncSettings(max_staleness=max_staleness, overdue=overdue, update=update)
    more = {"group_size": GROUP, "num_groups": PROMPTS, "num_prompts": 23, **more}
    return make_source(engine, reward, overlap=overlap, **more)


def prompts_of(groups):
    return [group.rollouts[0].prompt_record.prompt for group in kept_groups(groups)]


def rollouts_of(groups):
    return [group.rollouts for group in kept_groups(groups)]


def texts_of(groups):
    return [[rollout.text for rollout in group.rollouts] for group in groups]


def newest_first(in_flight):
    return in_flight[-1:]


def a_few(dice):
    return lambda in_flight: [group for group in in_flight if dice.random() < 0.15]


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("needs_greedy", [False, True])
def test_without_staleness_the_rollouts_are_those_of_a_synchronous_run(drops, needs_greedy):
    options = {"drops_constant_groups": drops, "needs_greedy": needs_greedy}
    options["settings"] = {"max_sampling_rounds": 3}
    engine = Engine(newest_first)
    source = source_of(engine, 0, "wait", **options)
    alone_engine = Engine()
    alone = source_of(alone_engine, **options)
    for step in range(6):
        engine.version = alone_engine.version = step
        found, expected = source.collect(step, Timer()), alone.collect(step, Timer())
        assert prompts_of(found) == prompts_of(expected)
        assert rollouts_of(found) == rollouts_of(expected)
        for mine, theirs in zip(kept_groups(found), kept_groups(expected), strict=True):
            assert torch.equal(mine.rewards, theirs.rewards)
            assert not needs_greedy or torch.equal(mine.greedy_reward, theirs.greedy_reward)
        mine, theirs = (rollout_metrics(groups, step) for groups in (found, expected))
        assert mine == pytest.approx(theirs)
        assert engine.in_flight == []


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("overdue", ["wait", "drop"])
@pytest.mark.parametrize("drops", [False, True])
def test_nothing_is_older_than_it_may_be_in_whatever_order_it_finishes(max_staleness, overdue, drops):
    for seed in range(4):
        engine = Engine(a_few(random.Random(seed)))
        source = source_of(engine, max_staleness, overdue, drops_constant_groups=drops)
        num_dropped, oldest = 0.0, 0
        for step in range(20):
            engine.version = step
            found = source.collect(step, Timer())
            metrics = rollout_metrics(found, step) | source.metrics(step)
            num_kept = len(kept_groups(found))
            assert num_kept == PROMPTS or (drops and num_kept < PROMPTS)
            if num_kept:
                oldest = max(oldest, int(metrics["staleness/token_max"]))
            num_dropped += metrics.get("queue/dropped", 0.0)
            if max_staleness:
                assert metrics["queue/in_flight"] + metrics["queue/finished"] <= max_staleness * PROMPTS
            assert set(metrics) <= METRICS | {f"reward/mine/{statistic}" for statistic in ("mean", "std")}
        assert oldest <= max_staleness
        if max_staleness:
            assert oldest > 0, "nothing overlapped"
        assert engine.most <= (max_staleness + 1) * PROMPTS
        assert (num_dropped > 0) == (overdue == "drop" and max_staleness > 0) or num_dropped == 0


def stuck(prompt):
    """Return an order that never finishes the requests of one prompt."""
    return lambda in_flight: [group for group in in_flight if group.prompt != prompt]


def first_prompt():
    return PromptOrder([PromptRecord(f"q{index}") for index in range(23)], 0).at(0).prompt


def test_a_late_group_is_dropped_and_another_begun_in_its_place():
    engine = Engine(stuck(first_prompt()))
    source = source_of(engine, 1, "drop")
    for step in range(3):
        engine.version = step
        found = source.collect(step, Timer())
        assert first_prompt() not in prompts_of(found)
        assert len(found) == PROMPTS
        # The group began at version 0, and step 1 is the last step that may train on it.
        assert source.metrics(step)["queue/dropped"] == float(step == 1)
    assert not any(group.prompt == first_prompt() for group in engine.in_flight)


@pytest.mark.parametrize("overdue", ["correct", "mask"])
def test_a_late_group_may_be_trained_on_with_or_without_its_oldest_tokens(overdue):
    engine = Engine(stuck(first_prompt()))
    source = source_of(engine, 1, overdue)
    for step in range(4):
        engine.version = step
        found = source.collect(step, Timer())
        assert first_prompt() not in prompts_of(found)
        masked = rollout_metrics(found, step, source.oldest_version(step)).get("staleness/masked_tokens")
        assert masked == (None if overdue == "correct" else 0.0)
    engine.choose = list
    engine.version = 4
    found = source.collect(4, Timer())
    assert prompts_of(found)[0] == first_prompt()
    metrics = rollout_metrics(found, 4)
    assert metrics["staleness/token_max"] == metrics["staleness/sequence_max"] == 4.0
    assert source.oldest_version(4) == (None if overdue == "correct" else 3)
    if overdue == "correct":
        return
    # The first token has version 0, the second has version 4.
    assert [rollout.versions for rollout in found[0].rollouts] == [(0, 4)] * GROUP
    share = rollout_metrics(found, 4, 3)["staleness/masked_tokens"]
    assert share == GROUP / (2 * GROUP * PROMPTS)
    batch = make_batch(found, get_algorithm("grpo"), oldest_version=3)
    assert batch.mask[:, 1:3].tolist() == [[False, True]] * GROUP + [[True, True]] * GROUP * (PROMPTS - 1)
    assert batch.valid.all()
    whole = make_batch(found, get_algorithm("grpo"))
    assert torch.equal(batch.token_rewards, whole.token_rewards)
    # A completion without remaining tokens counts nowhere.
    assert make_batch(found, get_algorithm("grpo"), oldest_version=5) is None


def test_a_run_that_resumes_samples_again_what_was_not_trained_on():
    engine = Engine(stuck(first_prompt()))
    source = source_of(engine, 2, "wait")
    trained = [prompts_of(source.collect(0, Timer()))]
    state = source.state()
    resumed_engine = Engine()
    resumed_engine.version = 1
    resumed = source_of(resumed_engine, 2, "wait")
    resumed.load_state(state, 1)
    assert resumed.state() == state
    for step in range(1, 6):
        resumed_engine.version = step
        trained.append(prompts_of(resumed.collect(step, Timer())))
    # The prompt comes after the groups that had finished, which have older weights.
    assert first_prompt() in trained[2]
    flat = [prompt for batch in trained for prompt in batch]
    assert len(flat[:23]) == len(set(flat[:23])) == 23, "a prompt was sampled twice before all were sampled"


class Draining(Engine):
    """An engine with `update: drain`: no group continues through an update."""

    def completion(self, prompt, params, index, group):
        whole = super().completion(prompt, params, index, group)
        return replace(whole, versions=(group.version,) * len(whole.token_ids))


@pytest.mark.parametrize("max_staleness", [1, 3])
@pytest.mark.parametrize("needs_greedy", [False, True])
def test_where_updates_drain_a_run_that_resumes_is_the_same_whatever_finishes_first(
    max_staleness, needs_greedy
):
    def source_and_engine(seed):
        engine = Draining(a_few(random.Random(seed)))
        return source_of(engine, max_staleness, needs_greedy=needs_greedy, update="drain"), engine

    found, states = {}, {}
    for seed in range(4):
        source, engine = source_and_engine(seed)
        for step in range(8):
            if step == 4 and seed % 2:
                # Go through the file of a checkpoint, which accepts only plain values.
                torch.save(source.state(), stream := io.BytesIO())
                source, engine = source_and_engine(seed + 100)
                source.load_state(torch.load(io.BytesIO(stream.getvalue()), weights_only=True), step)
            engine.version = step
            groups = source.collect(step, Timer())
            rewards = [(group.rewards.tolist(), group.greedy_reward) for group in groups]
            found[seed, step] = rollouts_of(groups), rewards
        states[seed] = source.state()["position"]
    for seed, step in found:
        assert found[seed, step] == found[0, step]
    oldest = max(
        step - rollout.versions[0]
        for (_, step), (groups, _) in found.items()
        for group in groups
        for rollout in group
    )
    assert oldest == max_staleness
    assert len(set(states.values())) == 1


def test_a_run_that_resumes_does_not_sample_again_what_had_finished():
    source = source_of(Engine(), 2, "wait")
    trained = prompts_of(source.collect(0, Timer()))
    state = source.state()
    assert (state["pending"], len(state["finished"])) == ([], 2 * PROMPTS)
    resumed_engine = Engine()
    resumed = source_of(resumed_engine, 2, "wait")
    resumed.load_state(state, 1)
    waiting = prompts_of(resumed.collect(1, Timer()))
    asked = [prompt for prompt, _ in resumed_engine.calls]
    assert len(asked) == PROMPTS
    assert len({*trained, *waiting, *asked}) == 3 * PROMPTS


class Busy(Engine):
    """An engine that nobody waits for while it has nothing to do."""

    def poll(self, timeout_s=0.0, at_least=1):
        assert self.in_flight, "this wait would never end"
        return super().poll(timeout_s, at_least)


@pytest.mark.parametrize("overdue", ["wait", "drop", "correct"])
@pytest.mark.parametrize(
    ("max_staleness", "num_groups", "group_size"),
    [
        *[(limit, PROMPTS, GROUP) for limit in (1, 0, None)],
        *[(2, PROMPTS - 1, GROUP), (1, 1, GROUP), (3, PROMPTS + 1, GROUP), (2, PROMPTS, GROUP + 1)],
    ],
)
def test_a_run_may_resume_with_fewer_or_smaller_groups_in_flight(
    overdue, max_staleness, num_groups, group_size
):
    source = source_of(Engine(), 2, overdue)
    trained = prompts_of(source.collect(0, Timer()))
    state = source.state()
    assert len(state["finished"]) == 2 * PROMPTS
    engine = Busy()
    resumed = source_of(engine, max_staleness, overdue, num_groups=num_groups, group_size=group_size)
    resumed.load_state(state, 1)
    for step in range(1, 4):
        engine.version = step
        groups = resumed.collect(step, Timer())
        trained += prompts_of(groups)
        assert [len(group.rollouts) for group in groups] == [group_size] * num_groups
        oldest = min(rollout.versions[0] for group in groups for rollout in group.rollouts)
        assert oldest >= step - (max_staleness or 0)
    order = PromptOrder([PromptRecord(f"q{index}") for index in range(23)], 0)
    assert trained == [order.at(position).prompt for position in range(len(trained))]


class Repeating(Engine):
    """An engine whose completions are their prompts."""

    def completion(self, prompt, params, index, group):
        return replace(super().completion(prompt, params, index, group), text=prompt)


@pytest.mark.parametrize("change", [{}, {"num_prompts": 30}, {"origin": "edited"}])
def test_finished_groups_of_other_prompts_or_rewards_are_sampled_again(change):
    source = source_of(Repeating(), 2, origin="rewards")
    source.collect(0, Timer())
    state = source.state()
    positions = sorted(saved["position"] for saved in state["finished"])
    engine = Repeating()
    resumed = source_of(engine, 2, **{"origin": "rewards", **change})
    resumed.load_state(state, 1)
    if change.get("origin"):
        assert (resumed.state()["finished"], resumed.state()["pending"]) == ([], positions)
    order = PromptOrder([PromptRecord(f"q{index}") for index in range(change.get("num_prompts", 23))], 0)
    trained = []
    for step in range(1, 3):
        engine.version = step
        for rollout in (rollout for group in resumed.collect(step, Timer()) for rollout in group.rollouts):
            assert rollout.text == rollout.prompt_record.prompt
            trained.append(rollout.text)
    assert trained[::GROUP] == [order.at(position).prompt for position in positions]
    assert len(engine.calls) == 2 * PROMPTS + len(positions) * bool(change)


class Hint(enum.StrEnum):
    LOWER = "lower"


def test_a_checkpoint_holds_pictures_and_messages_of_any_type():
    part = {"type": "image", "image": DOT}
    words = {"role": np.str_("user"), "content": Hint.LOWER, "mood": DOT, "sizes": np.arange(2)}
    reply = to_reply([words, {"role": "user", "content": [part]}])
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "aa"}, *reply.messages]
    record = PromptRecord(chat[:1])
    rollout = Rollout.from_completion(record, Completion((1,), (2,), (-0.5,), (0,), Hint.LOWER, "stop"))
    shown = {"messages": chat, "pictures": tuple(images_of(chat)), "policy_contents": [(1, Hint.LOWER)]}
    results = {"judge": [RewardResult(math.nan, "late", logged={"words": Hint.LOWER})]}
    group = PendingGroup(3, 1, SampledGroup([replace(rollout, **shown)], rollout, results))
    torch.save(group.state(), stream := io.BytesIO())
    saved = torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    restored = PendingGroup.restored(saved, record).sampled
    (found,) = restored.rollouts
    assert found.messages == [*chat[:2], {**words, "mood": str(DOT), "sizes": [0, 1]}, chat[3]]
    assert images_of(found.messages) == list(found.pictures) == [Picture.of_bytes(DOT)]
    assert images_of(found.messages)[0].data == DOT
    assert replace(found, messages=chat) == group.sampled.rollouts[0]
    assert restored.greedy == rollout
    assert str(restored.results) == str({"judge": [replace(results["judge"][0], logged={"words": "lower"})]})


class Tool:
    def __init__(self, **columns):
        self.count = 0

    def respond(self, text):
        self.count += 1
        return f"[{self.count}]"


def test_conversations_go_on_beside_each_other():
    engine = Engine(newest_first)
    options = {"make": Tool, "settings": {"max_turns": 3}}
    source = source_of(engine, 0, "wait", **options)
    alone_engine = Engine()
    alone = source_of(alone_engine, **options)
    found, expected = source.collect(0, Timer()), alone.collect(0, Timer())
    assert texts_of(found) == texts_of(expected)
    assert {rollout.num_turns for group in found for rollout in group.rollouts} == {3}
