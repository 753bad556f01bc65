"""The suite fails for each mistake of `mistakes`, in the check that is about it, and says what is wrong."""

from pathlib import Path

import pytest

from vectorlm import HFEngine, SamplingEngine
from vectorlm.sampling.testing import EngineUnderTest, answers, run_checks

# Other answers that the scheduler refuses are in tests/sampling/test_answers.py.
FIRST = "before_any_update_the_version_is_minus_one"
MISTAKES = [
    ("OneCompletionTooFew", "n_completions_come_for_each_prompt", "with 2 completions, but n=3"),
    ("VersionsOfTheFuture", FIRST, "with tokens of versions 6, but the weights were"),
    ("VersionsOfTheCheckpoint", "every_token_carries_the_version_that_sampled_it", "versions -1, but"),
    ("StopAndLengthSwapped", "parameters_may_be_given_for_each_prompt", "finish_reason == .length."),
    ("LastTokenDropped", "parameters_may_be_given_for_each_prompt", "== 2 < len"),
    ("ProbabilityInsteadOfLogprob", "logprobs_come_where_they_are_asked_for", "log-probability of 0.5"),
    ("LogprobsUnasked", "logprobs_come_where_they_are_asked_for", r"bare.sampler_logprobs == \(\)"),
    ("LoadCopiesNothing", "greedy_tokens_are_the_models_likeliest", "logprob_tolerance"),
    ("LoadComputesOnce", "an_updated_engine_answers_as_a_fresh_one", "sampler_logprobs"),
    ("LoadProvesNothing", "weights_that_do_not_arrive_are_noticed", "ChecksumMismatch must be raised"),
    ("CacheKeptThroughRecompute", "tokens_are_of_the_weights_that_they_name", "logprob_tolerance"),
    ("PromptsKeptOverAnUpdate", "logprobs_are_the_models_own", "logprob_tolerance"),
    ("CancelDoesNothing", "cancelled_requests_hold_nobody_up", r"cancel\(\) must end the requests"),
    ("CancelForgetsTheNames", "cancelled_requests_hold_nobody_up", r"cancel\(\) must end the requests"),
    ("CancelEndsEverything", "cancelled_requests_raise_and_leave_the_others_alone", "EngineTimeout"),
    ("RawLogprobs", "logprobs_are_the_models_own", "logprob_tolerance"),
    ("AnswersTwice", FIRST, "answered prompt 2 twice"),
    ("SeedIgnored", "a_seed_gives_the_same_answers_again", "_tokens"),
    ("LimitIsNotReached", "the_token_limit_is_kept", r"len\(completion.token_ids\) == max_tokens"),
]


TINY_LLAMA = {"tied": True, "hidden_size": 64}


@pytest.mark.parametrize(("mistake", "check", "said"), MISTAKES, ids=[each[0] for each in MISTAKES])
def test_the_suite_fails_for_a_mistake(mistake, check, said, folder, monkeypatch):
    monkeypatch.setattr(answers, "PATIENCE_S", 3.0)
    more = {}
    if mistake == "CancelForgetsTheNames":
        more = {"answers": "step {1}: {0}".format, "num_steps": 3, "max_num_seqs": 2, "step_s": 0.02}
    name = f"{Path(__file__).parent / 'mistakes.py'}:{mistake}"
    with (
        SamplingEngine(str(folder), inference=name, channel="inline", timeout_s=60, **more) as engine,
        pytest.raises(AssertionError, match=said) as caught,
    ):
        run_checks(EngineUnderTest(engine, folder, fresh=HFEngine))
    assert str(caught.value).startswith(f"{check}: ")
