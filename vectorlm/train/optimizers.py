"""Optimizers by name: their arguments, and the size of their state."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from vectorlm.packages import arguments_of
from vectorlm.plugin import load_plugin
from vectorlm.train.settings import OptimizerSettings

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OptimizerRow:
    """An optimizer class in the module ``optim`` of a library."""

    package: str
    class_name: str
    source: str
    """File in the package that declares the class."""
    per_rank_blocks: int = 0
    """How many numbers of a rank's shard share a scale in the quantised state; 0 for a state of plain numbers."""
    bits: int = 0
    """Size of a quantised number, in bits."""
    not_taken: Set[str] = frozenset()
    """Arguments whose meaning differs from the setting of the same name."""

    @property
    def arguments(self) -> Set[str]:
        """Names of the arguments of the class."""
        return arguments_of(self.source, self.class_name, self.package) - {"params"} - self.not_taken


OPTIMIZERS: Mapping[str, OptimizerRow] = {
    "adamw": OptimizerRow("torch", "AdamW", "optim/adamw.py"),
    "adamw8bit": OptimizerRow("torchao", "AdamW8bit", "optim/adam.py", 256, 8),
    "adamw4bit": OptimizerRow("torchao", "AdamW4bit", "optim/adam.py", 128, 4),
    # Muon's eps is for the iteration that makes a matrix orthogonal; the setting is for its AdamW.
    "muon": OptimizerRow("torch", "Muon", "optim/_muon.py", not_taken={"eps"}),
    # Adafactor's eps is a pair of numbers.
    "adafactor": OptimizerRow("torch", "Adafactor", "optim/_adafactor.py", not_taken={"eps"}),
    "sgd": OptimizerRow("torch", "SGD", "optim/sgd.py"),
}


def accepted(name: str) -> Set[str]:
    """Return the arguments of an optimizer by its name; an empty set if the name is unknown.

    Raises:
        ConfigError: `name` is a ``file.py:NAME`` that cannot be imported.
    """
    if ":" in name:
        return set(inspect.signature(load_plugin(name)).parameters) - {"params"}
    taken: Set[str] = OPTIMIZERS[name].arguments if name in OPTIMIZERS else set()
    # Muon has no `maximize`: its matrices would descend while its AdamW ascends.
    return taken | (OPTIMIZERS["adamw"].arguments - {"maximize"}) if name == "muon" else taken


def make_optimizer(
    settings: OptimizerSettings, model: torch.nn.Module, is_cuda: bool, lr: float | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer of the trainable parameters of `model`; `lr` overrides the learning rate of the settings."""
    import torch

    given = asdict(settings)
    name, more = given.pop("name"), dict(given.pop("arguments"))
    if lr is not None:
        given["lr"] = lr
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adamw = given
    if settings.fused is None and not settings.foreach:
        # torch's default makes a temporary copy of the whole state on CUDA, and takes four times as long on CPU.
        adamw = {**given, "fused": True}
    from vectorlm.train.optimizer_step import Parts, WholeTensors, pass_lr_as_tensor, step_by_mesh

    if name == "adamw":
        return step_by_mesh(torch.optim.AdamW(trained, **adamw))
    taken = accepted(name)
    if ":" in name:
        return load_plugin(name)(trained, **{key: given[key] for key in given.keys() & taken}, **more)

    row = OPTIMIZERS[name]
    kind = getattr(import_module(f"{row.package}.optim"), row.class_name)
    own = {key: given[key] for key in given.keys() & row.arguments} | more
    if name == "muon":
        matrices = muon_matrices(model)
        chosen = set(matrices)
        rest = [weight for weight in trained if weight not in chosen]
        # With this adjustment one learning rate fits both optimizers.
        parts = [kind(matrices, **{"adjust_lr_fn": "match_rms_adamw", **own})] if matrices else []
        return Parts([*parts, step_by_mesh(torch.optim.AdamW(rest, **adamw))] if rest else parts)
    optimizer = step_by_mesh(kind(trained, **own))
    if name == "adafactor":
        return WholeTensors(optimizer)
    return pass_lr_as_tensor(optimizer, is_cuda) if row.per_rank_blocks else optimizer


def muon_matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the trained weights of `model` that Muon steps: matrices in the blocks. AdamW steps the others."""
    from vectorlm.train.shard import transformer_blocks

    inside = {weight for block in transformer_blocks(model) for weight in block.parameters()}
    # A single row or column is already orthogonal, and ranks cannot share the iteration on it. Stacked experts have
    # three dimensions.
    return [
        weight
        for weight in model.parameters()
        if weight.requires_grad and weight in inside and weight.ndim == 2 and min(weight.shape) > 1
    ]


def state_bytes(settings: OptimizerSettings, bytes_per_weight: int, adamw_share: float) -> float:
    """Return the bytes of optimizer state per trained weight; with Muon, AdamW steps `adamw_share` of the weights."""
    row, averages = OPTIMIZERS.get(settings.name), 3 if settings.amsgrad else 2
    if settings.name == "muon":
        return bytes_per_weight * (1 - adamw_share + averages * adamw_share)
    if settings.name == "adafactor":
        return 0.0  # Negligible: one row and one column per matrix.
    if settings.name == "sgd":
        return float(bytes_per_weight) if settings.arguments.get("momentum") else 0.0
    if row is not None and row.per_rank_blocks:
        return averages * (row.bits / 8 + 4 / settings.arguments.get("block_size", row.per_rank_blocks))
    return averages * bytes_per_weight
