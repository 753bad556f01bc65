"""Ctrl-C in the midst of a call."""

import contextlib
import signal
import threading

import pytest

PRESS_AGAIN_S = 3.0


@contextlib.contextmanager
def interrupted(after_s):
    """Interrupt the block after `after_s` seconds, and expect that it raises `KeyboardInterrupt`.

    An interrupt that meets a callback of the garbage collector is dropped by Python: it is pressed again. One that
    comes before or behind the block's call, on a machine that was busy, ends the block too, and never the tests.
    """
    is_over = threading.Event()

    def press():
        wait_s = after_s
        while not is_over.wait(wait_s):
            signal.raise_signal(signal.SIGINT)
            wait_s = PRESS_AGAIN_S

    presser = threading.Thread(target=press, daemon=True)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (an interrupt may come anywhere in here)
        try:
            presser.start()
            yield
        finally:
            is_over.set()
            presser.join()
