import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import vectorlm
from vectorlm.errors import HandoffTimeout, LaunchError, RankFailed
from vectorlm.ranks.collectives import Collectives, NoteFolder
from vectorlm.ranks.launcher import process_group
from vectorlm.ranks.process_end import scratch_folder


def exchange():
    """Exchange notes, broadcast and reduce; return the results on this rank."""
    topology = vectorlm.Topology.from_environment()
    collectives = Collectives(topology, 30.0)
    notes = [collectives.all_gather_object("note", (topology.rank, turn)) for turn in range(5)]
    shared = collectives.broadcast_object("share", b"from rank 0" if topology.is_main else None)[0]
    total = torch.tensor(topology.rank + 10)
    dist.all_reduce(total)
    return topology.rank, notes[-1], shared, int(total), torch.get_num_threads()


def exchange_in_turn():
    """Use several `Collectives` in order, as successive engines do; return the last notes and the number of keys."""
    topology = vectorlm.Topology.from_environment()
    for turn in range(3):
        collectives = Collectives(topology, 30.0)
        for number in range(7):
            collectives.broadcast_object("share", bytes([turn, number]) if topology.is_main else None)
            notes = collectives.all_gather_object("note", (turn, number, topology.rank))
            assert notes == [(turn, number, rank) for rank in range(topology.world_size)]
    return notes, len(os.listdir(collectives._store._path))


def fail_on_rank_1(how):
    topology = vectorlm.Topology.from_environment()
    collectives = Collectives(topology, 3.0 if how == "stay away" else 60.0)
    collectives.all_gather_object("the start")
    if topology.rank == 1 and how == "raise":
        raise KeyError("lost")
    if topology.rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if topology.rank == 1 and how == "leave":
        os._exit(0)
    if topology.rank == 1 and how == "stay away":
        time.sleep(30)
    collectives.all_gather_object("sampling")


def leave_rank_0_alone(how):
    """Let rank 0 wait in a collective that the other rank never reaches."""

    if vectorlm.Topology.from_environment().rank == 1:
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while how == "loop":
            pass
    dist.barrier()


def share_arrays_from_the_last_rank():
    """Broadcast arrays of several kinds, including empty ones; return what this rank received, and its tickets."""
    topology = vectorlm.Topology.from_environment()
    collectives, root = Collectives(topology, 30.0), topology.world_size - 1
    matrix = np.arange(6, dtype=np.int32).reshape(2, 3)
    arrays = [matrix, np.zeros(0, np.float32), np.array(2.5), np.array([7], np.int8)]
    at_root = topology.rank == root
    given = ("a note", arrays) if at_root else (None, ())
    note, received = collectives.broadcast_object("arrays", *given, root=root)
    nothing = collectives.broadcast_object("nothing", 1 if at_root else None, root=root)
    tickets = [collectives.ticket("first") for _ in range(3)] + [collectives.ticket("second")]
    collectives.all_gather_object("the end")
    same = [
        np.array_equal(a, b) and a.dtype == b.dtype and a.shape == b.shape
        for a, b in zip(arrays, received, strict=True)
    ]
    return note, same, nothing, tickets


def call_all(*functions):
    return [function() for function in functions]


@pytest.fixture(scope="module")
def results():
    """Return the results of three functions on two ranks."""
    functions = exchange_in_turn, exchange, share_arrays_from_the_last_rank
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        return list(zip(*vectorlm.launch(call_all, *functions, world_size=2), strict=True))


@pytest.mark.slow
def test_any_rank_may_share_arrays_and_tickets_are_drawn_once(results):
    *_, results = results
    for note, same, nothing, _ in results:
        assert note == "a note"
        assert all(same)
        assert nothing == (1, [])
    drawn = [ticket for *_, tickets in results for ticket in tickets[:3]]
    assert sorted(drawn) == list(range(6))


