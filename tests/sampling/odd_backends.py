"""Scripted backends for a sampler process to import, which stream, never answer, or use types that ranks lack."""

import hashlib
import time
from typing import ClassVar

from vectorlm.errors import EngineError, WeightMismatch
from vectorlm.sampling.backends.scripted import Characters, Scripted
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


class Slow(Scripted):
    """A backend that takes three seconds to load."""

    def __init__(self, *args, **options):
        time.sleep(3)
        super().__init__(*args, **options)


class NeverAnswers(Scripted):
    """A backend that never finishes a request."""

    def poll(self):
        time.sleep(0.01)
        return []


class Seeing(Scripted):
    """A backend that answers with the digest of its prompt's picture."""

    takes_images = True

    def submit(self, name, prompt, sampling_params):
        super().submit(name, prompt, sampling_params)
        (picture,) = prompt.pictures
        self._answer = lambda *_: hashlib.sha256(picture.data).hexdigest()


class Shouted(Characters):
    """A tokenizer of this file."""

    def encode(self, text):
        return super().encode(text.upper())


class Refusal(EngineError):
    """An error of this file."""


class OtherModel(WeightMismatch):
    """A more exact error of this file."""


class Seconds(float):
    """A number of this file."""


class Foreign(Scripted):
    """A backend whose tokenizer, errors and times have types that only this file has."""

    tokenizer = Shouted()

    def submit(self, name, prompt, sampling_params):
        if prompt == [ord("?")]:
            raise Refusal("no questions")
        super().submit(name, prompt, sampling_params)

    def connect(self, manifest, arena_path, weight_set):
        if len(manifest) == 1:
            raise OtherModel("one tensor")
        return super().connect(manifest, arena_path, weight_set)

    def load(self, version, checksums, weight_sets, recompute):
        load_s = super().load(version, checksums, weight_sets, recompute)
        return Seconds(load_s) if version == 1 else (load_s for _ in "this cannot be pickled")

    def sleep(self, parts, asleep):
        raise EngineError(letter for letter in "this cannot be pickled")
