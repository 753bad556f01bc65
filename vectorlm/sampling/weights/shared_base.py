"""One base in memory: a trainer's frozen weights as views of the parameters of its engine."""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from vectorlm.errors import EngineDied, HandleRefused, WeightMismatch
from vectorlm.ranks.topology import Topology
from vectorlm.sampling.weights.exports import DeviceHandle, FileHandle, Lent
from vectorlm.sampling.weights.model_tensors import trainer_tensors
from vectorlm.sampling.weights.plan import dtype_of


class SharedBase:
    """The parameters of a model that are views of an engine's parameters, on one rank."""

    def __init__(self, model: torch.nn.Module, views: Mapping[str, torch.Tensor], lent: Lent) -> None:
        """Put `views` in the place of the model's parameters of these names.

        Every forward pass raises `EngineDied` after the process that owns the memory has ended.
        """
        tensors = trainer_tensors(model)
        new = {id(tensors[name]): torch.nn.Parameter(view, False) for name, view in views.items()}
        for module in model.modules():
            for name, old in module._parameters.items():
                module._parameters[name] = new.get(id(old), old)
        frozen = [name for name, tensor in tensors.items() if isinstance(tensor, torch.nn.Parameter)]
        self.num_bytes = sum(view.nbytes for view in views.values())
        """Bytes that are in memory once."""
        self.num_private_bytes = sum(tensors[name].nbytes for name in frozen if name not in views)
        """Bytes of the other parameters of the base, of which the trainer keeps a copy."""
        self._states = [(weakref.ref(weight), _state(weight)) for weight in new.values()]
        self._fingerprint: Any = None
        for export in lent.exports:
            if isinstance(export.handle, DeviceHandle) and export.name in views:
                weight = new[id(tensors[export.name])]
                weakref.finalize(weight, export.handle.close, views[export.name]).atexit = False
        embeddings: Any = model
        embeddings.get_input_embeddings().register_forward_pre_hook(_Watch(lent.pid))

    @property
    def parameters(self) -> Collection[torch.nn.Parameter]:
        """The parameters that are views; none after the model is gone."""
        return [weight for ref, _ in self._states if (weight := ref()) is not None]

    @property
    def is_over(self) -> bool:
        """Whether the model is gone."""
        return not self.parameters

    def require_intact(self, model: Any, fingerprint: object) -> None:
        """Raise `WeightMismatch` for another model, or if the base of `model` was written to.

        `fingerprint` is the result of `vectorlm.sampling.weights.lora_source.Fingerprint`.
        """
        weights = {id(weight) for weight in getattr(model, "parameters", list)()}
        found = [ref() for ref, _ in self._states]
        if any(weight is None or id(weight) not in weights for weight in found):
            raise WeightMismatch(
                "the engine shares its base with the model of share_base(), so it cannot take another base. Send that "
                "model, drop it first, or build another engine."
            )
        is_written = [_state(ref()) for ref, _ in self._states] != [state for _, state in self._states]
        self._fingerprint = self._fingerprint or fingerprint
        if is_written or fingerprint != self._fingerprint:
            raise WeightMismatch(
                "share_base: the trainer has written to its frozen base, which is the engine's too. Train adapters "
                "alone, or build engine and model without share_base (in a config, train_parameters.share_base: false)."
            )


class _Watch:
    """A forward hook that raises `EngineDied` once a process has ended."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        try:
            self._process = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise EngineDied(self._text) from error
        weakref.finalize(self, os.close, self._process)

    @property
    def _text(self) -> str:
        return (
            f"share_base: the engine's process {self._pid} has ended, and its memory holds the frozen base of this "
            "model. Build engine and model again."
        )

    def __call__(self, *_: Any) -> None:
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        if any(event & select.POLLIN for _, event in poll.poll(0)):
            raise EngineDied(self._text)


def _state(weight: Any) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


def lent_to(near: Sequence[Lent], topology: Topology) -> Lent:
    """Return the loan of this rank among those of the engines on its node.

    Raises:
        HandleRefused: No engine computes on this rank's CUDA device.
    """
    if not topology.is_cuda:
        return near[0]
    own = torch.device(topology.device)
    for lent in near:
        handles = [export.handle for export in lent.exports]
        if all(isinstance(handle, DeviceHandle) and handle.is_on(own) for handle in handles):
            return lent
    raise HandleRefused(
        f"no engine runs on {topology.device}, and reading weights from another device in every pass is slow."
    )


def views_of(model: torch.nn.Module, lent: Lent) -> dict[str, torch.Tensor]:
    """Open what an engine lends of the frozen parameters of `model`; return it by name.

    Parameters of another dtype or shape are left out. On CPU, what this process writes to a view stays its own.

    Raises:
        HandleRefused: CUDA refuses, or the engine lends nothing that fits.
    """
    files: dict[str, torch.Tensor] = {}
    views: dict[str, torch.Tensor] = {}
    tensors = trainer_tensors(model)
    for export in lent.exports:
        handle, weight = export.handle, tensors.get(export.name)
        fits = isinstance(weight, torch.nn.Parameter) and not weight.requires_grad
        if (
            weight is None
            or not fits
            or (dtype_of(handle.dtype), handle.shape) != (weight.dtype, weight.shape)
        ):
            continue
        if isinstance(handle, FileHandle):
            if handle.path not in files:
                files[handle.path] = handle.map(is_shared=False)
            views[export.name] = handle.view(files[handle.path])
        else:
            views[export.name] = handle.open()
    if not views:
        ours, theirs = (
            {str(x) for x in found}
            for found in (
                (weight.dtype for weight in tensors.values()),
                (export.handle.dtype for export in lent.exports),
            )
        )
        raise HandleRefused(
            f"the engine lends no tensor in the trainer's dtype ({ours}, the engine has {theirs})."
        )
    return views
