"""The first qualification step, for ten minutes on one GPU: one trainer and one engine from start to end."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest import mock

import torch
from gpu_bench import GIB, GREEDY, QWEN_3B, Bench, big_trainer, logprobs, used_bytes
from gpu_transfers import share

import vectorlm
from vectorlm.train.attention import flash_takes, packed_attention
from vectorlm.train.packing import Rows, pack

PROMPTS = [[2, 3, 4, 5], [6, 7]]
UPDATES, SWAPS, PASSES = 5, 50, 20


def first(bench: Bench) -> None:
    share(bench)
    vectorlm.launch(on_rank, bench, bench.big_model(QWEN_3B))


def on_rank(bench: Bench, folder: str) -> None:
    attention(bench)
    before = used_bytes()
    model = big_trainer(folder)
    with torch.no_grad():
        model(torch.tensor([[2, 3]], device=model.device))  # Loads kernels, which stay in memory.
    alone = used_bytes()
    graphs = {"enforce_eager": not bench.is_cuda, "enable_sleep_mode": True}
    started = time.perf_counter()
    with bench.big_engine(folder, **graphs) as engine:
        engine.wait_until_ready()
        bench.note("engine starts with graphs, s", time.perf_counter() - started)
        bench.note("engine holds, GiB", (used_bytes() - alone) / GIB)
        reports = [engine.update(model, step) for step in range(1 + UPDATES)]
        bench.note("transport", reports[0].transport)
        bench.note("first update, s", reports[0].total_s)
        bench.note("update, s", median(report.total_s for report in reports[1:]))
        bench.note("log-prob gap to the trainer, bf16", gap(engine, model))
        held = used_bytes()
        for _ in range(SWAPS):
            engine.update(model, engine.version + 1)
        bench.note("grown over 50 swaps, MiB", (used_bytes() - held) / 2**20)
        rest(bench, engine, model, alone)
        for count in (128, 256, 512) if bench.is_cuda else (2,):
            bench.note(f"decode at {count} sequences, tokens/s", decode_rate(engine, count, bench.is_cuda))
    if bench.is_cuda:
        bench.note("left after the engine's end, MiB", (used_bytes() - alone) / 2**20)
        del model
        gc.collect()
        bench.note("left after the model's end, MiB", (used_bytes() - before) / 2**20)


def rest(bench: Bench, engine: Any, model: Any, alone: int) -> None:
    """Let the KV cache sleep after an answer and after a cancelled request, then let the weights sleep too."""
    expected = logprobs(engine, PROMPTS)
    engine.sleep(weights=False)
    engine.wake_up()
    engine.submit(PROMPTS, {"max_tokens": 64, "ignore_eos": True}).cancel()
    engine.sleep(weights=False)
    bench.note("KV cache sleeps after a cancelled request", True)
    engine.wake_up()
    engine.sleep()
    if bench.is_cuda:
        bench.note("left after sleep of all, GiB", (used_bytes() - alone) / GIB)
    engine.wake_up(kv_cache=False)
    engine.update(model, engine.version + 1)
    engine.wake_up(weights=False)
    changes = [abs(one - other) for one, other in zip(expected, logprobs(engine, PROMPTS), strict=True)]
    bench.note("log-probs changed by, after sleep", max(changes))


def gap(engine: Any, model: Any) -> float:
    """Return the largest log-probability gap between engine and model over greedy completions."""
    gaps = []
    for prompt, (answer,) in zip(PROMPTS, engine.sample(PROMPTS, GREEDY), strict=True):
        tokens = torch.tensor([[*prompt, *answer.token_ids]], device=model.device)
        with torch.no_grad():
            scores = torch.log_softmax(model(tokens).logits[0].float(), dim=-1)
        ours = scores[len(prompt) - 1 : -1].gather(1, tokens[0, len(prompt) :, None])[:, 0].cpu()
        gaps.append(float((ours - torch.tensor(answer.sampler_logprobs)).abs().max()))
    return max(gaps)


def decode_rate(engine: Any, count: int, is_cuda: bool) -> float:
    """Return the tokens per second that an engine samples with `count` concurrent sequences."""
    params = {"temperature": 1.0, "max_tokens": 256 if is_cuda else 4, "ignore_eos": True}
    prompts = [[2 + index % 40, 3] for index in range(count)]
    engine.sample(prompts, params | {"max_tokens": 2})
    started = time.perf_counter()
    engine.sample(prompts, params)
    return count * params["max_tokens"] / (time.perf_counter() - started)


def attention(bench: Bench) -> None:
    """Time and compare the implementations of attention over packed rows, forward and backward."""
    ways = {"": (False, True), ", masked and padded": (False, False), ", the same by cuDNN": (True, False)}
    size, heads = (8192, (16, 2, 2)) if bench.is_cuda else (256, (4, 2, 2))
    outcomes = {}
    for number, (way, (is_cudnn, is_flash)) in enumerate(ways.items()):
        with attends(is_cudnn, is_flash):
            generator = torch.Generator().manual_seed(number)
            times = []
            for layout in [equal_layout(size), *(random_layout(size, generator) for _ in range(PASSES))]:
                tensors = inputs(layout, heads, bench.is_cuda)
                started = time.perf_counter()
                found, _ = packed_attention(torch.nn.Module(), *tensors, None, packing=layout)
                gradients = torch.autograd.grad(found.float().square().sum(), tensors)
                if bench.is_cuda:
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - started)
                if way not in outcomes:
                    outcomes[way] = [tensor.detach().float().cpu() for tensor in (found, *gradients)]
            bench.note(f"{PASSES} passes of attention over packed rows{way}, s", sum(times[1:]))
    pairs = zip(outcomes[""], outcomes[", masked and padded"], strict=True)
    bench.note(
        "varlen_attn against masked and padded, share",
        max(float((a - b).norm() / b.norm()) for a, b in pairs),
    )


@contextmanager
def attends(is_cudnn: bool, is_flash: bool) -> Iterator[None]:
    """Switch cuDNN and varlen_attn on or off for the block; varlen_attn still needs tensors that it supports."""
    was_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    takes = flash_takes if is_flash else lambda query, value: False
    torch.backends.cuda.enable_cudnn_sdp(is_cudnn)
    try:
        with mock.patch("vectorlm.train.attention.flash_takes", takes):
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_cudnn)


def inputs(layout: Any, heads: tuple[int, ...], is_cuda: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = layout.input_ids.shape[1]
    made = [torch.randn(1, num_heads, size, 64, generator=generator) for num_heads in heads]
    return [(tensor.cuda().bfloat16() if is_cuda else tensor).requires_grad_() for tensor in made]


def equal_layout(size: int) -> Any:
    return layout_of([size // 8] * 8)


def random_layout(size: int, generator: torch.Generator) -> Any:
    return layout_of(torch.randint(size // 32, size // 8, (8,), generator=generator).tolist())


def layout_of(lengths: list[int]) -> Any:
    """Pack two groups of four rows; the rows of a group begin with the same eight tokens."""
    ids = torch.arange(8)[:, None].expand(8, max(lengths) + 1).clone()
    ids[:4, :8], ids[4:, :8] = 100, 200
    ends = torch.tensor(lengths)[:, None]
    places = torch.arange(ids.shape[1])
    return pack(Rows(ids, (places <= ends).long(), places == ends, [0] * 4 + [1] * 4))
