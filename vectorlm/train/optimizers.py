"""The optimizers that a run may name, their arguments and what they keep of each trained weight."""

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
    """An optimizer of a library, a class of its module ``optim``."""

    package: str
    class_name: str
    source: str
    """The file of the package that declares the class."""
    per_rank_blocks: int = 0
    """Numbers of a rank's shard that share a scale in the optimizer's state; 0 keeps plain numbers."""
    bits: int = 0
    """Size of such a number."""
    not_taken: Set[str] = frozenset()
    """Arguments that mean something else than the settings of their names."""

    @property
    def arguments(self) -> Set[str]:
        """Names of the arguments that it takes."""
        return arguments_of(self.source, self.class_name, self.package) - {"params"} - self.not_taken


OPTIMIZERS: Mapping[str, OptimizerRow] = {
    "adamw": OptimizerRow("torch", "AdamW", "optim/adamw.py"),
    "adamw8bit": OptimizerRow("torchao", "AdamW8bit", "optim/adam.py", 256, 8),
    "adamw4bit": OptimizerRow("torchao", "AdamW4bit", "optim/adam.py", 128, 4),
    # Its eps is of the iteration that makes a matrix orthogonal; the setting is of its AdamW.
    "muon": OptimizerRow("torch", "Muon", "optim/_muon.py", not_taken={"eps"}),
    # Two numbers.
    "adafactor": OptimizerRow("torch", "Adafactor", "optim/_adafactor.py", not_taken={"eps"}),
    "sgd": OptimizerRow("torch", "SGD", "optim/sgd.py"),
}


def accepted(name: str) -> Set[str]:
    """Return the arguments of an optimizer, by its name; none of one that does not exist.

    Raises:
        ConfigError: `name` is a ``file.py:NAME`` that cannot be imported.
    """
    if ":" in name:
        return set(inspect.signature(load_plugin(name)).parameters) - {"params"}
    taken: Set[str] = OPTIMIZERS[name].arguments if name in OPTIMIZERS else set()
    # Muon has no `maximize`: its matrices would fall while its AdamW climbs.
    return taken | (OPTIMIZERS["adamw"].arguments - {"maximize"}) if name == "muon" else taken


def make_optimizer(
    settings: OptimizerSettings, model: torch.nn.Module, is_cuda: bool, lr: float | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer of the trainable parameters of `model`; `lr` replaces the learning rate of the settings."""
    import torch

    given = asdict(settings)
    name, more = given.pop("name"), dict(given.pop("arguments"))
    if lr is not None:
        given["lr"] = lr
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    of_adamw = given
    if settings.fused is None and not settings.foreach:
        # On CUDA torch would else make a temporary copy of all its state at once.
        of_adamw = {**given, "fused": is_cuda or None}
    if name == "adamw":
        return torch.optim.AdamW(trained, **of_adamw)
    taken = accepted(name)
    if ":" in name:
        return load_plugin(name)(trained, **{key: given[key] for key in given.keys() & taken}, **more)
    from vectorlm.train.optimizer_step import Parts, WholeTensors, pass_lr_as_tensor

    row = OPTIMIZERS[name]
    kind = getattr(import_module(f"{row.package}.optim"), row.class_name)
    own = {key: given[key] for key in given.keys() & row.arguments} | more
    if name == "muon":
        from vectorlm.train.shard import transformer_blocks

        inside = {
            each for block in transformer_blocks(model) for each in block.parameters() if each.ndim == 2
        }
        # One row or column is orthogonal as it is, and ranks cannot share the iteration on it.
        matrices = [each for each in trained if each in inside and min(each.shape) > 1]
        chosen = set(matrices)
        rest = [each for each in trained if each not in chosen]
        # So that one learning rate fits both.
        parts = [kind(matrices, **{"adjust_lr_fn": "match_rms_adamw", **own})] if matrices else []
        return Parts([*parts, torch.optim.AdamW(rest, **of_adamw)] if rest else parts)
    optimizer = kind(trained, **own)
    if name == "adafactor":
        return WholeTensors(optimizer)
    return pass_lr_as_tensor(optimizer, is_cuda) if row.per_rank_blocks else optimizer


def state_bytes(settings: OptimizerSettings, bytes_per_weight: int, share_outside: float) -> float:
    """Return the bytes of optimizer state of each trained weight; `share_outside` of them lie outside the blocks."""
    row, averages = OPTIMIZERS.get(settings.name), 3 if settings.amsgrad else 2
    if settings.name == "muon":
        return bytes_per_weight * (1 - share_outside + averages * share_outside)
    if settings.name == "adafactor":
        return 0.0  # A row and a column of each matrix.
    if settings.name == "sgd":
        return float(bytes_per_weight) if settings.arguments.get("momentum") else 0.0
    if row is not None and row.per_rank_blocks:
        return averages * (row.bits / 8 + 4 / settings.arguments.get("block_size", row.per_rank_blocks))
    return averages * bytes_per_weight
