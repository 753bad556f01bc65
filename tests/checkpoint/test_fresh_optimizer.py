"""Reading the state of an optimizer that has made no step, to save it, does not change its first one."""

import torch

from vectorlm.checkpoint.state import state_of
from vectorlm.types import TrainedModel


def first_step(saves):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if saves:
        state_of(TrainedModel(model, optimizer))
        assert not optimizer.state
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    assert all(state["step"] == 1 for state in optimizer.state.values())
    return model.weight.detach()


def test_a_saved_run_makes_the_step_of_one_that_was_never_saved():
    assert torch.equal(first_step(saves=True), first_step(saves=False))
