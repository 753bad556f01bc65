"""The checkpoints of a run: everything that a killed run needs to go on as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from vectorlm.checkpoint import folder
from vectorlm.checkpoint.rng import capture_rng, restore_rng
from vectorlm.errors import CheckpointError

NUM_KEPT = 2
"""Complete checkpoints that stay on disk."""

# Frozen weights are read from the model's own folder again; a LoRA checkpoint holds the adapters alone.
_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


@dataclass(frozen=True)
class Part:
    """A model of a run, with the optimizer that trains it."""

    model: nn.Module
    """Sharded."""
    optimizer: Optimizer | None
    """None for a model that is not trained; it is kept whole, its frozen weights too."""

    @property
    def is_fresh(self) -> bool:
        """Whether the optimizer has made no step yet."""
        return self.optimizer is not None and not self.optimizer.state

    def state(self) -> dict[str, Any]:
        """Return what is written, as tensors that `set_state` reads back."""
        if self.optimizer is None:
            return {"model": get_model_state_dict(self.model)}
        is_fresh = self.is_fresh
        weights, optimizer_state = get_state_dict(self.model, self.optimizer, options=_OPTIONS)
        if is_fresh:
            # To have something to return, torch made a step of its own, which would count in Adam's bias correction.
            self.optimizer.state.clear()
        return {"model": weights, "optimizer": optimizer_state}

    def set_state(self, state: dict[str, Any]) -> None:
        """Put model and optimizer back."""
        if self.optimizer is None:
            set_model_state_dict(self.model, state["model"])
            return
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_OPTIONS,
        )


class CheckpointStore:
    """The checkpoints under one folder, ``step-00000040/`` and so on, oldest ones deleted.

    A checkpoint holds the shards of the weights and of the optimizer's state, and for each rank its random
    generators and the loop's own state. It takes its name when all ranks have written, nobody sees it before.
    """

    def __init__(self, path: str | Path, identity: Mapping[str, Any]) -> None:
        """Look at the folder; nothing is written.

        Args:
            path: The folder, which need not exist.
            identity: JSON values that must be equal for a run to go on from another one's checkpoint.
        """
        self._path = Path(path)
        self._identity = json.loads(json.dumps(identity))

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, None where there is none.

        Raises:
            CheckpointError: It belongs to a run of another identity.
        """
        steps = self._steps()
        if not steps:
            return None
        self._check_identity(self._folder(steps[-1]))
        return steps[-1]

    def save(self, step: int, parts: Mapping[str, Part], loop: dict[str, Any]) -> None:
        """Write the checkpoint of `step`; called on all ranks.

        Args:
            step: Training steps done so far.
            parts: The models with their optimizers, by name.
            loop: This rank's own state, of tensors and plain values.
        """
        target, rank = self._folder(step), dist.get_rank()
        if rank == 0:
            folder.begin(target)
        dist.barrier()
        work = folder.unfinished(target)
        dcp.save({name: part.state() for name, part in parts.items()}, checkpoint_id=work / "shards")
        fresh = [name for name, part in parts.items() if part.is_fresh]
        torch.save({"loop": loop, "rng": capture_rng(), "fresh": fresh}, work / f"rank-{rank}.pt")
        dist.barrier()
        if rank == 0:
            (work / "identity.json").write_text(json.dumps(self._identity, indent=2))
            folder.finish(target)
            for old in self._steps()[:-NUM_KEPT]:
                folder.retire(self._folder(old))
        dist.barrier()

    def load(self, step: int, parts: Mapping[str, Part]) -> dict[str, Any]:
        """Put models, optimizers and random generators back to `step`; called on all ranks.

        Returns:
            What this rank passed as `loop` when it was saved.
        """
        source = self._folder(step)
        states = {name: part.state() for name, part in parts.items()}
        dcp.load(states, checkpoint_id=source / "shards")
        for name, part in parts.items():
            part.set_state(states[name])
        mine = torch.load(source / f"rank-{dist.get_rank()}.pt", weights_only=True)
        for name in mine["fresh"]:
            optimizer = parts[name].optimizer
            assert optimizer is not None
            optimizer.state.clear()
        restore_rng(mine["rng"])
        return mine["loop"]

    def _folder(self, step: int) -> Path:
        return self._path / f"step-{step:08d}"

    def _steps(self) -> list[int]:
        numbers = (path.name.removeprefix("step-") for path in self._path.glob("step-*"))
        return sorted(int(number) for number in numbers if number.isdigit())

    def _check_identity(self, checkpoint: Path) -> None:
        saved = json.loads((checkpoint / "identity.json").read_text())
        names = sorted(saved.keys() | self._identity.keys())
        differences = [
            f"{name} was {saved.get(name)!r} and is {self._identity.get(name)!r}"
            for name in names
            if saved.get(name) != self._identity.get(name)
        ]
        if differences:
            raise CheckpointError(
                f"cannot resume from {checkpoint}: {'; '.join(differences)}. A run resumes only with "
                "the settings it was started with. Restore them, choose another output_dir, or delete "
                f"{self._path}."
            )
