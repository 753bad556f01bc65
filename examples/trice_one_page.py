"""TRICE on one page: the model learns from right answers that it sampled, of which each question remembers one.

python examples/trice_one_page.py --world_size 2

It starts from the final model of configs/countdown_warmup.yaml. A Countdown answer is its own derivation. The whole
answer is therefore the latent rationale z of its question x, and p(right | z, x) is 1 or 0. Each question remembers a
right rationale. The policy proposes another, which replaces the remembered one if it is right: a step of a Markov
chain towards p(z | x, right). One optimizer step then follows the mean over questions of

    grad log p(remembered | x) - beta * grad log p(proposed | x),

where beta is the share of right proposals among the *other* questions. The second term is 0 on average and reduces
the variance: an accepted proposal has weight 1 - beta, a rejected one -beta, and if all are right the gradient is 0.

*Source*: Phan et al. 2023, arXiv 2312.02179. The paper draws the first rationales from a guide that sees the answer;
here they are right samples of the model itself. A question without a right sample stays out of the loss until one of
its proposals has been right. The paper trains on a weighted subsample of the rationales, this page on all of them.
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

NUM_QUESTIONS, BATCH, NUM_FIRST, SEED = 2048, 128, 8, 0
SAMPLING = {"temperature": 1.0, "max_tokens": 12}


def loop(path: str, prompts: str, held_out: str, num_steps: int, lr: float) -> list[float]:
    """Train, and return the share of right held-out answers before and after."""
    here = vectorlm.Topology.from_environment()
    questions, unseen = read_prompts(prompts)[:NUM_QUESTIONS], read_prompts(held_out)
    order = PromptOrder(range(len(questions)), SEED)
    with vectorlm.SamplingEngine(path, dtype="float32", max_model_len=64) as engine:
        policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for block in policy.model.layers:
            fully_shard(block)
        fully_shard(policy)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
        engine.update(policy, 0)
        shares, memory = [accuracy(engine, unseen, here)], {}
        # Begin each chain with a right sample of the policy, which is a sample of p(z | x, right).
        for first in zip(*propose(engine, questions, NUM_FIRST, step=0), strict=True):
            memory = accept(memory, range(len(questions)), first, mark(first, questions))
        for step in range(1, num_steps + 1):
            # Propose: one rationale for each question, from the current policy.
            engine.update(policy, step - 1)
            places = list(dict.fromkeys(order.take(BATCH)))
            asked = [questions[place] for place in places]
            proposals = [answers[0] for answers in propose(engine, asked, 1, step)]
            is_right, takes_part = mark(proposals, asked), [place in memory for place in places]
            # Accept: a right proposal becomes the rationale of its question.
            memory = accept(memory, places, proposals, is_right)
            remembered = [
                memory.get(place, proposal) for place, proposal in zip(places, proposals, strict=True)
            ]
            weights = torch.cat(trice_weights(torch.tensor(is_right), torch.tensor(takes_part)))
            # Train: this rank's share of the rationales and proposals, in one optimizer step.
            tokens, mask = pad(remembered + proposals)
            mine = slice(here.rank, None, here.world_size)
            tokens, mask, weights = (tensor[mine].to(here.device) for tensor in (tokens, mask, weights))
            per_token = -weights[:, None] * token_logprobs(policy(tokens).logits, tokens)
            loss = reduce_loss(per_token, mask, "sequence_mean_token_sum", max(sum(takes_part), 1))
            (loss * here.world_size).backward()  # FSDP averages over ranks; this loss is a share of the sum
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if here.is_main:
                right = sum(is_right) / len(is_right)
                known = f"{len(memory)} of {len(questions)} questions have a rationale"
                print(f"step {step}: {right:.0%} of the proposals right, {known}", flush=True)
        engine.update(policy, num_steps)
        shares.append(accuracy(engine, unseen, here))
    return shares


def trice_weights(is_right: torch.Tensor, takes_part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of the remembered rationales, 1, and of the proposals, -beta; 0 for a question left out.

    beta of a question is the share of right proposals among the other questions that take part. With its own proposal,
    beta would depend on the proposal that it scales, and the second term would not be 0 on average.

    Args:
        is_right: bool [P], whether the proposal of each question is right.
        takes_part: bool [P], whether the question had a rationale before this step.
    """
    takes_part = takes_part.float()
    is_right = is_right.float() * takes_part
    beta = (is_right.sum() - is_right) / (takes_part.sum() - 1).clamp(min=1)
    return takes_part, -beta * takes_part


def accept(memory: dict, places, proposals, is_right) -> dict:
    """Return the memory after each right proposal has replaced the rationale of its question."""
    found = zip(places, proposals, is_right, strict=True)
    return memory | {place: proposal for place, proposal, right in found if right}


def propose(engine, questions, count: int, step: int) -> list:
    """Sample answers to each question with a separate seed; with one seed for all, proposals would be alike."""
    seeds = np.random.default_rng((SEED, step)).integers(2**62, size=len(questions))
    params = [{**SAMPLING, "n": count, "seed": int(seed)} for seed in seeds]
    return engine.sample([question.prompt for question in questions], params)


def mark(answers, questions) -> list[bool]:
    """Return for each answer whether it is right."""
    pairs = zip(answers, questions, strict=True)
    return [countdown_reward(answer.text, **question.columns) == 1.0 for answer, question in pairs]


def accuracy(engine, questions, here) -> float:
    """Print and return the share of sampled answers that are right; every call uses the same seeds."""
    groups = propose(engine, questions, 4, step=0)
    share = sum(sum(mark(answers, questions)) for answers in zip(*groups, strict=True)) / (4 * len(questions))
    if here.is_main:
        print(f"{share:.1%} of the held-out answers are right", flush=True)
    return share


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
    for name, kind, default in (("num_steps", int, 100), ("lr", float, 3e-4), ("world_size", int, 1)):
        parser.add_argument(f"--{name}", type=kind, default=default)
    args = parser.parse_args()
    settings = (args.model, args.prompts, args.held_out, args.num_steps, args.lr)
    vectorlm.launch(loop, *settings, world_size=args.world_size)