def test_every_rank_runs_the_function_and_returns_its_result(results):
    for rank, (seen_rank, notes, shared, reduced, threads) in enumerate(results[1]):
        assert seen_rank == rank
        assert notes == [(0, 4), (1, 4)]
        assert shared == b"from rank 0"
        assert reduced == 21
        assert threads == max(1, len(os.sched_getaffinity(0)) // 2)


def test_exchanges_do_not_mix_and_leave_no_keys_behind(results):
    results = results[0]
    assert [notes for notes, _ in results] == [[(2, 6, 0), (2, 6, 1)]] * 2
    # Three objects make 14 exchanges each. Only their last exchanges, the places and torch's own keys may remain.
    assert all(num_keys < 40 for _, num_keys in results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", r"(?s)rank 1 of 2 raised KeyError: 'lost'.*fail_on_rank_1.*KeyError"),
        ("kill", "rank 1 of 2 was ended by SIGKILL"),
        pytest.param("leave", "rank 1 of 2 ended with exit code 0 and no error", marks=pytest.mark.slow),
        ("stay away", r"HandoffTimeout: rank 0 reached 'sampling' but rank 1 .*place of rank 1: the start"),
    ],
)
def test_the_rank_that_failed_first_is_named_and_nothing_is_left(tmp_path, monkeypatch, how, text):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RankFailed, match=text):
        vectorlm.launch(fail_on_rank_1, how, world_size=2)
    assert list(tmp_path.iterdir()) == []
    assert multiprocessing.active_children() == []


def return_a_lock():
    return threading.Lock()


def test_a_result_that_cannot_be_pickled_is_named_as_the_cause():
    with pytest.raises(RankFailed, match=r"LaunchError: the function of launch must return .*lock"):
        vectorlm.launch(return_a_lock)


