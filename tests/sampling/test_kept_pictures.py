"""Sending images to a sampler: their content crosses the connection once, even if a command fails."""

import pickle
import random

import pytest

from vectorlm.data.images import Picture, PicturedIds
from vectorlm.sampling import messages

RANDOM = random.Random(0)


def pictured(*contents):
    return messages.Generate([PicturedIds.of([7, 8], map(Picture.of_bytes, contents))], {}, False)


def crossed(ends, *commands):
    """Return the received commands, and the number of bytes of each message."""
    here, there = ends
    sent = here.encode(commands)
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


def test_a_command_that_cannot_be_sent_or_read_loses_no_picture():
    ends, content = (messages.KeptPictures(), messages.KeptPictures()), RANDOM.randbytes(5000)
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        ends[0].encode([pictured(content), messages.Generate([[1]], lambda: None, False)])
    (message,) = ends[0].encode([pictured(content)])
    pictures, pickled = message
    assert pictures[0][1] == content
    with pytest.raises(pickle.UnpicklingError):
        ends[1].decode((pictures, pickled[:-8]))
    (arrived,), (size,) = crossed(ends, pictured(content))
    assert arrived == pictured(content)
    assert size < 600


def test_a_command_without_pictures_is_pickled_as_ever():
    command = messages.Generate([[1, 2, 3]], {"n": 2}, False)
    assert messages.KeptPictures().encode([command]) == [pickle.dumps(command)]
