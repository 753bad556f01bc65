"""Measure how much staleness a learned reward tolerates, by algorithm. Run: python benchmarks/learned_reward.py

The experiment repeats Asynchronous RLHF (Noukhovitch et al. 2024, arXiv:2410.18252) on Countdown. The model of
configs/countdown_warmup.yaml answers 6,144 questions twice. A gold rule ignores the target and prefers the answer
whose value is nearer to 30. A reward model, initialised from the same weights, learns these pairs. Then online DPO,
RLOO and PPO train on the reward model alone. A batch of rollouts has N mini-batches; each is trained on once, and the
last is N - 1 optimizer steps old. staleness.py tuned the learning rates at N = 1. The gold rule also scores the
rollouts, with weight 0. After training, both score answers to 512 held-out questions. KL is the divergence of the
policy from its start.
Writes results/learned_reward.json and docs/images/learned_reward.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import parts
import staleness
from near_reward import near
from parts import Job, Study, is_run, measure, run_program
from report import RESULTS, ROOT, mean_and_range, write_result

ALGORITHMS = {"online_dpo": "tab:red", "rloo": "tab:green", "ppo": "tab:blue"}
SEEDS, ROLLOUTS = (0, 1, 2), (1, 4, 16)
NUM_QUESTIONS, NUM_ANSWERS, EPOCHS = 6144, 2, 3
"""Questions, answers per question, and epochs of the reward model's training."""
NUM_UPDATES = 32
"""Optimizer steps of a run; each has as many completions as in staleness.py."""
FOLDER, START = ROOT / "runs/learned_reward", ROOT / "runs/countdown_warmup/final-model"
REWARD_MODEL, GOLD = FOLDER / "reward_model/final-model", f"{ROOT}/benchmarks/near_reward.py:near"


def prepare() -> None:
    """Make the data, the start model and the reward model, unless they exist."""
    data, config = ROOT / "data/countdown/train.jsonl", "configs/countdown_reward.yaml"
    parts.prepare("countdown_warmup")
    if REWARD_MODEL.exists():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    pairs = FOLDER / "pairs.jsonl"
    asked = ["--prompts", str(data), "--limit", str(NUM_QUESTIONS), "--n", str(NUM_ANSWERS), "--seed", "0"]
    scored = ["--reward", GOLD, "--pairs", str(pairs)]
    run_program(
        "-m", "vectorlm", "evaluate", "configs/countdown_grpo.yaml", "--model", str(START), *asked, *scored
    )
    for name, split in (("train", "train[5%:]"), ("held_out", "train[:5%]")):
        made: dict[str, Any] = {"load_path": pairs, "save_path": FOLDER / name, "split": split}
        made = {f"dataset_preprocess.{key}": value for key, value in made.items()}
        run_program("-m", "vectorlm", "preprocess", config, *_words(made))
    settings: dict[str, Any] = {
        "model": START,
        "dataset.train_ds": FOLDER / "train",
        "dataset.eval_ds": FOLDER / "held_out",
        "train_parameters.output_dir": REWARD_MODEL.parent,
        "train_parameters.epochs": EPOCHS,
        "train_parameters.checkpointing_enabled": False,
    }
    run_program("-m", "vectorlm", "run", config, "--world_size", "1", *_words(settings))


