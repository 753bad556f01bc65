"""Sampler processes that freeze, die or receive unreadable data: an error before the deadline, on one rank and two."""

import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from child_processes import sampler_pid
from kit.rank_processes import on_ranks

import vectorlm
from vectorlm.errors import EngineDied, EngineError, EngineTimeout, WeightMismatch
from vectorlm.sampling.weights.module_source import ModuleSource

ENDLESS = {"answers": "{0}".format, "num_steps": 10**9, "step_s": 0.02}
STUCK = {"inference": f"{Path(__file__).parent}/odd_backends.py:NeverAnswers", "answers": "{0}".format}
# The limit is well above the second between two signs of life, for busy machines.
PATIENCE_S = 4.0


class Count(int):
    """A type that the sampler process cannot import."""


def scripted(topology, **script):
    options = {"inference": "vectorlm.sampling.backends.scripted:Scripted", "start_timeout_s": 120}
    return vectorlm.SamplingEngine("scripted", topology=topology, **options | script)


def poll(engine, handle):
    while not engine.poll():
        time.sleep(0.05)
    handle.result()


def drain(engine, handle):
    engine.update(torch.nn.Linear(2, 2), 1, in_flight="drain")


def ask(engine, handle):
    handle.result()


WAITS = {"poll": poll, "drain": drain, "result": ask}


def wait_in_vain(topology, waits, freezes=False, **script):
    """Wait for a frozen engine or a backend that never answers; return the errors and their times in seconds."""
    seen = []
    for wait in waits:
        with scripted(topology, timeout_s=PATIENCE_S, **script) as engine:
            handle = engine.submit([[2, 3]])
            assert engine.poll() == []
            if freezes and topology.is_main:
                os.kill(sampler_pid(), signal.SIGSTOP)
            start = time.monotonic()
            with pytest.raises(EngineTimeout) as caught:
                WAITS[wait](engine, handle)
            seen.append((str(caught.value), time.monotonic() - start))
    return seen


@pytest.mark.slow
def test_every_wait_for_a_frozen_engine_ends_at_the_deadline():
    for seen in on_ranks(2, partial(wait_in_vain, freezes=True, **ENDLESS), list(WAITS)):
        assert len(seen) == len(WAITS)
        for text, seconds in seen:
            assert f"nothing for {PATIENCE_S:g} s" in text
            assert PATIENCE_S / 2 < seconds < 3 * PATIENCE_S


@pytest.mark.slow
# The test above covers a frozen process. Here the process shows life, but its backend never answers.
@pytest.mark.parametrize(("channel", "waits"), [("inline", list(WAITS)), ("process", ["result"])])
def test_a_backend_that_never_answers_ends_every_wait(channel, waits):
    for seen in on_ranks(2, partial(wait_in_vain, channel=channel, **STUCK), waits):
        for text, seconds in seen:
            assert f"nothing for {PATIENCE_S:g} s while" in text
            assert seconds < 2 * PATIENCE_S


class KilledMeanwhile:
    """A model whose last rank kills the engine after an update has started and before it writes."""

    def __init__(self, model, topology, sampler):
        self._source, self._topology, self._sampler = ModuleSource(model, topology), topology, sampler
        self.manifest, self.fingerprint = self._source.manifest, None

    def publish(self, layout, with_checksums):
        if self._topology.rank == self._topology.world_size - 1:
            os.kill(self._sampler, signal.SIGKILL)
        while os.path.exists(layout.path):
            time.sleep(0.01)
        return self._source.publish(layout, with_checksums)


def kill_during_an_update(topology):
    with scripted(topology, answers="{0}".format) as engine:
        engine.wait_until_ready()
        pids = [sampler_pid() if topology.is_main else 0]
        torch.distributed.broadcast_object_list(pids)
        with pytest.raises(EngineDied) as caught:
            engine.update(KilledMeanwhile(torch.nn.Linear(2, 2), topology, pids[0]), 1)
        return str(caught.value)


def test_whoever_finds_the_arena_gone_the_error_says_how_the_engine_ended():
    for text in on_ranks(2, kill_during_an_update):
        assert "was ended by SIGKILL" in text


def test_prompts_may_have_types_of_a_script_and_other_arguments_are_refused_by_name():
    with scripted(None, answers="{0}".format) as engine:
        (completion,) = engine.sample([[Count(97), np.int64(98)]])[0]
        assert completion.text == "ab"
        assert engine.sample(np.array([[2, 3], [4, 5]]), {"seed": 1})[1][0].prompt_token_ids == (4, 5)
        with pytest.raises(EngineError, match="cannot read this call"):
            engine.sample([[97]], {"seed": Count(3)})
        assert engine.sample([[97]])[0][0].text == "a"
        assert engine.sample(["a"])[0][0].text == "a"


def load_slowly(topology, channel):
    slow = f"{Path(__file__).parent}/odd_backends.py:Slow"
    with scripted(topology, inference=slow, answers="{0}".format, timeout_s=1, channel=channel) as engine:
        return engine.sample([[97]])[0][0].text


