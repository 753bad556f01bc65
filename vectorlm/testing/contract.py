"""The checks, in the order in which one engine can go through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vectorlm.testing import answers, language, ranks, requests, rest, updates
from vectorlm.testing.subject import Subject

Check = Callable[[Subject], None]
"""Raises `AssertionError` where the engine breaks the contract; all ranks call it."""

MODEL_CHECKS: tuple[Check, ...] = (
    language.greedy_tokens_are_the_models_likeliest,
    language.logprobs_are_the_models_own,
    language.a_prompt_is_answered_as_if_it_were_alone,
    language.seeds_and_completions_differ,
    language.the_token_limit_is_kept,
    language.a_stop_token_ends_the_completion,
    language.a_stop_string_ends_the_text,
    language.text_and_chat_become_the_tokenizers_tokens,
)
"""Those of `CHECKS` that a scripted engine cannot keep."""

CHECKS: tuple[Check, ...] = (
    answers.before_any_update_the_version_is_minus_one,
    answers.no_prompts_give_no_answers,
    answers.every_prompt_is_answered_in_its_place,
    answers.n_completions_come_for_each_prompt,
    answers.logprobs_come_where_they_are_asked_for,
    answers.temperature_zero_gives_the_same_answers_again,
    answers.a_seed_gives_the_same_answers_again,
    answers.one_string_is_one_prompt,
    answers.parameters_may_be_given_for_each_prompt,
    answers.an_unknown_parameter_is_refused_by_name,
    answers.errors_cross_process_borders_unchanged,
    answers.every_token_carries_the_version_that_sampled_it,
    updates.an_update_brings_its_version_and_other_answers,
    updates.the_same_step_moves_nothing,
    updates.a_negative_step_is_refused,
    updates.another_model_is_refused_and_the_engine_keeps_its_weights,
    updates.an_update_is_refused_while_requests_are_under_way,
    updates.an_update_that_drains_waits_for_requests_under_way,
    updates.requests_under_way_go_on_with_the_new_weights,
    updates.ranks_must_agree_on_the_step,
    requests.a_submitted_batch_gives_what_sample_gives,
    requests.done_becomes_true_by_asking,
    requests.poll_returns_each_finished_handle_once_in_order,
    requests.results_may_be_fetched_in_any_order,
    requests.a_result_that_is_not_there_in_time_may_be_asked_for_again,
    requests.cancelled_requests_raise_and_leave_the_others_alone,
    ranks.every_rank_gets_the_same_answers,
    ranks.every_rank_gets_the_answers_to_its_own_prompts,
    ranks.every_rank_samples_its_own_prompts_in_its_own_way,
    ranks.ranks_must_agree_on_the_prompts,
    rest.an_engine_that_sleeps_samples_nothing,
    rest.weights_that_slept_hold_nothing_until_an_update,
    rest.the_cache_may_sleep_alone,
    rest.weights_wake_for_the_update_and_the_cache_after_it,
    rest.requests_under_way_keep_the_engine_awake,
    *MODEL_CHECKS,
    answers.a_closed_engine_says_so,
)
"""All of them. The first wants a fresh engine, and the last closes it."""


def run_checks(subject: Subject, checks: Sequence[Check] = CHECKS) -> None:
    """Make all checks on one engine; on every rank, where there are several.

    Raises:
        AssertionError: A check failed; the text names it.
    """
    for check in checks:
        try:
            check(subject)
        except Exception as error:
            raise AssertionError(f"{check.__name__}: {type(error).__name__}: {error}") from error
