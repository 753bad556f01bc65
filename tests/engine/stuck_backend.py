"""A backend that takes requests and keeps them, for a sampler process to import."""

import time

from vectorlm.backends.scripted import Scripted


class NeverAnswers(Scripted):
    """Polls for ever."""

    def poll(self):
        time.sleep(0.01)
        return []
