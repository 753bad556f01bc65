"""Compare log-probabilities of engine and trainer with truncated sampling. Run: python benchmarks/truncation.py

The final model of configs/countdown_warmup.yaml answers 128 questions 8 times each, at temperature 1. The trainer
computes log-probabilities of the same tokens in float32: over the support that it computes itself, and over all tokens,
like a trainer that ignores the truncation. Writes results/truncation.json.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from parts import prepare
from report import ROOT, write_result
from transformers import AutoModelForCausalLM

import vectorlm
from vectorlm.algorithms.logprobs import token_values
from vectorlm.algorithms.support import Support

sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "sampling")]
from swap_cases import scores_of

MODEL = ROOT / "runs/countdown_warmup/final-model"
QUESTIONS = ROOT / "data/countdown/train.jsonl"
NUM_QUESTIONS, NUM_ANSWERS = 128, 8
CUTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "top_p=0.9": {"top_p": 0.9},
    "top_k=8": {"top_k": 8},
    "min_p=0.05": {"min_p": 0.05},
    "all three": {"top_p": 0.9, "top_k": 8, "min_p": 0.05},
}


@torch.no_grad()
def compare(completions: list[Any], model: Any, cuts: dict[str, Any]) -> dict[str, Any]:
    """Return the differences between the engine's log-probabilities and the trainer's."""
    scores, targets, sampler = scores_of(completions, model)
    ours = token_values(scores, targets, support=Support(**cuts))
    whole = token_values(scores, targets).logprobs
    gap, unaware = (ours.logprobs - sampler).abs(), (whole - sampler).abs()
    return {
        "tokens": len(targets),
        "gap, mean": f"{gap.mean():.1e}",
        "gap, largest": f"{gap.max():.1e}",
        "outside the trainer's support, %": f"{100 * ours.outside.mean():.2f}",
        "mass of the support": f"{(whole - ours.logprobs).exp().mean():.3f}",
        "gap over all tokens, mean": f"{unaware.mean():.1e}",
        "largest": f"{unaware.max():.1e}",
    }


def main() -> None:
    """Measure, print and save."""
    prepare("countdown_warmup")
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    lines = QUESTIONS.read_text().splitlines()[:NUM_QUESTIONS]
    questions = [json.loads(line)["prompt"] for line in lines]
    params = {"temperature": 1.0, "max_tokens": 12, "logprobs": 0, "seed": 0, "n": NUM_ANSWERS}
    rows = []
    for dtype in ("float32", "bfloat16"):
        with vectorlm.SamplingEngine(
            str(MODEL), dtype=dtype, max_model_len=32, logprobs_mode="processed_logprobs"
        ) as engine:
            for name, cuts in CUTS.items():
                answers = engine.sample(questions, {**params, **cuts})
                completions = [completion for group in answers for completion in group]
                rows.append({"engine": dtype, "cut by": name, **compare(completions, model, cuts)})
    write_result("truncation", {"questions": NUM_QUESTIONS, "answers": NUM_ANSWERS}, rows)


if __name__ == "__main__":
    main()
