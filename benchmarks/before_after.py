"""Sampling, swaps and dynamic sampling of two commits, beside bare vLLM, in turn.

Run: python benchmarks/before_after.py COMMIT. It is checked out beside this tree, and the same measurements, those of
this file, use the library of either, each in a process of its own. Nothing else should run meanwhile. Before, train
configs/countdown_warmup.yaml on two ranks.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bare_vllm import ENGINE, BareVLLM
from bench_model import save_bench_model
from report import ROOT, write_result
from sampling import SETTINGS, params_of, prompts_of

REPEATS, UPDATES, STEPS, SKIPPED = 3, 20, 24, 8
BARE = "bare vLLM"


def sampling(model: str) -> dict[str, float]:
    """Return the median seconds of each setting of sampling.py, log-probabilities included."""
    import vectorlm

    found = {}
    arguments = {name: value for name, value in ENGINE.items() if name != "enforce_eager"}
    with vectorlm.SamplingEngine(model, **arguments) as engine:
        for name, setting in SETTINGS.items():
            asked, params = prompts_of(setting), params_of(setting)
            times = [_timed(lambda: engine.sample(asked, params)) for _ in range(REPEATS + 1)]  # noqa: B023
            found[f"sampling {name}, s"] = statistics.median(times[1:])
    return found


def bare_sampling(model: str) -> dict[str, float]:
    """Do the same with ``vllm.LLM``, its threads waiting as libgomp has them wait."""
    bare, found = BareVLLM(Path(model), "generate"), {}
    for name, setting in SETTINGS.items():
        asked, params = prompts_of(setting), params_of(setting)
        times = [bare.ask(prompts=asked, sampling_params=params) for _ in range(REPEATS + 1)]
        found[f"sampling {name}, s"] = statistics.median(times[1:])
    bare.close()
    return found


def swaps(model: str) -> dict[str, float]:
    """Return the median seconds of a verified and an unverified swap, as multiples of a memcpy in the same loop."""
    import vectorlm

    return vectorlm.launch(_swaps_on_rank, model, world_size=2)[0]


def _swaps_on_rank(model: str) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    import vectorlm

    trained: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for block in trained.model.layers:
        fully_shard(block)
    fully_shard(trained)
    size = sum(each.numel() for each in trained.parameters())
    source, target = torch.ones(size), torch.zeros(size)
    found = {}
    for receiver in ("live", "packed"):
        for verify in (False, True):
            copies, spans = [], []
            with vectorlm.SamplingEngine(
                model, receiver=receiver, verify_updates=verify, dtype="float32", max_model_len=512,
                kv_cache_memory_bytes=64 << 20,
            ) as engine:  # fmt: skip
                for step in range(UPDATES + 3):
                    dist.barrier()
                    copies.append(_timed(lambda: target.copy_(source)) if dist.get_rank() == 0 else 1.0)
                    dist.barrier()
                    report = engine.update(trained, step)
                    spans.append(report.publish_s + report.load_s)
            name = f"swap, {receiver}{', verified' if verify else ''}, x memcpy"
            found[name] = statistics.median(spans[3:]) / statistics.median(copies[3:])
    return found


def dynamic_sampling(model: str) -> dict[str, float]:
    """Return the times of a step with dynamic sampling, taking turns on all cores, of the model of async.py."""
    bench = importlib.import_module("async")
    bench._warm_up("long tail")
    shutil.rmtree(bench._output("long tail", bench.HEADLINE[0], 0), ignore_errors=True)
    found = bench._train("long tail", bench.HEADLINE[0], 0, STEPS)
    path = bench._output("long tail", bench.HEADLINE[0], 0) / "timeline.jsonl"
    window, idle, bars = idle_engine([json.loads(line) for line in path.read_text().splitlines()])
    return {
        "dynamic sampling, s a step": found["step_s"],
        "its sampling, s": found["generate_s"],
        "its engine idle while sampling, s": idle,
        "its engine idle while sampling, %": 100 * idle / window,
        "its engine's spans while sampling": bars,
    }


def idle_engine(lines: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Return, of the mean step, the seconds of collecting, those in which the engine stood still, and its spans."""
    engine = [span for line in lines for span in line["engine"]]
    found = []
    # The last step's engine is only known after another update.
    for line in lines[SKIPPED:-1]:
        spans = [(start, end) for name, start, end in line["trainer"] if name in ("generate", "score")]
        first, last = min(start for start, _ in spans), max(end for _, end in spans)
        inside = [
            (max(start, first), min(end, last)) for start, end in engine if start < last and end > first
        ]
        found.append((last - first, last - first - sum(end - start for start, end in inside), len(inside)))
    window, idle, bars = (statistics.fmean(column) for column in zip(*found, strict=True))
    return window, idle, bars


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(part: str, model: str, tree: Path) -> dict[str, float]:
    """Run one part in a process that imports the library of `tree`."""
    # Processes that are started with -m would take the library of the folder they start in.
    environment = os.environ | {"PYTHONPATH": f"{tree}:{ROOT / 'benchmarks'}", "PYTHONSAFEPATH": "1"}
    if part == "bare_sampling":
        environment["GOMP_SPINCOUNT"] = "300000"
    command = [sys.executable, "-W", "ignore", __file__, "--part", part, "--model", model]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", nargs="?", help="what this tree is compared with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", help="for this program's own processes")
    parser.add_argument("--model")
    args = parser.parse_args()
    if args.part:
        print(json.dumps(globals()[args.part](args.model)))
        return
    found: dict[str, list[dict[str, float]]] = {"before": [], "now": [], BARE: []}
    with tempfile.TemporaryDirectory() as scratch:
        before = Path(scratch) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(before), args.commit], check=True, capture_output=True)
        try:
            model = str(save_bench_model(Path(scratch) / "model"))
            for _ in range(args.rounds):
                for who, tree in (("before", before), ("now", ROOT)):
                    seen = [measure(part, model, tree) for part in ("sampling", "swaps", "dynamic_sampling")]
                    found[who].append({name: value for part in seen for name, value in part.items()})
                    print(who, found[who][-1], flush=True)
                found[BARE].append(measure("bare_sampling", model, ROOT))
                print(BARE, found[BARE][-1], flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)
    medians = {
        who: {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        for who, rounds in found.items()
    }
    rows = []
    for name, value in medians["now"].items():
        bare = medians[BARE].get(name)
        rows.append(
            {
                "what": name,
                "before": f"{medians['before'][name]:.3g}",
                "now": f"{value:.3g}",
                "now / before": f"{value / medians['before'][name]:.2f}",
                BARE: "" if bare is None else f"{bare:.3g}",
                f"{BARE} / now": "" if bare is None else f"{bare / value:.2f}",
            }
        )
    setting = {"before": args.commit, "rounds": args.rounds}
    write_result("before_after", setting, rows, {"rounds": found})


if __name__ == "__main__":
    main()
