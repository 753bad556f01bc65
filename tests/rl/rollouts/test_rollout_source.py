"""Rollouts of a step: groups, seeds, dynamic sampling, length penalties and turns with an environment."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from kit.batches import rollout_of
from kit.scripted_groups import Echo, make_source

from vectorlm.algorithms.registry import algorithm_names, get_algorithm
from vectorlm.errors import RolloutError
from vectorlm.rl.environments.environment import Reply
from vectorlm.rl.metrics import rollout_metrics
from vectorlm.rl.prompts import PromptOrder
from vectorlm.rl.rollout import make_batch
from vectorlm.rl.rollouts.replay import replay_order
from vectorlm.train.recorder import Timer
from vectorlm.types import PromptRecord


def stored_rollout(index, text, name=None):
    return rollout_of(PromptRecord(name or f"old{index}", {"index": index}), text, is_replayed=True)


def prompts_of(groups):
    return [group.rollouts[0].prompt_record.prompt for group in groups]


def rewards_of(groups):
    return [group.rewards.tolist() for group in groups]


def collect(script, reward, **more):
    """Return the groups of the first step."""
    return make_source(Echo(script), reward, **more).collect(0, Timer())


def test_every_prompt_has_a_seed_of_its_own_that_its_place_and_the_run_decide():
    engine = Echo(lambda prompt, index: "ab"[index])
    mine = make_source(engine, lambda text: float(text == "a"))
    found = mine.collect(7, Timer())
    prompts, params = zip(*engine.calls, strict=True)
    assert prompts_of(found) == list(prompts)
    assert rewards_of(found) == [[1.0, 0.0]] * 3
    seeds = [asked["seed"] for asked in params]
    assert len(set(seeds)) == 3
    assert all(asked["n"] == 2 and asked["logprobs"] == 0 for asked in params)
    mine.collect(8, Timer())
    assert set(seeds).isdisjoint(asked["seed"] for _, asked in engine.calls[3:])
    again = Echo(engine.script)
    make_source(again, lambda text: 1.0).collect(7, Timer())
    assert again.calls == engine.calls[:3]


def groups_of_rounds(prompts, stored, num_groups, max_rounds, share, is_dropped):
    """Return the prompts of successive rounds, and the number of fresh and of stored groups."""
    found, num_fresh, num_stored = [], 0, 0
    for _ in range(max_rounds):
        missing = num_groups - sum(not is_dropped(prompt) for prompt in found)
        old = round(missing * share)
        found += [prompts.at(num_fresh + index).prompt for index in range(missing - old)]
        found += [stored.at(num_stored + index)[0].prompt_record.prompt for index in range(old)]
        num_fresh, num_stored = num_fresh + missing - old, num_stored + old
    return found, num_fresh, num_stored


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("max_rounds", [1, 2, 5])
def test_dynamic_sampling_returns_the_groups_of_rounds_in_whatever_order_they_finish(max_rounds, share):
    shapes = set()
    for seed in range(60):
        dice = random.Random(seed)
        dropped = {index for index in range(20) if dice.random() < 0.5}
        engine = Echo(lambda prompt, index: f"{index}", choose=lambda groups: groups[dice.randrange(2) :: 3])  # noqa: B023
        mine = make_source(
            engine,
            lambda text, index: float(text == "0" or index in dropped),  # noqa: B023
            num_groups=6,
            drops_constant_groups=True,
            settings={"max_sampling_rounds": max_rounds},
            replay=replay_order([[stored_rollout(index, text) for text in "01"] for index in range(7)], 2, 0),
            replayed_share=share,
        )
        prompts, stored = (PromptOrder(order._items, 0) for order in (mine.prompts, mine.replay))
        expected = groups_of_rounds(
            prompts,
            stored,
            6,
            max_rounds,
            share,
            lambda prompt: int(prompt.strip("qold")) in dropped,  # noqa: B023
        )
        found = mine.collect(0, Timer())
        assert (prompts_of(found), mine.prompts.position, mine.replay.position) == expected
        assert engine.in_flight == []
        shapes.add(len(found))
    assert len(shapes) > 3 or max_rounds == 1


def test_dynamic_sampling_replaces_a_group_while_others_of_its_round_are_in_flight():
    order = PromptOrder([PromptRecord(f"q{index}") for index in range(20)], 0)
    first = order.at(0).prompt
    in_flight = []

    def all_but_the_first(groups):
        in_flight.append(len(groups))
        late = [group for group in groups if group.prompt == first]
        return [group for group in groups if group not in late] or late

    mine = make_source(
        Echo(lambda prompt, index: f"{index}", choose=all_but_the_first),
        lambda text, index: float(text == "0" or index % 2),
        num_groups=6,
        drops_constant_groups=True,
        settings={"max_sampling_rounds": 6},
    )
    found = mine.collect(0, Timer())
    assert len(found) > 6
    assert min(in_flight[:-1]) > 1, "a round waited for the one before"


@pytest.mark.parametrize(
    ("texts", "settings", "rewards"),
    [
        (
            ["x" * 6, "x" * 8, "x" * 10],
            {"overlong_buffer_tokens": 4, "overlong_penalty": 2.0},
            [1.0, 0.0, -1.0],
        ),
        (["abc", "abc…"], {"missing_end_penalty": 0.75}, [1.0, 0.25]),
    ],
)
def test_completions_lose_by_their_length_and_without_an_end(texts, settings, rewards):
    found = collect(
        lambda prompt, index: texts[index], lambda text: 1.0, group_size=len(texts), settings=settings
    )
    assert rewards_of(found)[0] == rewards


@pytest.mark.parametrize("name", ["dapo", "online_dpo", "best_of_k"])
@pytest.mark.parametrize("reward", [1.0, None])
def test_groups_that_are_dropped_or_that_nobody_could_score_are_not_trained_on(name, reward):
    more = {"drops_constant_groups": reward is not None, "settings": {"max_sampling_rounds": 3}}
    found = collect(lambda prompt, index: "x", lambda text: reward, **more)
    assert len(found) == (3 if reward is None else 9)
    assert make_batch(found, get_algorithm(name)) is None


def test_rewards_that_a_penalty_makes_equal_but_for_rounding_are_equal():
    for group in collect(
        lambda prompt, index: "abc…" if index else "abc",
        lambda text: 100.3 if text.endswith("…") else 0.2,
        settings={"missing_end_penalty": 100.1},
    ):
        assert group.is_constant()
        assert len(set(group.rewards.tolist())) == 1


def _learns(group, spec):
    """Return whether an algorithm's advantages of a group are not all zero."""
    if spec.level != "token" or spec.chooses or spec.needs_parts or spec.needs_greedy or spec.needs_teacher:
        return False
    if spec.needs_critic or spec.needs_gradient_norms:
        return True
    batch = make_batch([replace(group, is_dropped=False)], spec)
    return bool(spec.advantages(batch.for_baselines(), spec.settings).any())


