"""How long a hot swap takes, as a multiple of one memcpy of the same bytes.

Two FSDP2 ranks, one engine, a random Llama of 36 million parameters in fp32; beside it, in the same run, what vLLM
and a gathering trainer would need. Run: python benchmarks/hot_swap.py
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bare_vllm import BareVLLM
from bench_model import save_bench_model
from report import write_result

import vectorlm

REPEATS, WARMUP = 25, 3


def on_rank(folder: str) -> dict[str, tuple[float, float]]:
    """Measure everything that needs the ranks; return (seconds, seconds of a memcpy in the same loop) by name."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    num_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    measured: dict[str, tuple[float, float]] = {}
    for receiver in ("live", "packed"):
        for verify in (False, True):
            name = f"{receiver}, verified" if verify else receiver
            with vectorlm.SamplingEngine(
                folder, receiver=receiver, verify_updates=verify, dtype="float32", max_model_len=512,
                kv_cache_memory_bytes=64 << 20,
            ) as engine:  # fmt: skip
                reports, memcpy_s = alternate(lambda step: engine.update(model, step), source, target)
            measured[name] = median(report.publish_s + report.load_s for report in reports), memcpy_s
            measured[f"{name}, as the caller waits"] = median(report.total_s for report in reports), memcpy_s
    times, memcpy_s = alternate(
        lambda step: timed(lambda: [each.full_tensor() for each in model.parameters()]), source, target
    )
    measured["full_tensor() per parameter (gather only)"] = median(times), memcpy_s
    return measured


def alternate(work: Callable[[int], Any], source: Any, target: Any) -> tuple[list[Any], float]:
    """Call `work(step)` on all ranks in turn with one memcpy by one thread of rank 0; return results and its median."""
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
    """Return the seconds to save the weights and to start a new engine on them, the fastest way we know."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    start = time.perf_counter()
    model.save_pretrained(scratch)
    with vectorlm.SamplingEngine(
        scratch, dtype="float32", max_model_len=512, kv_cache_memory_bytes=64 << 20
    ) as engine:
        assert engine.receiver == "packed"
    return time.perf_counter() - start


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
            measured[f"vLLM {task}, tensors in its own process"] = median(times), memcpy_s
        measured["engine restart"] = restart_s(folder, Path(scratch) / "saved"), memcpy_s
        num_bytes = (folder / "model.safetensors").stat().st_size
    rows = [{"what": "memcpy", "ms": round(1000 * memcpy_s, 1), "x memcpy": 1.0}]
    rows += [
        {"what": name, "ms": round(1000 * seconds, 1), "x memcpy": round(seconds / copy, 2)}
        for name, (seconds, copy) in measured.items()
    ]
    setting = {
        "world_size": 2,
        "threads_per_rank": 1,
        "dtype": "float32",
        "bytes": num_bytes,
        "repeats": REPEATS,
    }
    write_result("hot_swap", setting, rows)


if __name__ == "__main__":
    main()
