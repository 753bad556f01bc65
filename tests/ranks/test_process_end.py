"""Which of several ranks' errors is the first, and the end of processes whose parent is gone."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vectorlm.errors import EngineError
from vectorlm.ranks.engine_ranks import capture, results_or_first_error
from vectorlm.ranks.process_end import absent_ranks, first_fault, write_fault


def leave(folder, rank, error):
    (folder / str(rank)).mkdir()
    write_fault(folder / str(rank) / "error.json", rank, error)


@pytest.mark.parametrize("words", ["Connection reset by peer", "Connection closed by peer [127.0.0.1]:22660"])
def test_a_lost_connection_is_not_the_first_error_where_there_is_another(tmp_path, words):
    """A rank without memory lost its connections, and the rank at the other end was named, which wrote first."""
    leave(tmp_path, 1, RuntimeError(f"Read error: {words}"))
    assert first_fault(tmp_path)[:2] == (1, f"RuntimeError: Read error: {words}")
    leave(tmp_path, 0, MemoryError("no memory"))
    leave(tmp_path, 2, ValueError("later"))
    assert first_fault(tmp_path)[:2] == (0, "MemoryError: no memory")


def test_an_error_is_found_beside_a_folder_that_is_removed_meanwhile(tmp_path, monkeypatch):
    """As a sampler removes its own, once its rank is gone."""
    for rank in (0, 1):
        (tmp_path / f"rank-{rank}" / "sampler").mkdir(parents=True)
    write_fault(tmp_path / "rank-1" / "error.json", 1, ValueError("no"))
    real = os.scandir

    def removed_first(path):
        if Path(path).name == "sampler":
            Path(path).rmdir()
        return real(path)

    monkeypatch.setattr(os, "scandir", removed_first)
    assert first_fault(tmp_path)[:2] == (1, "ValueError: no")
    assert not list(tmp_path.glob("*/sampler"))


def test_an_error_that_all_ranks_raise_is_of_the_rank_that_it_came_from(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    posted = pickle.dumps(capture(lambda: {}["lost"]))
    with pytest.raises(EngineError) as raised:
        results_or_first_error([pickle.loads(posted)])
    leave(tmp_path, 1, raised.value)
    assert first_fault(tmp_path)[0] == 0
    assert absent_ranks(tmp_path, 2).startswith("\nrank 0 of 2 raised nothing")


CHILD = """
import os, time
from vectorlm.ranks.process_end import follow_parent
follow_parent(os.getppid())
print("ready", flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
child.wait()
"""


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_process_that_was_stopped_ends_with_its_parent():
    """A stopped sampler stayed where its rank was killed before it could end it."""
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        lines = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
        (pid,) = (int(line) for line in lines - {"ready"})
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
        deadline = time.monotonic() + 20
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        has_ended = not is_running(pid)
        if not has_ended:
            os.kill(pid, signal.SIGKILL)
    assert has_ended
