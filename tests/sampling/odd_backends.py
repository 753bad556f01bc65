"""Scripted backends for a sampler process to import: one tells a letter in each step, the other never answers."""

import time
from typing import ClassVar

from vectorlm.sampling.backends.scripted import Scripted
from vectorlm.sampling.contract import RequestOutput
from vectorlm.types import Completion


class Streaming(Scripted):
    """Tells one letter of `streamed` in each step, and the whole answer in the last."""

    left: ClassVar = {}

    def submit_streamed(self, name, prompt, sampling_params):
        self.submit(name, prompt, sampling_params)
        self.left = {name: list("streamed")}

    def poll(self):
        outputs = super().poll()
        for name in self._requests.keys() & self.left.keys():
            part = Completion((), (1,), (), (self.version,), self.left[name].pop(0), None)
            outputs.append(RequestOutput(name, [part], is_part=True))
        return outputs


class NeverAnswers(Scripted):
    """Polls for ever."""

    def poll(self):
        time.sleep(0.01)
        return []
