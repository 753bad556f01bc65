"""One optimizer step of a sharded model: accumulate, check, clip, step, schedule the learning rate."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from vectorlm.errors import ConfigError, NonFiniteLoss
from vectorlm.ranks.topology import Topology
from vectorlm.sampling.weights.boxes import ranks_by_shard
from vectorlm.train.settings import BY_LOSS, PLATEAU_NAMES, gathers_once

COUNTED = (
    *("best", "num_bad_epochs", "num_good_epochs", "cooldown_counter", "warmup_counter", "reset_start"),
    *("last_epoch", "_streaming_avg"),
)
"""Keys of the progress of a schedule by the loss; its other keys are arguments, which a resumed run may change."""

NOISE = 1e-2
"""Largest relative difference between the gradients that two ranks have for a weight that both hold."""


@dataclass(frozen=True)
class OptimizerStep:
    """Makes the optimizer steps of one model; all ranks call the methods alike.

    For each step, call `backward` for each micro-batch, `require_finite` with the loss of the whole step, then
    `finish`. The weights change only in `finish`: a step that raises does not change them.
    """

    model: Any
    """A model sharded with FSDP2, or a plain one on a single rank."""
    optimizer: Optimizer
    schedule: Schedule | None
    """The schedule; None keeps the learning rate constant."""
    max_grad_norm: float
    topology: Topology
    name: str = "policy"
    """Name of the model in errors."""
    computes_in_bf16: bool = False
    """Whether FSDP2 casts the weights to bfloat16; see `gathers_once`."""

    def __post_init__(self) -> None:
        if self._gathers_once:
            self.model.set_reshard_after_forward(False)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Add the gradient of this rank's share of the step's loss; replicas exchange gradients if `is_last`."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_all_reduce(is_last)
        if self._gathers_once:
            self.model.set_requires_gradient_sync(is_last)
            self.model.set_reshard_after_backward(is_last)
        # FSDP averages gradients over ranks, but the loss is already a share of the whole step's loss.
        # Ranks that split a model have the same loss, which counts once.
        (loss * (self.topology.world_size // self.topology.model_parallel)).backward()

    @cached_property
    def _gathers_once(self) -> bool:
        parameters = list(self.model.parameters())
        num_trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        num_all = sum(parameter.numel() for parameter in parameters)
        device = torch.device(self.topology.device)
        memory = torch.cuda.get_device_properties(device).total_memory if self.topology.is_cuda else None
        return gathers_once(num_all, num_trained, self.topology.world_size, self.computes_in_bf16, memory)

    def require_finite(
        self,
        loss: float,
        step: int,
        details: str = "over all ranks",
        look_at: str = "the rewards in rollouts.jsonl",
    ) -> None:
        """Raise `NonFiniteLoss` unless the loss of `step` is finite; the message has `details` and `look_at`."""
        if not math.isfinite(loss):
            raise NonFiniteLoss(
                f"the {self.name}'s loss is {loss} at step {step} ({details}): training stops before the weights "
                f"change. Lower the learning rate, or look at {look_at}."
            )

    def finish(self, step: int) -> dict[str, float]:
        """Clip the gradient, update the weights, step the schedule; return `grad_norm` and `learning_rate`.

        If the gradient is 0 everywhere, the optimizer is skipped: momentum and weight decay would move the weights.
        """
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters]
        is_split = self.topology.model_parallel > 1
        if is_split:
            named = self.model.named_parameters()
            total = norm_of_split({name: x for name, x in named if x.requires_grad}, self.topology)
        else:
            total = get_total_norm(gradients)
        norm = (total.full_tensor() if isinstance(total, DTensor) else total).item()
        if not math.isfinite(norm):
            raise NonFiniteLoss(
                f"the {self.name}'s gradient norm is {norm} at step {step} (over all ranks, seen on rank "
                f"{self.topology.rank}) although the loss is finite: training stops before the weights change. "
                "Lower the learning rate, or train without use_mp."
            )
        # torch would also multiply gradients by 1. It adds the same small number.
        if norm + 1e-6 > self.max_grad_norm:
            if is_split:
                torch._foreach_mul_(list(map(_local, gradients)), self.max_grad_norm / (norm + 1e-6))
            else:
                clip_grads_with_norm_(parameters, self.max_grad_norm, total)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        if norm > 0:
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step()
        return {"grad_norm": norm, "learning_rate": learning_rate}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def norm_of_split(trained: Mapping[str, torch.Tensor], topology: Topology) -> torch.Tensor:
    """Return the norm of the gradients of weights that are split over ranks.

    The weights are on several meshes, and torch cannot combine tensors of different meshes. A shard that several ranks
    have counts as a fraction on each rank.

    Raises:
        ConfigError: Ranks that hold the same weight have different gradients for it.
    """
    found = torch.zeros(topology.world_size, len(trained), dtype=torch.float64, device=topology.device)
    holders: list[Sequence[Sequence[int]]] = []
    for index, weight in enumerate(trained.values()):
        if weight.grad is not None:
            found[topology.rank, index] = torch.linalg.vector_norm(_local(weight.grad), dtype=torch.float32)
        holders.append([range(topology.world_size)])
        if isinstance(weight, DTensor):
            ranks = ranks_by_shard(weight.device_mesh, weight.placements, topology.world_size)
            holders[index] = [*ranks.values()]
    dist.all_reduce(found)
    found = found.cpu()
    shares = torch.tensor([1 / len(shards[0]) for shards in holders], dtype=torch.float64)
    total = (found.square() @ shares).sum().sqrt()
    for index, (name, shards) in enumerate(zip(trained, holders, strict=True)):
        copies = found[:, index][torch.tensor([list(ranks) for ranks in shards])]
        most = copies.amax(dim=1)
        if (most - copies.amin(dim=1) > NOISE * (most + NOISE * total)).any():
            raise ConfigError(
                f"train_parameters.tensor_parallel does not work with this model: transformers' plan leaves {name} "
                "whole, but the ranks have different gradients for it. Set it to 1."
            )
    return total.float()


class Schedule:
    """The learning rate over a run: call `step` after each optimizer step, `observe` after each evaluation.

    Most schedules of transformers depend only on the step. ``plateau-with-warmup`` first rises linearly: step k of W
    uses lr (k + 1) / (W + 1). Then it falls whenever the evaluation loss stops falling (torch's ReduceLROnPlateau).
    ``greedy`` uses transformers' GreedyLR, which may rise again, up to the peak.
    """

    def __init__(
        self, name: str, optimizer: Optimizer, *, num_warmup_steps: int, num_steps: int, **arguments: Any
    ) -> None:
        """Set the learning rate of the first step; the optimizer holds the peak learning rate.

        Raises:
            ValueError: transformers has no schedule `name`, or the schedule needs other `arguments`.
            TypeError: The schedule has no such argument.
        """
        from transformers import get_scheduler

        self._optimizer, self._name = optimizer, name
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self._num_warmup_steps = num_warmup_steps
        self._num_steps_done = 0
        self._follows_loss = name in BY_LOSS
        self._held: float | None = None
        self._inner: Any
        if name in PLATEAU_NAMES:
            self._inner = ReduceLROnPlateau(optimizer, **arguments)
        else:
            # GreedyLR's default bounds (1e-3 to 1) are orders of magnitude above usual learning rates.
            bounds = {"min_lr": 0.0, "max_lr": list(self._peaks)} if name == "greedy" else {}
            self._inner = get_scheduler(name, optimizer, num_warmup_steps, num_steps, {**bounds, **arguments})
        if self._follows_loss:
            self._warm_up()

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next optimizer step."""
        return self._optimizer.param_groups[0]["lr"]

    def go_to(self, num_steps: int) -> None:
        """Advance to the state after `num_steps` optimizer steps of the run, made or skipped."""
        while self._num_steps_done < num_steps:
            self.step()

    def hold(self, learning_rate: float) -> None:
        """Use `learning_rate` instead of the schedule from the next optimizer step on."""
        self._held = learning_rate
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            # The learning rates of several groups keep their proportions.
            group["lr"] = learning_rate * (peak / self._peaks[0] if self._peaks[0] else 1.0)

    def step(self) -> None:
        """Set the learning rate of the next optimizer step."""
        self._num_steps_done += 1
        if self._held is not None:
            return
        if not self._follows_loss:
            with warnings.catch_warnings():
                # torch warns if the first optimizer step was skipped because its gradient is 0.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                self._inner.step()
        elif self._num_steps_done <= self._num_warmup_steps:
            self._warm_up()

    def observe(self, eval_loss: float) -> None:
        """Take an evaluation loss, which plateau and greedy schedules follow after their warmup."""
        if self._follows_loss and self._held is None and self._num_steps_done >= self._num_warmup_steps:
            self._inner.step(eval_loss)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run; the optimizer's own state holds the learning rate."""
        return {
            "num_steps_done": self._num_steps_done,
            "name": self._name,
            "peaks": self._peaks,
            "held": self._held,
            "by_loss": self._inner.state_dict() if self._follows_loss else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the steps of `state`, whose schedule may have had another length, peak or name.

        A schedule by steps depends only on their number. A schedule by the loss keeps the learning rate of the
        optimizer's state, scaled to the new peak. If the name changed, it starts from its peak.
        """
        self._num_steps_done = state["num_steps_done"]
        if (held := state.get("held")) is not None:
            self.hold(held)
            return
        groups = self._optimizer.param_groups
        if not self._follows_loss:
            self._inner.last_epoch = self._num_steps_done
            for group, peak, factor in zip(groups, self._peaks, self._inner.lr_lambdas, strict=True):
                group["lr"] = peak * factor(self._num_steps_done)
        elif state["name"] == self._name:
            counted = {name: value for name, value in state["by_loss"].items() if name in COUNTED}
            self._inner.load_state_dict(counted)
            for group, now, before in zip(groups, self._peaks, state["peaks"], strict=True):
                if now != before:
                    group["lr"] = group["lr"] * now / before if before else now
        else:
            self._warm_up()

    def _warm_up(self) -> None:
        fraction = min((self._num_steps_done + 1) / (self._num_warmup_steps + 1), 1.0)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * fraction


class Parts(Optimizer):
    """Several optimizers stepped as one, with one parameter group each."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        groups = [group for part in parts for group in part.param_groups]
        # Schedules of transformers read the peak learning rate from the defaults.
        super().__init__(groups, {"lr": groups[0]["lr"]})
        self._parts = parts

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step each part on its group, which is set each time because loading a checkpoint replaces the groups."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
            part.step()


class WholeTensors(Optimizer):
    """An optimizer that needs whole tensors, stepped one tensor at a time; all ranks hold all of its state.

    Adafactor cannot step shard by shard, because its averages over columns cross the ranks.
    """

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self._inner = inner

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Gather each tensor, step it, and keep this rank's rows."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                whole, whole.grad = (
                    tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                    for tensor in (parameter.detach(), parameter.grad.detach())
                )
                self._inner.param_groups = [{**group, "params": [whole]}]
                self._inner.state = defaultdict(dict, {whole: self.state[parameter]})
                self._inner.step()
                if isinstance(parameter, DTensor):
                    mesh, placements = parameter.device_mesh, parameter.placements
                    own = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
                    parameter.to_local().copy_(own)
        self._inner.param_groups, self._inner.state = [], defaultdict(dict)


def step_by_mesh(optimizer: Optimizer) -> Optimizer:
    """Let an optimizer step the weights of one mesh at a time: torch's kernels for many tensors need a single mesh.

    Its groups are split only during the step: checkpoints of other layouts then have the same groups.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if len({weight.device_mesh for weight in weights if isinstance(weight, DTensor)}) < 2:
        return optimizer
    before: list[dict[str, Any]] = []

    def enter(*_: Any) -> None:
        before[:] = optimizer.param_groups
        groups = []
        for group in before:
            by_mesh = defaultdict(list)
            for parameter in group["params"]:
                by_mesh[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
            groups += [{**group, "params": parameters} for parameters in by_mesh.values()]
        optimizer.param_groups = groups

    def leave(*_: Any) -> None:
        optimizer.param_groups = [*before]

    optimizer.register_step_pre_hook(enter)
    optimizer.register_step_post_hook(leave)
    return optimizer


def pass_lr_as_tensor(optimizer: Optimizer, is_cuda: bool) -> Optimizer:
    """Pass the learning rate to torchao's optimizers as a tensor; schedules and checkpoints see a number.

    These optimizers compile their step. This is turned off on CPU, where compiling takes longer than it saves.
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
