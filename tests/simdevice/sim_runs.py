"""Train a little on the CPU, then on the simulated device: python sim_runs.py FOLDER. Print lines of JSON."""

import ctypes
import json
import os
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "train")]

import sim_device
import torch
from flash import written_down
from kit import tiny_runs
from kit.rl_runs import config_of, numbers, save_files
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vectorlm import SamplingEngine
from vectorlm.ranks.topology import Topology
from vectorlm.rl.models import Critic
from vectorlm.rl.update import Updater
from vectorlm.runs.reinforcement import reinforce
from vectorlm.train import attention, shard
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.objective import NextTokens
from vectorlm.train.optimizer_step import OptimizerStep

RUNS = {
    "GRPO in 16 bits": (
        "grpo",
        [
            "rl.kl_coef=0.05",
            "train_parameters.use_mp=True",
            "train_parameters.use_activation_checkpointing=offload",
            "engine.offload_optimizer=True",
        ],
    ),
    "PPO of adapters": (
        "ppo",
        [
            "rl.num_mini_batches=2",
            "rl.num_epochs=2",
            "rl.kl_coef=0.05",
            "rl.kl_in=reward",
            "rl.critic.lr=1e-3",
            "train_parameters.lora_peft_config={r: 4, target_modules: [q_proj, down_proj]}",
        ],
    ),
}


def refuses():
    """Return the error of adding a host tensor, and the signal that ends a host that reads the device's memory."""
    tensor = torch.ones(3, device="sim")
    try:
        tensor + torch.ones(3)
        error = ""
    except RuntimeError as found:
        error = str(found)
    if (child := os.fork()) == 0:
        ctypes.string_at(tensor.data_ptr(), 4)
        os._exit(0)
    return [error[:45], os.WTERMSIG(os.waitpid(child, 0)[1])]


class Waits(TorchDispatchMode):
    """A mode that records operations in passes that make the host wait for its device, and counts the passes."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique")

    def __init__(self):
        super().__init__()
        self.found, self.num_passes = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
        devices, name = {x.device.type for x in tensors}, str(func)
        # Tensors without dimensions travel with the launch of an operation.
        moves = len({x.device.type for x in tensors if x.ndim}) > 1
        is_blocking = not kwargs.get("non_blocking") and not (name == "aten.copy_.default" and any(args[2:]))
        reads = "sim" in devices and any(read in name for read in self.READS)
        if reads or (moves and is_blocking):
            frames = traceback.extract_stack()
            # The trial before a run reads every module's output on purpose.
            if all(frame.name != "require_quiet" for frame in frames):
                ours = [f for f in frames[:-1] if f"{os.sep}vectorlm{os.sep}" in f.filename]
                self.found.append(f"{name} in {ours[-1].name if ours else 'torch'}")
        return result

    def watch(self, owner, name):
        """Record all calls of a method."""
        inner = getattr(owner, name)

        def watched(*arguments, **named):
            self.num_passes += 1
            with self:
                return inner(*arguments, **named)

        setattr(owner, name, watched)


def move_first():
    """Move a model before it is sharded: torch allows `tensor.data = ...` across devices only for its own devices."""
    shard_model = shard.shard_model

    def moved(model, topology, *arguments):
        model.to(topology.device)
        model.tie_weights()
        return shard_model(model, topology, *arguments)

    shard.shard_model = moved


def fine_tuned(device, folder):
    """Return the held-out loss of a fine-tuning run."""
    tiny_runs.shard_model = shard.shard_model
    loop = tiny_runs.build_loop(
        Topology(device=device), folder / "model", output=folder / f"sft-{device[:3]}", num_micro_batches=2
    )
    loop.run()
    assert loop.objective.language_model.packs
    return [{"loss": loop.held_out_losses()["eval/loss"]}]


def trained(device, folder, name):
    """Return the metrics of a reinforcement learning run, sampled by transformers on the CPU."""
    algorithm, overrides = RUNS[name]
    overrides = [*overrides, "rl.max_steps=2", "rl.save_every=1"]
    config = config_of(folder, folder / f"{algorithm}-{device[:3]}", algorithm, overrides)
    topology = Topology(device=device)
    model = str(folder / "model")
    with SamplingEngine(model, topology=topology, inference="transformers", channel="inline") as engine:
        reinforce(config, topology, engine)
    return numbers(Path(config.train_parameters.output_dir))


def main():
    """Print the results of each device."""
    folder = save_files(Path(sys.argv[1]))
    sim_device.install()
    move_first()
    print(json.dumps(["refuses", "sim:0", refuses()]))
    flashes, waits = [], Waits()
    for owner, name in (
        (OptimizerStep, "backward"),
        (Updater, "_policy_loss"),
        (LanguageModel, "logprobs"),
        (Critic, "__call__"),
        (NextTokens, "sum_loss"),
    ):
        waits.watch(owner, name)
    attention.flash_takes = lambda query, value: query.device.type == "sim" and query.dtype.itemsize == 2
    with ExitStack() as stack:
        stack.enter_context(written_down("sim", flashes))
        for device in ("cpu", "sim:0"):
            print(json.dumps(["fine-tuning", device, fine_tuned(device, folder)]), flush=True)
            for name in RUNS:
                print(json.dumps([name, device, trained(device, folder, name)]), flush=True)
    print(json.dumps(["calls of the flash kernel", "sim:0", len(flashes)]))
    print(json.dumps(["passes and waits", "sim:0", [waits.num_passes, *sorted(set(waits.found))]]))


if __name__ == "__main__":
    main()
