"""Measure how much staleness of rollouts each algorithm tolerates. Run: python benchmarks/staleness.py

All runs start from the model of configs/countdown_warmup.yaml, and make the same number of optimizer steps on the same
number of Countdown completions. A batch of rollouts has N mini-batches, and a run trains on each once. With N = 1 all
are on policy; with larger N the last mini-batch is N - 1 optimizer steps old. The method is from Asynchronous RLHF
(Noukhovitch et al. 2024, arXiv:2410.18252). First the learning rate and the KL weight (or beta) of each algorithm are
tuned at N = 1, on a separate seed, with the same number of runs. Then N grows with the tuned values. Accuracy is the
share of 512 held-out questions that the trained weights answer right at temperature 1. KL is the divergence of the
trained policy from its start model, over the policy's completions.
Writes results/staleness.json and docs/images/staleness.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from parts import Job, Study, found_before, is_run, measure
from report import ROOT, mean_and_range, write_result

from vectorlm.algorithms.registry import get_algorithm

SEEDS, TUNING_SEEDS, ROLLOUTS = (0, 1, 2), (100,), (1, 4, 8, 16, 32)
NUM_UPDATES, COMPLETIONS, GROUP = 64, 128, 8
"""Optimizer steps per run, completions per optimizer step, and completions per question."""
SETTINGS: dict[str, Any] = {
    "rl.algorithm.dynamic_sampling": False,
    "rl.show_every": 0,
    "evaluation.every": 1000,
    "engine.max_num_seqs": 512,
}
"""Settings of all runs that differ from configs/countdown_grpo.yaml."""
CRITIC = {"rl.critic.lr": 1.0e-3, "rl.critic.warmup_steps": 0}
LRS = (1.0e-4, 3.0e-4, 1.0e-3)
KL_COEFS, BETAS = (0.0, 0.01), (0.1, 0.5)
OTHERS = {
    "ppo": ("rl.kl_coef", KL_COEFS),
    "grpo": ("rl.kl_coef", KL_COEFS),
    "rloo": ("rl.kl_coef", KL_COEFS),
    "proximal_rloo": ("rl.kl_coef", KL_COEFS),
    "best_of_k": ("rl.kl_coef", KL_COEFS),
    "online_dpo": ("rl.algorithm.beta", BETAS),
}
"""Setting that is tuned besides the learning rate, with its values: the paper's KL penalty in the loss, or beta."""
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:gray", "tab:red")


def settings(job: Job) -> dict[str, Any]:
    """Return the settings of a run."""
    has_critic = get_algorithm(job["algorithm"]).needs_critic
    group = 1 if has_critic else GROUP
    name, _ = OTHERS[job["algorithm"]]
    return {
        **SETTINGS,
        **(CRITIC if has_critic else {}),
        "rl.algorithm.name": job["algorithm"],
        "rl.group_size": group,
        "rl.prompts_per_step": job["n"] * COMPLETIONS // group,
        "rl.num_mini_batches": job["n"],
        "rl.max_steps": NUM_UPDATES // job["n"],
        "train_parameters.optimizer.lr": job["lr"],
        name: job["other"],
    }


def divergence(engine: Any, config: Any) -> dict[str, float]:
    """Return the KL divergence of the policy from its start model, in nats per completion, with its standard error."""
    import torch
    from transformers import AutoModelForCausalLM

    start = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    lines = Path(config.evaluation.prompts).read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    params = {"temperature": 1.0, "max_tokens": config.rl.collect.sampling["max_tokens"], "logprobs": 0}
    found = []
    for (completion,) in engine.sample(prompts, params | {"seed": 0}):
        ids = torch.tensor([[*completion.prompt_token_ids, *completion.token_ids]])
        with torch.no_grad():
            says = torch.log_softmax(start(ids).logits[0], dim=-1)
        first = len(completion.prompt_token_ids)
        theirs = sum(
            says[first + place - 1, token].item() for place, token in enumerate(completion.token_ids)
        )
        found.append(sum(completion.sampler_logprobs) - theirs)
    return {
        "kl_from_start": statistics.fmean(found),
        "kl_error": statistics.stdev(found) / len(found) ** 0.5,
    }


STUDY = Study(ROOT / "runs/staleness", "countdown_grpo.yaml", settings, after=divergence)


def tuning_jobs(algorithms: list[str]) -> list[Job]:
    """Return the runs that tune the learning rate and the other setting, at N = 1."""
    return [
        {"algorithm": algorithm, "lr": lr, "other": other, "n": 1, "seed": seed}
        for algorithm in algorithms
        for lr in LRS
        for other in OTHERS[algorithm][1]
        for seed in TUNING_SEEDS
    ]


