"""Rollouts of one token, and batches made from a mask, for tests of code that reads them."""

import torch

from vectorlm.algorithms.batch import RolloutBatch, place_rewards
from vectorlm.rl.rollout import Rollout
from vectorlm.types import PromptRecord


def rollout_of(prompt, text="text", finish_reason="stop", **more):
    """Return a rollout of one token for a prompt or a prompt record."""
    record = prompt if isinstance(prompt, PromptRecord) else PromptRecord(prompt)
    return Rollout(record, (1,), (3,), (True,), (-1.0,), (0,), text, finish_reason, **more)


def batch_of(mask, rewards=None, sampler_logprobs=None):
    """Return one group whose rows are trained on where `mask` is set; rewards [1, K] are 0 unless given."""
    mask = torch.as_tensor(mask).bool()
    rewards = torch.zeros(1, len(mask)) if rewards is None else rewards
    return RolloutBatch(
        input_ids=torch.ones_like(mask, dtype=torch.int64),
        attention_mask=torch.ones_like(mask, dtype=torch.int64),
        mask=mask,
        sampler_logprobs=torch.zeros(mask.shape) if sampler_logprobs is None else sampler_logprobs,
        rewards=rewards,
        valid=torch.ones(rewards.shape, dtype=torch.bool),
        columns=torch.arange(rewards.shape[1])[None],
        token_rewards=place_rewards(mask, rewards),
    )
