"""What an engine owes to `sample` and `generate_text`."""

from __future__ import annotations

import pickle

from vectorlm.errors import EngineError
from vectorlm.testing.subject import GREEDY, NUM_TOKENS, PROMPTS, SAMPLED, Subject, raises


def before_any_update_the_version_is_minus_one(subject: Subject) -> None:
    """The checkpoint is no training step."""
    assert subject.engine.version == -1
    assert set(subject.engine.sample(PROMPTS, GREEDY)[0][0].versions) == {-1}


def no_prompts_give_no_answers(subject: Subject) -> None:
    """An empty batch is a batch."""
    assert subject.engine.sample([], GREEDY) == []
    assert subject.engine.sample_sharded([], GREEDY) == []
    assert subject.engine.generate_text([], GREEDY) == []


def every_prompt_is_answered_in_its_place(subject: Subject) -> None:
    """The answers are those of the prompts, in their order, and complete records."""
    for order in (PROMPTS, PROMPTS[::-1]):
        answers = subject.engine.sample(order, GREEDY)
        assert [len(each) for each in answers] == [1, 1, 1]
        for prompt, (completion,) in zip(order, answers, strict=True):
            assert completion.prompt_token_ids == tuple(prompt)
            assert 0 < len(completion.token_ids) <= NUM_TOKENS
            assert all(type(token) is int for token in completion.token_ids)
            assert type(completion.text) is str
            assert completion.finish_reason in ("stop", "length")


def n_completions_come_for_each_prompt(subject: Subject) -> None:
    """`n` asks for several."""
    answers = subject.engine.sample(PROMPTS, {**SAMPLED, "n": 3})
    assert [len(each) for each in answers] == [3, 3, 3]


def logprobs_come_where_they_are_asked_for(subject: Subject) -> None:
    """One for each token, or none."""
    (scored,), (bare,) = subject.engine.sample([[2, 3], [4]], [{**SAMPLED, "logprobs": 0}, SAMPLED])
    assert len(scored.sampler_logprobs) == len(scored.token_ids)
    assert all(type(logprob) is float and logprob <= 0 for logprob in scored.sampler_logprobs)
    assert bare.sampler_logprobs == ()


def temperature_zero_gives_the_same_answers_again(subject: Subject) -> None:
    """Greedy sampling has no randomness."""
    assert _tokens(subject, GREEDY) == _tokens(subject, GREEDY)


def a_seed_gives_the_same_answers_again(subject: Subject) -> None:
    """All randomness comes from the seed, where there is one."""
    several = {**SAMPLED, "n": 2}
    assert _tokens(subject, several) == _tokens(subject, several)


def one_string_is_one_prompt(subject: Subject) -> None:
    """A string is a sequence of strings too, and must not be taken for one."""
    (completion,) = subject.engine.sample("abc", GREEDY)[0]
    assert subject.engine.generate_text("abc", GREEDY) == [completion.text]
    assert subject.engine.generate_text(["abc", "abc"], GREEDY) == [completion.text] * 2


def parameters_may_be_given_for_each_prompt(subject: Subject) -> None:
    """A list has one entry per prompt, and no other length."""
    (short,), (long,) = subject.engine.sample([[2], [3]], [{**GREEDY, "max_tokens": 2}, GREEDY])
    assert len(short.token_ids) == 2 < len(long.token_ids)
    assert short.finish_reason == "length"
    with raises(EngineError):
        subject.engine.sample([[2]], [GREEDY, GREEDY])


def every_token_carries_the_version_that_sampled_it(subject: Subject) -> None:
    """One version for each token."""
    trained, _ = subject.models()
    subject.engine.update(trained, step := subject.next_step)
    for (completion,) in subject.engine.sample(PROMPTS, GREEDY):
        assert completion.versions == (step,) * len(completion.token_ids)


def an_unknown_parameter_is_refused_by_name(subject: Subject) -> None:
    """Nothing is ignored, and the engine lives on."""
    with raises(EngineError, saying="temprature"):
        subject.engine.sample([[2]], {**GREEDY, "temprature": 1.0})
    assert subject.engine.sample([[2]], GREEDY)


def errors_cross_process_borders_unchanged(subject: Subject) -> None:
    """An error pickles with its type and text."""
    with raises(EngineError) as caught:
        subject.engine.sample([[2]], {"temprature": 1.0})
    again = pickle.loads(pickle.dumps(caught[0]))
    assert type(again) is type(caught[0])
    assert str(again) == str(caught[0])


def a_closed_engine_says_so(subject: Subject) -> None:
    """Closing twice is allowed; everything after it is refused. The last check: it ends the engine."""
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


def _tokens(subject: Subject, sampling_params: object) -> list[list[tuple[int, ...]]]:
    answers = subject.engine.sample(PROMPTS, sampling_params)
    return [[completion.token_ids for completion in each] for each in answers]
