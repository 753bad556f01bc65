"""Order and mixture of prompts, and levels of difficulty that follow the scores."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.batches import rollout_of
from kit.scripted_groups import Echo, make_source

from vectorlm.data.settings import CurriculumSettings
from vectorlm.rl.prompts import Curriculum, PromptMixture, PromptOrder
from vectorlm.rl.rollout import RolloutGroup
from vectorlm.train.recorder import Timer
from vectorlm.types import PromptRecord

SETTINGS = CurriculumSettings(rise_above=0.8, fall_below=0.2, num_groups=4)


class Ladder:
    """A data set of four levels with eight prompts each."""

    num_levels = 4

    def __init__(self, level=0):
        self.level = level

    def at_level(self, level):
        return Ladder(level)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return PromptRecord(f"l{self.level}q{index}", {"level": self.level})


def records(name, count):
    return [PromptRecord(f"{name}{index}") for index in range(count)]


def group_of(record, score, **more):
    return RolloutGroup(
        [rollout_of(record, **more)], torch.tensor([score]), {"reasoning_gym": torch.tensor([score])}
    )


def level_after(curriculum, scores, position, level=None):
    level = curriculum.level if level is None else level
    curriculum.observe([group_of(PromptRecord("q", {"level": level}), score) for score in scores], position)
    return curriculum.level


def test_every_pass_has_a_new_order_that_the_seed_decides_and_any_cut_continues():
    order = PromptOrder(records("q", 7), seed=3)
    first, second = order.take(7), order.take(7)
    assert sorted(first, key=str) == sorted(second, key=str) == records("q", 7)
    assert first != second
    order.position = 6
    assert order.take(1) + order.take(7) == [first[6], *second]
    assert PromptOrder(records("q", 7), seed=4).take(14) != first + second


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 200))
def test_each_source_has_its_share_of_every_beginning(parts, count):
    shares = {f"s{index}": part / sum(parts) for index, part in enumerate(parts)}
    mixture = PromptMixture({name: records(name, 5) for name in shares}, 0, shares, {})
    names = [mixture.at(place).source for place in range(count)]
    for name, share in shares.items():
        assert abs(names.count(name) - share * count) <= len(parts)


def test_each_source_goes_in_an_order_of_its_own():
    sources = {"a": records("a", 3), "b": records("b", 100)}
    mixture = PromptMixture(sources, 4, {"a": 0.5, "b": 0.5}, {})
    # Request the positions in any order, as after a resume.
    places = list(range(24))
    random.Random(0).shuffle(places)
    found = {place: mixture.at(place) for place in places}
    for name, prompts in sources.items():
        mine = [found[place].prompt for place in sorted(found) if found[place].source == name]
        assert mine == [record.prompt for record in PromptOrder(prompts, 4).take(12)]


def test_the_level_rises_and_falls_with_the_mean_of_the_newest_groups():
    curriculum = Curriculum(Ladder(), SETTINGS)
    assert level_after(curriculum, [1.0, 1.0, 1.0], 3) == 0
    assert level_after(curriculum, [1.0], 4) == 1
    # Groups of an earlier level do not count, and a mean between the thresholds changes nothing.
    assert level_after(curriculum, [1.0] * 9, 9, level=0) == 1
    assert level_after(curriculum, [0.0, 1.0, 0.0, 1.0], 12) == 1
    # The newest scores are 0, 1, 0, 0, then four zeros.
    assert level_after(curriculum, [0.0, 0.0], 14) == 1
    assert level_after(curriculum, [0.0, 0.0], 16) == 0
    assert level_after(curriculum, [0.0] * 8, 30) == 0
    for level in (1, 2, 3, 3):
        assert level_after(curriculum, [0.9] * 4, 40 + level) == level


def test_groups_without_a_score_and_stored_ones_do_not_count():
    curriculum = Curriculum(Ladder(), SETTINGS)
    assert level_after(curriculum, [float("nan")] * 8, 3) == 0
    curriculum.observe([group_of(PromptRecord("q", {"level": 0}), 1.0, is_replayed=True)] * 8, 4)
    assert curriculum.level == 0


def test_a_position_keeps_its_prompt_whenever_it_is_asked():
    curriculum = Curriculum(Ladder(), SETTINGS)
    mixture = PromptMixture({"": Ladder()}, 0, {"": 1.0}, {"": curriculum})
    before = [mixture.at(place) for place in range(10)]
    assert level_after(curriculum, [1.0] * 4, 10) == 1
    assert [mixture.at(place) for place in range(10)] == before
    assert mixture.at(10).columns["level"] == 1
    resumed = Curriculum(Ladder(), SETTINGS)
    resumed.load_state(curriculum.state())
    again = PromptMixture({"": Ladder()}, 0, {"": 1.0}, {"": resumed})
    assert [again.at(place) for place in range(30)] == [mixture.at(place) for place in range(30)]


def levelled_source(engine):
    # At level 2 one of a group's two completions is right; below, both are right.
    def reward(text, level):
        return float(level < 2 or text.endswith("0"))

    mine = make_source(engine, reward, num_groups=3, name="reasoning_gym")
    curriculum = Curriculum(Ladder(), SETTINGS)
    mine.prompts = PromptMixture({"": Ladder()}, 0, {"": 1.0}, {"": curriculum})
    mine._curricula = {"": curriculum}
    return mine


def prompts_of(groups):
    return [group.rollouts[0].prompt_record.prompt for group in groups]


@pytest.mark.parametrize("stop", range(1, 7))
def test_a_run_that_resumes_asks_and_rises_as_one_that_was_never_stopped(stop):
    def engine():
        return Echo(lambda prompt, index: f"{prompt}{index}")

    whole = levelled_source(engine())
    expected, levels = [], []
    for step in range(7):
        expected.append(prompts_of(whole.collect(step, Timer())))
        levels.append(whole.metrics(step)["curriculum/level"])
    assert levels[0] == 0.0
    assert levels[-1] == 2.0
    first = levelled_source(engine())
    for step in range(stop):
        first.collect(step, Timer())
    second = levelled_source(engine())
    second.load_state(first.state(), stop)
    assert [prompts_of(second.collect(step, Timer())) for step in range(stop, 7)] == expected[stop:]
    assert second.metrics(6)["curriculum/level"] == levels[-1]
