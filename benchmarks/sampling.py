"""Compare tokens per second of `SamplingEngine` on two ranks, bare vLLM and transformers in one run.

The two engines alternate, because other work of the machine then slows both. Run: python benchmarks/sampling.py
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from bare_vllm import ENGINE, BareVLLM
from bench_model import save_bench_model
from report import write_result

import vectorlm

ROUNDS = 7


class Setting(NamedTuple):
    """Sizes of a sampling call."""

    prompts: int
    prompt_tokens: int
    completions: int
    """Number of completions of each prompt."""
    new_tokens: int


SETTINGS = {
    "64 x 64 tokens": Setting(64, 32, 1, 64),
    "8 groups of 8 x 64 tokens": Setting(8, 32, 8, 64),
    "512 x 12 tokens": Setting(512, 32, 1, 12),
}


def params_of(setting: Setting) -> dict[str, Any]:
    """Return sampling parameters with log-probabilities, whose completions all have `new_tokens` tokens."""
    more = {"n": setting.completions, "max_tokens": setting.new_tokens}
    return {"temperature": 1.0, "seed": 1, "ignore_eos": True, "logprobs": 0, "detokenize": False, **more}


def prompts_of(setting: Setting) -> list[list[int]]:
    """Return random prompts, the same in every process; no two share a prefix block."""
    import torch

    generator = torch.Generator().manual_seed(0)
    size = (setting.prompts, setting.prompt_tokens)
    return torch.randint(3, 8000, size, generator=generator).tolist()


def on_rank(folder: str) -> dict[str, dict[str, list[float]]]:
    """Time alternating calls of the engines; every rank runs this, and rank 0 runs bare vLLM too."""
    import torch.distributed as dist

    is_main = dist.get_rank() == 0
    found: dict[str, dict[str, list[float]]] = {}
    # Bare vLLM's threads spin for as long as libgomp's default, because nothing else runs on this machine.
    os.environ["GOMP_SPINCOUNT"] = "300000"
    bare = BareVLLM(Path(folder), "generate") if is_main else None
    del os.environ["GOMP_SPINCOUNT"]
    arguments = {name: value for name, value in ENGINE.items() if name != "enforce_eager"}
    with vectorlm.SamplingEngine(folder, **arguments) as engine:
        for name, setting in SETTINGS.items():
            asked, params = prompts_of(setting), params_of(setting)
            times: dict[str, list[float]] = {"generate": [], "sample": [], "bare": []}
            for round_number in range(ROUNDS + 1):
                for which, call in (("generate", engine.generate), ("sample", engine.sample)):
                    dist.barrier()
                    start = time.perf_counter()
                    call(asked, params)
                    times[which].append(time.perf_counter() - start)
                if bare is not None:
                    times["bare"].append(bare.ask(prompts=asked, sampling_params=params))
                if round_number == 0:
                    for seconds in times.values():
                        seconds.clear()
            found[name] = times
        receiver = engine.receiver
    if bare is not None:
        bare.close()
    assert receiver == "packed"
    return found


def transformers_s(folder: Path, setting: Setting) -> list[float]:
    """Return the seconds that transformers' `generate` takes for the same prompts, as one batch on all cores."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = torch.tensor(prompts_of(setting))
    length = setting.new_tokens
    times = []
    for _ in range(3):
        start = time.perf_counter()
        model.generate(batch, max_new_tokens=length, min_new_tokens=length, do_sample=True, pad_token_id=0)
        times.append(time.perf_counter() - start)
    return times[1:]


def main() -> None:
    """Measure, print and save."""
    titles = {
        "generate": "SamplingEngine.generate",
        "sample": "SamplingEngine.sample",
        "bare": "vllm.LLM.generate",
        "transformers": "transformers generate",
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_bench_model(Path(scratch) / "model")
        found = vectorlm.launch(on_rank, str(folder), world_size=2)[0]
        first = next(iter(SETTINGS))
        found[first]["transformers"] = transformers_s(folder, SETTINGS[first])
    rows = []
    for name, times in found.items():
        tokens = SETTINGS[name].prompts * SETTINGS[name].completions * SETTINGS[name].new_tokens
        base = statistics.median(times["bare"])
        rows += [
            {
                "prompts x new tokens": name,
                "what": titles[which],
                "tokens/s": round(tokens / statistics.median(seconds)),
                "x vllm.LLM.generate": round(base / statistics.median(seconds), 3),
            }
            for which, seconds in times.items()
        ]
    settings = {name: setting._asdict() for name, setting in SETTINGS.items()}
    setting = {"world_size": 2, "dtype": "float32", "rounds": ROUNDS, "settings": settings}
    write_result("sampling", setting, rows, {"seconds": found})


if __name__ == "__main__":
    main()
