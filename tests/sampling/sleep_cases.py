"""A vLLM backend for a sampler process to import: its sleep discards the same tensors as vLLM's level 2."""

from __future__ import annotations

import gc
import os
import types
from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from vectorlm.sampling.backends.vllm.backend import VLLM, prepare_process, start_worker
from vectorlm.sampling.weights.unlisted import COPIED_BYTES

__all__ = ["Discarding", "prepare_process", "start_worker"]

OWNERS = (
    "vllm.model_executor",
    "vllm._custom_ops",
    "vllm.lora",
    "torch.nn.modules",
    "transformers.models",
    __name__,
)
"""Modules of the classes whose tensors a sleep discards."""
FOLLOWED = (dict, OrderedDict, list, tuple, types.CellType)
PLANT = "VECTORLM_TEST_PLANT"
"""Name of the variable with an engine's planted hazard, a key of `PLANTS`."""


@dataclass
class Scales:
    """A reference cycle that holds a tensor."""

    by_name: dict = field(default_factory=dict)
    owner: object = None


def small(layer):
    layer.quant_method.scales = Scales({"k": [torch.ones(7)]}, layer.quant_method)


def large(layer):
    layer.table = torch.ones(COPIED_BYTES // 4 + 1)


def number(layer):
    layer.factor = 1.0
    # vLLM's layers return the product and a bias.
    layer.register_forward_hook(lambda layer, given, answer: (answer[0] * layer.factor, *answer[1:]))


PLANTS = {"small": small, "large": large, "number": number}


def layer_of(worker):
    """Return the last linear layer of the model."""
    from vllm.model_executor.layers.linear import LinearBase

    return [layer for layer in worker.model_runner.get_model().modules() if isinstance(layer, LinearBase)][-1]


def plant(worker, name):
    if name:
        PLANTS[name](layer_of(worker))


def change_number(worker):
    if hasattr(layer := layer_of(worker), "factor"):
        layer.factor = 1.5


def discard(worker):
    """Overwrite the tensors that a sleep loses: parameters, and all tensors except buffers and the KV cache.

    Find tensors by the garbage collector's references, because the code under test finds them in another way.
    """
    model = worker.model_runner.get_model()
    kept = {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
    caches = [getattr(module, "kv_cache", []) for module in model.modules()]
    kept |= {cache.untyped_storage().data_ptr() for cache in tensors_in(caches)}
    for tensor in tensors_in(model):
        if tensor.untyped_storage().data_ptr() not in kept:
            tensor.data.fill_(77)


def tensors_in(root):
    found, left = {id(root): root}, [root]
    while left:
        value = left.pop()
        if type(value).__module__.startswith(OWNERS) or type(value) in FOLLOWED:
            for part in gc.get_referents(value):
                if id(part) not in found and not isinstance(part, type | types.ModuleType):
                    found[id(part)] = part
                    left.append(part)
    return [value for value in found.values() if isinstance(value, torch.Tensor)]


class Discarding(VLLM):
    """A vLLM backend on CPU whose weights are garbage after a sleep."""

    def __init__(self, model, **arguments):
        super().__init__(model, **arguments)
        self._engine.collective_rpc(plant, args=(os.environ.get(PLANT, ""),))

    def sleep(self, parts, asleep):
        super().sleep(parts, asleep)
        self._engine.collective_rpc(change_number)
        if "weights" in parts:
            self._engine.collective_rpc(discard)
