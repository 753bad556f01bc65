"""Qualification steps for failures: the delay of the error, and whether it names the process that failed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from child_processes import sampler_pid
from gpu_bench import Bench
from kit.tiny_engine import TINY_ENGINE
from transformers import AutoModelForCausalLM

import vectorlm
from vectorlm.errors import RankFailed

LIMIT_S = 15.0


def kills(bench: Bench) -> None:
    folder = bench.tiny_model()
    for victim, name in (("sampler", "sampler process"), ("rank", "rank 0")):
        began = bench.folder / victim
        error = error_of(die, bench, folder, victim, began)
        bench.note(f"{victim} killed: error after, s", time.time() - float(began.read_text()))
        bench.note(f"{victim} killed: the error names it", name in error and "SIGKILL" in error)


def timeouts(bench: Bench) -> None:
    began = bench.folder / "collective"
    error = error_of(stay_away_from_the_collective, began, world_size=2, timeout_s=LIMIT_S)
    bench.note("collective: error after the time-out, s", time.time() - float(began.read_text()) - LIMIT_S)
    bench.note("collective: error", error.splitlines()[0][:120])
    began = bench.folder / "engine"
    error = error_of(stay_away_from_the_engine, bench.tiny_model(), began, world_size=2)
    bench.note("engine: error after the time-out, s", time.time() - float(began.read_text()) - LIMIT_S)
    bench.note("engine: the error names the absent rank", "rank 1 did not" in error)


def error_of(on_rank: Callable[..., None], *args: Any, **launch_args: Any) -> str:
    """Return the error message that a user of `launch` reads; empty if the run ended without an error."""
    try:
        vectorlm.launch(on_rank, *args, **launch_args)
    except RankFailed as error:
        return str(error)
    return ""


def die(bench: Bench, folder: str, victim: str, began: Path) -> None:
    started = time.time()
    model = AutoModelForCausalLM.from_pretrained(folder)
    with vectorlm.SamplingEngine(folder, **TINY_ENGINE) as engine:
        engine.update(model.to(vectorlm.Topology.from_environment().device), 0)
        engine.sample([[2, 3]], {"max_tokens": 4})
        # Noted before the kill, to distinguish a slow start from a death that nobody notices.
        bench.note(f"{victim} killed: after, s", time.time() - started)
        began.write_text(str(time.time()))
        os.kill(sampler_pid() if victim == "sampler" else os.getpid(), signal.SIGKILL)
        engine.sample([[2, 3]], {"max_tokens": 4})


def stay_away_from_the_collective(began: Path) -> None:
    topology = vectorlm.Topology.from_environment()
    tensor = torch.ones(1, device=topology.device)
    dist.all_reduce(tensor)
    if topology.rank == 1:
        time.sleep(600)
    began.write_text(str(time.time()))
    dist.all_reduce(tensor)
    tensor.item()  # NCCL returns before the collective has finished.


def stay_away_from_the_engine(folder: str, began: Path) -> None:
    with vectorlm.SamplingEngine(folder, timeout_s=LIMIT_S, **TINY_ENGINE) as engine:
        engine.wait_until_ready()
        if vectorlm.Topology.from_environment().rank == 1:
            time.sleep(600)
        began.write_text(str(time.time()))
        engine.sample([[2, 3]], {"max_tokens": 4})
