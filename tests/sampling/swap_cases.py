"""Cases of the hot-swap tests, run on every rank: perturb the weights, update, compare the engine with transformers."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from unittest import mock

import torch
from kit.tiny_engine import TINY_ENGINE
from transformers import AutoModelForCausalLM

import vectorlm
from vectorlm import SamplingEngine, Topology
from vectorlm.sampling import transport
from vectorlm.sampling.handle import WorkQueue
from vectorlm.sampling.weights.arena import Arena
from vectorlm.sampling.weights.model_tensors import persistent_buffers
from vectorlm.sampling.weights.module_source import ModuleSource

PROMPTS = [[2, 3, 4], [5, 6, 7, 8, 9], [10]]
NUM_TOKENS = 10
# Two fp32 computations of three layers differ by a few 1e-6; a stale tensor makes a difference of at least 1e-2.
FP32_GAP = 1e-4
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0}
SAMPLED = {"temperature": 1.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0, "seed": 7, "n": 2}


def perturb(model, reference, seed):
    """Move both models to the same new weights, far from the old ones."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for ours, whole in zip(model.parameters(), reference.parameters(), strict=True):
            whole.add_(torch.randn(whole.shape, generator=generator) * 0.05)
            sharded = isinstance(ours, DTensor)
            ours.copy_(distribute_tensor(whole, ours.device_mesh, ours.placements) if sharded else whole)
        for module in (model, reference):
            for name, buffer in persistent_buffers(module).items():
                # Apertus' activation needs its other number unchanged.
                buffer.add_(0.0 if name.endswith(".eps") else 0.1 * (seed + 1))


@contextlib.contextmanager
def publishing(change):
    """Replace this rank's sums of each update by the result of `change(sums, layout, tensors)`.

    `tensors` are the arena's tensors by name, after the rank has written its rows.
    """
    publish = ModuleSource.publish

    def publish_and_change(source, layout, with_checksums):
        sums = publish(source, layout, with_checksums)
        arena = Arena.open(layout.path, layout.num_bytes)
        try:
            return change(sums, layout, {slot.name: arena.view(slot) for slot in layout.slots})
        finally:
            arena.close()

    ModuleSource.publish = publish_and_change
    try:
        yield
    finally:
        ModuleSource.publish = publish


@contextlib.contextmanager
def counting_chunks():
    """Yield a list to which each result appends the number of chunks that this rank's engine took."""
    counts = []
    collect = WorkQueue.collect

    def collect_and_count(queue, *args):
        answers = collect(queue, *args)
        counts.append(len(answers))
        return answers

    with mock.patch.object(WorkQueue, "collect", collect_and_count):
        yield counts


def reference_greedy(reference, prompt):
    answer = reference.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return answer[0, len(prompt) :].tolist()


def reference_logprobs(reference, completion):
    tokens = torch.tensor([[*completion.prompt_token_ids, *completion.token_ids]])
    is_exact = any(hasattr(module, "exact_attention") for module in reference.modules())
    with torch.no_grad():
        logits = reference(tokens).logits
        # In exact mode, float32 has the engine's bits.
        logprobs = (logits if is_exact else logits.double()).log_softmax(-1).double()
    start = len(completion.prompt_token_ids)
    return logprobs[0, start - 1 : -1].gather(1, tokens[0, start:, None])[:, 0]


def scores_of(completions, model):
    """Return a model's logits for the tokens of completions [T, V], the tokens, and the engine's log-probabilities."""
    scores, tokens, logprobs = [], [], []
    for completion in completions:
        ids = torch.tensor([*completion.prompt_token_ids, *completion.token_ids])
        start = len(completion.prompt_token_ids)
        scores.append(model(ids[None]).logits[0, start - 1 : -1])
        tokens.append(ids[start:])
        logprobs.append(torch.tensor(completion.sampler_logprobs))
    return torch.cat(scores), torch.cat(tokens), torch.cat(logprobs)


def largest_gap(completions, reference):
    """Return the largest difference between the engine's log-probabilities and transformers' values."""
    gaps = []
    for completion in completions:
        ours = torch.tensor(completion.sampler_logprobs, dtype=torch.float64)
        gaps.append((ours - reference_logprobs(reference, completion)).abs().max())
    # Unlike Python's maximum, torch's is NaN if an element is NaN.
    return torch.stack(gaps).max().item()


def compare(engine, reference):
    """Return whether greedy tokens are equal, and the largest log-prob gap over greedy and sampled tokens."""
    greedy = engine.sample(PROMPTS, GREEDY)
    sampled = engine.sample(PROMPTS, SAMPLED)
    equal = [
        list(answers[0].token_ids) == reference_greedy(reference, prompt)
        for answers, prompt in zip(greedy, PROMPTS, strict=True)
    ]
    gap = largest_gap([completion for answers in [*greedy, *sampled] for completion in answers], reference)
    return equal, gap, [[list(completion.token_ids) for completion in answers] for answers in sampled]


def swap_and_compare(folder, receiver, num_updates=3, dtype="float32", bucket_bytes=1 << 29, **engine_args):
    """Update an engine from an FSDP2 model on every rank; return rank, results of `compare` and versions."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model, reference = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    if dist.is_initialized():
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
    if engine_args.get("exact"):
        vectorlm.exact(reference)
    seen, reports = [], []
    transport.BUCKET_BYTES = bucket_bytes
    with SamplingEngine(
        folder, receiver=receiver, **{**TINY_ENGINE, "dtype": dtype, **engine_args}
    ) as engine:
        for step in range(num_updates):
            perturb(model, reference, seed=step)
            reports.append(engine.update(model, step))
            seen.append(compare(engine, reference))
        assert engine.receiver == receiver
        # This is the choice of `auto`.
        default = "pull" if torch.cuda.is_available() else "push"
        assert {report.transport for report in reports} == {engine_args.get("transport", default)}
    return Topology.from_environment().rank, seen, [report.version for report in reports]


def consecutive_samples_differ(seen):
    return all(before[2] != after[2] for before, after in pairwise(seen))


def require_the_trainers_answers(seen, *, is_exact=False):
    """Require every result of `compare` to be right, and the updates to have changed something."""
    for equal, gap, _ in seen:
        assert all(equal), "greedy completions differ"
        assert gap == 0.0 if is_exact else gap < FP32_GAP
    assert consecutive_samples_differ(seen), "the updates changed nothing, so equality proves nothing"
