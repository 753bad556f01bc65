"""Measure hot swaps and sampling in bf16, int8, fp8 and with speculation. Run: python benchmarks/quantised.py MODEL

The trainer holds MODEL in float32 on one rank. Prints bytes and seconds of an update (medians of 5), and tokens per
second of one and of 32 sequences (medians of 3): at temperature 1, and greedy after a prompt with repetitions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from report import circumstances
from transformers import AutoModelForCausalLM

from vectorlm import SamplingEngine

ENGINES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8_per_channel"},
    "bf16, n-grams": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    },
}
NUM_UPDATES = 5
NUM_SAMPLES = 3
NUM_TOKENS = 32
TOKENS = list(range(500, 520))
PROMPTS = {"": (TOKENS, 1.0), ", repeating": (TOKENS * 4, 0.0)}
"""The prompt after its first token and the temperature, by the suffix of the printed name."""


def measure(folder: str, model: torch.nn.Module, options: dict[str, Any]) -> dict[str, float]:
    """Return the measurements of one engine."""
    with SamplingEngine(
        folder, dtype="bfloat16", max_model_len=128, kv_cache_memory_bytes=128 << 20, **options
    ) as engine:
        reports = [engine.update(model, 0)]
        for step in range(1, NUM_UPDATES + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.0001)
            reports.append(engine.update(model, step))
        found = {"MB": reports[-1].num_bytes / 1e6}
        for name in ("publish_s", "load_s", "total_s"):
            found[name] = statistics.median(getattr(report, name) for report in reports[1:])
        for kind, (rest, temperature) in PROMPTS.items():
            parameters = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": temperature}
            for count in (1, 32):
                prompts = [[100 + index, *rest] for index in range(count)]
                engine.sample(prompts, {**parameters, "max_tokens": 2})
                times = []
                for _ in range(NUM_SAMPLES):
                    start = time.perf_counter()
                    engine.sample(prompts, parameters)
                    times.append(time.perf_counter() - start)
                found[f"tokens/s of {count}{kind}"] = count * NUM_TOKENS / statistics.median(times)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a model folder")
    folder = parser.parse_args().model
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    print(circumstances())
    for name, options in ENGINES.items():
        numbers = measure(folder, model, options)
        print(name, "  ".join(f"{key} {value:.3g}" for key, value in numbers.items()), flush=True)


if __name__ == "__main__":
    main()
