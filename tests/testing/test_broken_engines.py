"""The suite against engines that break one rule each: a check that nothing fails proves nothing."""

import itertools
from dataclasses import replace

import pytest
import torch
from rank_processes import save_tiny_llama

from vectorlm.sampling import decoding, fake_sampler, hf_sampler
from vectorlm.sampling.desk import Desk
from vectorlm.sampling.fake_engine import FakeEngine
from vectorlm.sampling.hf_engine import HFEngine
from vectorlm.sampling.parameters import Parameters
from vectorlm.sampling.readiness import Readiness
from vectorlm.sampling.requests import Request, Requests
from vectorlm.sampling.row import Row
from vectorlm.testing import CHECKS, Subject

NAMED = {check.__name__: check for check in CHECKS}
COUNTER = itertools.count()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("broken") / "model", hidden_size=64)


def each_completion(change):
    """Break every completion that `sample` returns."""
    honest = FakeEngine.sample

    def sample(engine, prompts, params=None):
        return [[change(completion) for completion in each] for each in honest(engine, prompts, params)]

    return FakeEngine, "sample", sample


def forget(*args, **kwargs):
    return None


def never_skip(desk, *args, honest=Desk.update):
    desk.readiness.held_step = None
    return honest(desk, *args)


def update_without_version(readiness, version):
    readiness.held_step, readiness._obstacle = version, None


def sample_backwards(engine, prompts, params=None, honest=FakeEngine.sample):
    return honest(engine, prompts, params)[::-1]


def answer_once(request, timeout_s=None, honest=Request.result):
    answers = honest(request, timeout_s)
    request._outcome = ([], None)
    return answers


def wait_longer(request, timeout_s=None, honest=Request.result):
    return honest(request)


def tell_twice(requests, honest=Requests.poll):
    return honest(requests) * 2


BROKEN = [
    ("every_prompt_is_answered_in_its_place", (FakeEngine, "sample", sample_backwards)),
    (
        "n_completions_come_for_each_prompt",
        (
            FakeEngine,
            "sample",
            lambda e, p, s=None, honest=FakeEngine.sample: [a[:1] for a in honest(e, p, s)],
        ),
    ),
    (
        "logprobs_come_where_they_are_asked_for",
        each_completion(lambda each: replace(each, sampler_logprobs=(-1.0,))),
    ),
    (
        "a_seed_gives_the_same_answers_again",
        each_completion(lambda each: replace(each, token_ids=(next(COUNTER),))),
    ),
    (
        "every_token_carries_the_version_that_sampled_it",
        each_completion(lambda each: replace(each, versions=(0,))),
    ),
    ("an_update_brings_its_version_and_other_answers", (Readiness, "finish_update", update_without_version)),
    (
        "an_update_brings_its_version_and_other_answers",
        each_completion(lambda each: replace(each, text="always")),
    ),
    ("the_same_step_moves_nothing", (Desk, "update", never_skip)),
    ("another_model_is_refused_and_the_engine_keeps_its_weights", (fake_sampler, "require_same", forget)),
    ("a_submitted_batch_gives_what_sample_gives", (Request, "result", answer_once)),
    ("poll_returns_each_finished_handle_once_in_order", (Requests, "poll", tell_twice)),
    ("a_result_that_is_not_there_in_time_may_be_asked_for_again", (Request, "result", wait_longer)),
    ("cancelled_requests_raise_and_leave_the_others_alone", (Request, "cancel", forget)),
    ("an_engine_that_sleeps_samples_nothing", (Readiness, "require_sampling", Readiness.require_open)),
    ("weights_that_slept_hold_nothing_until_an_update", (Readiness, "sleep", forget)),
    ("requests_under_way_keep_the_engine_awake", (Requests, "num_under_way", 0)),
    ("a_closed_engine_says_so", (Readiness, "close", forget)),
]
MODEL_BROKEN = [
    ("greedy_tokens_are_the_models_likeliest", (hf_sampler, "copy_whole", lambda model, into: 0)),
    ("logprobs_are_the_models_own", (hf_sampler, "copy_whole", lambda model, into: 0)),
    ("a_prompt_is_answered_as_if_it_were_alone", (torch.Tensor, "new_ones", torch.Tensor.new_zeros)),
    ("seeds_and_completions_differ", (Row, "uniform", lambda row: 0.5)),
    ("a_stop_token_ends_the_completion", (Row, "forbidden", [])),
    ("a_stop_string_ends_the_text", (Parameters, "stop_strings", ())),
    ("the_token_limit_is_kept", (decoding.Decoding, "is_finished", True)),
]


def fails(engine, model_path, name):
    # Several checks need a version that the engine holds.
    subject = Subject(engine, model_path)
    subject.engine.update(subject.models(20)[0], 0)
    with pytest.raises(AssertionError):
        NAMED[name](subject)


@pytest.mark.parametrize(("name", "change"), BROKEN)
def test_a_broken_rule_is_noticed(name, change, model_path, monkeypatch):
    monkeypatch.setattr(*change)
    with FakeEngine(lambda prompt, version: f"step {version}: {prompt}", num_steps=3) as engine:
        fails(engine, model_path, name)


@pytest.mark.parametrize(("name", "change"), MODEL_BROKEN)
def test_answers_that_are_not_the_models_are_noticed(name, change, model_path, monkeypatch):
    with HFEngine(model_path) as engine:
        monkeypatch.setattr(*change)
        fails(engine, model_path, name)
