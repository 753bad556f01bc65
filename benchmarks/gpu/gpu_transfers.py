"""Qualification steps for transfers: copies, shared handles, and a hot swap of a 7B model."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from gpu_bench import Bench, big_trainer

import vectorlm
from vectorlm.sampling.weights.arena import Arena
from vectorlm.sampling.weights.exports import DeviceHandle

HANDLE_WITHIN_S = 40.0


def ceilings(bench: Bench) -> None:
    """Share memory handles between child processes while this one has no CUDA context, then measure copies."""
    share(bench)
    if not bench.is_cuda:
        return
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if not share(bench, is_expandable=True):
        bench.note("with expandable_segments", "refused, or no answer")
    del os.environ["PYTORCH_CUDA_ALLOC_CONF"]
    size = 4 << 30
    first, second = (torch.ones(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    bench.note("device copy, TB/s", 2 * size / seconds(lambda: second.copy_(first)) / 1e12)
    size = 2 << 30
    pageable, there = torch.empty(size, dtype=torch.uint8), first[:size]
    bench.note("host to device, pageable, GB/s", size / seconds(lambda: there.copy_(pageable)) / 1e9)
    # Its memory is registered with CUDA.
    host = Arena.create(size)
    bench.note("host to device, registered, GB/s", size / seconds(lambda: there.copy_(host.bytes)) / 1e9)
    bench.note("device to host, registered, GB/s", size / seconds(lambda: host.bytes.copy_(there)) / 1e9)


def seconds(copy: Callable[[], Any]) -> float:
    """Return the median seconds of one copy."""
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times)


def share(bench: Bench, is_expandable: bool = False) -> bool:
    """Let a new process share memory with another one; return whether it exited without an error in time."""
    owner = multiprocessing.get_context("spawn").Process(target=own, args=(bench, is_expandable))
    owner.start()
    owner.join(HANDLE_WITHIN_S)
    if owner.exitcode is None:
        owner.kill()
    return owner.exitcode == 0


def own(bench: Bench, is_expandable: bool) -> None:
    """Share 1 GB by the handle that `pull` uses, change it, and compare the sums of both processes."""
    processes = torch.multiprocessing.get_context("spawn")
    mine, theirs = processes.Pipe()
    size, device = (250_000_000, "cuda") if bench.is_cuda else (250_000, "cpu")
    tensor = torch.arange(size, dtype=torch.float32, device=device)
    reader = processes.Process(target=read, args=(theirs,), daemon=True)
    reader.start()
    mine.send(DeviceHandle.of(tensor) if bench.is_cuda else tensor)
    equal = []
    for _ in range(2):
        equal.append(mine.poll(HANDLE_WITHIN_S / 2) and mine.recv() == int(tensor.long().sum()))
        tensor.add_(1)
        if bench.is_cuda:
            torch.cuda.synchronize()
        mine.send("again")
    if bench.is_cuda and not is_expandable and mine.poll(HANDLE_WITHIN_S / 2):
        bench.note("cast into bfloat16 in the second process, TB/s", mine.recv())
    if is_expandable:
        bench.note("with expandable_segments", f"the same bits: {all(equal)}")
    else:
        bench.note("second process reads the same bits", equal[0])
        bench.note("second process sees a later write", equal[1])


def read(pipe: Any) -> None:
    """Receive a tensor, send its sum twice, and time a cast on CUDA."""
    tensor = pipe.recv()
    if isinstance(tensor, DeviceHandle):
        torch.zeros(1, device="cuda")  # A handle can be opened only in a CUDA context.
        tensor = tensor.open()
    for _ in range(2):
        pipe.send(int(tensor.long().sum()))
        pipe.recv()
    if tensor.is_cuda:
        into = torch.empty_like(tensor, dtype=torch.bfloat16)
        pipe.send(6 * tensor.numel() / seconds(lambda: into.copy_(tensor)) / 1e12)


def swap(bench: Bench, world_size: int = 1) -> None:
    vectorlm.launch(swap_on_rank, bench, bench.big_model(), world_size=world_size)


def swap_on_rank(bench: Bench, folder: str) -> None:
    """Time the updates of an engine with each transport, and with `pull` also without verification."""
    model: Any = big_trainer(folder)
    note = bench.note if vectorlm.Topology.from_environment().is_main else lambda *figure: None
    note("parameters, 1e9", sum(parameter.numel() for parameter in model.parameters()) / 1e9)
    ways = ("push", "bucketed", "pull")
    for way in ways:
        with bench.big_engine(folder, transport=way) as engine:
            engine.wait_until_ready()
            first, *later = [engine.update(model, step) for step in range(4)]
        note(f"{way}: first update, s", first.total_s)
        note(f"{way}: update, s", verified_s := median(report.total_s for report in later))
        note(f"{way}: of it until the ranks have published, s", median(report.publish_s for report in later))
    with bench.big_engine(folder, verify_updates=False, transport=ways[-1]) as engine:
        _, *later = [engine.update(model, step) for step in range(4)]
    note("verification, s", verified_s - median(report.total_s for report in later))
