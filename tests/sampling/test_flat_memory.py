"""Two hundred swaps must not use up memory or file descriptors, because runs have thousands of steps."""

import os
from pathlib import Path

import pytest
import torch
from child_processes import sampler_pid
from kit.rank_processes import save_tiny_llama
from kit.tiny_engine import TINY_ENGINE
from transformers import AutoModelForCausalLM

import vectorlm
from vectorlm import SamplingEngine, Topology

WARM_UP, SWAPS = 20, 200
# The model has 1 MB and a process at most 700 MB: a copy leaked at every other swap would show.
TOLERANCE = 0.02


def memory_kb(pid):
    """Return a process's memory with the shared arena (`Rss`) and without it (`Anonymous`), and its open files."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines)}
    return {
        **{name: sizes[name] for name in ("Rss", "Anonymous")},
        "files": len(os.listdir(f"/proc/{pid}/fd")),
    }


def swap_and_weigh(folder, receiver, transport):
    """Swap on every rank; return the memory of this rank and its processes after the warm-up and at the end."""
    from torch.distributed.fsdp import fully_shard

    topology = Topology.from_environment()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    weights = []
    with SamplingEngine(folder, receiver=receiver, transport=transport, **TINY_ENGINE) as engine:
        for step in range(SWAPS):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.0001)
            assert not engine.update(model, step).skipped
            if step % 10 == 0:
                engine.sample([[2, 3, 4]] * 8, {"max_tokens": 4, "ignore_eos": True, "logprobs": 0})
            if step + 1 in (WARM_UP, SWAPS):
                processes = {f"rank {topology.rank}": os.getpid()}
                if topology.is_main:
                    processes |= {"sampler": sampler_pid(), "launcher": os.getppid()}
                weights.append({name: memory_kb(pid) for name, pid in processes.items()})
    return weights


@pytest.mark.long
@pytest.mark.parametrize("transport", ["push", "pull"])
def test_no_process_grows_over_two_hundred_swaps(tmp_path, transport):
    folder = save_tiny_llama(tmp_path / "model", hidden_size=128, vocab_size=512)
    grown = {}
    for early, late in vectorlm.launch(swap_and_weigh, str(folder), "packed", transport, world_size=2):
        for name in early:
            grown |= {f"{name}, {kind}": late[name][kind] / early[name][kind] - 1 for kind in early[name]}
    assert {"rank 0, Rss", "rank 1, Rss", "sampler, Rss", "launcher, Rss"} <= set(grown)
    assert {name: share for name, share in grown.items() if share > TOLERANCE} == {}
