"""The contract of trainers: our trainer keeps it, the checks catch broken trainers, and an engine follows a trainer."""

import copy
import dataclasses

import pytest
import torch
from kit.module_trainer import ModuleTrainer
from kit.rank_processes import on_ranks
from kit.tiny_engine import TINY_ENGINE
from peft import LoraConfig, get_peft_model
from swap_cases import compare
from transformers import AutoModelForCausalLM

from vectorlm import SamplingEngine
from vectorlm.errors import WeightMismatch
from vectorlm.ranks.topology import Topology
from vectorlm.sampling.contract import Trainer
from vectorlm.sampling.testing import TRAINER_CHECKS, TrainerUnderTest
from vectorlm.sampling.weights.arena import Arena


def loss_of(model, batch):
    return model(input_ids=batch, labels=batch).loss


def subject_of(folder, topology, kind=ModuleTrainer, adapters=None):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapters is not None:
        model = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **adapters))
    if topology.world_size > 1:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    names = [spec.name for spec in ModuleTrainer(model, optimizer, loss_of, topology).manifest()]

    def whole():
        merged = model if adapters is None else copy.deepcopy(model).merge_and_unload()
        state = {name: value for name, value in merged.named_parameters() if name in names}
        return {
            name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in state.items()
        }

    batch = torch.tensor([[2 + topology.rank, 5, 9, 4, 2]])
    return TrainerUnderTest(kind(model, optimizer, loss_of, topology), batch, whole, topology)


TINY_LLAMA = {"tied": True, "hidden_size": 64}


@pytest.mark.parametrize(
    "adapters",
    [
        None,
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    ],
    ids=["module", "LoRA", "LoRA and a norm"],
)
@pytest.mark.parametrize("check", TRAINER_CHECKS, ids=lambda check: check.__name__)
def test_a_module_and_its_optimizer_keep_the_contract(folder, check, adapters):
    subject = subject_of(folder, Topology(), adapters=adapters)
    assert isinstance(subject.trainer, Trainer)
    check(subject)


def keep_the_contract(topology, folder):
    subject = subject_of(folder, topology)
    for check in TRAINER_CHECKS:
        check(subject)


def test_two_ranks_keep_the_contract(folder):
    on_ranks(2, keep_the_contract, folder)


class Forgets(ModuleTrainer):
    """A trainer that publishes zeros for one tensor."""

    def publish(self, layout, with_checksums):
        whole = super().publish(layout, with_checksums)
        Arena.open(layout.path, layout.num_bytes).view(layout.slots[-1]).zero_()
        return whole


class Counts(ModuleTrainer):
    """A trainer with the same version after every step."""

    version = property(lambda self: 7, lambda self, value: None)


class Renames(ModuleTrainer):
    """A trainer that renames its tensors after a step."""

    def manifest(self):
        return [dataclasses.replace(spec, name=f"{spec.name}{self.version}") for spec in super().manifest()]


class Stands(ModuleTrainer):
    """A trainer that learns nothing."""

    def step(self, batch):
        self.version += 1
        return {"loss": 0.0}


class Drifts(ModuleTrainer):
    """A trainer that changes a weight while it publishes."""

    def publish(self, layout, with_checksums):
        sums = super().publish(layout, with_checksums)
        with torch.no_grad():
            next(self._model.parameters()).mul_(2)
        return sums


class Miscounts(ModuleTrainer):
    """A trainer that returns wrong checksums."""

    def publish(self, layout, with_checksums):
        return [checksum + 1 for checksum in super().publish(layout, with_checksums)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Forgets, "what_is_published_are_the_weights"),
        (Counts, "a_step_makes_the_next_version_and_other_weights"),
        (Renames, "the_manifest_is_the_same_everywhere_and_stays"),
        (Stands, "a_step_makes_the_next_version_and_other_weights"),
        (Drifts, "publishing_changes_nothing"),
        (Miscounts, "checksums_of_the_ranks_add_up"),
    ],
)
def test_a_trainer_that_breaks_a_rule_is_caught(folder, kind, name):
    (check,) = (check for check in TRAINER_CHECKS if check.__name__ == name)
    with pytest.raises(AssertionError):
        check(subject_of(folder, Topology(), kind))


def follow(topology, folder):
    subject = subject_of(folder, topology)
    trainer = subject.trainer
    with SamplingEngine(str(folder), topology=topology, **TINY_ENGINE) as engine:
        seen = []
        for _ in range(2):
            trainer.step(subject.batch)
            report = engine.update(trainer, trainer.version)
            assert report.version == trainer.version == engine.version
            reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            state = subject.whole()
            with torch.no_grad():
                for parameter_name, parameter in reference.named_parameters():
                    parameter.copy_(state[parameter_name])
            equal, gap, tokens = compare(engine, reference)
            assert all(equal)
            assert gap < 1e-4
            seen.append(tokens)
        assert seen[0] != seen[1]
        trainer.manifest = lambda: list(ModuleTrainer.manifest(trainer))[1:]
        with pytest.raises(WeightMismatch, match=r"missing: \['model.embed"):
            engine.update(trainer, 9)
        trainer.manifest = lambda: list(ModuleTrainer.manifest(trainer))[::-1]
        with pytest.raises(WeightMismatch, match="order"):
            engine.update(trainer, 9)
        assert engine.version == trainer.version


@pytest.mark.slow
def test_an_engine_follows_a_trainer(folder):
    on_ranks(2, follow, folder)
