"""Compare losses for distilling a larger model into a small one on Countdown. Run: python benchmarks/distill.py

The model of configs/countdown_warmup.yaml teaches the model of configs/countdown_student.yaml. Fine-tuning learns from
completions that the teacher sampled at temperature 1. On-policy distillation learns from the student's completions,
which the teacher scores. All runs train on one rank, on the same number of tokens, with 256 completions per optimizer
step. Accuracy is the share of 512 held-out questions that the trained weights answer right at temperature 1. Writes
results/distill.json.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import parts
from parts import Job, Study, gains, measure, run_program
from report import ROOT, mean_and_range, write_result

from vectorlm.algorithms.spec import AlgorithmSpec

SEEDS = (0, 1, 2)
TEACHER = "runs/countdown_warmup/final-model"
SAMPLES = ROOT / "runs/distill/teacher"
SFT = AlgorithmSpec(
    name="sft",
    advantages=lambda batch, hparams: batch.mask.float(),
    loss=lambda inputs, hparams: -inputs.policy_logprobs,
    samples_from_policy=False,
)
"""Fine-tuning on stored completions, as an algorithm, to use the same loop, batches and optimizer for all runs."""
FINE_TUNING: dict[str, Any] = {
    "rl.algorithm": "benchmarks/distill.py:SFT",
    "rl.rollout.source": "file",
    "rl.rollout.path": str(SAMPLES / "rollouts.jsonl"),
    "rl.teacher": None,
    # The student writes a tenth more tokens than the teacher. 111 steps on the teacher's completions have as many
    # tokens as 100 steps on the student's.
    "rl.max_steps": 111,
}
ARMS: dict[str, dict[str, Any]] = {
    "fine-tuning on the teacher's completions": FINE_TUNING,
    "the same, learning rate 0.003": FINE_TUNING | {"train_parameters.optimizer.lr": 3.0e-3},
    "distillation, sampled tokens": {"rl.teacher.kind": "sampled"},
    "distillation, whole distributions": {"rl.teacher.kind": "full"},
}
"""Settings by run; the learning rate is 0.001 unless the settings change it."""
NUM_SAMPLED_STEPS = 50
"""Steps of 256 prompts with four completions each. Fine-tuning needs about half of them, and seeds draw different
ones."""


def settings(job: Job) -> dict[str, Any]:
    """Return the settings of a run."""
    return {
        **ARMS[job["arm"]],
        "evaluation.every": 1000,
        "engine.max_num_seqs": 512,
        "rl.show_every": 0,
    }


STUDY = Study(ROOT / "runs/distill", "countdown_distill.yaml", settings)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is None:
        prepare()
    jobs = [{"arm": arm, "seed": seed} for seed in arguments.seeds for arm in ARMS]
    found = measure(STUDY, jobs, arguments.part)
    rows = [_row(arm, found) for arm in ARMS]
    lines = map(json.loads, (SAMPLES / "metrics.jsonl").read_text().splitlines())
    setting = {
        "seeds": list(arguments.seeds),
        "accuracy of the teacher, %": 100 * next(line["eval/accuracy"] for line in lines),
    }
    write_result("distill", setting, rows, {"runs": found})


def prepare() -> None:
    """Make the data, the models and the teacher's completions that all runs need, unless they exist."""
    parts.prepare("countdown_warmup", "countdown_student")
    if not (SAMPLES / "final-model").exists():
        sampling = {
            "model": TEACHER,
            "train_parameters.output_dir": str(SAMPLES),
            "train_parameters.optimizer.lr": 0.0,
            "evaluation.every": 1000,
            "engine.max_num_seqs": 512,
            "rl.algorithm": "reinforce",
            "rl.teacher": None,
            "rl.max_steps": NUM_SAMPLED_STEPS,
            "rl.prompts_per_step": 256,
            "rl.rollout.save_tokens": True,
            "rl.show_every": 0,
        }
        overrides = [
            word for name, value in sampling.items() for word in ("--set", f"{name}={json.dumps(value)}")
        ]
        config = ("--yaml_path", "configs/countdown_distill.yaml", "--world_size", "2")
        run_program("examples/rl_example_mp.py", *config, *overrides)


def _row(arm: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    runs = [run for run in found if run["arm"] == arm]
    return {
        "learning from": arm,
        "seeds": len(runs),
        "before, %": mean_and_range([100 * run["before"] for run in runs]),
        "after, %": mean_and_range([100 * run["after"] for run in runs]),
        "gain, points": mean_and_range(gains(runs)),
        "thousand tokens trained on": mean_and_range([run["tokens"] / 1000 for run in runs], digits=0),
        "KL(student, teacher) at the end": mean_and_range(
            [run["teacher_kl"] for run in runs if run["teacher_kl"] is not None], digits=3
        ),
    }


if __name__ == "__main__":
    main()
