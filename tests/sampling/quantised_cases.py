"""Cases of the quantised engine's tests, run on every rank: update, spoil an update, compare with a fresh engine."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from kit.module_trainer import ModuleTrainer
from kit.tiny_engine import TINY_ENGINE
from swap_cases import GREEDY, PROMPTS, SAMPLED, perturb, publishing

from vectorlm import SamplingEngine
from vectorlm.errors import ChecksumMismatch, ConfigError, EngineError
from vectorlm.sampling import transport
from vectorlm.sampling.testing import EngineUnderTest
from vectorlm.train.load import load_model
from vectorlm.train.shard import transformer_blocks

SMALL_BUCKET = 1 << 14
"""Bytes of the arena of `bucketed`, which then sends the scales in another round than their rows."""
OPTIONS = {**TINY_ENGINE, "dtype": "bfloat16"}


def answers_of(engine):
    """Return tokens and log-probabilities of greedy and of sampled completions."""
    return [
        (list(completion.token_ids), list(completion.sampler_logprobs))
        for parameters in (GREEDY, SAMPLED)
        for completions in engine.sample(PROMPTS, parameters)
        for completion in completions
    ]


def spoil(engine, model, wants_scale):
    """Let rank 0 change a byte of its first row or scale in an update; return the tensor's name and the errors."""
    import torch.distributed as dist

    spoiled = []

    def change(sums, layout, tensors):
        wanted = (
            slot.name for slot in layout.slots if slot.quantised and slot.quantised.is_scale == wants_scale
        )
        # A round may have none.
        if not spoiled and (name := next(wanted, None)) is not None:
            if not dist.is_initialized() or dist.get_rank() == 0:
                tensors[name].view(torch.uint8).view(-1)[0] ^= 1
            spoiled.append(name)
        return sums

    errors = []
    with publishing(change):
        try:
            engine.update(model, 7)
        except ChecksumMismatch as error:
            errors.append(str(error))
    try:
        engine.sample(PROMPTS, GREEDY)
    except (ChecksumMismatch, EngineError) as error:
        errors.append(str(error))
    return spoiled[0], errors


def swap(folder, quantization, options):
    """Update a quantised engine twice, spoil two updates; return its and a fresh engine's answers, errors, report."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model, reference = load_model(folder), load_model(folder)
    if dist.is_initialized():
        for block in transformer_blocks(model):
            fully_shard(block)
        fully_shard(model)
    options = {**OPTIONS, "quantization": quantization, **options}
    with (
        mock.patch.object(transport, "BUCKET_BYTES", SMALL_BUCKET),
        SamplingEngine(folder, **options) as engine,
    ):
        first = answers_of(engine)
        for step in range(2):
            perturb(model, reference, seed=step)
            report = engine.update(model, step)
        swapped = answers_of(engine)
        spoiled = [spoil(engine, model, wants_scale) for wants_scale in (False, True)]
        engine.update(model, 2)
        recovered = answers_of(engine)
        with pytest.raises(ConfigError, match="scales"):
            engine.update(ModuleTrainer(model, None, None), 3)
    with (
        EngineUnderTest(engine, folder).saved(reference) as path,
        SamplingEngine(path, **options) as fresh,
    ):
        return first, swapped, recovered, answers_of(fresh), spoiled, report


def num_bytes(folder):
    """Return the bytes of an update: one per linear layer's weight, four per row of it, two per other weight."""
    model = load_model(folder)
    in_blocks = [
        module.weight
        for block in transformer_blocks(model)
        for module in block.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    saved = sum(weight.numel() - 4 * len(weight) for weight in in_blocks)
    return 2 * sum(parameter.numel() for parameter in model.parameters()) - saved
