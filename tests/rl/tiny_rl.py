"""A tiny reinforcement learning run without an engine: real models and settings, random rollouts."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from kit.tensors import full
from transformers import AutoModelForCausalLM

from vectorlm.algorithms.registry import algorithm_names, get_algorithm
from vectorlm.algorithms.spec import AlgorithmSpec
from vectorlm.algorithms.support import WHOLE
from vectorlm.ranks.topology import Topology
from vectorlm.rl.models import (
    Critic,
    Reference,
    RLModels,
    SelfTeacher,
    ServerTeacher,
    Teacher,
    disable_dropout,
    load_critic,
    load_reference,
    num_logits,
)
from vectorlm.rl.prepare import correction_of, prepare_batch
from vectorlm.rl.rollout import Rollout, RolloutGroup, make_batch
from vectorlm.rl.settings import (
    SELF,
    CorrectionSettings,
    KLSettings,
    StepSettings,
    TeacherSettings,
    UpdateSettings,
)
from vectorlm.rl.update import Updater
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.load import load_model
from vectorlm.train.lora import add_lora
from vectorlm.train.optimizer_step import OptimizerStep
from vectorlm.train.packing import ContextGroup
from vectorlm.train.shard import DEFAULTS, load_sharded
from vectorlm.types import PromptRecord

NUM_GROUPS, GROUP_SIZE = 5, 4
SOME = ("grpo", "ppo", "online_dpo", "reinforce_pp", "clip_cov", "otb", "gdpo", "vespo", "gmpo")
"""One algorithm of each kind: on tokens, completions and pairs; with a critic, marks, gradient norms or parts."""
OTHERS = [name for name in algorithm_names() if name not in SOME]
BY_KIND = [SOME, pytest.param(OTHERS, marks=pytest.mark.slow)]


def random_groups():
    """Return groups of rollouts of 2 to 9 tokens over the tiny Llama's vocabulary, some with a tool's tokens."""
    generator = torch.Generator().manual_seed(0)

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
            reason = "length" if len(tokens) >= 8 else "stop"
            group.append(
                Rollout(PromptRecord("q"), prompt, tokens, is_policy, logprobs, versions, "text", reason)
            )
        groups.append(group)
    return groups


def random_rewards():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(NUM_GROUPS, GROUP_SIZE, generator=generator)
    rewards[1, 2] = torch.nan
    return rewards


def scored(groups, rewards):
    """Return the groups with these rewards [P, G] and a greedy completion of reward 0.5."""
    weights = {"mine": 1.0, "square": 0.5}
    return [
        RolloutGroup(group, row, {"mine": row, "square": row**2}, torch.tensor(0.5), reward_weights=weights)
        for group, row in zip(groups, rewards, strict=True)
    ]


def random_rows(algorithm, drop_truncated=False, teacher_prompt=None):
    """Return the rows that an algorithm trains on, made from the random rollouts."""
    groups = scored(random_groups(), random_rewards())
    spec = get_algorithm(algorithm)
    return make_batch(groups, spec, drop_truncated=drop_truncated, teacher_prompt=teacher_prompt)


@dataclass(frozen=True)
class TinyRun:
    """The models and settings of a run's steps."""

    models: RLModels
    spec: AlgorithmSpec
    settings: StepSettings
    topology: Topology

    def prepare(self, rows, kl_coef=0.0):
        return prepare_batch(rows, self.models, self.spec, self.settings, self.topology, kl_coef=kl_coef)

    def update(self, batch, step=0, kl_coef=0.0):
        return Updater(self.models, self.spec, self.settings, self.topology).update(
            batch, step, kl_coef=kl_coef
        )

    def descend(self, batch, kl_coef=0.0):
        """Make an update; return the decrease of each weight, and the metrics."""
        before = self.weights()
        metrics, after = self.update(batch, kl_coef=kl_coef), self.weights()
        return {name: before[name] - after[name] for name in before}, metrics

    def weights(self):
        """Return the full weights of policy and critic."""
        weights = whole(self.models.policy.model)
        if self.models.critic is not None:
            weights |= {f"critic.{name}": value for name, value in whole(self.models.critic.model).items()}
        return weights


