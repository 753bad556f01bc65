"""Measure the time of a hot swap as a multiple of one memcpy of the same bytes.

Two ranks send a random Llama of 36 million fp32 parameters, sharded by FSDP2 or whole, to one engine per transport. The
same run also times vLLM's own loading, gathering by `full_tensor()`, and an engine restart.
Run: python benchmarks/hot_swap.py
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bare_vllm import BareVLLM
from bench_model import save_bench_model
from report import write_result

import vectorlm

REPEATS, WARMUP = 25, 3
TRANSPORTS = ("push", "pull", "bucketed")
BUCKET_BYTES = 32 << 20
"""Size of the bucket. The 142 MB need several rounds; in the library's own bucket they would need one."""

Times = dict[str, float]
"""Seconds by transport; only ``push`` if the work has no choice of transport."""


def on_rank(folder: str) -> dict[str, tuple[Times, float]]:
    """Measure swaps and gathering on the ranks; return (seconds, seconds of a memcpy in the same loop) by name."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from vectorlm.sampling import transport

    transport.BUCKET_BYTES = BUCKET_BYTES
    disable_progress_bar()
    whole: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    num_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    measured: dict[str, tuple[Times, float]] = {}
    for receiver in ("live", "packed"):
        for verify in (False, True):
            name = f"{receiver}, verified" if verify else receiver
            with ExitStack() as stack:
                engines = {
                    transport_name: stack.enter_context(
                        vectorlm.SamplingEngine(
                            folder, receiver=receiver, verify_updates=verify, transport=transport_name, dtype="float32",
                            max_model_len=512, kv_cache_memory_bytes=64 << 20,
                        )
                    )
                    for transport_name in TRANSPORTS
                }  # fmt: skip
                for held, trained in (("", model), (", ranks hold all", whole)):
                    reports, memcpy_s = alternate(partial(update_all, engines, trained), source, target)
                    swaps = {
                        transport_name: median(
                            by[transport_name].publish_s + by[transport_name].load_s for by in reports
                        )
                        for transport_name in engines
                    }
                    waits = {
                        transport_name: median(by[transport_name].total_s for by in reports)
                        for transport_name in engines
                    }
                    measured[name + held] = swaps, memcpy_s
                    measured[f"{name}{held}, as the caller waits"] = waits, memcpy_s
    times, memcpy_s = alternate(
        lambda step: timed(lambda: [parameter.full_tensor() for parameter in model.parameters()]),
        source,
        target,
    )
    measured["full_tensor() per parameter (gather only)"] = {"push": median(times)}, memcpy_s
    return measured


def update_all(engines: dict[str, Any], model: Any, step: int) -> dict[str, Any]:
    """Update every engine, in an order that rotates with the step; return the reports by transport."""
    first = step % len(engines)
    order = [*engines][first:] + [*engines][:first]
    return {transport: engines[transport].update(model, step) for transport in order}


def alternate(work: Callable[[int], Any], source: Any, target: Any) -> tuple[list[Any], float]:
    """Alternate a one-thread memcpy on rank 0 with `work(step)` on all ranks; return results and median memcpy time."""
    import torch.distributed as dist

    results, copies = [], []
    for step in range(REPEATS + WARMUP):
        dist.barrier()
        copies.append(timed(lambda: target.copy_(source)) if dist.get_rank() == 0 else 0.0)
        dist.barrier()
        results.append(work(step))
    return results[WARMUP:], median(copies[WARMUP:])


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def restart_s(folder: Path, scratch: Path) -> float:
    """Return the seconds for saving the weights and starting a new engine on them, the fastest way we know."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    start = time.perf_counter()
    model.save_pretrained(scratch)
    with vectorlm.SamplingEngine(
        scratch, dtype="float32", max_model_len=512, kv_cache_memory_bytes=64 << 20
    ) as engine:
        assert engine.receiver == "packed"
    return time.perf_counter() - start


def row_of(what: str, seconds: Times, memcpy_s: float) -> dict[str, Any]:
    """Return a row of the table; cells of transports without a time are empty."""
    ms = {
        transport: round(1000 * seconds[transport], 1) if transport in seconds else ""
        for transport in TRANSPORTS
    }
    beside = {f"{transport} (ms)": ms[transport] for transport in TRANSPORTS if transport != "push"}
    return {"what": what, "ms": ms["push"], "x memcpy": round(seconds["push"] / memcpy_s, 2), **beside}


def main() -> None:
    """Measure, print and save."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_bench_model(Path(scratch) / "model")
        measured = vectorlm.launch(on_rank, str(folder), world_size=2)[0]
        memcpy_s = median(copy for _, copy in measured.values())
        for task in ("load_weights", "reload_weights"):
            bare = BareVLLM(folder, task)
            times = [bare.ask() for _ in range(REPEATS + WARMUP)][WARMUP:]
            bare.close()
            measured[f"vLLM {task}, tensors in its own process"] = {"push": median(times)}, memcpy_s
        measured["engine restart"] = {"push": restart_s(folder, Path(scratch) / "saved")}, memcpy_s
        num_bytes = (folder / "model.safetensors").stat().st_size
    rows = [row_of("memcpy", {"push": memcpy_s}, memcpy_s)]
    rows += [row_of(name, *times) for name, times in measured.items()]
    setting = {
        "world_size": 2,
        "threads_per_rank": 1,
        "dtype": "float32",
        "bytes": num_bytes,
        "repeats": REPEATS,
        "bucket_bytes": BUCKET_BYTES,
    }
    write_result("hot_swap", setting, rows)


if __name__ == "__main__":
    main()
