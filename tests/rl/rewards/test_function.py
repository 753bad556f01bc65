"""Reward functions in workers: a completion that makes one hang, die or print without end fails alone."""

import asyncio
import errno
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from unittest import mock

import cloudpickle
import psutil
import pytest

from vectorlm.errors import ConfigError, WorkersDied
from vectorlm.ranks.workers.pool import MAX_DEATHS, WorkerPool
from vectorlm.ranks.workers.supervisor import MAX_LOG_BYTES
from vectorlm.rl.rewards.function import RewardFunction
from vectorlm.rl.rewards.runner import Scorable

# Pickling by value spares workers the import of this file and of pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
MARK = "VECTORLM_TEST_WORKERS"


def items(*texts):
    return [Scorable(text, f"ask {text}", (1,), {"target": 2}) for text in texts]


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """Yield a pool, and require that no process remains after it closes, even if workers started some."""
    monkeypatch.setenv(MARK, str(tmp_path))
    with WorkerPool(2, tmp_path / "rewards.log") as pool:
        yield pool
    monkeypatch.delenv(MARK)
    assert marked(str(tmp_path)) == []


def marked(mark):
    """Return the processes with this mark in their environment, which children inherit."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    return found


def score(reward, pool, *texts, timeout_s=0.5, **more):
    return RewardFunction(reward, pool, timeout_s=timeout_s, **more).score(items(*texts))


def test_temporary_files_of_workers_are_in_the_folder_of_their_rank(tmp_path, monkeypatch):
    def is_here(text):
        return float(tempfile.gettempdir() == text)

    # The launcher and the ranks delete this folder, even if a worker was killed.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with WorkerPool(1) as pool:
        assert [result.reward for result in score(is_here, pool, str(tmp_path), timeout_s=10.0)] == [1.0]


def hang_in_c():
    re.match("(a+)+b", "a" * 40)


def hang_in_a_loop():
    while True:
        try:
            time.sleep(0)
        except Exception:
            continue


def catch_everything():
    while True:
        try:
            time.sleep(60)
        except BaseException:
            continue


def take_the_alarm():
    """Set the alarm that also enforces a limit, as math-verify does."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(3)
    signal.alarm(0)
    time.sleep(60)


def wait_for_a_process_that_is_frozen():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        process.communicate()


def stop_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


def hang_without_await():
    async def judge():
        time.sleep(60)

    asyncio.run(judge())


LATE = r"no answer within 0\.5 s"
FAULTS = [
    (hang_in_c, LATE),
    (hang_in_a_loop, LATE),
    (catch_everything, LATE),
    (take_the_alarm, LATE),
    (wait_for_a_process_that_is_frozen, LATE),
    (stop_itself, LATE),
    (hang_without_await, LATE),
    (lambda: os._exit(3), "its process ended with exit code 3"),
    (lambda: os._exit(0), "its process ended with exit code 0"),
    (lambda: os.abort(), "its process was ended by SIGABRT"),
    (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        "its process was ended by SIGKILL, as the kernel does when memory",
    ),
]
LESS_COMMON = (take_the_alarm, wait_for_a_process_that_is_frozen, stop_itself, hang_without_await)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [pytest.param(*case, marks=pytest.mark.slow if case[0] in LESS_COMMON else ()) for case in FAULTS],
)
def test_a_call_that_hangs_or_dies_has_no_reward_and_the_others_have(pool, fault, message):
    def reward(text):
        if text == "bad":
            fault()
        return float(len(text))

    texts = ["a", "bb", "bad", *("ccc",) * 20, "bad", "d"]
    found = score(reward, pool, *texts)
    for text, result in zip(texts, found, strict=True):
        if text == "bad":
            assert re.match(message, result.error)
            assert math.isnan(result.reward)
        else:
            assert (result.reward, result.error) == (len(text), None)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "message"), [FAULTS[0], FAULTS[7]])
def test_a_coroutine_that_hangs_or_dies_costs_its_own_completion(pool, fault, message):
    async def reward(text):
        await asyncio.sleep(0.01)
        if text == "bad":
            fault()
        return 1.0

    found = score(reward, pool, "a", "bad", "c")
    # Alone, the completion has the time limit plus the second that ends the loop.
    assert re.match(message.replace("0", "1", 1), found[1].error)
    assert [found[0].reward, found[2].reward] == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "message"), [FAULTS[0], FAULTS[7]])
def test_a_coroutine_of_one_group_that_hangs_or_dies_costs_no_completion_of_another(pool, fault, message):
    async def reward(text):
        await asyncio.sleep(0.2)
        if text == "bad":
            fault()
        return 1.0

    function = RewardFunction(reward, pool, timeout_s=0.5)
    groups = [["a", "bad"], ["c"], ["d", "e"]]
    works = [pool.submit(function.score_alone(items(*texts))) for texts in groups]
    (good, bad), *others = [work.result() for work in works]
    assert good.reward == 1.0
    assert re.match(message.replace("0", "1", 1), bad.error)
    assert [result.reward for group in others for result in group] == [1.0] * 3
    # Another worker replaces it.
    assert [result.reward for result in pool.submit(function.score_alone(items("f"))).result()] == [1.0]


