"""Scripts that launch ranks, and are killed, interrupted or lack their guard."""

import os
import signal
import subprocess
import sys
import time

import pytest
from kit.watched_run import WatchedRun

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


@pytest.mark.parametrize("folder", ["there", "removed"])
def test_a_rank_that_raises_after_its_launcher_was_killed_leaves_no_note_of_it(tmp_path, folder):
    """Another rank may have removed the folder of the notes already."""
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
    """A terminal that closes sends SIGHUP to all, `srun` passes SIGUSR1 on; the lock of a rank has a name."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "script.py").write_text(INTERRUPTED)
    # Under nohup, or in the background of a shell, the tests themselves ignore it, and so would the run.
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
        "LaunchError: the script calls launch() while it is imported, and every rank imports it. Put the call, and "
        'whatever else must run once, under `if __name__ == "__main__":`.\n'
    )
