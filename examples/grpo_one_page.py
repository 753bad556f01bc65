"""GRPO on one page: the whole algorithm, without options.

python examples/grpo_one_page.py --world_size 2

It starts from the final model of configs/countdown_warmup.yaml. Its losses equal the losses of rl_example_mp.py with
rl.algorithm: grpo and one optimizer step per batch; a test compares them. Shao et al. 2024, arXiv 2402.03300.
"""

import argparse

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import vectorlm
from vectorlm.algorithms.groups import group_advantages
from vectorlm.algorithms.logprobs import token_logprobs
from vectorlm.algorithms.policy_loss import ppo_policy_loss
from vectorlm.algorithms.reduce import reduce_loss
from vectorlm.data.prompts import read_prompts
from vectorlm.rl.prompts import PromptOrder
from vectorlm.rl.rewards.countdown import countdown_reward

NUM_PROMPTS, GROUP_SIZE, SEED = 64, 8, 0
SAMPLING = {"temperature": 1.0, "max_tokens": 12}


def loop(path: str, prompts: str, num_steps: int, lr: float) -> list[tuple[float, float]]:
    """Train, and return the loss of every step with the norm of its gradient."""
    here = vectorlm.Topology.from_environment()
    order, losses = PromptOrder(read_prompts(prompts), SEED), []
    with vectorlm.SamplingEngine(path, dtype="float32", max_model_len=64) as engine:
        policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for block in policy.model.layers:
            fully_shard(block)
        fully_shard(policy)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
        for step in range(num_steps):
            # Collect: update the engine to the policy's weights, and sample several answers to each question.
            engine.update(policy, step)
            first, prompt_records = order.position, order.take(NUM_PROMPTS)
            dice = [np.random.default_rng((SEED, first + place)) for place in range(NUM_PROMPTS)]
            params = [{**SAMPLING, "n": GROUP_SIZE, "seed": int(die.integers(0, 2**62))} for die in dice]
            groups = engine.sample([prompt_record.prompt for prompt_record in prompt_records], params)
            # Score: reward every answer, then compare it with the other answers of its group.
            rewards = torch.tensor(
                [
                    [countdown_reward(answer.text, **prompt_record.columns) for answer in answers]
                    for prompt_record, answers in zip(prompt_records, groups, strict=True)
                ]
            )
            advantages = group_advantages(rewards).flatten()
            # Train: one optimizer step on this rank's share of the rows, with the policy that sampled them.
            rows = [answer for answers in groups for answer in answers]
            tokens, mask = pad(rows)
            mine = slice(here.rank, None, here.world_size)
            logprobs = token_logprobs(
                policy(tokens[mine].to(here.device)).logits, tokens[mine].to(here.device)
            )
            per_token = ppo_policy_loss(logprobs, logprobs.detach(), advantages[mine, None].to(here.device))
            loss = reduce_loss(per_token, mask[mine].to(here.device), "sequence_mean_token_mean", len(rows))
            (loss * here.world_size).backward()  # FSDP averages over ranks; this loss is a share of the sum
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0).full_tensor().item()
            if norm > 0:  # if all rewards are equal, momentum would still move the weights
                optimizer.step()
            optimizer.zero_grad()
            total = loss.detach()
            if here.world_size > 1:
                dist.all_reduce(total)
            # At a ratio of 1 the loss is minus the mean advantage, which is 0; its gradient is not 0.
            losses.append((total.item(), norm))
            if here.is_main:
                right = (rewards == 1.0).float().mean()
                print(f"step {step + 1}: gradient {norm:.3f}, {right:.0%} of the answers right", flush=True)
    return losses


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
    for name, kind, default in (("num_steps", int, 100), ("lr", float, 3e-4), ("world_size", int, 1)):
        parser.add_argument(f"--{name}", type=kind, default=default)
    args = parser.parse_args()
    vectorlm.launch(loop, args.model, args.prompts, args.num_steps, args.lr, world_size=args.world_size)
