"""A tiny policy, critic and reference, and random rollouts, for the tests of the updates."""

import torch

from vectorlm.algorithms.registry import get_algorithm
from vectorlm.config.rl import CorrectionSettings
from vectorlm.data.questions import Question
from vectorlm.model.load import load_model
from vectorlm.model.shard import shard_model
from vectorlm.reinforce import knobs_of
from vectorlm.rl.correction import correction_of
from vectorlm.rl.models import load_critic, load_reference
from vectorlm.rl.roles import Critic, Policy, Reference, disable_dropout
from vectorlm.rl.score import Assessor
from vectorlm.rl.update import Updater, UpdateSettings
from vectorlm.rollout.batch import make_batch
from vectorlm.rollout.rollout import Rollout

NUM_GROUPS, GROUP_SIZE = 5, 4


def random_groups(seed=0):
    """Return groups of rollouts of 2 to 9 tokens over the tiny Llama's vocabulary, some with a tool's tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, count=1):
        return torch.randint(low, high, (count,), generator=generator).tolist()

    groups = []
    for _ in range(NUM_GROUPS):
        prompt = tuple(draw(2, 48, draw(2, 6)[0]))
        group = []
        for _ in range(GROUP_SIZE):
            tokens = tuple(draw(2, 48, draw(2, 10)[0]))
            is_policy = tuple(index != 1 or len(tokens) < 5 for index in range(len(tokens)))
            logprobs, versions = (-1.0,) * len(tokens), (0,) * len(tokens)
            reason = "length" if len(tokens) == 9 else "stop"
            group.append(
                Rollout(Question("q"), prompt, tokens, is_policy, logprobs, versions, "text", reason)
            )
        groups.append(group)
    return groups


def random_rewards(seed=0):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(NUM_GROUPS, GROUP_SIZE, generator=generator)
    rewards[1, 2] = torch.nan
    return rewards


def select(spec, groups, rewards):
    """Return the rows that an algorithm trains on."""
    selection = spec.select(rewards, torch.ones_like(rewards, dtype=torch.bool))
    chosen = [
        [group[column] for column in columns]
        for group, columns in zip(groups, selection.columns.tolist(), strict=True)
    ]
    return make_batch(chosen, rewards.gather(1, selection.columns), selection, pad_token_id=0)


class Settings:
    """An `rl` section in which everything is left to the algorithm."""

    def __getattr__(self, name):
        return None


def build(
    topology,
    folder,
    algorithm,
    *,
    lr=0.1,
    max_tokens=64,
    kl_coef=0.0,
    temperature=1.0,
    correction=None,
    **more,
):
    """Return assessor, updater and models of a tiny run with plain gradient descent."""
    spec = get_algorithm(algorithm)
    correction = correction_of(CorrectionSettings(**(correction or {})), spec)
    knobs = knobs_of(Settings(), spec)

    def shard(model):
        return shard_model(model, topology)

    policy = Policy(shard(disable_dropout(load_model(folder))), temperature)
    has_reference = spec.needs_reference or kl_coef > 0
    reference = Reference(policy, load_reference(folder, shard)) if has_reference else None
    critic = Critic(load_critic(folder, shard)) if spec.needs_critic else None
    settings = {
        "num_epochs": 2,
        "num_mini_batches": 2,
        "max_tokens_per_micro_batch": max_tokens,
        "reduction": spec.reduction,
        "fixed_length": 9,
        "kl_kind": "k3",
        "kl_straight_through": False,
        "entropy_coef": 0.01,
        "value_clip": 0.2,
        "max_grad_norm": 1.0,
        "critic_max_grad_norm": 1.0,
        "max_kl": None,
        "seed": 0,
    } | more
    assessor = Assessor(
        policy=policy,
        reference=reference,
        critic=critic,
        spec=spec,
        knobs=knobs,
        kl_in="loss",
        kl_kind="k3",
        whitens=bool(spec.settings.get("whiten_advantages")),
        is_one_step=settings["num_epochs"] * settings["num_mini_batches"] == 1,
        max_tokens=max_tokens,
        topology=topology,
        correction=correction,
    )
    updater = Updater(
        policy,
        torch.optim.SGD(policy.model.parameters(), lr=lr),
        critic,
        None if critic is None else torch.optim.SGD(critic.model.parameters(), lr=lr),
        spec=spec,
        knobs=knobs,
        settings=UpdateSettings(**settings),
        topology=topology,
        correction=correction,
    )
    return spec, assessor, updater


def whole(model):
    """Return the full weights of a sharded model."""
    return {name: parameter.full_tensor().detach().clone() for name, parameter in model.named_parameters()}


def same(metrics):
    """Return the metrics that do not depend on how rows are shared out."""
    return {name: value for name, value in metrics.items() if not name.startswith("balance/")}


__all__ = ["GROUP_SIZE", "NUM_GROUPS", "build", "random_groups", "random_rewards", "same", "select", "whole"]