@pytest.mark.parametrize("num_turns", [1, 2])
@pytest.mark.parametrize("name", algorithm_names())
def test_dynamic_sampling_keeps_equal_sums_of_different_turns_only_where_they_are_learned_from(
    name, num_turns
):
    number = itertools.count()

    class Turns:
        """An environment that rewards the first of `num_turns` turns in every second instance, else the last of two."""

        def __init__(self):
            self.left = [1.0, None][:num_turns] if next(number) % 2 == 0 else [None, 1.0]

        def step(self, message):
            reward = self.left.pop(0)
            return Reply("?", reward, done=not self.left)

    spec = get_algorithm(name)
    mine = make_source(
        Echo(lambda prompt, index: "a"),
        lambda text: None,
        num_groups=1,
        group_size=4,
        make=Turns,
        drops_constant_groups=True,
        compared=spec.compared,
        settings={"max_turns": 2},
    )
    group = mine.collect(0, Timer())[0]
    assert sorted(rollout.turn_rewards for rollout in group.rollouts) == [(0.0, 1.0)] * 2 + [(1.0,)] * 2
    assert group.rewards.tolist() == [1.0] * 4
    # Without a baseline, equal returns have advantages; dynamic sampling drops them as it drops equal rewards.
    assert group.is_dropped is not (_learns(group, spec) and (name, num_turns) != ("reinforce", 1))


def test_greedy_completions_are_scored_apart():
    engine = Echo(lambda prompt, index: "a" * (index + 1))
    found = make_source(engine, lambda text: float(len(text)), needs_greedy=True).collect(0, Timer())
    assert [group.greedy_reward.item() for group in found] == [1.0] * 3
    more = {"needs_greedy": True, "max_tokens": 1, "settings": {"overlong_buffer_tokens": 1}}
    for group in make_source(engine, lambda text: float(len(text)), **more).collect(0, Timer()):
        assert group.greedy_reward.item() == group.rewards[0].item() == 0.0, (
            "the penalty is for all completions"
        )
    greedy = {"logprobs": 0, "temperature": 0.0, "max_tokens": 10, "n": 1}
    assert sum(params == greedy for _, params in engine.calls) == 3


