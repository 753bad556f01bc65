"""Measure the time that slow environments add to sampling.

Every round samples 64 rollouts of the 36 M parameter Llama with three environments. One replies immediately. The other
two, synchronous and asynchronous, sleep half a second at each of four turns. Run: python benchmarks/environments.py
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import statistics
import tempfile
import time
from pathlib import Path

from bench_model import save_bench_model
from report import write_result

from vectorlm import SamplingEngine
from vectorlm.ranks.workers.pool import WorkerPool
from vectorlm.rl.environments.remote import EnvironmentWorkers, RemoteEnvironment
from vectorlm.rl.rollouts.queue import GroupQueue
from vectorlm.rl.rollouts.sampler import GroupSampler, Task
from vectorlm.rl.settings import CollectSettings
from vectorlm.types import PromptRecord

GROUPS, SIZE, TURNS, SLEEP_S, TOKENS = 8, 8, 4, 0.5, 16


class Environment:
    """A synchronous environment that sleeps and then replies with three tokens."""

    def __init__(self, sleep_s: float) -> None:
        self.sleep_s = sleep_s

    def respond(self, text: str) -> str:
        """Return the reply."""
        time.sleep(self.sleep_s)
        return "more"


class Asynchronous:
    """An asynchronous environment that does the same; all instances share one process."""

    def __init__(self, sleep_s: float) -> None:
        self.sleep_s = sleep_s

    async def respond(self, text: str) -> str:
        """Return the reply."""
        await asyncio.sleep(self.sleep_s)
        return "more"


class Tokenizer:
    """A tokenizer that encodes every reply as the same three tokens."""

    def encode(self, text: str, **how: bool) -> list[int]:
        """Return three tokens."""
        return [5, 6, 7]


def sampler(pool: WorkerPool, kind: str) -> GroupSampler:
    # The policy has as many turns as the environment.
    settings = CollectSettings(
        prompts=("",),
        prompts_per_step=GROUPS,
        group_size=SIZE,
        max_turns=TURNS,
        # About one token in sixteen ends a turn.
        sampling_params={"max_tokens": 16 * TOKENS, "stop_token_ids": list(range(8000 // TOKENS))},
    )
    host = EnvironmentWorkers(f"{__file__}:{kind}", pool, 60.0)
    return GroupSampler(
        settings=settings,
        seed=0,
        max_model_len=1024,
        tokenizer=Tokenizer(),
        open_environment=functools.partial(RemoteEnvironment, host),
    )


def seconds(engine: SamplingEngine, pool: WorkerPool, kind: str, sleep_s: float, first: int) -> float:
    """Sample all groups once, and return the seconds."""
    queue = GroupQueue(engine, sampler(pool, kind))
    prompts = (PromptRecord([index + 3] * 64, {"sleep_s": sleep_s}) for index in range(GROUPS))
    tasks = [Task(first + index, record) for index, record in enumerate(prompts)]
    began = time.perf_counter()
    left = set(queue.submit(tasks))
    while left:
        found = queue.poll(60.0, at_least=len(left))
        assert all(rollout.num_turns == TURNS for group in found.values() for rollout in group.rollouts)
        left -= found.keys()
    took_s = time.perf_counter() - began
    queue.close()
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = save_bench_model(Path(folder) / "model")
        options = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 30}
        with (
            WorkerPool(GROUPS * SIZE) as pool,
            SamplingEngine(model, skip_tokenizer_init=True, **options) as engine,
        ):
            engine.wait_until_ready()
            runs = [("Environment", 0.0), ("Environment", SLEEP_S), ("Asynchronous", SLEEP_S)]
            seconds(engine, pool, "Environment", 0.0, 0)
            times: dict[tuple[str, float], list[float]] = {run: [] for run in runs}
            for round_ in range(args.rounds):
                for run, found in times.items():
                    found.append(seconds(engine, pool, *run, GROUPS * (1 + round_)))
    at_once, slow, asynchronous = (statistics.median(found) for found in times.values())
    row = {
        "rollouts": GROUPS * SIZE,
        "turns of the environment": TURNS,
        "sleep, s": SLEEP_S,
        "replies at once, s": round(at_once, 2),
        "sleeps, s": round(slow, 2),
        "sleeps in one process, s": round(asynchronous, 2),
        "over the sampling, s": round(slow - at_once, 2),
        "in one process, s": round(asynchronous - at_once, 2),
        "one after the other, s": GROUPS * SIZE * TURNS * SLEEP_S,
    }
    write_result("environments", {"tokens a turn": TOKENS, "rounds": args.rounds}, [row])


if __name__ == "__main__":
    main()
