import ctypes
import os
import platform
import resource
import threading
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from kit.rank_processes import on_ranks

from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import (
    Placement,
    Topology,
    devices_of_engine,
    keeping_freed_memory,
    set_affinity,
    share_cores,
    split_node,
    tensor_parallel_size,
)
from vectorlm.runs.config.schema import AsyncSettings
from vectorlm.runs.start import place_ranks


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 1, 8, 2})


@pytest.mark.parametrize(
    ("num_for_engine", "expected"),
    [(None, Placement((1, 2), (3, 8))), (1, Placement((1, 2, 3), (8,))), (3, Placement((1,), (2, 3, 8)))],
)
def test_cores_are_divided_and_the_engine_has_the_last(four_cores, num_for_engine, expected):
    assert split_node(Topology(), num_for_engine) == expected


def test_each_side_needs_a_core(four_cores, monkeypatch):
    with pytest.raises(ConfigError, match="4 of 4 cores"):
        split_node(Topology(), 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    with pytest.raises(ConfigError, match="0 of 1 cores"):
        split_node(Topology())


def test_on_cuda_the_engine_has_the_devices_behind_those_of_the_ranks(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    node = Topology(rank=1, local_rank=1, world_size=2, local_world_size=2, device="cuda:1")
    assert split_node(node) == Placement((0, 1), (2,))
    assert split_node(node, 2) == Placement((0, 1), (2, 3))
    with pytest.raises(ConfigError, match=r"rl\.async\.placement"):
        split_node(node, 3)


def test_engines_of_a_node_share_its_devices():
    ranks = [Topology(rank, rank, 4, 4) for rank in range(4)]
    assert [devices_of_engine((4, 5, 6, 7), 2, rank) for rank in ranks] == [(4, 5), (4, 5), (6, 7), (6, 7)]
    assert devices_of_engine(None, 2, ranks[0]) is None
    for devices in ((), (4, 5, 6)):
        with pytest.raises(ValueError, match="devices="):
            devices_of_engine(devices, 2, ranks[0])


@pytest.mark.parametrize(
    ("num_devices", "num_heads", "weight_bytes", "expected"),
    [(1, 8, 10, 1), (8, 8, 5, 1), (8, 8, 6, 2), (8, 8, 21, 8), (8, 8, 1000, 8), (6, 8, 11, 2), (6, 9, 11, 3)],
)
def test_an_engine_has_as_few_devices_as_hold_its_weights_in_half_of_its_room(
    num_devices, num_heads, weight_bytes, expected
):
    assert tensor_parallel_size(num_devices, num_heads, weight_bytes, room_bytes=10) == expected


def test_all_threads_of_a_process_keep_to_its_cores():
    before = os.sched_getaffinity(0)
    stop, ready, seen = threading.Event(), threading.Event(), []

    def wait():
        ready.set()
        stop.wait()
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=wait)
    thread.start()
    ready.wait()
    one = {min(before)}
    try:
        set_affinity(tuple(one))
        assert os.sched_getaffinity(0) == one
    finally:
        stop.set()
        thread.join()
        set_affinity(tuple(before))
    assert seen == [one]
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="nothing to split")
def test_a_rank_of_a_split_node_has_no_more_threads_than_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    config = SimpleNamespace(overlap=AsyncSettings(max_staleness=1, placement="split"))
    share_cores(Topology())
    try:
        with ExitStack() as stack:
            placement = place_ranks(config, Topology(), stack)
            assert os.sched_getaffinity(0) == set(placement.trainer)
            assert torch.get_num_threads() == len(placement.trainer)
        assert os.sched_getaffinity(0) == cores
        assert torch.get_num_threads() == len(cores)
    finally:
        torch.set_num_threads(before)


def test_ranks_share_the_cores_unless_told_otherwise(four_cores, monkeypatch):
    before = torch.get_num_threads()
    try:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        share_cores(Topology(local_world_size=2, world_size=2))
        assert torch.get_num_threads() == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        share_cores(Topology())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def faults_of_large_tensors():
    """Return the page faults of allocating, filling and freeing 8 MiB fifty times."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        torch.zeros(2 << 20).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def count_faults(topology):
    with keeping_freed_memory():
        faults_of_large_tensors()
        kept = faults_of_large_tensors()
    return kept, faults_of_large_tensors()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no mallopt")
def test_ranks_keep_freed_memory_and_give_it_back_at_the_end():
    ((kept, after),) = on_ranks(1, count_faults)
    assert kept < 1000
    assert after > 10 * kept


def test_the_users_malloc_settings_win(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    monkeypatch.setattr(ctypes.CDLL(None), "mallopt", pytest.fail, raising=False)
    with keeping_freed_memory():
        pass
