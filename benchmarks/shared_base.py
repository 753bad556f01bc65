"""Measure the memory of a GRPO run with adapters over all processes, with a shared base and with two bases.

    vectorlm model HuggingFaceTB/SmolLM2-135M-Instruct data/smollm2
    python benchmarks/shared_base.py data/smollm2 --world_size 1

After every step it prints the proportional set size (PSS): a page that n processes share counts 1/n in each process.
Rank 0 returns freed memory before.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from vectorlm import launch
from vectorlm.ranks.topology import return_freed_memory
from vectorlm.runs.config.load import load_config
from vectorlm.runs.reinforcement import reinforce

CONFIG = """
model: {model}
callbacks: ["{here}:Memory"]
train_parameters:
  output_dir: {output}
  max_seq_len: 64
  lora_peft_config: {{r: 8, target_modules: all-linear}}
  share_base: {share}
  optimizer: {{lr: 1.0e-3}}
engine: {{max_model_len: 64, kv_cache_memory_bytes: 16777216}}
rl:
  algorithm: grpo
  max_steps: 2
  prompts: [aaa, bbb]
  prompts_per_step: 2
  group_size: 2
  sampling_params: {{max_tokens: 8}}
  rewards: {{"{here}:vowels": 1.0}}
  reward_workers: 0
"""


def vowels(text: str) -> float:
    """Count vowels."""
    return sum(text.count(letter) for letter in "aeiou") / 8


class Memory:
    """A callback that prints the memory of all processes of the run."""

    def on_step(self, *_: Any, **__: Any) -> None:
        """Print the memory of the launcher and of all processes below it."""
        return_freed_memory()
        launcher = psutil.Process(os.getppid())
        found = [process.memory_full_info().pss for process in (launcher, *launcher.children(recursive=True))]
        print(f"  {sum(found) / 2**20:.0f} MiB in {len(found)} processes", flush=True)


def main() -> None:
    """Run with two bases, then with a shared base."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--world_size", type=int, default=1)
    arguments = parser.parse_args()
    here = Path(__file__).absolute()
    for share in ("false", "true"):
        print(f"share_base: {share}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "run.yaml")
            given = {"model": Path(arguments.model).absolute(), "output": f"{folder}/run"}
            path.write_text(CONFIG.format(here=here, share=share, **given))
            launch(reinforce, load_config(path), world_size=arguments.world_size)


if __name__ == "__main__":
    sys.exit(main())
