"""How long a hot swap takes, as a multiple of one memcpy of the same bytes.

Two FSDP2 ranks, one engine, a random Llama of 36 million parameters in fp32; beside it, in the same run, what vLLM
and a gathering trainer would need. Run: python benchmarks/hot_swap.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bare_vllm import BareVLLM
from bench_model import save_bench_model
from report import median_s, write_result

import vectorlm

REPEATS = 15


def on_rank(folder: str) -> dict[str, float]:
    """Measure everything that needs the ranks; every rank runs this."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    num_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    measured = {"num_bytes": num_bytes, "memcpy": _memcpy_s(num_bytes)}
    for receiver in ("live", "packed"):
        for verify in (False, True):
            name = f"{receiver}, verified" if verify else receiver
            with vectorlm.SamplingEngine(
                folder, receiver=receiver, verify_updates=verify, dtype="float32", max_model_len=512,
                kv_cache_memory_bytes=64 << 20,
            ) as engine:  # fmt: skip
                reports = [engine.update(model, step) for step in range(REPEATS + 3)][3:]
            measured[name] = statistics.median(report.publish_s + report.load_s for report in reports)
            measured[f"{name}, as the caller waits"] = statistics.median(report.total_s for report in reports)
    dist.barrier()
    measured["full_tensor() per parameter (gather only)"] = median_s(
        lambda: [parameter.full_tensor() for parameter in model.parameters()], REPEATS
    )
    measured["memcpy again"] = _memcpy_s(num_bytes)
    return measured


def _memcpy_s(num_bytes: int) -> float:
    """Return the seconds of one copy by one thread of rank 0, while the other rank waits."""
    import torch
    import torch.distributed as dist

    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    seconds = median_s(lambda: target.copy_(source), REPEATS) if dist.get_rank() == 0 else 0.0
    dist.barrier()
    return seconds


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
        for task in ("load_weights", "reload_weights"):
            bare = BareVLLM(folder, task)
            times = [bare.ask() for _ in range(REPEATS + 3)][3:]
            bare.close()
            measured[f"vLLM {task}, tensors in its own process"] = statistics.median(times)
        measured["engine restart"] = restart_s(folder, Path(scratch) / "saved")
    num_bytes, memcpy = measured.pop("num_bytes"), (measured["memcpy"] + measured["memcpy again"]) / 2
    rows = [
        {"what": name, "ms": round(1000 * seconds, 1), "x memcpy": round(seconds / memcpy, 2)}
        for name, seconds in measured.items()
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
