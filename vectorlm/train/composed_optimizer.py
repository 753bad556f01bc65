"""Optimizers of libraries, as one optimizer of sharded weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


class Parts(Optimizer):
    """Steps several optimizers, of one group of weights each, and holds their groups and states."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        groups = [group for part in parts for group in part.param_groups]
        # Schedules of transformers read the peak there.
        super().__init__(groups, {"lr": groups[0]["lr"]})
        self._parts = parts

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step each part on its group, as a checkpoint may have replaced it."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
            part.step()


class WholeTensors(Optimizer):
    """Steps an optimizer that must see whole tensors, one tensor at a time; all ranks hold all of its state.

    Its step cannot be made shard by shard: Adafactor's averages over columns go across the ranks.
    """

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self._inner = inner

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Gather, step and keep the own rows of each tensor."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                whole, whole.grad = _whole(parameter), _whole(parameter.grad)
                self._inner.param_groups = [{**group, "params": [whole]}]
                self._inner.state = defaultdict(dict, {whole: self.state[parameter]})
                self._inner.step()
                if isinstance(parameter, DTensor):
                    place = parameter.device_mesh, parameter.placements
                    own = distribute_tensor(whole, *place, src_data_rank=None).to_local()
                    parameter.to_local().copy_(own)
        self._inner.param_groups, self._inner.state = [], defaultdict(dict)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def pass_lr_as_tensor(optimizer: Optimizer, is_cuda: bool) -> Optimizer:
    """Let the optimizers of torchao, which take it as a tensor, be scheduled and saved like all others.

    They compile their step, which on CPU would take longer than it saves.
    """
    before: list[Any] = []
    for group in optimizer.param_groups:
        group["lr"] = group["lr"].item()

    def enter(*_: Any) -> None:
        before[:] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)
        if not is_cuda:
            before.append(torch.compiler.set_stance("force_eager"))

    def leave(*_: Any) -> None:
        if not is_cuda:
            before.pop().__exit__(None, None, None)
        for group, lr in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = lr

    optimizer.register_step_pre_hook(enter)
    optimizer.register_step_post_hook(leave)
    return optimizer
