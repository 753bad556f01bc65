"""Hot swaps without vLLM: a trainer's model, and an engine with workers and scheduler in the rank's process."""

from __future__ import annotations

import torch
from receivers_here import receivers_of
from torch import nn

from vectorlm.ranks.collectives import Collectives
from vectorlm.ranks.engine_ranks import EngineRanks, results_or_first_error
from vectorlm.sampling.hot_swap import HotSwap
from vectorlm.sampling.sampler.scheduler import Scheduler
from vectorlm.sampling.settings import EngineSettings

TRANSPORTS = ("push", "bucketed", "pull")
SMALL_BUCKET = 128
"""Less than half the size of `Model`, whose tables then fill a round each."""


class Model(nn.Module):
    """A model to train; its seven rows and six columns do not divide evenly among two ranks or two workers."""

    def __init__(self, tied=False):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.up, self.gate = nn.Linear(4, 6), nn.Linear(4, 6, bias=False)
        self.down = nn.Linear(6, 4, bias=False)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.table.weight
        # One number that engines load, one count, and one buffer that engines make themselves.
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(2, 5).tril().bool())

    def forward(self, ids):
        x = self.norm(self.table(ids))
        return self.head(x * self.scale + self.down(self.up(x) * self.gate(x)))


class Worker(nn.Module):
    """The tensors of a worker: gate and up fused by rows, down by columns and transposed, the others whole."""

    def __init__(self, index, count, tied, dtype):
        super().__init__()
        self.place = slice(6 * index // count, 6 * (index + 1) // count)
        size = 6 // count
        shapes = {
            "gate_up": (2 * size, 4),
            "up_bias": (size,),
            "down": (size, 4),
            "table": (7, 4),
            "norm": (2, 4),
        }
        if not tied:
            shapes["head"] = (7, 4)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))
        self.register_buffer("scale", torch.ones((), dtype=dtype))
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))

    def load_weights(self, weights):
        for name, tensor in weights:
            target, piece = self.place_of(name, tensor)
            target.data.copy_(piece)

    def place_of(self, name, tensor):
        size = len(self.up_bias)
        match name:
            case "up.weight":
                return self.gate_up[size:], tensor[self.place]
            case "gate.weight":
                return self.gate_up[:size], tensor[self.place]
            case "up.bias":
                return self.up_bias, tensor[self.place]
            case "down.weight":
                return self.down, tensor.t()[self.place]
            case "norm.weight" | "norm.bias":
                return self.norm[int(name == "norm.bias")], tensor
        return getattr(self, name.removesuffix(".weight")), tensor


class Engine:
    """A channel to workers in this process, and their backend."""

    version = -1

    def __init__(self, num_workers=1, tied=False, dtype=torch.float32, make=None):
        """Build `num_workers` instances of `Worker`, or use the models that `make` returns."""
        self.make = make or (
            lambda: [Worker(index, num_workers, tied, dtype) for index in range(num_workers)]
        )
        self.workers, self.commands = self.make(), []
        self.receivers = receivers_of(*self.workers)
        self.connect, self.copy_round = self.receivers.connect, self.receivers.copy_round
        self.open_handles, self.lend = self.receivers.open_handles, self.receivers.lend
        self.scheduler = Scheduler(self)

    def call(self, command, silence_s):
        self.commands.append(type(command).__name__)
        ((_, result),) = self.scheduler.carry_out(0, command)
        return results_or_first_error([result])[0]

    def load(self, version, checksums, weight_sets, recompute):
        return self.receivers.load(version, checksums, weight_sets)

    def pause(self): ...

    def resume(self): ...

    def sleep(self, parts, asleep): ...

    def wake_up(self, parts): ...

    def differs_from(self, model, tolerance=0.0):
        """Return the names of parameters that differ from the workers' own loading of `model`."""
        expected = self.make()
        for worker in expected:
            tensors = {**dict(model.named_parameters()), "scale": model.scale, "steps": model.steps}
            worker.load_weights((name, tensor.detach()) for name, tensor in tensors.items())
        return [
            name
            for worker, other in zip(self.workers, expected, strict=True)
            for (name, ours), theirs in zip(
                worker.state_dict().items(), other.state_dict().values(), strict=True
            )
            if not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)
        ]


def swap_of(topology, transport, engines_per_node=1, lora_mode="merged", **engine_args):
    """Return this rank's hot swap, and its engine if it owns one."""
    engine_ranks = EngineRanks(topology, Collectives(topology, 60.0), engines_per_node)
    engine = Engine(**engine_args) if engine_ranks.owns_an_engine else None
    settings = EngineSettings(lora_mode=lora_mode, transport=transport, timeout_s=60.0)
    return HotSwap(engine_ranks, engine, settings), engine


def move(model, reference, seed):
    """Give both models the same new weights, sharded or not."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for ours, whole in zip(model.parameters(), reference.parameters(), strict=True):
            whole.copy_(torch.randn(whole.shape, generator=generator))
            if isinstance(ours, DTensor):
                mesh, placements = ours.device_mesh, ours.placements
                ours.copy_(distribute_tensor(whole, mesh, placements, src_data_rank=None))
            else:
                ours.copy_(whole)
        for module in (model, reference):
            module.scale.fill_(seed + 0.5)
            module.steps += 1
