"""Send Ctrl-C during a call."""

import signal
import threading

import pytest

PRESS_AGAIN_S = 3.0


def interrupt(call, after_s):
    """Make a call, interrupt it after `after_s` seconds, and expect `KeyboardInterrupt`.

    The function repeats the interrupt, because Python drops an interrupt during a callback of the garbage collector.
    On a busy machine it may arrive before or after the call, and must not end the tests.
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
