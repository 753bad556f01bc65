"""Learn where an engine puts each checkpoint tensor, by watching its own loader."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vectorlm.errors import WeightMismatch
from vectorlm.weights.plan import TensorSpec

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
"""An engine model's ``load_weights``: takes (checkpoint name, tensor) pairs."""


@dataclass(frozen=True)
class View:
    """A strided piece of a tensor, counted in elements from the tensor's first one."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, piece: torch.Tensor, offset: int) -> View:
        """Describe `piece`, which starts `offset` elements into the tensor."""
        return cls(tuple(piece.shape), tuple(piece.stride()), offset)

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this piece of the contiguous `tensor`."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)

    @property
    def is_whole(self) -> bool:
        """Whether the piece is one contiguous run of elements."""
        return self.stride == torch.empty(self.shape, device="meta").stride()

    @property
    def count(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Copy:
    """One copy that the loader makes: a piece of a trainer's parameter into a piece of one of the engine's."""

    source: str
    """Name of the trainer's parameter."""
    source_view: View
    parameter: str
    """Name of the engine's parameter."""
    parameter_view: View


def record_loading(
    load_weights: Loader, parameters: Mapping[str, torch.Tensor], manifest: Sequence[TensorSpec]
) -> list[Copy]:
    """Run the engine's loader on tensors without data, and write down every copy it would make.

    This is right for any architecture whose loader only slices and copies (fused projections, padded vocabularies,
    experts), because it is that loader. No weight changes. A worker of a parallel engine takes its pieces only.

    Args:
        load_weights: The engine model's loader.
        parameters: The engine's parameters by name; tied ones once.
        manifest: What the trainer sends.

    Returns:
        The copies, in the order of the manifest.

    Raises:
        WeightMismatch: The loader does not know a name, rejects a shape, or computes with a tensor.
    """
    recorder = _Recorder(parameters)
    for spec in manifest:
        source = torch.empty(spec.shape, device="meta")
        recorder.watch(spec.name, source)
        try:
            with recorder:
                load_weights(_checkpoint_tensors(spec, source))
        except WeightMismatch:
            raise
        except Exception as error:
            raise WeightMismatch(
                f"the trainer sends {spec.name!r} with shape {spec.shape}, which the engine's loader rejects: "
                f"{type(error).__name__}: {error}"
            ) from error
    return recorder.copies


def _checkpoint_tensors(spec: TensorSpec, whole: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return what the loader would find in the checkpoint: the parameter itself, or views of its pieces."""
    pieces = [(each.name, whole.as_strided(each.shape, each.stride, each.offset)) for each in spec.pieces]
    return pieces or [(spec.name, whole)]


class _Recorder(TorchDispatchMode):
    """Catches copies from the watched tensor into a parameter, and lets everything else happen."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        # By address, not by storage: parameters that are views of an arena share one storage.
        self._owners = sorted((each.data_ptr(), name) for name, each in parameters.items())
        self._parameters = parameters
        self._name = ""
        self._storage = 0

    def watch(self, name: str, source: torch.Tensor) -> None:
        self._name, self._storage = name, source.untyped_storage()._cdata

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default or not args[1].is_meta or args[0].is_meta:
            return func(*args, **(kwargs or {}))
        target, source = args[0], args[1]
        if source.untyped_storage()._cdata != self._storage:
            raise WeightMismatch(
                f"the engine computes with {self._name!r} while loading it: it cannot be swapped directly."
            )
        owner, offset = self._owner_of(target)
        source_view = View.of(source, source.storage_offset())
        self.copies.append(Copy(self._name, source_view, owner, View.of(target, offset)))
        return target

    def _owner_of(self, target: torch.Tensor) -> tuple[str, int]:
        """Find the parameter that `target` is a piece of, and the element that it starts at."""
        place = bisect.bisect_right(self._owners, target.data_ptr(), key=lambda owner: owner[0]) - 1
        if place >= 0:
            start, name = self._owners[place]
            offset = (target.data_ptr() - start) // target.element_size()
            if offset < self._parameters[name].numel():
                return name, offset
        raise WeightMismatch(f"the engine loads {self._name!r} into something that is not a parameter.")
