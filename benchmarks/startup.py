"""Compare the seconds from the import to the first token of an engine, and of bare vLLM with its fastest settings.

Both start in fresh interpreters, and their runs alternate. In a second part two ranks load and shard their model while
the engine loads: this measures how far both overlap. Run: python benchmarks/startup.py
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bare_vllm import ENGINE
from bench_model import save_bench_model
from report import write_result

import vectorlm

ROUNDS = 3
ONE_TOKEN = {"max_tokens": 1, "ignore_eos": True, "detokenize": False}

OURS = """
import sys, time
start = time.perf_counter()
import json
from vectorlm import SamplingEngine
with SamplingEngine(sys.argv[1], **json.loads(sys.argv[2])) as engine:
    engine.sample([[3, 4, 5]], json.loads(sys.argv[3]))
    print("SECONDS", time.perf_counter() - start)
"""
BARE = """
import sys, time
start = time.perf_counter()
import json
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True, disable_log_stats=True, **json.loads(sys.argv[2]))
llm.generate([{"prompt_token_ids": [3, 4, 5]}], SamplingParams(**json.loads(sys.argv[3])), use_tqdm=False)
print("SECONDS", time.perf_counter() - start)
"""


def first_token_s(code: str, folder: str, environment: dict[str, str]) -> float:
    """Run `code` in a fresh interpreter; return the seconds that it prints."""
    command = [sys.executable, "-c", code, folder, json.dumps(ENGINE), json.dumps(ONE_TOKEN)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("SECONDS"))
    return float(line.split()[1])


def ranks_s(folder: str, with_engine: bool, with_model: bool) -> float:
    """Return the seconds until a rank is ready: with its model, with the engine, or with both."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    start = time.perf_counter()
    engine = vectorlm.SamplingEngine(folder, **ENGINE) if with_engine else None
    if with_model:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        fully_shard(model)
    if engine is not None:
        engine.sample([[3, 4, 5]], ONE_TOKEN)
        engine.close()
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    """Measure, print and save."""
    from vectorlm.ranks.topology import Topology
    from vectorlm.sampling.process_channel import sampler_environment

    times: dict[str, list[float]] = {name: [] for name in ("bare", "ours", "model", "engine", "both")}
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(save_bench_model(Path(scratch) / "model"))
        fastest = sampler_environment(os.environ, scratch, Topology())
        for round_number in range(ROUNDS + 1):
            seen = {
                "bare": first_token_s(BARE, folder, fastest),
                "ours": first_token_s(OURS, folder, dict(os.environ)),
                "model": max(vectorlm.launch(ranks_s, folder, False, True, world_size=2)),
                "engine": max(vectorlm.launch(ranks_s, folder, True, False, world_size=2)),
                "both": max(vectorlm.launch(ranks_s, folder, True, True, world_size=2)),
            }
            # The first round fills the page cache and vLLM's own caches.
            for name, seconds in seen.items() if round_number else ():
                times[name].append(seconds)
    titles = {
        "bare": "bare vllm.LLM, import to first token",
        "ours": "SamplingEngine, import to first token",
        "model": "2 ranks: load and shard the model",
        "engine": "2 ranks: engine to first token",
        "both": "2 ranks: both, overlapping",
    }
    base = statistics.median(times["bare"])
    rows = []
    for name, title in titles.items():
        seconds = statistics.median(times[name])
        rows.append({"what": title, "s": round(seconds, 2), "x bare vLLM": round(seconds / base, 3)})
    write_result("startup", {"rounds": ROUNDS, "engine": ENGINE, "world_size": [1, 2]}, rows)


if __name__ == "__main__":
    main()
