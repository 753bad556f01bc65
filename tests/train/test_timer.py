"""The timer adds up spans by name."""

import pytest

from vectorlm.train.recorder import Timer


class HandClock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_spans_of_one_name_add_up_and_nested_spans_count_for_both() -> None:
    clock = HandClock()
    timer = Timer(clock)
    with timer.span("step"):
        clock.now += 2.0
        with timer.span("publish"):
            clock.now += 0.5
    with timer.span("publish"):
        clock.now += 0.25
    assert timer.drain() == {"step": 2.5, "publish": 0.75}
    assert timer.drain() == {}


def test_a_span_that_raises_is_counted_and_raises_on() -> None:
    clock = HandClock()
    timer = Timer(clock)

    @timer.span("step")
    def fail() -> None:
        clock.now += 3.0
        raise KeyError("inside")

    with pytest.raises(KeyError):
        fail()
    assert timer.drain() == {"step": 3.0}


def test_spans_are_kept_and_short_breaks_left_out() -> None:
    clock = HandClock()
    timer = Timer(clock)
    for pause in (0.005, 2.0, 0.0):
        with timer.span("step"):
            clock.now += 1.0
        clock.now += pause
    assert timer.spans == [("step", 100.0, 102.005), ("step", 104.005, 105.005)]
    timer.drain()
    assert timer.spans == []
