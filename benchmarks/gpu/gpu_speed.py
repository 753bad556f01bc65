"""The qualification step for speed: compare implementations that only a GPU can decide between, in two minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
from gpu_bench import QWEN_3B, REHEARSAL, Bench

import vectorlm
from vectorlm.algorithms import logprobs
from vectorlm.algorithms.logprobs import token_values
from vectorlm.sampling.weights import reader
from vectorlm.sampling.weights.inspection import Reading
from vectorlm.sampling.weights.reader import Reader
from vectorlm.train.packing import Rows, to_device

QWEN_HALF_B = (151936, 896, 4864, 24, 14, 2)
REPEATS = 5
ENGINE = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 512, "enforce_eager": True}
DECODE = """
import json, os, sys, time
from vllm import LLM, SamplingParams
folder, counts, num_tokens, options = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
engine, found = LLM(folder, **options), {}
for count in counts:
    prompts = [{"prompt_token_ids": [2 + index % 40, 3]} for index in range(count)]
    for seeded in (False, True):
        params = [
            SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=0, seed=index if seeded else None)
            for index in range(count)
        ]
        engine.generate(prompts, params[:1] * count, use_tqdm=False)
        started = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        rate = count * num_tokens / (time.perf_counter() - started)
        found[f"{count} sequences{', with seeds' if seeded else ''}"] = rate
