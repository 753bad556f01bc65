"""Two launchers on loopback, each taken for a machine of its own."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from watched_run import living

SCRIPT = Path(__file__).with_name("node_script.py")
GONE_WITHIN_S = 20.0
"""Longest time from a signal to one launcher to the end of everything, on a busy machine."""


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def free_endpoint():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


class Nodes:
    """The script, once per node, in sessions of their own; no process of theirs may be left in the end."""

    def __init__(self, what, scratch, *, world_size=2):
        self.mark = f"VECTORLM_TEST_MARK={uuid.uuid4().hex}"
        self.scratch = scratch
        endpoint, (name, value) = free_endpoint(), self.mark.split("=")
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), what, str(world_size), "2", str(rank), endpoint, "120"],
                env={**os.environ, name: value, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for rank in range(2)
        ]

    def wait_until_working(self):
        for process in self.processes:
            assert "working" in process.stdout.readline(), process.stderr.read()

    def outcomes(self, timeout_s=240):
        """Return exit code, output and error text of each node, once all is over and nothing is left."""
        texts = [process.communicate(timeout=timeout_s) for process in self.processes]
        deadline = time.monotonic() + GONE_WITHIN_S
        while self.living() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.living() == []
        assert sorted(path.name for path in self.scratch.iterdir()) == []
        return [(process.returncode, *text) for process, text in zip(self.processes, texts, strict=True)]

    def living(self):
        return living(self.mark)


def results(output):
    return [json.loads(line) for line in output.splitlines() if line.startswith("[")]


def test_two_nodes_make_one_run_and_may_meet_again_at_the_same_endpoint(tmp_path):
    outcomes = Nodes("exchange", tmp_path).outcomes()
    for node, (code, output, error) in enumerate(outcomes):
        assert code == 0, error
        place = {"rank": node, "node": node, "local_rank": 0, "num_nodes": 2}
        assert results(output) == [[place | {"notes": [0, 1], "total": 3}]] * 2


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("raise late on 0", r"RankFailed: rank 0 of 2 raised KeyError: 'late'\n\nTraceback"),
        slow("raise on 1", r"RankFailed: rank 1 of 2 raised KeyError: 'lost'\n\nTraceback"),
        slow("kill 1", r"RankFailed: rank 1 of 2 was ended by SIGKILL"),
    ],
    ids=["raised after the other had returned", "raised in a collective", "killed"],
)
def test_both_nodes_report_the_rank_that_failed(tmp_path, what, cause):
    for code, _, error in Nodes(what, tmp_path).outcomes():
        assert code == 1
        assert re.match(cause, error), "something else was printed first:\n" + error


@pytest.mark.parametrize(
    ("victim", "number", "own_code", "cause"),
    [
        (1, signal.SIGINT, 130, r"RankFailed: node 1 of 2 was ended by SIGINT\."),
        slow(0, signal.SIGTERM, 1, r"RankFailed: node 0 of 2 was ended by SIGTERM\."),
        (
            0,
            signal.SIGKILL,
            -9,
            r"RankFailed: node 0 of 2 \(.*\) is gone, and with it rank 0: its launcher was",
        ),
        (
            1,
            signal.SIGKILL,
            -9,
            r"RankFailed: node 1 of 2 \(.*\) is gone, and with it rank 1: its launcher was",
        ),
    ],
    ids=["ctrl-c", "sigterm", "killed 0", "killed 1"],
)
def test_a_launcher_that_is_ended_ends_the_other(tmp_path, victim, number, own_code, cause):
    nodes = Nodes("wait", tmp_path)
    nodes.wait_until_working()
    nodes.processes[victim].send_signal(number)
    outcomes = nodes.outcomes(timeout_s=GONE_WITHIN_S)
    assert outcomes[victim][0] == own_code
    code, _, error = outcomes[1 - victim]
    assert code == 1
    assert re.search(cause, error), error
