"""Qualification steps for the engine: updates, corrupted weights, sleep, LoRA adapters, several ranks."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import torch
from gpu_bench import GIB, Bench, big_trainer, logprobs, used_bytes
from gpu_transfers import swap
from kit.tiny_engine import TINY_ENGINE
from lora_cases import WITH_LORA, adapted, move
from swap_cases import compare, perturb, publishing, swap_and_compare
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import vectorlm
from vectorlm.errors import ChecksumMismatch
from vectorlm.sampling.testing import EngineUnderTest
from vectorlm.sampling.weights import exports

PROMPTS = [[2, 3, 4, 5], [6, 7]]
WARM_UP, SWAPS, ROUNDS = 20, 200, 5
LONG = {"temperature": 1.0, "max_tokens": 1500, "ignore_eos": True}


def gap_fp32(bench: Bench) -> None:
    bench.note("log-prob gap, fp32", largest_gap(bench.tiny_model(), dtype="float32"))


def gap_bf16(bench: Bench) -> None:
    bench.note("log-prob gap, bf16", largest_gap(bench.tiny_model(), dtype="bfloat16"))


def gap_eager(bench: Bench) -> None:
    found = largest_gap(bench.tiny_model(), dtype="float32", enforce_eager=True, transport="push")
    bench.note("log-prob gap, fp32, eager", found)


def corrupt(bench: Bench) -> None:
    vectorlm.launch(corrupt_a_row, bench, bench.tiny_model())


def swaps(bench: Bench) -> None:
    vectorlm.launch(swap_often, bench, bench.tiny_model())


def handles(bench: Bench) -> None:
    vectorlm.launch(lose_a_handle, bench, bench.tiny_model())


def lose_a_handle(bench: Bench, folder: str) -> None:
    """Export memory by an invalid handle; the weights must reach the engine by another transport."""
    model = fully_shard(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    if not bench.is_cuda:
        return  # On CPU a handle is the path of a file, which always exists.
    with (
        mock.patch.object(exports, "export_memory", return_value=(bytes(64), 0)),
        vectorlm.SamplingEngine(folder, **TINY_ENGINE, enforce_eager=True) as engine,
    ):
        bench.note("transport without handles", engine.update(model, 0).transport)


def largest_gap(folder: str, world_size: int = 1, **engine_args: Any) -> float:
    """Return the largest log-probability gap between trainer and engine over three updates."""
    on_rank = partial(swap_and_compare, folder, "live", **engine_args)
    return max(gap for _, seen, _ in vectorlm.launch(on_rank, world_size=world_size) for _, gap, _ in seen)


def corrupt_a_row(bench: Bench, folder: str) -> None:
    """Corrupt one row of the weights after the trainer has computed their checksums."""

    def change(sums: list[int], layout: Any, tensors: dict[str, torch.Tensor]) -> list[int]:
        next(iter(tensors.values()))[3].add_(1)
        return sums

    model = fully_shard(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    with vectorlm.SamplingEngine(folder, **TINY_ENGINE, enforce_eager=True, transport="push") as engine:
        engine.update(model, 0)
        try:
            with publishing(change):
                engine.update(model, 1)
            bench.note("corrupted row noticed", False)
        except ChecksumMismatch:
            bench.note("corrupted row noticed", True)


def swap_often(bench: Bench, folder: str) -> None:
    """Measure memory growth over many swaps, swap during a completion, and compare with a new engine."""
    model, whole = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    fully_shard(model)
    perturb(model, whole, seed=0)
    arguments = {**TINY_ENGINE, "max_model_len": 2048}
    with vectorlm.SamplingEngine(folder, **arguments) as engine:
        bench.note("model runner", engine.runner)
        for step in range(WARM_UP + SWAPS):
            if step == WARM_UP:
                before = used_bytes()
            engine.update(model, step)
        bench.note("grown over 200 swaps, MiB", (used_bytes() - before) / 2**20)
        for mode in ("keep", "recompute"):
            handle = engine.submit([PROMPTS[0]], LONG)
            time.sleep(0.3)
            engine.update(model, engine.version + 1, in_flight=mode)
            ((answer,),) = handle.result()
            bench.note(f"{mode}: tokens of both weights", len(set(answer.versions)) == 2)
        swapped = logprobs(engine, PROMPTS)
    with (
        EngineUnderTest(engine, folder).saved(whole) as path,
        vectorlm.SamplingEngine(path, **arguments) as fresh,
    ):
        same = logprobs(fresh, PROMPTS) == swapped
        bench.note("a fresh engine of the same weights has the same log-probs", same)


def sleep(bench: Bench) -> None:
    vectorlm.launch(sleep_on_rank, bench, bench.big_model())


def sleep_on_rank(bench: Bench, folder: str) -> None:
    model = big_trainer(folder)
    alone = used_bytes()
    with bench.big_engine(folder, enable_sleep_mode=True) as engine:
        engine.update(model, 0)
        before = logprobs(engine, PROMPTS)
        left = {"all": 0.0, "the KV cache": 0.0}
        for step in range(1, ROUNDS + 1):
            engine.sleep(weights=False)
            left["the KV cache"] = max(left["the KV cache"], (used_bytes() - alone) / GIB)
            if step % 2:
                engine.wake_up()
            engine.sleep()
            left["all"] = max(left["all"], (used_bytes() - alone) / GIB)
            engine.wake_up(kv_cache=False)
            engine.update(model, step)
            engine.wake_up(weights=False)
        after = logprobs(engine, PROMPTS)
        changes = [abs(one - other) for one, other in zip(before, after, strict=True)]
        bench.note("log-probs changed by, after the rounds", max(changes))
        for part, gib in left.items():
            if bench.is_cuda:
                bench.note(f"left after sleep of {part}, GiB", gib)
        turn = vectorlm.DeviceTurn(engine, model=model, sleep="all")
        if bench.is_cuda:
            # The tensor is freed immediately, and torch keeps its memory in the cache.
            torch.empty(torch.cuda.mem_get_info()[0] - 4 * GIB, dtype=torch.uint8, device="cuda")
        with turn.sampling(ROUNDS + 1):
            logprobs(engine, PROMPTS)
        bench.note("KV cache wakes while the trainer caches all memory", True)


def adapter(bench: Bench) -> None:
    vectorlm.launch(adapter_on_rank, bench, bench.tiny_model())


def adapter_on_rank(bench: Bench, folder: str) -> None:
    model, reference = adapted(folder), adapted(folder)
    fully_shard(model)
    # The Triton kernels of LoRA assert float16 or bfloat16.
    arguments = {**TINY_ENGINE, **WITH_LORA, "dtype": "bfloat16" if bench.is_cuda else "float32"}
    with vectorlm.SamplingEngine(folder, **arguments, enable_sleep_mode=True) as engine:
        whole = engine.update(model, 0).num_bytes
        move([model, reference], seed=1)
        adapters = engine.update(model, 1).num_bytes
        bench.note("bytes of an adapter update over the first", adapters / whole)
        bench.note("log-prob gap", compare(engine, reference)[1])
        engine.sleep()
        move([model, reference], seed=2)
        engine.update(model, 2)
        engine.wake_up()
        bench.note("log-prob gap after sleep", compare(engine, reference)[1])


def ranks_2(bench: Bench) -> None:
    ranks(bench, 2)


def ranks_8(bench: Bench) -> None:
    ranks(bench, 8)


def ranks(bench: Bench, world_size: int) -> None:
    folder = bench.tiny_model()
    bench.note("log-prob gap", largest_gap(folder, world_size, dtype="float32"))
    vectorlm.launch(parallel_on_rank, bench, folder, world_size=world_size)
    if bench.is_cuda:
        swap(bench, world_size)


def parallel_on_rank(bench: Bench, folder: str) -> None:
    """Let a tensor-parallel engine on two devices sleep between two updates, and compare its log-probabilities."""
    model, reference = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    fully_shard(model)
    alone = used_bytes()
    arguments = {**TINY_ENGINE, "tensor_parallel_size": 2, "enable_sleep_mode": True}
    with vectorlm.SamplingEngine(folder, **arguments) as engine:
        engine.update(model, 0)
        contexts = contexts_of_a_device() if bench.is_cuda else 0
        engine.sleep()
        left = (used_bytes() - alone) / GIB
        engine.wake_up(kv_cache=False)
        perturb(model, reference, seed=0)
        engine.update(model, 1)
        engine.wake_up(weights=False)
        _, largest, _ = compare(engine, reference)
    if vectorlm.Topology.from_environment().is_main:
        bench.note("tensor parallel: log-prob gap after sleep", largest)
        if bench.is_cuda:
            bench.note("tensor parallel: left after sleep, GiB", left)
            bench.note("tensor parallel: contexts on a device", contexts)


def contexts_of_a_device() -> int:
    """Return the largest number of processes with a context on one device."""
    words = ["nvidia-smi", "--query-compute-apps=gpu_uuid", "--format=csv,noheader"]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    return max(Counter(lines).values(), default=0)
