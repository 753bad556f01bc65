"""Random prompts and sampling parameters for one engine: it returns an answer or an error, and keeps nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vectorlm.errors import EngineDied, EngineTimeout, VectorLMError
from vectorlm.ranks.engine_ranks import capture

TINY_LLAMA = {"hidden_size": 64}
ENGINE_ARGS = {"timeout_s": 60}
PROBE = [[2, 3, 4], [5]]
GREEDY = {"temperature": 0, "max_tokens": 6, "logprobs": 1}

NUMBERS = st.one_of(
    st.integers(-2, 60),
    st.floats(-1.0, 2.5),
    st.sampled_from([2**31, 2**63, -(2**63), 10**30, 1e300, float("nan"), float("inf")]),
)
ANYTHING = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=4), st.lists(NUMBERS, max_size=3))
PROMPTS = st.one_of(
    st.text(max_size=20),
    st.text("abc", max_size=80),
    st.lists(st.integers(-1, 50), max_size=70),
    st.lists(st.sampled_from([2**31, 2**64, -5, 47, 48]), max_size=3),
    st.lists(
        st.fixed_dictionaries({"role": st.text(max_size=5), "content": st.text("ab", max_size=5)}), max_size=2
    ),
    ANYTHING,
)
NAMES = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "stop", "stop_token_ids"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "prompt_logprobs"),
    *("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "bad_words", "allowed_token_ids"),
    *("logit_bias", "detokenize", "truncate_prompt_tokens", "no_such_parameter"),
)
PARAMETERS = st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=3)


@pytest.mark.long
@given(prompts=st.lists(PROMPTS, max_size=3), parameters=PARAMETERS, n=st.integers(-1, 3))
def test_an_answer_or_an_error_and_the_same_engine_afterwards(engine, prompts, parameters, n):
    expected = engine.sample(PROBE, GREEDY)
    answers, error = capture(lambda: engine.sample(prompts, {"max_tokens": 4, "n": n, **parameters}))
    if error is None:
        assert [len(completions) for completions in answers] == [n] * len(prompts)
    else:
        assert isinstance(error, VectorLMError | ValueError | TypeError)
        assert not isinstance(error, EngineDied | EngineTimeout)
        assert str(error)
    assert engine.sample(PROBE, GREEDY) == expected