def test_coroutines_of_many_groups_run_together_in_one_worker(pool):
    running, enough = [], asyncio.Event()

    async def reward(text):
        running.append(text)
        if len(running) == 12:
            enough.set()
        await enough.wait()
        return float(os.getpid())

    function = RewardFunction(reward, pool, timeout_s=60.0)
    works = [pool.submit(function.score_alone(items("a", "b"))) for _ in range(6)]
    assert len({result.reward for work in works for result in work.result()}) == 1


@pytest.mark.parametrize(("fault", "message"), [FAULTS[0], FAULTS[7]])
def test_a_call_for_all_completions_that_hangs_or_dies_fails_for_all(pool, fault, message):
    found = score(lambda completions: fault(), pool, "a", "b")
    assert all(re.match(message, result.error) for result in found)


def test_coroutines_run_together_and_each_has_its_limit(pool):
    running = most = 0

    async def reward(text):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(60 if text == "bad" else 0.01)
        return float(most)

    found = score(reward, pool, "a", "bad", "c")
    assert [found[0].reward, found[2].reward] == [3.0, 3.0]
    assert found[1].error == "no answer within 0.5 s"


def test_a_function_that_runs_a_loop_of_its_own(pool):
    def reward(text):
        return asyncio.run(asyncio.sleep(0, float(len(text))))

    assert [result.reward for result in score(reward, pool, "a", "bb")] == [1.0, 2.0]


def test_what_a_call_forks_gives_no_second_answer_and_is_ended(pool):
    def reward(text):
        if os.fork() == 0:
            if text == "stay":
                os.setsid()
                time.sleep(600)
            return -1.0
        return 1.0

    def spawn(text):
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        if text == "bad":
            os._exit(1)
        return 1.0

    assert [result.reward for result in score(reward, pool, *("go", "stay") * 4)] == [1.0] * 8
    found = score(spawn, pool, "a", "bad", "c")
    assert [result.error is None for result in found] == [True, False, True]


def test_what_a_function_prints_is_in_the_log_up_to_a_limit(pool, tmp_path):
    def reward(text):
        for _ in range(100):
            print("x" * 2**20)
        print("the last line")
        return 1.0

    assert score(reward, pool, "a", timeout_s=60.0)[0].reward == 1.0
    pool.close()
    logs = [tmp_path / "rewards.log", tmp_path / "rewards.log.1"]
    assert logs[0].read_bytes().endswith(b"the last line\n")
    assert sum(log.stat().st_size for log in logs) <= MAX_LOG_BYTES


def test_lines_of_processes_that_print_side_by_side_stay_whole_and_name_their_process(pool, tmp_path):
    def reward(text):
        for _ in range(200):
            for part in (text, text, "é", "\n"):
                os.write(1, part.encode())
        subprocess.run(["echo", "-n", f"begun by {os.getpid()}"])
        return float(os.getpid())

    pids = {result.reward for result in score(reward, pool, "a", "b")}
    pool.close()
    lines = (tmp_path / "rewards.log").read_text().splitlines()
    for pid in map(int, pids):
        own = [line.removeprefix(f"[{pid}] ") for line in lines if line.startswith(f"[{pid}] ")]
        assert own[-1] == f"begun by {pid}"
        assert set(own[:-1]) <= {"aaé", "bbé", f"begun by {pid}aaé", f"begun by {pid}bbé"}
    assert all(line.startswith("[") for line in lines)
    assert sum(line.endswith("é") for line in lines) == 400


def test_the_log_says_where_a_call_hung(pool, tmp_path):
    score(lambda text: hang_in_c(), pool, "a")
    pool.close()
    assert "in hang_in_c" in (tmp_path / "rewards.log").read_text()


def test_the_log_has_no_stack_of_an_idle_worker(pool, tmp_path):
    async def end_a_worker_after_its_job():
        worker = await pool.start_shared()
        assert await worker.ask("builtins:range", 3, 4) == 3
        pool.end(worker, "no longer needed")

    pool.submit(end_a_worker_after_its_job()).result()
    score(lambda text: print("scored"), pool, "a")
    pool.close()
    (line,) = (tmp_path / "rewards.log").read_text().splitlines()
    assert line.endswith("] scored")


def test_the_first_failure_stops_the_rest(pool):
    def reward(text):
        if text == "bad":
            raise ValueError("not a word")
        time.sleep(0.2)
        return 1.0

    found = score(reward, pool, "a", "bad", *("c",) * 40, stops_at_error=True, timeout_s=5.0)
    assert found[1].error.startswith(f"ValueError: not a word ({__file__}:")
    assert [result.error for result in found].count(None) == 41
    assert sum(math.isnan(result.reward) for result in found) > 10