def tuned(algorithm: str, found: list[dict[str, Any]]) -> dict[str, float]:
    """Return the learning rate and the value of the other setting with the highest mean accuracy."""

    def accuracy(pair: dict[str, float]) -> float:
        return statistics.fmean(
            run["after"] for run in found if is_run(run, {"algorithm": algorithm, **pair})
        )

    pairs = [{"lr": lr, "other": other} for lr in LRS for other in OTHERS[algorithm][1]]
    return max(pairs, key=accuracy)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithms", nargs="+", default=list(OTHERS), choices=OTHERS)
    parser.add_argument("--rollouts", nargs="+", type=int, default=ROLLOUTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--is_tuned", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    trials = tuning_jobs(arguments.algorithms)
    found = found_before(STUDY, trials) if arguments.is_tuned else measure(STUDY, trials, arguments.part)
    chosen = {algorithm: tuned(algorithm, found) for algorithm in arguments.algorithms}
    jobs = [
        {"algorithm": algorithm, **chosen[algorithm], "n": n, "seed": seed}
        for seed in arguments.seeds
        for algorithm in arguments.algorithms
        for n in arguments.rollouts
    ]
    runs = measure(STUDY, jobs, arguments.part, "--is_tuned")
    rows = [
        _row(algorithm, chosen[algorithm], runs, arguments.rollouts) for algorithm in arguments.algorithms
    ]
    setting = {
        "seeds": list(arguments.seeds),
        "tuning_seeds": TUNING_SEEDS,
        "updates": NUM_UPDATES,
        "completions": COMPLETIONS,
        "differs": SETTINGS,
    }
    write_result("staleness", setting, rows, {"chosen": chosen, "tuning": found, "runs": runs})
    draw(runs, ROOT / "docs/images/staleness.png")


def _row(
    algorithm: str, pair: dict[str, float], runs: list[dict[str, Any]], rollouts: list[int]
) -> dict[str, Any]:
    name = OTHERS[algorithm][0].removeprefix("rl.")
    row: dict[str, Any] = {"algorithm": algorithm, "learning rate": f"{pair['lr']:.0e}"}
    row["besides"] = f"{name} {pair['other']}"
    for n in rollouts:
        points, nats = _found(runs, algorithm, n)
        row[f"N = {n}"] = mean_and_range(points)
        row[f"KL, N = {n}"] = mean_and_range(nats, 2)
    return row


def _found(runs: list[dict[str, Any]], algorithm: str, n: int) -> tuple[list[float], list[float]]:
    """Return the gains in accuracy of the runs, in points, and their divergences."""
    mine = [run for run in runs if run["algorithm"] == algorithm and run["n"] == n]
    gained = [100 * (run["after"] - run["before"]) for run in mine]
    return gained, [run["kl_from_start"] for run in mine]


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw gains over N, and gains over the divergence."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 4.8), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    algorithms = list(dict.fromkeys(run["algorithm"] for run in runs))
    rollouts = sorted({run["n"] for run in runs})
    for algorithm, colour in zip(algorithms, COLOURS, strict=False):
        pairs = [_found(runs, algorithm, n) for n in rollouts]
        means = [statistics.fmean(points) for points, _ in pairs]
        left.plot(rollouts, means, color=colour, label=algorithm)
        right.plot([statistics.fmean(nats) for _, nats in pairs], means, color=colour, lw=0.8, alpha=0.6)
        for n, (points, nats) in zip(rollouts, pairs, strict=True):
            left.scatter([n] * len(points), points, s=14, color=colour, alpha=0.45, linewidths=0)
            mean = (statistics.fmean(nats), statistics.fmean(points))
            right.scatter(*mean, s=10 + 20 * rollouts.index(n), color=colour)
    left.set_xscale("log", base=2)
    left.set_xticks(rollouts, list(map(str, rollouts)))
    left.set(
        title="Staleness: a flat line tolerates it",
        xlabel="N, mini-batches of a rollout, each trained on once",
        ylabel="points of held-out accuracy gained; dots: seeds",
    )
    right.set(
        title="What it costs: up and to the left is better",
        xlabel="KL from the start, nats of a completion; larger dots: larger N",
        xscale="log",
        xticks=(0.2, 0.5, 1, 2, 5, 10),
        xticklabels=("0.2", "0.5", "1", "2", "5", "10"),
    )
    for panel in (left, right):
        panel.axhline(0, color="black", lw=0.6)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=8)
    figure.savefig(path)


if __name__ == "__main__":
    main()
