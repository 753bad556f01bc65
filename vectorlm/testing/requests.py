"""What an engine owes to `submit`, `poll` and the handles."""

from __future__ import annotations

import time

from vectorlm.errors import EngineError, EngineTimeout
from vectorlm.testing.subject import GREEDY, PROMPTS, Subject, raises

LONG = {**GREEDY, "max_tokens": 40, "n": 8, "temperature": 1.0, "seed": 1}
PATIENCE_S = 300.0


def a_submitted_batch_gives_what_sample_gives(subject: Subject) -> None:
    """The result is the same, and the same again."""
    expected = subject.engine.sample(PROMPTS, GREEDY)
    handle = subject.engine.submit(PROMPTS, GREEDY)
    assert handle.result() == expected
    assert handle.result(timeout_s=0.0) == expected
    assert handle.done()
    assert subject.engine.submit([], GREEDY).result() == []
    _drain(subject)


def done_becomes_true_by_asking(subject: Subject) -> None:
    """A loop that only asks comes to an end."""
    handle = subject.engine.submit(PROMPTS, GREEDY)
    _until(lambda: handle.done(), "done() stayed false")
    assert len(handle.result()) == 3
    _drain(subject)


def poll_returns_each_finished_handle_once_in_order(subject: Subject) -> None:
    """The very handles that `submit` returned."""
    handles = [subject.engine.submit([prompt], GREEDY) for prompt in PROMPTS]
    found: list[object] = []

    def all_are_there() -> bool:
        batch = subject.engine.poll()
        places = [handles.index(handle) for handle in batch]
        assert places == sorted(places), "one poll must return handles in the order of their submission"
        found.extend(batch)
        return len(found) >= 3

    _until(all_are_there, "poll() did not return every handle")
    assert sorted(map(id, found)) == sorted(map(id, handles))
    assert subject.engine.poll() == []
    for prompt, handle in zip(PROMPTS, handles, strict=True):
        assert handle.result()[0][0].prompt_token_ids == tuple(prompt)


def results_may_be_fetched_in_any_order(subject: Subject) -> None:
    """Each handle has its own answers."""
    first, second = (subject.engine.submit([prompt], GREEDY) for prompt in PROMPTS[:2])
    assert second.result()[0][0].prompt_token_ids == tuple(PROMPTS[1])
    assert first.result()[0][0].prompt_token_ids == tuple(PROMPTS[0])
    _drain(subject)


def a_result_that_is_not_there_in_time_may_be_asked_for_again(subject: Subject) -> None:
    """The deadline ends the waiting, and not the work."""
    handle = subject.engine.submit(PROMPTS, LONG)
    with raises(EngineTimeout):
        handle.result(timeout_s=0.0)
    assert [len(each) for each in handle.result()] == [8, 8, 8]
    _drain(subject)


def cancelled_requests_raise_and_leave_the_others_alone(subject: Subject) -> None:
    """Only what was cancelled is gone."""
    expected = subject.engine.sample(PROMPTS, GREEDY)
    doomed = subject.engine.submit(PROMPTS, LONG)
    spared = subject.engine.submit(PROMPTS, GREEDY)
    doomed.cancel()
    with raises(EngineError):
        doomed.result()
    assert doomed.done()
    assert spared.result() == expected
    spared.cancel()
    assert spared.result() == expected, "cancel() must do nothing to what has finished"
    assert subject.engine.sample(PROMPTS, GREEDY) == expected
    _drain(subject)


def _drain(subject: Subject) -> None:
    """Take note of what has finished, so that the next check's `poll` finds its own handles alone."""
    subject.engine.poll()


def _until(condition: object, otherwise: str) -> None:
    assert callable(condition)
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{otherwise} for {PATIENCE_S:g} s."
        time.sleep(0.01)