@pytest.mark.slow
def test_a_backend_may_load_in_the_rank_for_longer_than_a_rank_may_be_silent():
    assert on_ranks(2, load_slowly, "inline") == ["a", "a"]


FOREIGN = f"{Path(__file__).parent}/odd_backends.py:Foreign"


def meet_types_of_a_backends_file(topology, channel):
    """Return the errors of calls whose answers have types of the backend's file; the engine samples after each."""
    seen = []
    with scripted(topology, inference=FOREIGN, answers="{0}".format, channel=channel) as engine:
        calls = [
            lambda: engine.sample(["?"]),
            lambda: engine.update(torch.nn.Linear(2, 2, bias=False), 1),
            engine.sleep,
            lambda: engine.update(torch.nn.Linear(2, 2), 1),
            lambda: engine.update(torch.nn.Linear(2, 2), 2),
        ]
        # Without a sampler process, nothing is sent to the rank.
        for call in calls if channel == "process" else calls[:3]:
            with pytest.raises((EngineError, WeightMismatch)) as caught:
                call()
            seen.append((caught.type, str(caught.value)))
            assert [row[0].text for row in engine.sample(["ab", [99]])] == ["AB", "c"]
    return seen


@pytest.mark.parametrize(
    ("channel", "world_size"),
    [
        ("process", 1),
        pytest.param("process", 2, marks=pytest.mark.slow),
        pytest.param("inline", 2, marks=pytest.mark.slow),
    ],
)
def test_types_of_a_backends_file_reach_the_ranks_or_fail_one_call(channel, world_size):
    texts = ["Refusal: no questions", "OtherModel: one tensor", "EngineError: <generator"]
    texts += ["cannot read the engine's answer", "cannot pickle"]
    for seen in on_ranks(world_size, meet_types_of_a_backends_file, channel):
        assert [kind for kind, _ in seen[:2]] == [EngineError, WeightMismatch]
        assert len(seen) == (5 if channel == "process" else 3)
        for (_, found), expected in zip(seen, texts, strict=False):
            assert expected in found


STOPPED = """
import sys, time
import vectorlm

engine = vectorlm.SamplingEngine(
    "scripted",
    inference="vectorlm.sampling.backends.scripted:Scripted",
    answers=["a"],
    num_steps=10**9,
    step_s=0.02,
    timeout_s=3.0,
)
with engine:
    handle = engine.submit([[2, 3]])
    print("sampling", flush=True)
    for _ in range(40):
        engine.poll()
        time.sleep(0.1)
print("went on", flush=True)
"""


@pytest.mark.slow
def test_ctrl_z_and_fg_do_not_count_as_the_engines_silence():
    process = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "sampling\n"
    time.sleep(1)
    # Ctrl-Z does the same: the sampler has a separate session and continues.
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(5)
    os.kill(process.pid, signal.SIGCONT)
    assert process.stdout.read() == "went on\n"
    assert process.wait() == 0


def fork_and_call(topology):
    """Use and drop the engine in forks of a rank; return their errors, and require the rank's engine to continue."""
    said = []
    with scripted(topology, **ENDLESS | {"num_steps": 1}) as engine:
        handle = engine.submit([[2, 3]])
        for call in (lambda: engine.sample([[2]]), handle.result, handle.done, engine.poll, engine.close):
            reader, writer = os.pipe()
            if (child := os.fork()) == 0:
                try:
                    call()
                    text = "nothing"
                except EngineError as error:
                    text = str(error)
                os.write(writer, text.encode())
                del handle, engine
                os._exit(0)
            os.close(writer)
            with os.fdopen(reader) as lines:
                said.append(lines.read())
            os.waitpid(child, 0)
        assert len(handle.result()) == len(engine.sample([[2]])) == 1
        with pytest.raises(TypeError, match="cannot be sent to another process"):
            pickle.dumps(engine)
    return said


def test_a_call_in_a_forked_process_is_an_error_at_once():
    for said in on_ranks(2, fork_and_call):
        assert all(text.startswith("this engine belongs to process") for text in said[:4])
        assert said[4] == "nothing"


def poll_for(topology, num_steps, timeout_s):
    """Poll once; return the number of finished batches and the time in seconds."""
    with scripted(topology, answers="{0}".format, num_steps=num_steps, step_s=0.02) as engine:
        engine.wait_until_ready()
        handle = engine.submit([[2, 3]])
        start = time.monotonic()
        return engine.poll(timeout_s).count(handle), time.monotonic() - start


def poll_twice(topology):
    return poll_for(topology, 40, 60.0), poll_for(topology, 10**6, 0.7)


@pytest.mark.slow
def test_poll_waits_for_what_finishes_next_and_not_longer_than_it_was_told():
    for (num_finished, _), (num_unfinished, seconds) in on_ranks(2, poll_twice):
        assert (num_finished, num_unfinished) == (1, 0)
        assert 0.7 <= seconds < 5
