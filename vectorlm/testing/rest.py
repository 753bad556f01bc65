"""What an engine owes to `sleep` and `wake_up`."""

from __future__ import annotations

from vectorlm.errors import EngineError
from vectorlm.testing.subject import GREEDY, PROMPTS, Subject, raises


def an_engine_that_sleeps_samples_nothing(subject: Subject) -> None:
    """By whatever call."""
    subject.engine.sleep()
    subject.engine.sleep()
    with raises(EngineError, saying="wake_up"):
        subject.engine.sample(PROMPTS, GREEDY)
    with raises(EngineError):
        subject.engine.sample_sharded(PROMPTS, GREEDY)
    with raises(EngineError):
        subject.engine.submit(PROMPTS, GREEDY).result()
    _wake(subject)


def weights_that_slept_hold_nothing_until_an_update(subject: Subject) -> None:
    """Not even those of the step that the engine held."""
    trained, _ = subject.models(8)
    subject.engine.update(trained, step := subject.next_step)
    before = subject.engine.sample(PROMPTS, GREEDY)
    subject.engine.sleep()
    subject.engine.wake_up()
    with raises(EngineError, saying="update"):
        subject.engine.sample(PROMPTS, GREEDY)
    assert not subject.engine.update(trained, step).skipped
    assert subject.engine.sample(PROMPTS, GREEDY) == before


def the_cache_may_sleep_alone(subject: Subject) -> None:
    """Then waking up is enough."""
    before = subject.engine.sample(PROMPTS, GREEDY)
    subject.engine.sleep(weights=False)
    with raises(EngineError, saying="wake_up"):
        subject.engine.sample(PROMPTS, GREEDY)
    subject.engine.wake_up()
    assert subject.engine.sample(PROMPTS, GREEDY) == before


def weights_wake_for_the_update_and_the_cache_after_it(subject: Subject) -> None:
    """The order that needs the least memory: the cache comes back when the trainer is through."""
    subject.engine.sleep()
    subject.engine.wake_up(kv_cache=False)
    trained, _ = subject.models(9)
    subject.engine.update(trained, subject.next_step)
    with raises(EngineError, saying="wake_up"):
        subject.engine.sample(PROMPTS, GREEDY)
    subject.engine.wake_up(weights=False)
    assert len(subject.engine.sample(PROMPTS, GREEDY)) == 3


def requests_under_way_keep_the_engine_awake(subject: Subject) -> None:
    """Their results are still owed."""
    with subject.kept_busy():
        handle = subject.engine.submit(PROMPTS, GREEDY)
        with raises(EngineError):
            subject.engine.sleep()
    assert len(handle.result()) == 3
    subject.engine.poll()


def _wake(subject: Subject) -> None:
    subject.engine.wake_up()
    subject.engine.update(subject.models()[0], subject.next_step)