def build(
    topology,
    folder,
    algorithm,
    *,
    lr=0.1,
    max_grad_norm=1.0,
    correction="off",
    hyperparameters=None,
    kl=None,
    has_reference=False,
    support=WHOLE,
    packs=True,
    teacher=None,
    teacher_scale=2.0,
    teacher_top=None,
    adapters=None,
    split=DEFAULTS,
    **update,
):
    """Return a tiny run with plain gradient descent; `update` changes single update settings.

    The teacher's weights are multiplied by `teacher_scale`, which lets one folder serve as policy and teacher.
    `teacher_top` replaces a teacher server. `split` may split the policy over the ranks.
    """
    topology = replace(topology, model_parallel=split.model_parallel)
    spec = get_algorithm(algorithm)
    if spec.needs_teacher and teacher is None:
        teacher = TeacherSettings(model=str(folder))
    defaults = {
        "num_epochs": 2,
        "num_mini_batches": 2,
        "max_tokens_per_micro_batch": 64,
        "entropy_coef": 0.01,
    }
    settings = StepSettings(
        hparams=replace(spec.settings, **(hyperparameters or {})),
        correction=correction_of(CorrectionSettings(preset=correction), spec),
        update=UpdateSettings(**(defaults | update)),
        kl=kl or KLSettings(),
        teacher=teacher,
        max_tokens=9,
    )

    def load(load):
        return load_sharded(load, topology)

    def descent(model, name):
        return OptimizerStep(
            model, torch.optim.SGD(model.parameters(), lr=lr), None, max_grad_norm, topology, name
        )

    def load_policy(is_empty):
        model = load_model(folder, is_empty=is_empty)
        return disable_dropout(model if adapters is None else add_lora(model, adapters))

    model = load_sharded(load_policy, topology, split)
    policy = LanguageModel(model, support=support, packs=packs, context=ContextGroup.of(topology))
    has_reference = has_reference or spec.needs_reference
    reference = (
        Reference(policy, load_reference(partial(load_model, folder), load)) if has_reference else None
    )
    critic = Critic(load_critic(folder, load), policy) if spec.needs_critic else None
    critic_step = None if critic is None else descent(critic.model, "critic")
    taught_by = None
    if teacher is not None:
        if teacher.server is not None:
            taught_by = ServerTeacher(None, topology, num_logits(model), teacher_top)
        elif teacher.model == SELF:
            taught_by = SelfTeacher(policy)
        else:
            taught_by = Teacher(
                policy, load_reference(partial(load_model, teacher.model), load, num_tokens=num_logits(model))
            )
            with torch.no_grad():
                for parameter in taught_by.model.parameters():
                    parameter.mul_(teacher_scale)
    models = RLModels(policy, descent(policy.model, "policy"), reference, critic, critic_step, taught_by)
    return TinyRun(models, spec, settings, topology)


def one_step(topology, folder, algorithm, **more):
    """Build a run of one optimizer step that subtracts the gradient from the weights."""
    defaults = {"num_epochs": 1, "num_mini_batches": 1, "max_grad_norm": 1e9, "lr": 1.0}
    return build(topology, folder, algorithm, **(defaults | more))


def leave_reference(run):
    """Move the policy of a run away from its reference; return the run."""
    with torch.no_grad():
        for parameter in run.models.policy.model.parameters():
            parameter.mul_(1.2)
    return run


def distributions(folder, scale=1.0, prompt=None):
    """Return the model's log-probabilities after each token of every random rollout, in float64, row by row.

    A `prompt` replaces all prompts; positions in the rows stay as with the original prompts.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    rollouts = [rollout for group in random_groups() for rollout in group]
    ids = [
        torch.tensor([[*(prompt or rollout.prompt_token_ids), *rollout.token_ids]]) for rollout in rollouts
    ]
    found = [torch.log_softmax(model(row).logits[0], dim=-1) for row in ids]
    if prompt is not None:
        found = [
            torch.cat([torch.zeros(len(rollout.prompt_token_ids) - 1, row.shape[1]), row[len(prompt) - 1 :]])
            for rollout, row in zip(rollouts, found, strict=True)
        ]
    return model, found


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def whole(model):
    """Return the full weights of a sharded model."""
    return {name: full(parameter).detach().clone() for name, parameter in model.named_parameters()}


def same(metrics):
    """Return the metrics that do not depend on the split of rows."""
    shared_out = ("balance/", "perf/trained_tokens")
    return {name: value for name, value in metrics.items() if not name.startswith(shared_out)}


def assert_alike(found, expected, rel=1e-3):
    """Check weights and metrics of two runs, which sum float32 numbers in different orders."""
    torch.testing.assert_close(found[0], expected[0], rtol=2e-4, atol=2e-6)
    assert same(found[1]) == pytest.approx(same(expected[1]), rel=rel, abs=rel / 100)
