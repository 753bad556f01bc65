"""Tokens per second through `SamplingEngine` on two ranks, beside bare vLLM and transformers, in one run.

The engines take turns, so that whatever else the machine does hits both. Run: python benchmarks/sampling.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bare_vllm import ENGINE, BareVLLM
from bench_model import save_bench_model
from report import write_result

import vectorlm

NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 64, 32, 64, 7
PARAMS = {"temperature": 1.0, "seed": 1, "max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 0}


def prompts() -> list[list[int]]:
    """Return random prompts, the same everywhere, no two with a common prefix block."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 8000, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator).tolist()


def on_rank(folder: str) -> dict[str, list[float]]:
    """Let the engines take turns; every rank runs this, rank 0 holds the clock."""
    import torch.distributed as dist

    is_main = dist.get_rank() == 0
    asked = prompts()
    times: dict[str, list[float]] = {
        "SamplingEngine.generate": [],
        "SamplingEngine.sample": [],
        "vllm.LLM.generate": [],
    }
    bare = BareVLLM(Path(folder), "generate") if is_main else None
    arguments = {name: value for name, value in ENGINE.items() if name != "enforce_eager"}
    with vectorlm.SamplingEngine(
        folder, sampling_params={**PARAMS, "detokenize": False}, **arguments
    ) as engine:
        for turn in range(ROUNDS + 1):
            for name, call in (("generate", engine.generate), ("sample", engine.sample)):
                dist.barrier()
                start = time.perf_counter()
                call(asked)
                times[f"SamplingEngine.{name}"].append(time.perf_counter() - start)
            if bare is not None:
                times["vllm.LLM.generate"].append(bare.ask(prompts=asked, sampling_params=PARAMS))
            if turn == 0:
                for each in times.values():
                    each.clear()
        receiver = engine.receiver
    if bare is not None:
        bare.close()
    assert receiver == "packed"
    return times


def transformers_s(folder: Path) -> list[float]:
    """Return the seconds that transformers' `generate` takes for the same prompts, as one batch on all cores."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = torch.tensor(prompts())
    times = []
    for _ in range(3):
        start = time.perf_counter()
        model.generate(
            batch, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=True, pad_token_id=0
        )
        times.append(time.perf_counter() - start)
    return times[1:]


def main() -> None:
    """Measure, print and save."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_bench_model(Path(scratch) / "model")
        times = vectorlm.launch(on_rank, str(folder), world_size=2)[0]
        times["transformers generate"] = transformers_s(folder)
    tokens = NUM_PROMPTS * NEW_TOKENS
    base = statistics.median(times["vllm.LLM.generate"])
    rows = [
        {
            "what": name,
            "tokens/s": round(tokens / statistics.median(each)),
            "x vllm.LLM.generate": round(base / statistics.median(each), 3),
        }
        for name, each in times.items()
    ]
    setting = {
        "world_size": 2, "prompts": NUM_PROMPTS, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS,
        "dtype": "float32", "rounds": ROUNDS, "sampling_params": PARAMS,
    }  # fmt: skip
    write_result("sampling", setting, rows)


if __name__ == "__main__":
    main()
