"""Sending images to a sampler: their content crosses the connection once, even if a command fails."""

import hashlib
import pickle
import random
from pathlib import Path

import pytest

from vectorlm import SamplingEngine
from vectorlm.data.images import Picture, PicturedIds
from vectorlm.errors import EngineError
from vectorlm.sampling import messages

RANDOM = random.Random(0)


def pictured(*contents):
    return messages.Generate([PicturedIds.of([7, 8], map(Picture.of_bytes, contents))], {}, False)


def crossed(ends, *commands):
    """Return the received commands, and the number of bytes of each message."""
    here, there = ends
    sent = [here.encode(messages.pickled(command)) for command in commands]
    return [there.decode(message) for message in sent], [len(pickle.dumps(message)) for message in sent]


def test_a_picture_crosses_a_connection_once(monkeypatch):
    ends = messages.KeptPictures(), messages.KeptPictures()
    first, second = RANDOM.randbytes(5000), RANDOM.randbytes(6000)
    arrived, sizes = crossed(ends, pictured(first), pictured(first, second), pictured(second, first))
    assert arrived == [pictured(first), pictured(first, second), pictured(second, first)]
    assert [one.data for one in arrived[1].prompts[0].pictures] == [first, second]
    assert 5000 < sizes[0] < 5500
    assert 6000 < sizes[1] < 6700
    assert sizes[2] < 600
    # Both ends drop the same images.
    monkeypatch.setattr(messages, "KEPT_PICTURE_BYTES", 10_000)
    for number in range(30):
        contents = [bytes([7 * number * place % 11]) * 3000 for place in range(1 + number % 3)]
        (arrived,), _ = crossed(ends, pictured(*contents))
        assert [one.data for one in arrived.prompts[0].pictures] == contents


def test_a_command_that_cannot_be_read_loses_no_picture():
    ends, content = (messages.KeptPictures(), messages.KeptPictures()), RANDOM.randbytes(5000)
    pictures, pickled = ends[0].encode(messages.pickled(pictured(content)))
    assert pictures[0][1] == content
    with pytest.raises(pickle.UnpicklingError):
        ends[1].decode((pictures, pickled[:-8]))
    (arrived,), (size,) = crossed(ends, pictured(content))
    assert arrived == pictured(content)
    assert size < 600


def test_a_command_without_pictures_is_pickled_as_ever():
    command = messages.Generate([[1, 2, 3]], {"n": 2}, False)
    assert messages.KeptPictures().encode(messages.pickled(command)) == pickle.dumps(command)


class Interrupted:
    """An outbox whose next `put` is interrupted."""

    def __init__(self, outbox):
        self.get, self._put, self._is_due = outbox.get, outbox.put, True

    def put(self, message):
        if self._is_due:
            self._is_due = False
            raise KeyboardInterrupt
        self._put(message)


def test_a_picture_arrives_after_its_first_message_failed_or_was_interrupted():
    seeing = f"{Path(__file__).parent}/odd_backends.py:Seeing"
    content = RANDOM.randbytes(5000)
    prompt = PicturedIds.of([97], [Picture.of_bytes(content)])
    with SamplingEngine("scripted", inference=seeing, answers="{0}".format) as engine:
        engine.wait_until_ready()
        with pytest.raises(EngineError, match="pickle"):
            engine.sample([prompt], {"seed": lambda: None})
        engine._channel._outbox = Interrupted(engine._channel._outbox)
        with pytest.raises(KeyboardInterrupt):
            engine.sample([prompt])
        for _ in range(2):
            assert engine.sample([prompt])[0][0].text == hashlib.sha256(content).hexdigest()
