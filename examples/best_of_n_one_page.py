"""Best-of-n fine-tuning on one page: sample n answers, train on the right ones, repeat with the new weights.

python examples/best_of_n_one_page.py --world_size 2

It starts from the final model of configs/countdown_warmup.yaml. A round samples n answers to each question, keeps at
most k different answers with reward 1, and minimises their cross-entropy. Questions without a right answer are left
out. As in RAFT, a round starts from the weights of the round before it. ReST-EM starts every round from the first
model; k is its limit of answers per question, which keeps easy questions from outweighing hard ones.

*Source*: RAFT, Dong et al. 2023, arXiv 2304.06767; ReST-EM, Singh et al. 2023, arXiv 2312.06585.
custom_loop.py does the same from a random model, with reference answers to questions without a right answer.
"""

import argparse

import numpy as np
import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import vectorlm
from vectorlm.algorithms.logprobs import token_logprobs
from vectorlm.algorithms.reduce import reduce_loss
from vectorlm.data.prompts import read_prompts
from vectorlm.rl.prompts import PromptOrder
from vectorlm.rl.rewards.countdown import countdown_reward

NUM_QUESTIONS, BATCH, SEED = 256, 64, 0
SAMPLING = {"temperature": 1.0, "max_tokens": 12}


def loop(path: str, prompts: str, held_out: str, n: int, k: int, num_rounds: int, lr: float) -> list[float]:
    """Train, and return the share of right held-out answers before and after."""
    here = vectorlm.Topology.from_environment()
    order, unseen = PromptOrder(read_prompts(prompts), SEED), read_prompts(held_out)
    with vectorlm.SamplingEngine(path, dtype="float32", max_model_len=64) as engine:
        policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for block in policy.model.layers:
            fully_shard(block)
        fully_shard(policy)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
        engine.update(policy, 0)
        shares = [accuracy(engine, unseen, here)]
        for step in range(1, num_rounds + 1):
            # Sample: n answers to each question, from the current policy.
            engine.update(policy, step - 1)
            questions = order.take(NUM_QUESTIONS)
            groups = sample(engine, questions, n, step)
            # Keep: the best answers, which are the right answers.
            kept = [choose(answers, question, k) for answers, question in zip(groups, questions, strict=True)]
            rows = [answer for answers in kept for answer in answers]
            # Train: one pass over them in whole batches; each rank takes its share of a batch.
            for start in range(0, len(rows) - BATCH + 1, BATCH):
                tokens, mask = pad(rows[start : start + BATCH])
                denominator, mine = int(mask.sum()), slice(here.rank, None, here.world_size)
                tokens, mask = tokens[mine].to(here.device), mask[mine].to(here.device)
                per_token = -token_logprobs(policy(tokens).logits, tokens)
                loss = reduce_loss(per_token, mask, "token_mean", denominator)
                # FSDP averages over ranks; this loss is a share of the sum.
                (loss * here.world_size).backward()
                torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if here.is_main:
                solved = sum(map(bool, kept)) / len(kept)
                print(f"round {step}: {solved:.0%} of the questions solved, {len(rows)} answers", flush=True)
        engine.update(policy, num_rounds)
        shares.append(accuracy(engine, unseen, here))
    return shares


def is_right(answer, question) -> bool:
    """Return whether an answer is right."""
    return countdown_reward(answer.text, **question.columns) == 1.0


def choose(answers, question, k: int) -> list:
    """Return at most `k` different right answers."""
    right = {answer.text: answer for answer in answers if is_right(answer, question)}
    return list(right.values())[:k]


def sample(engine, questions, n: int, step: int) -> list:
    """Sample n answers to each question, with a separate seed for each question."""
    seeds = np.random.default_rng((SEED, step)).integers(2**62, size=len(questions))
    params = [{**SAMPLING, "n": n, "seed": int(seed)} for seed in seeds]
    return engine.sample([question.prompt for question in questions], params)


def accuracy(engine, questions, here) -> float:
    """Print and return the share of sampled answers that are right; every call uses the same seeds."""
    groups = zip(sample(engine, questions, 4, step=0), questions, strict=True)
    marks = [is_right(answer, question) for answers, question in groups for answer in answers]
    if here.is_main:
        print(f"{sum(marks) / len(marks):.1%} of the held-out answers are right", flush=True)
    return sum(marks) / len(marks)


def pad(rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of prompts and answers [B, T], and a mask of the answers' tokens [B, T]."""
    length = max(len(row.prompt_token_ids) + len(row.token_ids) for row in rows)
    tokens, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length)
    for index, row in enumerate(rows):
        start, end = len(row.prompt_token_ids), len(row.prompt_token_ids) + len(row.token_ids)
        tokens[index, :end] = torch.tensor([*row.prompt_token_ids, *row.token_ids])
        mask[index, start:end] = 1
    return tokens, mask


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="runs/countdown_warmup/final-model")
    parser.add_argument("--prompts", default="data/countdown/train.jsonl")
    parser.add_argument("--held_out", default="data/countdown/held_out.jsonl")
    numbers = (
        ("n", int, 8),
        ("k", int, 1),
        ("num_rounds", int, 30),
        ("lr", float, 3e-4),
        ("world_size", int, 1),
    )
    for name, kind, default in numbers:
        parser.add_argument(f"--{name}", type=kind, default=default)
    args = parser.parse_args()
    settings = (args.model, args.prompts, args.held_out, args.n, args.k, args.num_rounds, args.lr)
    vectorlm.launch(loop, *settings, world_size=args.world_size)