def test_the_best_and_the_worst_of_a_group_are_chosen_in_this_order():
    rewards = {"a": 0.5, "b": 0.1, "c": None, "d": 0.9}
    found = collect(lambda prompt, index: "abcd"[index], rewards.get, group_size=4, num_groups=1)
    batch = make_batch(found, get_algorithm("online_dpo"))
    assert batch.columns.tolist() == [[3, 1]]
    torch.testing.assert_close(batch.rewards, torch.tensor([[0.9, 0.1]]))
    assert make_batch(found, get_algorithm("best_of_k")).columns.tolist() == [[3]]


def test_what_was_cut_is_not_chosen_where_cut_completions_are_left_out():
    texts = ["a", "bb…", "ccc", "dddd…"]
    found = collect(lambda prompt, index: texts[index], lambda text: len(text), group_size=4, num_groups=1)
    assert make_batch(found, get_algorithm("online_dpo")).columns.tolist() == [[3, 0]]
    batch = make_batch(found, get_algorithm("online_dpo"), drop_truncated=True)
    assert batch.columns.tolist() == [[2, 0]]
    assert batch.mask.any(dim=1).all(), "a pair has two halves"
    assert make_batch(found, get_algorithm("best_of_k"), drop_truncated=True).columns.tolist() == [[2]]


class Calculator:
    """An environment that answers sums, and ends at "done"."""

    def __init__(self, index):
        self.index = index

    def respond(self, text):
        return None if text == "done" else f"={len(text) + self.index};"


def test_turns_with_an_environment_are_one_rollout_in_which_its_words_are_not_the_policys():
    # The first rollout of the group sends the first request.
    engine = Echo(lambda prompt, index: "1+1" if len(engine.calls) == 1 else "done")
    mine = make_source(
        engine,
        lambda text: float(text.count("done")),
        num_groups=1,
        make=Calculator,
        settings={"max_turns": 4},
    )
    (group,) = mine.collect(0, Timer())
    talked, silent = group.rollouts
    reply = f"={3 + talked.prompt_record.columns['index']};"
    assert talked.text == f"1+1{reply}done"
    assert talked.num_turns == 2
    assert talked.token_ids == tuple(map(ord, talked.text))
    gap = len(reply)
    assert talked.policy_mask == (True,) * 3 + (False,) * gap + (True,) * 4
    assert talked.sampler_logprobs == (-0.5,) * 3 + (0.0,) * gap + (-0.5,) * 4
    assert talked.versions == (4,) * 3 + (-1,) * gap + (4,) * 4
    assert (silent.text, silent.num_turns) == ("done", 1)
    prompt, _ = engine.calls[1]
    assert prompt == [*map(ord, talked.prompt_record.prompt), *map(ord, f"1+1{reply}")]


class Guess:
    """A chat game: one point for each guess that is nearer, three for the number."""

    def reset(self, row):
        self.wanted, self.gap = row["index"] % 3 + 5, 10
        return [{"role": "system", "content": "guess"}]

    def step(self, message):
        gap, self.gap = self.gap, abs(int(message["content"]) - self.wanted)
        if not self.gap:
            return Reply(reward=3.0, done=True, metrics={"gap": 0.0})
        metrics = {"gap": float(self.gap)}
        return Reply([{"role": "user", "content": "no"}], float(self.gap < gap) or None, metrics=metrics)


