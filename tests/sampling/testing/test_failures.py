"""A check that fails says which line it was and with which values, called by `run_checks` or by itself."""

from types import SimpleNamespace

import pytest

from vectorlm.sampling.testing import CHECKS, TRAINER_CHECKS, run_checks

NAMED = {check.__name__: check for check in (*CHECKS, *TRAINER_CHECKS)}


def test_every_check_is_of_an_engine_or_of_a_trainer():
    assert {check.__annotations__["subject"] for check in CHECKS} == {"EngineUnderTest"}
    assert {check.__annotations__["subject"] for check in TRAINER_CHECKS} == {"TrainerUnderTest"}
    assert CHECKS[-1].__name__ == "a_closed_engine_says_so", "it ends the engine"


def test_a_check_says_which_line_failed_and_with_which_values():
    engine = SimpleNamespace(sample=lambda prompts, params: [[1, 2]])
    text = "assert [len(each) for each in answers] == [3, 3, 3]; answers = [[1, 2]]"
    check, subject = NAMED["n_completions_come_for_each_prompt"], SimpleNamespace(engine=engine)
    with pytest.raises(AssertionError) as caught:
        check(subject)
    assert str(caught.value) == text
    with pytest.raises(AssertionError) as caught:
        run_checks(subject, [check])
    assert str(caught.value) == f"n_completions_come_for_each_prompt: AssertionError: {text}"


def test_a_text_that_a_check_has_stays():
    trainer = SimpleNamespace(manifest=tuple)
    with pytest.raises(AssertionError, match=r"^there is nothing to publish$"):
        NAMED["the_manifest_is_the_same_everywhere_and_stays"](SimpleNamespace(trainer=trainer))
