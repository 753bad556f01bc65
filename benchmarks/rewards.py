"""Measure the overhead of a reward call, in the rank and through workers. Run: python benchmarks/rewards.py

A batch has 64 completions of 2,000 characters and 512 tokens; the reward functions return immediately.
"""

from __future__ import annotations

import statistics
import time

from vectorlm.ranks.workers.pool import WorkerPool
from vectorlm.rl.rewards.function import RewardFunction
from vectorlm.rl.rewards.runner import Scorable

NUM_BATCHES, SIZE = 50, 64


def alone(completion: str) -> float:
    return float(len(completion))


async def together(completion: str) -> float:
    return float(len(completion))


def lists(completions: list[str]) -> list[float]:
    return [float(len(completion)) for completion in completions]


def main() -> None:
    batches = [
        [
            Scorable(f"{number}-{index}" + "x" * 2000, "ask", tuple(range(512)), {"answer": "5"})
            for index in range(SIZE)
        ]
        for number in range(NUM_BATCHES + 1)
    ]
    with WorkerPool(WorkerPool.auto_size()) as pool:
        for function in (alone, together, lists):
            for where, workers in (("in the rank", None), (f"{pool.size} workers", pool)):
                reward = RewardFunction(function, workers, timeout_s=60.0)
                reward.score(batches[0])
                wall, cpu = [], []
                for batch in batches[1:]:
                    wall_s, cpu_s = time.perf_counter(), time.process_time()
                    reward.score(batch)
                    wall.append((time.perf_counter() - wall_s) / SIZE * 1e3)
                    cpu.append((time.process_time() - cpu_s) / SIZE * 1e3)
                print(
                    f"{function.__name__:9} {where:12} {statistics.median(wall):.3f} ms a completion, of which "
                    f"the rank computes {statistics.median(cpu):.3f}"
                )


if __name__ == "__main__":
    main()
