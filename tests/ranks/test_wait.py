"""Messages of waits: on standard error, with the reason, and only if the wait takes long."""

import re
import time

import pytest
from kit.rank_processes import on_ranks

from vectorlm import SamplingEngine
from vectorlm.ranks import collectives, wait
from vectorlm.ranks.collectives import Collectives


@pytest.fixture
def impatient(monkeypatch):
    for name, value in {"AFTER_S": 0.1, "EVERY_S": 0.1, "TICK_S": 0.05}.items():
        monkeypatch.setattr(wait, name, value)


def test_a_short_wait_says_nothing_and_a_rank_that_is_not_asked_to_speak_neither(impatient, capsys):
    with wait.report_wait("reading"):
        pass
    with wait.report_wait("reading", is_on=False):
        time.sleep(0.3)
    assert capsys.readouterr() == ("", "")


def test_a_long_wait_prints_lines_and_how_long_it_took(impatient, capsys):
    with wait.report_wait("reading", detail=lambda: "1.2 GiB"):
        time.sleep(0.5)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "reading: 0 s so far, 1.2 GiB"
    assert last == "reading: done after 0 s" or last == "reading: done after 1 s"


def test_a_wait_that_fails_is_not_said_to_be_done(impatient, capsys):
    def fail():
        time.sleep(0.3)
        raise KeyError("gone")

    with pytest.raises(KeyError), wait.report_wait("reading"):
        fail()
    assert "done" not in capsys.readouterr().err


def meet_late(topology, late, kind, shows_life=False):
    """Meet with one rank that comes some seconds late; return this rank's messages."""
    said = []
    # In tests the ranks meet in a file, whose times are whole seconds.
    collectives.LATE_S, collectives.PROBE_EVERY_S, collectives.say = 1.0, 0.5, said.append
    meeting = Collectives(topology, timeout_s=20.0)
    meeting.all_gather_object("the start")
    for _ in range(5 if topology.rank == late else 0):
        time.sleep(0.5)
        if shows_life:
            meeting.show_life()
    if kind == "all":
        meeting.all_gather_object("publish")
    else:
        meeting.broadcast_object("sample", root=late)
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "late", "kind", "place"), [(3, 0, "all", "publish"), (2, 1, "one", "sample")]
)
def test_the_first_rank_that_waits_for_another_says_for_which_and_where_that_was_last(
    world_size, late, kind, place
):
    said = on_ranks(world_size, meet_late, late, kind)
    (text,) = said.pop(1 - late)
    pattern = rf"{place}: waited \d s for rank {late} \(last place of rank {late}: the start\)"
    assert re.fullmatch(pattern, text)
    assert not any(said)


def test_a_rank_that_shows_life_is_not_said_to_be_late():
    assert on_ranks(2, meet_late, 0, "one", True) == [[], []]


SLOW = """
import time
from vectorlm.sampling.backends.scripted import Scripted

class Slow(Scripted):
    def __init__(self, model, **more):
        time.sleep(1.0)
        super().__init__(model, **more)
"""


@pytest.mark.slow
@pytest.mark.parametrize("channel", ["process", "inline"])
def test_an_engine_that_takes_long_to_start_is_waited_for_aloud(impatient, tmp_path, capsys, channel):
    (tmp_path / "slow.py").write_text(SLOW)
    backend = {"inference": f"{tmp_path}/slow.py:Slow", "answers": "{0}".format}
    with SamplingEngine("scripted", channel=channel, **backend) as engine:
        pid = f"process {engine._channel.pid} holds " if channel == "process" else ""
        assert engine.generate_text("a") == ["a"]
    first, *_, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"waiting for the engine: 0 s so far{', ' + pid if pid else ''}([\d.]+ GiB)?", first)
    assert last.startswith("waiting for the engine: done after ")


def test_progress_of_a_process_is_printed_in_plain_lines_without_a_terminal(monkeypatch, capsys):
    now = iter([0.0, 4.0, 16.0, 16.0, 20.0, 20.0])
    monkeypatch.setattr(wait.time, "monotonic", lambda: next(now))
    progress = wait.Progress("tokenise, rows", 400)
    for _ in range(2):
        progress.add(100)
    assert capsys.readouterr().err == "tokenise, rows: 200 of 400, 20 s so far, about 20 s left\n"
