"""Scripts that launch ranks and are killed or interrupted, or lack their guard."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit.watched_run import WatchedRun

from vectorlm.errors import EngineError
from vectorlm.ranks.engine_ranks import capture, results_or_first_error
from vectorlm.ranks.process_end import absent_ranks, first_fault, write_fault

ORPHAN = """
import os, shutil, signal, sys, tempfile, vectorlm

def lose_the_launcher():
    launcher = os.getppid()
    os.kill(launcher, signal.SIGKILL)
    while os.getppid() == launcher:
        pass
    if sys.argv[1] == "removed":
        shutil.rmtree(tempfile.gettempdir())
    raise ValueError("alone")

if __name__ == "__main__":
    vectorlm.launch(lose_the_launcher)
"""


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["there", "removed"])
def test_a_rank_that_raises_after_its_launcher_was_killed_leaves_no_note_of_it(tmp_path, folder):
    """Another rank may already have removed the folder of the notes."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "orphan.py").write_text(ORPHAN)
    run = WatchedRun([str(tmp_path / "orphan.py"), folder], tmp_path / "scratch")
    code, error = run.outcome(timeout_s=60)
    assert code == -signal.SIGKILL
    assert error == ""


INTERRUPTED = """
import multiprocessing, pathlib, signal, sys, time, vectorlm

def work():
    lock = multiprocessing.get_context('spawn').RLock()
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(60)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        vectorlm.launch(work)
    except KeyboardInterrupt:
        sys.exit("interrupted")
elif sys.argv[2] == "import":
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(0.5)
"""


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGHUP,
        pytest.param(signal.SIGQUIT, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_all_processes_ends_the_run_by_name_and_leaves_nothing(tmp_path, number):
    """A closing terminal sends SIGHUP to all, and `srun` forwards SIGUSR1. The name of the rank's lock must go."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "script.py").write_text(INTERRUPTED)
    # Under nohup or in a shell's background, the tests ignore the signal, and the run would inherit that.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        run = WatchedRun([str(tmp_path / "script.py"), str(tmp_path / "now"), "work"], tmp_path / "scratch")
    finally:
        signal.signal(number, before)
    while run.process.poll() is None and not (tmp_path / "now").exists():
        time.sleep(0.01)
    os.killpg(run.process.pid, number)
    code, error = run.outcome(timeout_s=60)
    assert code == 1
    assert f"ended by {number.name}" in error


@pytest.mark.parametrize("when", ["import", "work"])
def test_ranks_are_silent_at_ctrl_c_whatever_they_do(tmp_path, when):
    (tmp_path / "script.py").write_text(INTERRUPTED)
    command = [sys.executable, tmp_path / "script.py", tmp_path / "now", when]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as run:
        while run.poll() is None and not (tmp_path / "now").exists():
            time.sleep(0.01)
        os.killpg(run.pid, signal.SIGINT)
        assert run.communicate(timeout=60)[1] == "interrupted\n"


def test_a_script_without_its_guard_is_told_so_once(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text("import vectorlm\nvectorlm.launch(print, world_size=2)\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.endswith(
        "LaunchError: the script starts ranks (launch(), reinforce() or finetune()) while it is imported, and every "
        'rank imports it. Put the call, and whatever else must run once, under `if __name__ == "__main__":`.\n'
    )


def leave(folder, rank, error):
    (folder / str(rank)).mkdir()
    write_fault(folder / str(rank) / "error.json", rank, error)


@pytest.mark.parametrize("words", ["Connection reset by peer", "Connection closed by peer [127.0.0.1]:22660"])
def test_a_lost_connection_is_not_the_first_error_where_there_is_another(tmp_path, words):
    """If a rank runs out of memory, its peer loses the connection and may write its error first."""
    leave(tmp_path, 1, RuntimeError(f"Read error: {words}"))
    assert first_fault(tmp_path)[:2] == (1, f"RuntimeError: Read error: {words}")
    leave(tmp_path, 0, MemoryError("no memory"))
    leave(tmp_path, 2, ValueError("later"))
    assert first_fault(tmp_path)[:2] == (0, "MemoryError: no memory")


def test_an_error_is_found_beside_a_folder_that_is_removed_meanwhile(tmp_path, monkeypatch):
    """A sampler removes its folder when its rank has ended."""
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
    assert absent_ranks(tmp_path, 2).startswith("\nrank 0 of 2 raised no error")


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
    """A stopped sampler cannot end itself, and its rank may be killed before the rank can end it."""
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