def _words(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def settings(job: Job) -> dict[str, Any]:
    """Return the settings of a run."""
    return staleness.settings(job) | {
        "rl.max_steps": NUM_UPDATES // job["n"],
        "rl.rewards": {GOLD: 0.0},
        "rl.reward_models": {str(REWARD_MODEL): 1.0},
        "rl.reward_workers": 0,
        "evaluation.rewards": GOLD,
    }


def judge(engine: Any, config: Any) -> dict[str, Any]:
    """Return the mean of both rewards on held-out answers of the trained weights, and on the rollouts of each step."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    rows = [json.loads(line) for line in Path(config.evaluation.prompts).read_text().splitlines()]
    params = {"temperature": 1.0, "max_tokens": config.rl.collect.sampling["max_tokens"], "seed": 0}
    texts = [completion.text for (completion,) in engine.sample([row["prompt"] for row in rows], params)]
    tokenizer = AutoTokenizer.from_pretrained(REWARD_MODEL)
    scorer = AutoModelForSequenceClassification.from_pretrained(REWARD_MODEL).eval()
    learned = []
    for row, text in zip(rows, texts, strict=True):
        with torch.no_grad():
            ids = torch.tensor([tokenizer(row["prompt"] + text)["input_ids"]])
            learned.append(scorer(input_ids=ids).logits.item())
    path = Path(config.train_parameters.output_dir) / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return staleness.divergence(engine, config) | {
        "gold_before": lines[0]["eval/reward"],
        "gold": statistics.fmean(near(text, **row) for row, text in zip(rows, texts, strict=True)),
        "learned": statistics.fmean(learned),
        "by_step": [(line["step"], line["reward/mean"], line["reward/near/mean"]) for line in lines[1:]],
    }


STUDY = Study(FOLDER, "countdown_grpo.yaml", settings, after=judge, num_parts=1)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--rollouts", nargs="+", type=int, default=ROLLOUTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    prepare()
    chosen = json.loads((RESULTS / "staleness.json").read_text())["chosen"]
    jobs = [
        {"algorithm": algorithm, **chosen[algorithm], "n": n, "seed": seed}
        for seed in arguments.seeds
        for algorithm in arguments.algorithms
        for n in arguments.rollouts
    ]
    runs = measure(STUDY, jobs, arguments.part)
    rows = [_row(algorithm, n, runs) for algorithm in arguments.algorithms for n in arguments.rollouts]
    last = json.loads((REWARD_MODEL.parent / "metrics.jsonl").read_text().splitlines()[-1])
    setting = {
        "seeds": list(arguments.seeds),
        "questions": NUM_QUESTIONS,
        "answers": NUM_ANSWERS,
        "epochs": EPOCHS,
        "updates": NUM_UPDATES,
        "completions": staleness.COMPLETIONS,
        "pair_accuracy": last["eval/pair_accuracy"],
    }
    write_result("learned_reward", setting, rows, {"runs": runs})
    draw(runs, ROOT / "docs/images/learned_reward.png")


def _row(algorithm: str, n: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    mine = [run for run in runs if is_run(run, {"algorithm": algorithm, "n": n})]

    def shown(name: str, factor: float = 1.0, digits: int = 2) -> str:
        return mean_and_range([factor * run[name] for run in mine], digits)

    return {
        "algorithm": algorithm,
        "N": n,
        "seeds": len(mine),
        "gold rule": shown("gold"),
        "reward model": shown("learned"),
        "KL, nats": shown("kl_from_start"),
    }


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw both rewards against N, and the gold reward against the divergence from the start."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.4), dpi=110, layout="constrained")
    panels = figure.subplots(1, 3)
    sizes = sorted({run["n"] for run in runs})
    for algorithm, colour in ALGORITHMS.items():
        mine = [run for run in runs if run["algorithm"] == algorithm]
        tried = sorted({run["n"] for run in mine})
        for panel, name in zip(panels, ("learned", "gold"), strict=False):
            means = [statistics.fmean(run[name] for run in mine if run["n"] == n) for n in tried]
            panel.plot(tried, means, color=colour, label=algorithm)
            panel.scatter(
                [run["n"] for run in mine], [run[name] for run in mine], s=14, color=colour, alpha=0.5
            )
        for run in mine:
            area = 14 + 20 * sizes.index(run["n"])
            panels[2].scatter(run["kl_from_start"], run["gold"], s=area, color=colour, alpha=0.6)
    start = statistics.fmean(run["gold_before"] for run in runs)
    for panel in panels[1:]:
        panel.axhline(start, color="black", lw=0.6)
    for panel in panels[:2]:
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, list(map(str, sizes)))
        panel.set_xlabel("N, mini-batches per rollout batch")
    panels[0].set(title="Reward model", ylabel="mean score of held-out answers (dots: seeds)")
    panels[1].set(title="Gold reward", ylabel="mean score of the same answers (line: before training)")
    panels[2].set(
        title="Gold reward and divergence",
        xlabel="KL from the start, nats a completion (larger dots: larger N)",
        xscale="log",
    )
    for panel in panels:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