def leave_a_fork_behind(began):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    began.write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_scratch_folder_is_deleted_later_if_its_process_was_killed_and_kept_while_it_lives(tmp_path):
    code = (
        "import pathlib, time; from vectorlm.ranks.process_end import scratch_folder\n"
        f"with scratch_folder(pathlib.Path({str(tmp_path)!r}), '.rows.') as folder: print(folder, flush=True); "
        "time.sleep(60)"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        killed, living = (Path(process.stdout.readline().decode().strip()) for process in processes)
        processes[0].kill()
        processes[0].wait()
        assert killed.is_dir()
        with scratch_folder(tmp_path, ".rows.") as folder:
            assert sorted(tmp_path.iterdir()) == sorted([living, folder])
        assert list(tmp_path.iterdir()) == [living]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_killed_rank_is_noticed_although_what_it_started_keeps_its_pipes_open(tmp_path):
    with pytest.raises(RankFailed, match="rank 0 of 1 was ended by SIGKILL"):
        vectorlm.launch(leave_a_fork_behind, tmp_path / "began")
    assert time.time() - float((tmp_path / "began").read_text()) < 30


def fork_and_go_on():
    """Fork rank 0; return which process returned, and the error files in the run's folder."""
    rank = vectorlm.Topology.from_environment().rank
    for how in ("return", "exit", "raise") if rank == 0 else ():
        if (child := os.fork()) == 0:
            if how == "return":
                return "the fork"
            raise SystemExit(0) if how == "exit" else KeyError("of the fork")
        assert os.waitpid(child, 0)[1] == (256 if how == "raise" else 0)
    dist.all_reduce(torch.zeros(1))
    return "the rank", [str(path) for path in Path(os.environ["VECTORLM_SCRATCH"]).rglob("error.json")]


@pytest.mark.slow
def test_a_fork_that_comes_back_from_the_function_is_not_the_rank():
    """Otherwise a fork would send its own result or note an error as the rank's, and delete the run's folder."""
    assert vectorlm.launch(fork_and_go_on, world_size=2) == [("the rank", [])] * 2


def test_a_fork_does_not_keep_the_lock_of_a_counter(tmp_path):
    """Another thread may fork while the file is open; the ranks must not wait for the fork's end."""
    notes, lock, forks = NoteFolder(tmp_path), fcntl.flock, []

    def lock_and_fork(file, operation):
        lock(file, operation)
        if not forks:
            forks.append(os.fork())
            if forks == [0]:
                time.sleep(5)
                os._exit(0)

    with mock.patch.object(fcntl, "flock", lock_and_fork):
        notes.add("life", 1)
    assert notes.add("life", 1) == 2
    assert os.waitpid(forks[0], os.WNOHANG) == (0, 0)
    os.kill(forks[0], signal.SIGKILL)
    os.waitpid(forks[0], 0)


def run_without_memory(is_begun):
    def fail(*_):
        raise MemoryError("for a thread")

    thread = threading.Thread(target=fail, daemon=True)
    if not is_begun:
        # If the interpreter has no memory for a new thread, `start` waits forever.
        thread._set_ident = fail
    thread.start()
    time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize("is_begun", [True, False])
def test_a_rank_ends_with_a_thread_that_has_no_memory(is_begun):
    """The run must not wait forever for the lost thread."""
    with pytest.raises(RankFailed, match="rank 0 of 1 raised MemoryError: for a thread"):
        vectorlm.launch(run_without_memory, is_begun, world_size=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "where"),
    [
        (
            "loop",
            r"was here when it was ended:\n.*\n  File .*test_launch.py\", line \d+ in leave_rank_0_alone",
        ),
        # A stopped rank does not handle SIGTERM, and torch sends SIGKILL only after 30 seconds.
        pytest.param("stop", r"was stopped, or hung outside Python", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_misses_a_collective_is_named_and_where_it_was(how, where):
    with pytest.raises(
        RankFailed,
        match=rf"(?s)rank 0 of 2 raised .*rank 1 of 2 raised no error and did not reach the collective: it {where}",
    ):
        vectorlm.launch(leave_rank_0_alone, how, world_size=2, timeout_s=3.0)


def test_a_closure_runs_with_a_bounded_spin_and_the_caller_keeps_its_variables_and_handlers(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    word, numbers = "here", (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    assert vectorlm.launch(lambda: (word, os.environ.get("GOMP_SPINCOUNT"))) == [("here", "10000")]
    assert [signal.getsignal(number) for number in numbers] == before
    assert not {"GOMP_SPINCOUNT", "TORCHELASTIC_SIGNALS_TO_HANDLE", "VECTORLM_SCRATCH"} & set(os.environ)


@pytest.fixture
def as_torchrun(monkeypatch):
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    for name, value in (variables | {"MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)


def test_a_process_that_is_a_rank_already_runs_the_function_itself(as_torchrun):

    assert vectorlm.launch(lambda: (os.getpid(), dist.get_world_size())) == [(os.getpid(), 1)]
    assert not dist.is_initialized()


@pytest.mark.parametrize("world_size", [0, 2])
def test_a_wrong_number_of_ranks_is_refused(as_torchrun, world_size):
    with pytest.raises(LaunchError, match=f"world_size={world_size}"):
        vectorlm.launch(exchange, world_size=world_size)


def test_a_lone_rank_meets_itself():
    collectives = Collectives(vectorlm.Topology(), 1.0)
    assert collectives.all_gather_object("here", 7) == [7]
    assert collectives.broadcast_object("there", b"x") == (b"x", [])
    assert issubclass(HandoffTimeout, TimeoutError)


RANK_ON_CUDA = """
import atexit, contextlib, os, sys, time
import vectorlm
from vectorlm.ranks import launcher
launcher.process_group = lambda *about: contextlib.nullcontext()
launcher.Topology.from_environment = lambda: vectorlm.Topology(device="cuda:0")
atexit.register(time.sleep, 600)  # What waits for a peer that is gone.

def fail():
    raise ValueError("no such thing")

vectorlm.launch(fail)
"""


def test_a_rank_of_torchrun_that_fails_on_cuda_waits_for_nobody():
    names = ("RANK", "LOCAL_RANK", "MASTER_PORT")
    variables = {**os.environ, **dict.fromkeys(names, "0"), "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    ended = subprocess.run(
        [sys.executable, "-c", RANK_ON_CUDA], env=variables, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1
    assert "ValueError: no such thing" in ended.stderr


def test_ranks_on_cuda_attend_without_cudnn_which_plans_for_each_shape(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda **about: None)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    try:
        with process_group(vectorlm.Topology(device="cuda:0")):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def connect(rank, folder, times):
    """Join the group, as rank 0 with a delay; put the times of connecting and of beginning on the queue."""
    topology = vectorlm.Topology(rank=rank, local_rank=rank, world_size=2, local_world_size=2)
    init = dist.init_process_group

    def init_late(**about):
        init(**about)
        time.sleep(1.0 if rank == 0 else 0.0)
        times.put(("connected", time.monotonic()))

    with mock.patch.object(dist, "init_process_group", init_late), process_group(topology, 60.0, folder):
        times.put(("began", time.monotonic()))


def test_no_rank_begins_before_all_are_connected(tmp_path):
    """Otherwise a rank with little to do could exit before a slow rank has connected, and the slow rank would fail."""
    context = multiprocessing.get_context("spawn")
    times = context.Queue()
    ranks = [context.Process(target=connect, args=(rank, str(tmp_path), times)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    seen = [times.get(timeout=120) for _ in range(4)]
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert max(at for what, at in seen if what == "connected") <= min(
        at for what, at in seen if what == "began"
    )


def test_a_lone_process_may_go_on_after_an_error():

    with pytest.raises(KeyError), process_group(vectorlm.Topology()):
        raise KeyError
    assert not dist.is_initialized()
