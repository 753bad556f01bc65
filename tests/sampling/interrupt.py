"""Ctrl-C in the midst of a call."""

import signal
import threading

import pytest

PRESS_AGAIN_S = 3.0


def interrupt(call, after_s):
    """Make a call, interrupt it after `after_s` seconds, and expect that it raises `KeyboardInterrupt`.

    An interrupt that meets a callback of the garbage collector is dropped by Python: it is pressed again. On a machine
    that is busy it may come before the call or behind it, and must not end the tests then.
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
            call()
        finally:
            is_over.set()
            presser.join()
