"""Compare the cost of broadcasting completions with generating them. Run: python benchmarks/broadcast.py

Two ranks, 512 completions of 256 tokens with log-probabilities. The time runs from the engine's answer on rank 0 to
`Completion` records on every rank. The same run times pickled vLLM objects, which the records replace.
"""

from __future__ import annotations

import pickle
import statistics
import tempfile
import time
from pathlib import Path

from bare_vllm import ENGINE
from bench_model import save_bench_model
from report import write_result

import vectorlm
from vectorlm.ranks.collectives import Collectives
from vectorlm.sampling.handle import exchange_results
from vectorlm.sampling.messages import unpack

COMPLETIONS, NEW_TOKENS, ROUNDS = 512, 256, 9
PARAMS = {"temperature": 1.0, "seed": 1, "max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 0}


def on_rank(folder: str) -> dict[str, list[float]]:
    """Generate once, then broadcast the same answer many times, alternating between records and pickled objects."""
    import torch.distributed as dist

    topology = vectorlm.Topology.from_environment()
    collectives = Collectives(topology, 600.0)
    asked = [[3 + index % 900] for index in range(COMPLETIONS)]
    with vectorlm.SamplingEngine(folder, sampling_params=PARAMS, **ENGINE) as engine:
        engine.sample(asked[:8], {**PARAMS, "max_tokens": 4})
        start = time.perf_counter()
        batch = engine.submit(asked)
        exchange_results([batch])
        (packed,) = batch._result[0].values()
        generate_s = time.perf_counter() - start
        outputs = engine.generate(asked[:64])
    times: dict[str, list[float]] = {"generate": [generate_s], "arrays": [], "records": [], "pickled": []}
    whole = outputs * (COMPLETIONS // 64)
    for _ in range(ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        _, received = collectives.broadcast_object("arrays", None, [packed] if topology.is_main else ())
        times["arrays"].append(time.perf_counter() - start)
        unpack(received[0])
        times["records"].append(time.perf_counter() - start)
        dist.barrier()
        start = time.perf_counter()
        # Pickled one by one, because pickle writes an object that occurs several times only once.
        note = pickle.dumps([pickle.dumps(output) for output in whole]) if topology.is_main else None
        [
            pickle.loads(pickled_output)
            for pickled_output in pickle.loads(collectives.broadcast_object("pickled", note)[0])
        ]
        times["pickled"].append(time.perf_counter() - start)
    return times


def main() -> None:
    """Measure, print and save."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_bench_model(Path(scratch) / "model")
        by_rank = vectorlm.launch(on_rank, str(folder), world_size=2)
    generate_s = max(times["generate"][0] for times in by_rank)
    titles = {
        "generate": "generate (once)",
        "arrays": "packed answers to both ranks",
        "records": "packed answers to both ranks, as Completion records",
        "pickled": "vLLM's objects pickled to both ranks",
    }
    rows = []
    for key, title in titles.items():
        seconds = max(statistics.median(times[key]) for times in by_rank)
        share = round(100 * seconds / generate_s, 3)
        rows.append({"what": title, "ms": round(1000 * seconds, 1), "% of generate": share})
    setting = {"world_size": 2, "completions": COMPLETIONS, "new_tokens": NEW_TOKENS, "rounds": ROUNDS}
    write_result("broadcast", setting, rows)


if __name__ == "__main__":
    main()