def test_workers_that_die_one_after_the_other_end_the_run(pool, tmp_path):
    with pytest.raises(
        WorkersDied,
        match=rf"[34] workers died .*; the last: its process ended with exit code 7\..*{tmp_path}",
    ):
        score(lambda text: os._exit(7), pool, *"abcdef")
    (tmp_path / "broken.py").write_text("import os\nos._exit(9)\n")
    with WorkerPool(2) as other, pytest.raises(WorkersDied, match="exit code 9"):
        score(f"{tmp_path}/broken.py:reward", other, "a")


def test_an_answer_in_between_is_enough(pool):
    def reward(text):
        return os._exit(7) if text == "bad" else 1.0

    found = score(reward, pool, *("good", "bad", "good", "good") * (2 * MAX_DEATHS))
    assert sum(result.reward == 1.0 for result in found) == 6 * MAX_DEATHS


def test_a_supervisor_that_could_not_start_says_so_and_is_tried_again(monkeypatch):
    """Before, the caller got a broken pipe instead of this error."""
    monkeypatch.setattr(subprocess, "Popen", mock.Mock(side_effect=OSError(errno.ENOMEM, "no memory")))
    with WorkerPool(1) as pool:
        with pytest.raises(OSError, match="no memory"):
            score(len, pool, "a")
        monkeypatch.undo()
        assert score(lambda text: 2.0, pool, "a")[0].reward == 2.0


def test_a_supervisor_that_is_killed_is_replaced(pool):
    def reward(text):
        return float(len(text))

    assert score(reward, pool, "a")[0].reward == 1.0
    supervisor = pool._process
    supervisor.kill()
    supervisor.wait()
    (found,) = score(reward, pool, "bb")
    assert found.reward == 2.0 or found.error == "its supervisor was ended by SIGKILL"
    assert score(reward, pool, "ccc")[0].reward == 3.0


def test_workers_import_the_file_once_and_this_process_and_torch_stay_out(pool, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        f"import sys\nopen({str(tmp_path / 'imports')!r}, 'a').write('once ')\n"
        "def reward(text, target):\n    return float('torch' in sys.modules or 'numpy' in sys.modules)\n"
    )
    with WorkerPool(1) as one:
        for _ in range(3):
            assert score(f"{path}:reward", one, "a", "b")[0].reward == 0.0
    assert (tmp_path / "imports").read_text() == "once "
    assert not any(str(path) in name for name in sys.modules)


def test_a_file_that_cannot_be_imported_is_an_error_of_the_config(pool, tmp_path):
    (tmp_path / "mine.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=r"ZeroDivisionError: division by zero \(.*mine.py:1\)"):
        score(f"{tmp_path}/mine.py:reward", pool, "a")


def test_a_function_keeps_what_it_remembers(pool):
    seen = []

    def reward(completions):
        seen.extend(completions)
        return [float(len(seen))] * len(completions)

    function = RewardFunction(reward, pool)
    assert [function.score(items("a"))[0].reward for _ in range(3)] == [1.0, 2.0, 3.0]
    assert seen == []


def test_nothing_needs_no_worker(pool):
    assert score(lambda text: os._exit(1), pool) == []


SCRIPT = """
import os, re, sys
from vectorlm import launch
from vectorlm.rl.rewards.function import RewardFunction
from vectorlm.rl.rewards.runner import Scorable
from vectorlm.ranks.workers.pool import WorkerPool

def reward(text):
    open(os.environ["VECTORLM_TEST_WORKERS"] + "/calls", "a").write("x")
    if os.fork() == 0:
        os.setsid()
    re.match("(a+)+b", "a" * 40)

def score():
    with WorkerPool(2) as pool:
        RewardFunction(reward, pool).score([Scorable("a", "", (), {})] * 8)

if __name__ == "__main__":
    launch(score, world_size=2) if sys.argv[1] == "2" else score()
"""


@pytest.mark.parametrize(
    ("number", "world_size"),
    [
        (signal.SIGKILL, 2),
        pytest.param(signal.SIGINT, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 1, marks=pytest.mark.slow),
    ],
)
def test_workers_end_with_their_rank(tmp_path, number, world_size):
    script, mark = tmp_path / "script.py", str(tmp_path)
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(world_size)]
    with subprocess.Popen(command, env={**os.environ, MARK: mark}, stderr=subprocess.DEVNULL) as process:
        calls = tmp_path / "calls"
        while process.poll() is None and not (calls.exists() and calls.stat().st_size >= 2 * world_size):
            time.sleep(0.05)
        assert len(marked(mark)) > 2
        process.send_signal(number)
    deadline = time.monotonic() + 20
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert marked(mark) == []
