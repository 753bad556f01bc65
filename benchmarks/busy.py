"""Time GRPO steps on a busy machine by how long OpenMP threads spin. Run: python benchmarks/busy.py

One rank trains the random model of examples/make_countdown.py with configs/countdown_grpo.yaml (512 completions, two
optimizer steps per step). On a "busy" machine another process computes all the time. The cases alternate in rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report import ROOT, write_result

ROUNDS, STEPS, SKIPPED = 2, 4, 1
OWN = "libgomp's own (300000 rounds)"
SETTINGS = {
    OWN: {"GOMP_SPINCOUNT": "300000"},
    "the default here (10000 rounds)": {},
    "1000 rounds": {"GOMP_SPINCOUNT": "1000"},
}


def step_times(folder: Path, variables: dict[str, str]) -> dict[str, list[float]]:
    """Train for some steps; return the seconds of every step, of its sampling and of its update."""
    with tempfile.TemporaryDirectory(dir=folder) as output:
        overrides = {
            "model": folder / "model",
            "train_parameters.output_dir": output,
            "evaluation.prompts": folder / "held_out.jsonl",
            "evaluation.every": 1000,
            "rl.prompts": folder / "train.jsonl",
            "rl.max_steps": STEPS,
            "rl.algorithm.dynamic_sampling": False,
            "rl.max_sampling_rounds": 4,
        }
        command = [sys.executable, str(ROOT / "examples/rl_example_mp.py")]
        command += ["--yaml_path", str(ROOT / "configs/countdown_grpo.yaml")]
        command += [word for name, value in overrides.items() for word in ("--set", f"{name}={value}")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        subprocess.run(command, env=environment, check=True, capture_output=True)
        rows = [json.loads(line) for line in Path(output, "metrics.jsonl").read_text().splitlines()]
    kept = rows[1 + SKIPPED :]
    return {part: [row[f"time/{part}_s"] for row in kept] for part in ("step", "generate", "update")}


def main() -> None:
    """Measure every setting with and without the other process, print and save."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make = [sys.executable, str(ROOT / "examples/make_countdown.py"), "--output_dir", folder]
        subprocess.run(make, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
        for round_number in range(ROUNDS):
            for name, variables in SETTINGS.items():
                for load in ("quiet", "busy"):
                    # One run takes minutes, and its result is far from the others.
                    if (name, load) == (OWN, "busy") and round_number > 0:
                        continue
                    other = [sys.executable, "-c", "while True: pass" if load == "busy" else "pass"]
                    with subprocess.Popen(other) as process:
                        try:
                            times = step_times(Path(folder), variables)
                        finally:
                            process.kill()
                    medians = {part: statistics.median(seconds) for part, seconds in times.items()}
                    found.setdefault((name, load), []).append(medians)
    base = [medians["step"] for medians in found[OWN, "quiet"]]
    rows = [
        {
            "threads wait": name,
            "machine": load,
            **{
                f"{part} (s)": round(statistics.median(medians[part] for medians in rounds), 2)
                for part in rounds[0]
            },
            # The machine's own speed drifts: compare runs of the same round.
            "beside libgomp's own, quiet": round(
                statistics.median(medians["step"] / own for medians, own in zip(rounds, base, strict=False)),
                2,
            ),
        }
        for (name, load), rounds in found.items()
    ]
    setting = {"rounds": ROUNDS, "steps": STEPS - SKIPPED, "world_size": 1, "other processes when busy": 1}
    write_result(
        "busy", setting, rows, {"medians": {" / ".join(key): rounds for key, rounds in found.items()}}
    )


if __name__ == "__main__":
    main()
