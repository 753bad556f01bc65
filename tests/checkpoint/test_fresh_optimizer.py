"""Looking at an optimizer that has made no step, to save it, changes nothing about its first one."""

import torch

from vectorlm.checkpoint.state import Part


def first_step(saves):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    part = Part(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    assert part.is_fresh
    if saves:
        part.state()
        assert part.is_fresh
    model(torch.ones(2, 4)).square().sum().backward()
    part.optimizer.step()
    assert not part.is_fresh
    assert all(state["step"] == 1 for state in part.optimizer.state.values())
    return model.weight.detach()


def test_a_saved_run_makes_the_step_of_one_that_was_never_saved():
    assert torch.equal(first_step(saves=True), first_step(saves=False))