def test_rewards_of_turns_reach_the_batch_and_the_tokens_are_the_chats():
    # The first request contains messages, the later ones contain tokens.
    engine = Echo(lambda prompt, index: "4" if isinstance(prompt[0], dict) else "7")
    more = {"num_groups": 1, "make": Guess, "settings": {"max_turns": 3}}
    more["prompt"] = lambda index: [{"role": "user", "content": f"q{index}"}]
    (group,) = make_source(engine, lambda text: 0.5, **more).collect(0, Timer())
    rollout = group.rollouts[0]
    wanted = rollout.prompt_record.columns["index"] % 3 + 5
    begin = f"<u>q{rollout.prompt_record.columns['index']}\n<s>guess\n<a>"
    assert "".join(map(chr, rollout.prompt_token_ids)) == begin
    assert rollout.text == ("4\n<u>no\n<a>7" if wanted == 7 else "4\n<u>no\n<a>7\n<u>no\n<a>7")
    assert "".join(map(chr, rollout.token_ids)) == rollout.text
    assert rollout.measured == {"gap": abs(7 - wanted)}
    roles = [message["role"] for message in rollout.messages]
    assert roles == ["user", "system", "assistant", *["user", "assistant"] * (rollout.num_turns - 1)]
    second = 3.0 if wanted == 7 else float(abs(7 - wanted) < abs(4 - wanted))
    assert sum(rollout.turn_rewards) == 1.0 + second
    assert rollout.turn_rewards[0] == 1.0
    assert group.rewards_by_name["environment"].tolist() == [1.0 + second] * 2
    assert group.rewards.tolist() == [1.5 + second] * 2
    batch = make_batch([group], get_algorithm("rloo"))
    policy = [place for place, is_policy in enumerate(rollout.policy_mask) if is_policy]
    placed = batch.token_rewards[0, len(begin) :][policy].tolist()
    assert placed == ([1.0, second + 0.5] if wanted == 7 else [1.0, second, 0.5])
    assert batch.turns[0, len(begin) :][policy].tolist() == list(range(len(policy)))
    assert make_batch([group], get_algorithm("gmpo")).turns is None
    mine = make_source(engine, lambda text: None, **more)
    assert rewards_of(mine.collect(0, Timer())) == [[1.0 + second] * 2], "a None is left out"


class Mixed:
    """An environment that replies with a text and then with a message."""

    num = 0

    def step(self, message):
        self.num += 1
        return ("=4;", [{"role": "user", "content": "no"}], None)[self.num - 1]


def test_a_message_of_the_chat_is_what_one_turn_of_the_assistants_holds():
    """The message has the prompt's beginning of it, the policy's text, and the environment's text in between."""

    def said(script):
        begun = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "I say "}]
        more = {"num_groups": 1, "make": lambda: Mixed(), "prompt": lambda index: begun}
        (user, *others) = collect(script, lambda text: 0.0, **more)[0].rollouts[0].messages
        assert user["content"] == "q"
        return [(message["role"], message["content"]) for message in others]

    found = said(lambda prompt, index: "2+2" if isinstance(prompt[0], dict) else "ok")
    assert found == [("assistant", "I say 2+2=4;ok"), ("user", "no"), ("assistant", "ok")]
    # The context has no room for a third turn, nor for the environment's message before it.
    long = "x" * 60
    assert said(lambda prompt, index: long) == [("assistant", f"I say {long}=4;{long}")]


def test_an_environment_that_speaks_chat_to_a_text_is_refused():
    class Speaks:
        def step(self, message):
            return [{"role": "user", "content": "no"}]

    with pytest.raises(RolloutError, match="messages"):
        collect(lambda prompt, index: "4", lambda text: 0.5, make=lambda: Speaks())


def test_a_conversation_ends_after_its_turns_where_it_is_cut_and_where_there_is_no_room():
    def turns(script):
        more = {"num_groups": 1, "group_size": 1, "make": Calculator, "settings": {"max_turns": 3}}
        (group,) = collect(script, lambda text: 1.0, **more)
        cut = rollout_metrics([group], 0)["completion/truncated"]
        return group.rollouts[0].num_turns, cut

    assert turns(lambda prompt, index: "more") == (3, 0.0)
    assert turns(lambda prompt, index: "cut…") == (1, 1.0)
    # A length that is too long for an agent is too long here.
    assert turns(lambda prompt, index: "x" * 60) == (2, 1.0)


def test_stored_groups_take_their_share_of_each_step():
    stored = [[stored_rollout(0, "s", name=f"old{group}")] * 2 for group in range(3)]
    engine = Echo(lambda prompt, index: "ab"[index])
    mine = make_source(
        engine,
        lambda text: float(text == "a"),
        num_groups=4,
        replay=replay_order(stored, 2, 0),
        replayed_share=0.5,
    )
    found = mine.collect(0, Timer())
    prompts = prompts_of(found)
    assert [prompt.startswith("old") for prompt in prompts] == [False, False, True, True]
    assert [prompt for prompt, _ in engine.calls] == prompts[:2]
    assert rollout_metrics(found, 9)["rollout/replayed"] == 0.5
    assert rollout_metrics(found, 9)["staleness/token_max"] == 5.0
    alone = make_source(
        engine, lambda text: 1.0, num_groups=3, replay=replay_order(stored, 2, 0), replayed_share=1.0
    )
    assert len(alone.collect(0, Timer())) == 3
    assert len(engine.calls) == 2, "nothing was sampled"
