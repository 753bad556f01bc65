"""Rejection-sampling fine-tuning: sample answers, keep the right ones, train on them, repeat with the new weights.

python examples/custom_loop.py --world_size 2      (first: python examples/make_countdown.py)

Every rank runs `loop`, which is written as for one process. If no sampled answer is right, the model learns the
reference answer, as in STaR (Zelikman et al. 2022, arXiv 2203.14465), because a random model has no right answers.
"""

import argparse
import random

import torch
from countdown_problems import CountdownRules, generate_problems
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import vectorlm
from vectorlm.rl.rewards.countdown import countdown_reward

BATCH = 256
EXPLORE = {"n": 4, "temperature": 1.0, "max_tokens": 12}
GREEDY = {"temperature": 0.0, "max_tokens": 12}


def loop(path: str, num_steps: int, lr: float) -> list[float]:
    """Train, and return the share of right held-out answers at every tenth step and at the end."""
    problems, held_out = generate_problems(256 * 64, 128, rules=CountdownRules(), seed=0)
    tokenizer = AutoTokenizer.from_pretrained(path)
    with vectorlm.SamplingEngine(path, dtype="float32", max_model_len=64) as engine:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98))
        here = vectorlm.Topology.from_environment()
        shares = []
        for step in range(num_steps + 1):
            engine.update(model, step)
            if step % 10 == 0 or step == num_steps:
                texts = engine.generate_text([problem.prompt for problem in held_out], GREEDY)
                shares.append(sum(map(is_right, texts, held_out)) / len(held_out))
                if here.is_main:
                    print(f"step {step}: {shares[-1]:.0%} of the held-out answers are right", flush=True)
            batch = random.Random(step).sample(problems, BATCH)
            answers = engine.sample([problem.prompt for problem in batch], EXPLORE)
            kept = [choose(problem, options) for problem, options in zip(batch, answers, strict=True)]
            mine = slice(here.rank, None, here.world_size)
            loss_of(model, tokenizer, batch[mine], kept[mine]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return shares


def is_right(text, problem) -> bool:
    """Return whether an answer is right."""
    return countdown_reward(text, numbers=problem.numbers, target=problem.target) == 1.0


def choose(problem, options) -> str:
    """Return a right sampled answer, or the reference answer if there is none."""
    return next((answer.text for answer in options if is_right(answer.text, problem)), problem.completion)


def loss_of(model, tokenizer, problems, texts) -> torch.Tensor:
    """Return the mean cross-entropy of the answers, without their prompts."""
    whole = [f"{p.prompt}{text}{tokenizer.eos_token}" for p, text in zip(problems, texts, strict=True)]
    rows = tokenizer(whole)["input_ids"]
    starts = [len(ids) for ids in tokenizer([problem.prompt for problem in problems])["input_ids"]]
    tokens = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_token_id)
    labels = torch.full_like(tokens, -100)
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        tokens[index, : len(row)] = torch.tensor(row)
        labels[index, start : len(row)] = torch.tensor(row[start:])
    return model(tokens.to(model.device), labels=labels.to(model.device)).loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="data/countdown/model")
    for name, kind, default in (("num_steps", int, 300), ("lr", float, 2e-3), ("world_size", int, 1)):
        parser.add_argument(f"--{name}", type=kind, default=default)
    args = parser.parse_args()
    vectorlm.launch(loop, args.model, args.num_steps, args.lr, world_size=args.world_size)
