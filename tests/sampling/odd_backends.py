"""Scripted backends for a sampler process to import: one streams a letter in each step, the other never answers."""

import time
from typing import ClassVar

from vectorlm.sampling.backends.scripted import Scripted
from vectorlm.sampling.contract import RequestOutput
from vectorlm.types import Completion


class Streaming(Scripted):
    """A backend that streams one letter of `streamed` per step, and the whole answer in the last step."""

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
    """A backend that never finishes a request."""

    def poll(self):
        time.sleep(0.01)
        return []
