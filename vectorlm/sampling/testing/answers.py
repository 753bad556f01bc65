"""Checks of `sample`, `submit`, `poll` and the handles."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable

from vectorlm.errors import EngineError, EngineTimeout, RankMismatch
from vectorlm.ranks.engine_ranks import gather
from vectorlm.sampling.testing.subject import (
    GREEDY,
    NUM_TOKENS,
    PROMPTS,
    SAMPLED,
    EngineUnderTest,
    raises,
)

LONG = {**GREEDY, "max_tokens": 40, "n": 8, "temperature": 1.0, "seed": 1}
PATIENCE_S = 60.0


def before_any_update_the_version_is_minus_one(subject: EngineUnderTest) -> None:
    """-1 is the version of the checkpoint."""
    assert subject.engine.version == -1
    assert set(subject.engine.sample(PROMPTS, GREEDY)[0][0].versions) == {-1}


def no_prompts_give_no_answers(subject: EngineUnderTest) -> None:
    """An empty batch is a batch."""
    assert subject.engine.sample([], GREEDY) == []
    assert subject.engine.sample_sharded([], GREEDY) == []
    assert subject.engine.generate_text([], GREEDY) == []


def every_prompt_is_answered_in_its_place(subject: EngineUnderTest) -> None:
    """Answers come in the order of the prompts, as complete records."""
    for order in (PROMPTS, PROMPTS[::-1]):
        answers = subject.engine.sample(order, GREEDY)
        assert [len(completions) for completions in answers] == [1, 1, 1]
        for prompt, (completion,) in zip(order, answers, strict=True):
            assert completion.prompt_token_ids == tuple(prompt)
            assert 0 < len(completion.token_ids) <= NUM_TOKENS
            assert all(type(token) is int for token in completion.token_ids)
            assert type(completion.text) is str
            assert completion.finish_reason in ("stop", "length")


def n_completions_come_for_each_prompt(subject: EngineUnderTest) -> None:
    """A prompt gets `n` completions."""
    answers = subject.engine.sample(PROMPTS, {**SAMPLED, "n": 3})
    assert [len(completions) for completions in answers] == [3, 3, 3]


def logprobs_come_where_they_are_asked_for(subject: EngineUnderTest) -> None:
    """There is one log-probability per token, or none."""
    (scored,), (bare,) = subject.engine.sample([[2, 3], [4]], [{**SAMPLED, "logprobs": 0}, SAMPLED])
    assert len(scored.sampler_logprobs) == len(scored.token_ids)
    assert all(type(logprob) is float and logprob <= 0 for logprob in scored.sampler_logprobs)
    assert bare.sampler_logprobs == ()


def temperature_zero_gives_the_same_answers_again(subject: EngineUnderTest) -> None:
    """Greedy sampling has no randomness."""
    assert _tokens(subject, GREEDY) == _tokens(subject, GREEDY)


def a_seed_gives_the_same_answers_again(subject: EngineUnderTest) -> None:
    """All randomness comes from the seed, if there is one."""
    several = {**SAMPLED, "n": 2}
    assert _tokens(subject, several) == _tokens(subject, several)


def one_string_is_one_prompt(subject: EngineUnderTest) -> None:
    """A string is not a list of one-letter prompts."""
    (completion,) = subject.engine.sample("abc", GREEDY)[0]
    assert subject.engine.generate_text("abc", GREEDY) == [completion.text]
    assert subject.engine.generate_text(["abc", "abc"], GREEDY) == [completion.text] * 2


def parameters_may_be_given_for_each_prompt(subject: EngineUnderTest) -> None:
    """A list has one entry per prompt; another length raises."""
    (short,), (long,) = subject.engine.sample([[2], [3]], [{**GREEDY, "max_tokens": 2}, GREEDY])
    assert len(short.token_ids) == 2 < len(long.token_ids)
    assert short.finish_reason == "length"
    with raises(EngineError, ValueError):
        subject.engine.sample([[2]], [GREEDY, GREEDY])


def every_token_carries_the_version_that_sampled_it(subject: EngineUnderTest) -> None:
    """There is one version per token."""
    trained, _ = subject.models()
    subject.engine.update(trained, step := subject.next_step)
    for (completion,) in subject.engine.sample(PROMPTS, GREEDY):
        assert completion.versions == (step,) * len(completion.token_ids)


def an_unknown_parameter_is_refused_by_name(subject: EngineUnderTest) -> None:
    """No parameter is ignored, and the engine continues."""
    with raises(EngineError, saying="temprature"):
        subject.engine.sample([[2]], {**GREEDY, "temprature": 1.0})
    assert subject.engine.sample([[2]], GREEDY)


def errors_cross_process_borders_unchanged(subject: EngineUnderTest) -> None:
    """An error pickles with its type and text."""
    with raises(EngineError) as caught:
        subject.engine.sample([[2]], {"temprature": 1.0})
    again = pickle.loads(pickle.dumps(caught[0]))
    assert type(again) is type(caught[0])
    assert str(again) == str(caught[0])


def a_submitted_batch_gives_what_sample_gives(subject: EngineUnderTest) -> None:
    """The result is the same, also on a second call."""
    expected = subject.engine.sample(PROMPTS, GREEDY)
    handle = subject.engine.submit(PROMPTS, GREEDY)
    assert handle.result() == expected
    assert handle.result(timeout_s=0.0) == expected
    assert handle.done()
    assert subject.engine.submit([], GREEDY).result() == []
    subject.engine.poll()


def done_becomes_true_by_asking(subject: EngineUnderTest) -> None:
    """A loop that only calls `done` ends."""
    handle = subject.engine.submit(PROMPTS, GREEDY)
    _until(lambda: handle.done(), "done() stayed false")
    assert len(handle.result()) == 3
    subject.engine.poll()


def poll_returns_each_finished_handle_once_in_order(subject: EngineUnderTest) -> None:
    """`poll` returns the handles of `submit_many`, with and without waiting, also of a batch without prompts."""
    requests = [[], *([prompt] for prompt in PROMPTS)]
    handles = subject.engine.submit_many([(prompts, GREEDY) for prompts in requests])
    found: list[object] = []

    def all_are_there() -> bool:
        batch = subject.engine.poll(0.01 * (len(found) % 2))
        places = [handles.index(handle) for handle in batch]
        assert places == sorted(places), "one poll must return handles in the order of their submission"
        found.extend(batch)
        return len(found) >= len(handles)

    _until(all_are_there, "poll() did not return every handle")
    assert sorted(map(id, found)) == sorted(map(id, handles))
    assert subject.engine.poll() == []
    for prompts, handle in zip(requests, handles, strict=True):
        assert [row[0].prompt_token_ids for row in handle.result()] == [*map(tuple, prompts)]


def results_may_be_fetched_in_any_order(subject: EngineUnderTest) -> None:
    """Each handle has its own answers."""
    first, second = (subject.engine.submit([prompt], GREEDY) for prompt in PROMPTS[:2])
    assert second.result()[0][0].prompt_token_ids == tuple(PROMPTS[1])
    assert first.result()[0][0].prompt_token_ids == tuple(PROMPTS[0])
    subject.engine.poll()


def a_result_that_is_not_there_in_time_may_be_asked_for_again(subject: EngineUnderTest) -> None:
    """The deadline ends the wait, not the sampling."""
    handle = subject.engine.submit(PROMPTS, LONG)
    with raises(EngineTimeout):
        handle.result(timeout_s=0.0)
    assert [len(completions) for completions in handle.result()] == [8, 8, 8]
    subject.engine.poll()


def cancelled_requests_raise_and_leave_the_others_alone(subject: EngineUnderTest) -> None:
    """Only the cancelled requests are lost."""
    expected = subject.engine.sample(PROMPTS, GREEDY)
    doomed = subject.engine.submit(PROMPTS, LONG)
    spared = subject.engine.submit(PROMPTS, GREEDY)
    doomed.cancel()
    with raises(EngineError):
        doomed.result()
    assert doomed.done()
    assert spared.result(timeout_s=PATIENCE_S) == expected
    spared.cancel()
    assert spared.result() == expected, "cancel() must do nothing to what has finished"
    assert subject.engine.sample(PROMPTS, GREEDY) == expected
    subject.engine.poll()


def cancelled_requests_hold_nobody_up(subject: EngineUnderTest) -> None:
    """After 40 times as many cancelled requests, the next ones take less than ten times as long as alone."""

    def seconds_of(wait: Callable[[], object]) -> float:
        start = time.monotonic()
        wait()
        return max(gather(subject.topology, time.monotonic() - start))

    def alone() -> None:
        subject.engine.sample(PROMPTS, LONG)

    before_s = seconds_of(alone)
    subject.engine.submit(PROMPTS * 40, LONG).cancel()
    handle = subject.engine.submit(PROMPTS, LONG)
    rule = f"alone they take {before_s:.2g} s: cancel() must end the requests."
    try:
        behind_s = seconds_of(lambda: handle.result(timeout_s=PATIENCE_S))
    except EngineTimeout:
        raise AssertionError(rule) from None
    # Measured again, because other work on the machine may have begun meanwhile.
    assert behind_s < max(10 * before_s, 10 * seconds_of(alone), 1.0), rule
    subject.engine.poll()


def every_rank_gets_the_same_answers(subject: EngineUnderTest) -> None:
    """This includes random answers."""
    answers = subject.engine.sample(PROMPTS, {**SAMPLED, "seed": None, "n": 2, "logprobs": 0})
    assert all(theirs == answers for theirs in gather(subject.topology, answers))


def every_rank_gets_the_answers_to_its_own_prompts(subject: EngineUnderTest) -> None:
    """Ranks may have different numbers of prompts, also none."""
    rank, world_size = subject.topology.rank, subject.topology.world_size
    for num_prompts in (rank, world_size - 1 - rank, 3):
        prompts = [[2 + rank, 3 + index] for index in range(num_prompts)]
        answers = subject.engine.sample_sharded(prompts, GREEDY)
        assert [completions[0].prompt_token_ids for completions in answers] == [
            tuple(prompt) for prompt in prompts
        ]
        together = [prompt for shard in gather(subject.topology, prompts) for prompt in shard]
        expected = {
            tuple(completions[0].prompt_token_ids): completions
            for completions in subject.engine.sample(together, GREEDY)
        }
        assert answers == [expected[tuple(prompt)] for prompt in prompts]


def every_rank_samples_its_own_prompts_in_its_own_way(subject: EngineUnderTest) -> None:
    """`sample_sharded` takes each rank's own parameters, for all prompts or one per prompt."""
    num_tokens = 2 + subject.topology.rank
    short, long = ({**GREEDY, "max_tokens": number} for number in (num_tokens, 8))
    answers = subject.engine.sample_sharded([[2], [3]], [short, long])
    assert len(answers[0][0].token_ids) == num_tokens < len(answers[1][0].token_ids)
    for (completion,) in subject.engine.sample_sharded([[2], [3]], short):
        assert len(completion.token_ids) == num_tokens


def ranks_must_agree_on_the_prompts(subject: EngineUnderTest) -> None:
    """Every rank raises an error with the rank that differs; the engine continues."""
    if subject.topology.world_size == 1:
        return
    mine = [[2, 3 + subject.topology.rank]]
    with raises(RankMismatch, saying="rank 1"):
        subject.engine.sample(mine, GREEDY)
    with raises(RankMismatch, saying="rank 1"):
        subject.engine.submit(mine, GREEDY)
    with raises(RankMismatch, saying="rank 1"):
        subject.engine.sample([[2]], {**GREEDY, "max_tokens": 3 + subject.topology.rank})
    assert len(subject.engine.sample([[2]], GREEDY)) == 1


def _tokens(subject: EngineUnderTest, sampling_params: object) -> list[list[tuple[int, ...]]]:
    answers = subject.engine.sample(PROMPTS, sampling_params)
    return [[completion.token_ids for completion in completions] for completions in answers]


def _until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{otherwise} for {PATIENCE_S:g} s."
        time.sleep(0.01)
