"""Where the time of sampling goes, inside the process that samples. Run: python benchmarks/sampling_parts.py

The functions of vLLM and of the library that do each part are timed, in three shapes, with a tokenizer, whose texts and
log-probabilities are asked for. What a part calls that is a part of its own is not counted twice.
"""

from __future__ import annotations

import os
import pickle
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import write_result
from rl_step import SETTINGS as STEPS
from rl_step import save_prompts
from sampling import SETTINGS, params_of, prompts_of

ROUNDS = 3
ENGINE = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 256 << 20}


class Parts:
    """Seconds by part, of functions that were wrapped; nested ones count for the inner part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.inner: list[float] = []

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Time the function `name` of a class, module or object."""
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            return self.call(part, lambda: original(*args, **kwargs))

        setattr(owner, name, timed)

    def call(self, part: str, work: Callable[[], Any]) -> Any:
        """Time one call."""
        self.inner.append(0.0)
        start = time.perf_counter()
        try:
            return work()
        finally:
            took = time.perf_counter() - start
            self.seconds[part] += took - self.inner.pop()
            if self.inner:
                self.inner[-1] += took


def measure(model: Path) -> list[dict[str, Any]]:
    """Sample in this process, and return a row for each part."""
    from vectorlm.sampling import messages
    from vectorlm.sampling.messages import unpack
    from vectorlm.sampling.sampler.scheduler import Scheduler, open_backend

    backend: Any = open_backend(messages.Start(str(model), ENGINE, "packed"))
    scheduler, parts = Scheduler(backend), Parts()
    engine = backend._engine
    runner = engine.model_executor.driver_worker.worker.model_runner
    core = engine.engine_core.engine_core
    parts.wrap(type(runner.model), "forward", "the model")
    parts.wrap(type(runner.sampler), "forward", "drawing tokens, log-probabilities")
    parts.wrap(core.scheduler, "schedule", "vLLM's scheduler")
    parts.wrap(core.scheduler, "update_from_output", "vLLM's scheduler")
    parts.wrap(runner, "execute_model", "preparing a step's inputs")
    parts.wrap(runner, "sample_tokens", "reading a step's outputs")
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
    from vllm.v1.engine.logprobs import LogprobsProcessor

    parts.wrap(LogprobsProcessor, "update_from_output", "log-probabilities as objects, their tokens as text")
    parts.wrap(FastIncrementalDetokenizer, "update", "completions as text")
    parts.wrap(engine.output_processor, "process_outputs", "the rest of vLLM's outputs")
    parts.wrap(backend, "_finished_of", "results as arrays")
    found: dict[str, dict[str, float]] = {}
    for name, setting in SETTINGS.items():
        command = messages.Generate(prompts_of(setting), {**params_of(setting), "detokenize": True}, False)
        rounds = []
        for turn in range(ROUNDS + 1):
            parts.seconds.clear()
            start = time.perf_counter()
            parts.call("submission", lambda: scheduler.carry_out(turn, command))  # noqa: B023
            answers: list[Any] = []
            while scheduler.busy:
                answers += scheduler.step()
            ((_, answer),) = answers
            message = parts.call("to the ranks and out of the arrays", lambda: pickle.dumps(answer))  # noqa: B023
            parts.call(
                "to the ranks and out of the arrays",
                lambda: unpack(pickle.loads(message)[0]),  # noqa: B023
            )
            whole = time.perf_counter() - start
            rounds.append({**parts.seconds, "everything": whole})
        found[name] = {part: statistics.median(each[part] for each in rounds[1:]) for part in rounds[-1]}
    names = list(next(iter(found.values())))
    for times in found.values():
        times["the rest"] = times["everything"] - sum(times[part] for part in names if part != "everything")
    return [
        {"part": part}
        | {f"{name}, ms": round(1000 * times[part], 1) for name, times in found.items()}
        | {f"{name}, %": round(100 * times[part] / times["everything"], 1) for name, times in found.items()}
        for part in sorted([*names, "the rest"], key=lambda part: -found[next(iter(found))][part])
    ]


def main() -> None:
    """Measure, print and save."""
    from vectorlm.ranks.topology import Topology
    from vectorlm.sampling.process_channel import sampler_environment

    with tempfile.TemporaryDirectory() as scratch:
        wanted = sampler_environment(os.environ, scratch, Topology())
        if "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ:
            # The variables are read when libraries are loaded.
            os.execve(sys.executable, [sys.executable, *sys.argv], wanted | {"TMPDIR": "/tmp"})
        model, _ = save_prompts(Path(scratch), next(iter(STEPS.values())))
        write_result("sampling_parts", {"rounds": ROUNDS, "engine": ENGINE}, measure(model))


if __name__ == "__main__":
    main()
