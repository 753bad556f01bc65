"""Qualification steps for the trainer: process groups, an optimizer step of a 7B model, offloading, a GRPO run."""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from gpu_bench import GIB, Bench, big_trainer
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import vectorlm
from vectorlm.runs.preflight.memory import host_memory_bytes
from vectorlm.runs.preflight.memory_plan import CUDA_PROCESS_BYTES, Demand, plan_memory
from vectorlm.sampling.weights.model_size import read_model_size
from vectorlm.train.handover import Offload

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 512
SPARE_HOST_SHARE = 0.8


def imports(bench: Bench) -> None:
    vectorlm.launch(groups_on_rank, bench)
    import_module("vllm.v1.worker.gpu.model_runner" if bench.is_cuda else "vllm.v1.worker.gpu_model_runner")
    bench.note("vLLM's model runner imports", True)


def groups_on_rank(bench: Bench) -> None:
    device = vectorlm.Topology.from_environment().device
    dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
    dist.all_reduce(torch.ones(1, device=device))
    model = torch.nn.Linear(64, 64)
    fully_shard(model)
    model(torch.ones(2, 64, device=device)).sum().backward()
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
    bench.note("group and sharded backward pass", all(bool(grad.isfinite().all()) for grad in gradients))


def train(bench: Bench) -> None:
    folder = bench.big_model()
    for kind in ("fused", "foreach"):
        vectorlm.launch(step_on_rank, bench, folder, kind)


def step_on_rank(bench: Bench, folder: str, kind: str) -> None:
    """Take two optimizer steps, because only the second needs all memory; then offload the state of `fused`."""
    model = big_trainer(folder)
    planned = planned_bytes(model, folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, **{kind: True})
    tokens = torch.arange(NUM_TOKENS, device=model.device)[None] % model.config.vocab_size
    try:
        for _ in range(2):
            optimizer.zero_grad()
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
    except torch.OutOfMemoryError:
        bench.note(f"{kind} AdamW, peak GiB", "out of memory")
        return
    if bench.is_cuda:
        peak = torch.cuda.max_memory_allocated()
        bench.note(f"{kind} AdamW, peak GiB", peak / GIB)
        if kind == "fused":
            bench.note("fused AdamW, peak over the plan", peak / planned)
    if kind == "fused":
        optimizer.zero_grad()
        offload(bench, optimizer)


def planned_bytes(model: Any, folder: str) -> int:
    """Return the bytes that the memory plan predicts for training this model, without the process itself."""
    # The plan reads only the headers of safetensors files; the tensors may be missing.
    shapes = {name: {"shape": list(parameter.shape)} for name, parameter in model.named_parameters()}
    head = json.dumps(shapes).encode()
    (Path(folder) / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    size = read_model_size(folder)
    demand = Demand(
        model=size,
        num_trainable=size.num_parameters,
        num_ranks=1,
        num_shards=1,
        keeps_gathered=False,
        is_mixed=True,
        recomputes=True,
        micro_batch_size=1,
        sequence_tokens=NUM_TOKENS,
        engine=None,
        device_bytes=1,
        is_cpu=False,
    )
    return plan_memory(demand).training - CUDA_PROCESS_BYTES


def offload(bench: Bench, optimizer: torch.optim.Optimizer) -> None:
    """Move the optimizer's state to the host and back twice; the first move also allocates the host memory."""
    held = [state["exp_avg_sq"] for state in optimizer.state.values()]
    moments = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in held]
    if sum(2 * moment.nbytes for moment in moments) > SPARE_HOST_SHARE * host_memory_bytes():
        raise MemoryError("the host has no room for the optimizer's state: offload was not tried.")
    before = [float(moment.sum(dtype=torch.float64)) for moment in moments]
    away = Offload(optimizer, vectorlm.Topology.from_environment().device)
    for _ in range(2):
        times = [time.perf_counter()]
        for move in (away.move_out, away.move_back):
            move()
            if bench.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter())
    bench.note("offload: out, s", times[1] - times[0])
    bench.note("offload: back, s", times[2] - times[1])
    after = [float(moment.sum(dtype=torch.float64)) for moment in moments]
    bench.note("offload: the same bits came back", before == after)


def grpo(bench: Bench) -> None:
    """Train on Countdown for five steps, first in fp32, then in bf16."""
    data = make_countdown(bench.folder)
    for name in ("fp32", "bf16"):
        grpo_in(bench, data, name)


def grpo_in(bench: Bench, data: Path, name: str) -> None:
    from vectorlm.runs.config.load import load_config
    from vectorlm.runs.reinforcement import reinforce

    output = bench.folder / name
    changes = {
        "model": data / "model",
        "train_parameters.output_dir": output,
        "train_parameters.use_mp": name == "bf16",
        "engine.dtype": {"fp32": "float32", "bf16": "bfloat16"}[name],
        "evaluation.prompts": data / "held_out.jsonl",
        "rl.prompts": data / "train.jsonl",
        "rl.max_steps": 5,
    }
    if not bench.is_cuda:
        changes["rl.prompts_per_step"] = 8
    config = load_config(
        ROOT / "configs/countdown_grpo.yaml", [f"{key}={value}" for key, value in changes.items()]
    )
    vectorlm.launch(reinforce, config)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["sampler/logprob_gap_max"] for line in lines if "sampler/logprob_gap_max" in line]
    bench.note(f"steps, {name}", lines[-1]["step"])
    bench.note(f"largest log-prob gap, {name}", max(gaps))
    times = [line["time/step_s"] for line in lines if "time/step_s" in line]
    if times:
        bench.note(f"a step, {name}, s", median(times))


def make_countdown(folder: Path) -> Path:
    """Write the model and questions of examples/make_countdown.py to `folder`, without the tokenised datasets."""
    if find_spec("datasets") is None:
        # Reinforcement learning does not need this package, and an offline machine may lack it.
        sys.modules["datasets"] = SimpleNamespace(Dataset=None, disable_progress_bars=None)  # type: ignore[assignment]
    sys.path.append(str(ROOT / "examples"))
    countdown = import_module("make_countdown")
    training, held_out = countdown.generate_problems(2048, 128, rules=countdown.CountdownRules(), seed=0)
    tokenizer = countdown.build_tokenizer()
    countdown.build_model(tokenizer, 0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    countdown.write_questions(training, folder / "train.jsonl")
    countdown.write_questions(held_out, folder / "held_out.jsonl")
    return folder
