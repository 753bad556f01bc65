"""The contract's suite against engines that break one rule, by a patch or by a backend of mistakes.py."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessorList

from vectorlm.data import encoding
from vectorlm.errors import EngineTimeout, WeightMismatch
from vectorlm.sampling import handle
from vectorlm.sampling.backends import scripted
from vectorlm.sampling.backends.generation import Parameters, SequenceState
from vectorlm.sampling.backends.scripted import Scripted
from vectorlm.sampling.engine import SamplingEngine
from vectorlm.sampling.handle import BatchHandle
from vectorlm.sampling.hot_swap import HotSwap
from vectorlm.sampling.inline_channel import InlineChannel
from vectorlm.sampling.inline_engines import FakeEngine, HFEngine
from vectorlm.sampling.sampler import scheduler
from vectorlm.sampling.sampler.scheduler import Scheduler, SleepState
from vectorlm.sampling.testing import CHECKS, TRAINER_CHECKS, EngineUnderTest, answers, run_checks
from vectorlm.types import UpdateReport

NAMED = {check.__name__: check for check in CHECKS}


TINY_LLAMA = {"tied": True, "hidden_size": 64}


def forget(*args, **kwargs):
    return None


def each_output(change, backend=Scripted):
    """Return a patch that changes every output of the backend."""
    honest = backend.poll

    def poll(self):
        return [replace(output, completions=change(output.completions)) for output in honest(self)]

    return backend, "poll", poll


def each_completion(change):
    return each_output(lambda completions: [change(completion) for completion in completions])


def unpack_backwards(packed, first=0, last=None, honest=handle.unpack):
    return honest(packed, first, last)[::-1]


def load_without_version(backend, *args):
    return 0.0


def never_skip(swap, *args, honest=HotSwap.update):
    swap.forget()
    return honest(swap, *args)


def take_any_model(swap, model, step, *args, honest=HotSwap.update):
    try:
        return honest(swap, model, step, *args)
    except WeightMismatch:
        return UpdateReport(step, False, 0, 0.0, 0.0, 0.0)


def never_drain(engine, model, step, in_flight="refuse", *name, honest=SamplingEngine.update):
    return honest(engine, model, step, "keep" if in_flight == "drain" else in_flight, *name)


def answer_once(handle, timeout_s=None, honest=BatchHandle.result):
    answers = honest(handle, timeout_s)
    handle.result = lambda timeout_s=None: []
    return answers


def wait_longer(channel, number, silence_s, waiting_for, deadline_s=None, honest=InlineChannel.answer):
    return honest(channel, number, silence_s, waiting_for)


def give_the_answer_before(channel, number, silence_s, waiting_for, *args, honest=InlineChannel.answer):
    if waiting_for == "generating":
        with suppress(EngineTimeout):
            return honest(channel, number - 1, silence_s, waiting_for, *args)
    return honest(channel, number, silence_s, waiting_for, *args)


def tell_twice(engine, honest=SamplingEngine.poll):
    return honest(engine) * 2


def sleep_anyway(state, parts, num_requests, honest=SleepState.sleep):
    return honest(state, parts, 0)


def cancel_everything(self, number, command, honest=Scheduler.carry_out):
    if isinstance(command, scheduler.messages.Abort):
        return [
            answer
            for other_number in range(number + 5)
            for answer in honest(self, number, replace(command, generate=other_number))
        ]
    return honest(self, number, command)


BROKEN = [
    ("every_prompt_is_answered_in_its_place", (handle, "unpack", unpack_backwards)),
    (
        "an_unknown_parameter_is_refused_by_name",
        (scripted, "read_parameters", lambda given, defaults: defaults),
    ),
    ("an_update_brings_its_version_and_other_answers", (Scripted, "load", load_without_version)),
    (
        "an_update_brings_its_version_and_other_answers",
        each_completion(lambda completion: replace(completion, text="always")),
    ),
    ("the_same_step_moves_nothing", (HotSwap, "update", never_skip)),
    ("another_model_is_refused_and_the_engine_keeps_its_weights", (HotSwap, "update", take_any_model)),
    ("an_update_is_refused_while_requests_are_in_flight", (scheduler, "require_room_for_update", forget)),
    ("an_update_that_drains_waits_for_requests_in_flight", (SamplingEngine, "update", never_drain)),
    (
        "requests_in_flight_go_on_with_the_new_weights",
        each_completion(lambda completion: replace(completion, versions=(99,) * len(completion.versions))),
    ),
    ("a_submitted_batch_gives_what_sample_gives", (BatchHandle, "result", answer_once)),
    ("done_becomes_true_by_asking", (InlineChannel, "advance", forget)),
    ("poll_returns_each_finished_handle_once_in_order", (SamplingEngine, "poll", tell_twice)),
    ("results_may_be_fetched_in_any_order", (InlineChannel, "answer", give_the_answer_before)),
    ("a_result_that_is_not_there_in_time_may_be_asked_for_again", (InlineChannel, "answer", wait_longer)),
    ("cancelled_requests_raise_and_leave_the_others_alone", (BatchHandle, "cancel", forget)),
    ("cancelled_requests_raise_and_leave_the_others_alone", (Scheduler, "carry_out", cancel_everything)),
    ("an_engine_that_sleeps_samples_nothing", (SleepState, "check_sampling", forget)),
    ("weights_that_slept_hold_nothing_until_an_update", (HotSwap, "forget", forget)),
    ("the_cache_may_sleep_alone", (SleepState, "wake_up", forget)),
    ("weights_wake_for_the_update_and_the_cache_after_it", (SleepState, "finish_update", forget)),
    ("requests_in_flight_keep_the_engine_awake", (SleepState, "sleep", sleep_anyway)),
    ("a_closed_engine_says_so", (SamplingEngine, "close", forget)),
]
MODEL_BROKEN = [
    ("a_prompt_is_answered_as_if_it_were_alone", (torch.Tensor, "new_ones", torch.Tensor.new_zeros)),
    ("seeds_and_completions_differ", (SequenceState, "uniform", lambda sequence: 0.5)),
    (
        "a_stop_token_ends_the_completion",
        (SequenceState, "make_processors", lambda sequence, device: LogitsProcessorList()),
    ),
    ("a_stop_string_ends_the_text", (Parameters, "stop_strings", ())),
    ("text_and_chat_become_the_tokenizers_tokens", (encoding, "encode", lambda prompt, tokenizer: [2, 3])),
]


# tests/sampling/test_answers.py covers other answers that the scheduler refuses.
MISTAKES = {
    "OneCompletionTooFew": "n_completions_come_for_each_prompt",
    "VersionsOfTheFuture": "before_any_update_the_version_is_minus_one",
    "VersionsOfTheCheckpoint": "every_token_carries_the_version_that_sampled_it",
    "StopAndLengthSwapped": "parameters_may_be_given_for_each_prompt",
    "LastTokenDropped": "parameters_may_be_given_for_each_prompt",
    "ProbabilityInsteadOfLogprob": "logprobs_come_where_they_are_asked_for",
    "LogprobsUnasked": "logprobs_come_where_they_are_asked_for",
    "LoadCopiesNothing": "greedy_tokens_are_the_models_likeliest",
    "LoadComputesOnce": "an_updated_engine_answers_as_a_fresh_one",
    "LoadProvesNothing": "weights_that_do_not_arrive_are_noticed",
    "CacheKeptThroughRecompute": "tokens_are_of_the_weights_that_they_name",
    "PromptsKeptOverAnUpdate": "logprobs_are_the_models_own",
    "CancelDoesNothing": "cancelled_requests_hold_nobody_up",
    "CancelForgetsTheNames": "cancelled_requests_hold_nobody_up",
    "CancelEndsEverything": "cancelled_requests_raise_and_leave_the_others_alone",
    "RawLogprobs": "logprobs_are_the_models_own",
    "AnswersTwice": "before_any_update_the_version_is_minus_one",
    "SeedIgnored": "a_seed_gives_the_same_answers_again",
    "LimitIsNotReached": "the_token_limit_is_kept",
}


def fails(engine, folder, name):
    subject = EngineUnderTest(engine, folder, fresh=HFEngine)
    if name != CHECKS[0].__name__:
        # Several checks need a version of the engine.
        subject.engine.update(subject.models(20)[0], 0)
    with pytest.raises(AssertionError, match=name):
        run_checks(subject, [NAMED[name]])


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_a_backend_is_noticed(mistake, folder, monkeypatch):
    monkeypatch.setattr(answers, "PATIENCE_S", 3.0)
    more = {}
    if mistake == "CancelForgetsTheNames":
        more = {"answers": "step {1}: {0}".format, "num_steps": 3, "max_num_seqs": 2, "step_s": 0.02}
    name = f"{Path(__file__).parent / 'mistakes.py'}:{mistake}"
    with SamplingEngine(str(folder), inference=name, channel="inline", timeout_s=60, **more) as engine:
        fails(engine, folder, MISTAKES[mistake])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "change"), BROKEN)
def test_a_broken_rule_is_noticed(name, change, folder, monkeypatch):
    monkeypatch.setattr(*change)
    monkeypatch.setattr(answers, "PATIENCE_S", 0.5)
    with FakeEngine(lambda prompt, version: f"step {version}: {prompt}", num_steps=3) as engine:
        fails(engine, folder, name)


@pytest.mark.parametrize(("name", "change"), MODEL_BROKEN)
def test_answers_that_are_not_the_models_are_noticed(name, change, folder, monkeypatch):
    with HFEngine(folder) as engine:
        monkeypatch.setattr(*change, raising=False)
        fails(engine, folder, name)


def test_the_same_engines_unbroken_fail_none_of_these_checks(folder):
    with FakeEngine(lambda prompt, version: f"step {version}: {prompt}", num_steps=3) as engine:
        subject = EngineUnderTest(engine, folder)
        engine.update(subject.models(20)[0], 0)
        run_checks(subject, [NAMED[name] for name in dict(BROKEN)])


ALL_CHECKS = {check.__name__: check for check in (*CHECKS, *TRAINER_CHECKS)}


def test_every_check_is_of_an_engine_or_of_a_trainer():
    assert {check.__annotations__["subject"] for check in CHECKS} == {"EngineUnderTest"}
    assert {check.__annotations__["subject"] for check in TRAINER_CHECKS} == {"TrainerUnderTest"}
    assert CHECKS[-1].__name__ == "a_closed_engine_says_so", "it ends the engine"


def test_a_check_says_which_line_failed_and_with_which_values():
    engine = SimpleNamespace(sample=lambda prompts, params: [[1, 2]])
    text = "assert [len(completions) for completions in answers] == [3, 3, 3]; answers = [[1, 2]]"
    check, subject = ALL_CHECKS["n_completions_come_for_each_prompt"], SimpleNamespace(engine=engine)
    with pytest.raises(AssertionError) as caught:
        check(subject)
    assert str(caught.value) == text
    with pytest.raises(AssertionError) as caught:
        run_checks(subject, [check])
    assert str(caught.value) == f"n_completions_come_for_each_prompt: AssertionError: {text}"


def test_a_text_that_a_check_has_stays():
    trainer = SimpleNamespace(manifest=tuple)
    with pytest.raises(AssertionError, match=r"^there is nothing to publish$"):
        ALL_CHECKS["the_manifest_is_the_same_everywhere_and_stays"](SimpleNamespace(trainer=trainer))
