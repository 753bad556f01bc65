"""A module and its optimizer as a trainer; tests/sampling/test_trainers.py holds it to the contract."""

import torch

from vectorlm.ranks.topology import Topology
from vectorlm.sampling.weights.arena import Arena
from vectorlm.sampling.weights.module_trainer import ModuleTrainer
from vectorlm.sampling.weights.plan import Layout, Slot


def trainer_of(topology):
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return ModuleTrainer(model, optimizer, lambda model, batch: model(batch).sum(), topology), model


def test_each_step_counts_descends_and_returns_the_loss_from_before_it():
    trainer, model = trainer_of(Topology())
    batch = torch.tensor([[1.0, 3.0]])
    assert trainer.version == 0
    assert trainer.step(batch) == {"loss": 4.0}
    assert (trainer.version, model.weight.tolist()) == (1, [[0.5, -0.5]])
    assert trainer.step(batch) == {"loss": -1.0}
    assert (trainer.version, model.weight.tolist()) == (2, [[0.0, -2.0]]), "gradients do not add up"


def test_it_writes_the_rows_of_the_rank_that_it_is_told():
    arena = Arena.create(64)
    layout = Layout(arena.path, 64, (Slot("weight", (1, 2), "float32", 0),))
    trainer, _ = trainer_of(Topology(rank=1, local_rank=1, world_size=2, local_world_size=2))
    assert trainer.publish(layout, True) == [0]
    assert not arena.bytes.any()