print("FOUND", json.dumps(found), flush=True)
"""


def speed(bench: Bench) -> None:
    vectorlm.launch(on_rank, bench, bench.big_model(QWEN_HALF_B))


def on_rank(bench: Bench, folder: str) -> None:
    swap(bench)
    head(bench)
    transfers(bench)
    steps(bench, folder)
    decode(bench, folder)


def ms(bench: Bench, name: str, work: Callable[[], Any]) -> Any:
    """Note the median time of `work` in milliseconds, and return its last result."""
    times, found = [], None
    for _ in range(1 + (REPEATS if bench.is_cuda else 1)):
        started = time.perf_counter()
        found = work()
        if bench.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    bench.note(f"{name}, ms", 1e3 * median(times[1:]))
    return found


def swap(bench: Bench) -> None:
    """Time checksums of a 3B model by torch and by the kernel, and copies one by one and together."""
    device = "cuda" if bench.is_cuda else "cpu"
    vocab, hidden, inner, layers, _, _ = QWEN_3B if bench.is_cuda else REHEARSAL
    kv = hidden // 8
    block = [(hidden, hidden), (hidden,), (kv, hidden), (kv,), (kv, hidden), (kv,), (hidden, hidden)]
    block += [(inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,)]
    shapes = [(vocab, hidden), *block * layers, (hidden,)]
    held = [torch.randn(shape, device=device) * 0.02 for shape in shapes]
    engine = [torch.empty(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
    bench.note("tensors", float(len(held)))
    found = {}
    for way, is_trusted in (("by torch", lambda *_: False), ("by the kernel", reader.is_trusted)):
        with mock.patch.object(reader, "is_trusted", is_trusted):
            look = Reader([Reading(rows, 0, 0, torch.bfloat16) for rows in held], check_finite=True)
            proof = Reader([Reading(rows, 0) for rows in engine])
        found[way] = ms(bench, f"trainer's look {way}", look.read)
        ms(bench, f"engine's checksums {way}", proof.read)
    bench.note("kernel and torch find the same", found["by torch"] == found["by the kernel"])
    ms(
        bench,
        "copies one by one",
        lambda: [a.copy_(b, non_blocking=True) for a, b in zip(engine, held, strict=True)],
    )
    ms(bench, "copies together", lambda: torch._foreach_copy_(engine, held, non_blocking=True))


def head(bench: Bench) -> None:
    """Time the loss head, forward and backward: by torch, by the kernels, and with gradients of entropies."""
    device, dtype = ("cuda", torch.bfloat16) if bench.is_cuda else ("cpu", torch.float32)
    num_tokens, vocab, hidden = (4096, 151936, 896) if bench.is_cuda else (32, 512, 64)
    weight = (torch.randn(vocab, hidden, device=device) * 0.02).to(dtype).requires_grad_()
    start = torch.randn(num_tokens, hidden, device=device).to(dtype)
    targets = torch.randint(0, vocab, (num_tokens,), device=device)

    def run(entropy: Any) -> torch.Tensor:
        weight.grad, states = None, start.clone().requires_grad_()
        found = token_values(states, targets, 1.0, 441, head=lambda x: x @ weight.t(), entropy=entropy)
        found.logprobs.sum().backward()
        return found.logprobs.detach()

    found = {}
    for way, is_trusted in (("by torch", lambda *_: False), ("by the kernels", logprobs.is_trusted)):
        with mock.patch.object(logprobs, "is_trusted", is_trusted):
            found[way] = ms(bench, f"loss head of 4096 tokens {way}", lambda: run("value"))
    gap = (found["by torch"] - found["by the kernels"]).abs().max().item()
    bench.note("log-probs by kernels and by torch differ by", gap)
    ms(bench, "loss head of 4096 tokens with the gradient of entropies", lambda: run("gradient"))


def transfers(bench: Bench) -> None:
    """Time how long the host waits for eleven small transfers that follow two matrix products."""
    size = 8192 if bench.is_cuda else 64
    device = "cuda" if bench.is_cuda else "cpu"
    large = torch.randn(size, size, device=device)
    rows = [torch.zeros(64, 1024, dtype=torch.int64) for _ in range(11)]
    for way, move in (("blocking", lambda x: x.to(device)), ("not blocking", lambda x: to_device(x, device))):
        for row in rows:
            move(row)
        started = time.perf_counter()
        _ = large @ large, large @ large
        for row in rows:
            move(row)
        bench.note(f"host held up by eleven transfers, {way}, ms", 1e3 * (time.perf_counter() - started))


def steps(bench: Bench, folder: str) -> None:
    """Time a fine-tuning and a GRPO step of a 0.5B model, with and without compiled blocks."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from vectorlm.train.language_model import LanguageModel
    from vectorlm.train.optimizer_step import OptimizerStep
    from vectorlm.train.settings import ModelSettings
    from vectorlm.train.shard import shard_model

    topology = vectorlm.Topology.from_environment()
    num_rows, length = (16, 512) if bench.is_cuda else (2, 16)
    for is_compiled in (False, True) if bench.is_cuda else (False,):
        with torch.device(topology.device):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        settings = ModelSettings(use_mp=bench.is_cuda, compile=is_compiled)
        model = shard_model(model, topology, settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        training = OptimizerStep(model, optimizer, None, 1.0, topology)
        policy = LanguageModel(model, device=topology.device)
        ids = torch.arange(num_rows * length).view(num_rows, length) % 500
        # As in a group of rollouts: all rows share the first half, the prompt.
        shared = torch.cat([ids[:1, : length // 2].expand(num_rows, -1), ids[:, length // 2 :]], dim=1)
        for name, tokens, first in (("fine-tuning", ids, 1), ("GRPO", shared, length // 2)):
            is_asked = (torch.arange(length) >= first).expand(num_rows, -1)
            rows = Rows(tokens, torch.ones_like(tokens), is_asked, [0] * num_rows)

            name = f"{name} step of {num_rows} x {length} tokens{', compiled' * is_compiled}"
            ms(bench, name, partial(train, training, policy, rows))
        del model, optimizer, training, policy


def train(training: Any, policy: Any, rows: Rows) -> None:
    training.backward(-policy(rows, "value").logprobs.sum() / 1000, is_last=True)
    training.finish(0)


def decode(bench: Bench, folder: str) -> None:
    """Sample with vLLM alone, with and without a seed per request, and with its engine in this or its own process."""
    counts, num_tokens = ((128, 256, 512), 64) if bench.is_cuda else ((2,), 4)
    options = {**ENGINE, "dtype": "bfloat16", "max_num_seqs": max(counts)}
    options |= {"gpu_memory_utilization": 0.3} if bench.is_cuda else {"kv_cache_memory_bytes": 16 << 20}
    for is_apart in (False, True):
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(is_apart))}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        words = [
            sys.executable,
            "-c",
            DECODE,
            folder,
            json.dumps(counts),
            str(num_tokens),
            json.dumps(options),
        ]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
        line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), None)
        way = "engine in its own process" if is_apart else "one process"
        if line is None:
            bench.note(f"decode, {way}", (done.stderr.strip().splitlines() or ["no output"])[-1][:200])
            continue
        for name, rate in json.loads(line.removeprefix("FOUND ")).items():
            bench.note(f"decode of {name}, {way}, tokens/s", rate)
