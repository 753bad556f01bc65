"""Cases of the LoRA swap tests, run on every rank: move adapters, update, compare the engine with the PEFT model."""

from __future__ import annotations

import torch
from kit.tiny_engine import TINY_ENGINE
from peft import LoraConfig, get_peft_model
from swap_cases import compare
from transformers import AutoModelForCausalLM

from vectorlm import SamplingEngine, exact

OPTIONS = {
    "r": 2,
    "target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "rank_pattern": {"o_proj": 5},
    "alpha_pattern": {"v_proj": 3},
    "use_rslora": True,
}
WITH_LORA = {"enable_lora": True, "max_lora_rank": 8}


def adapted(folder, options=OPTIONS):
    """Return a PEFT model whose adapters are zero."""
    return with_adapters(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), options)


def with_adapters(base, options=OPTIONS):
    """Add zero adapters to a model; return the PEFT model."""
    torch.manual_seed(0)
    return get_peft_model(base, LoraConfig(**{"task_type": "CAUSAL_LM", **options})).eval()


def move(models, seed):
    """Add the same random change to the trained parameters of all `models`, sharded or not."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            if parameters[0].requires_grad:
                step = torch.randn(parameters[0].shape, generator=generator) * 0.2
                for parameter in parameters:
                    sharded = isinstance(parameter, DTensor)
                    parameter.add_(
                        distribute_tensor(step, parameter.device_mesh, parameter.placements)
                        if sharded
                        else step
                    )


def swap_and_compare(folder, engine_args, options=OPTIONS, num_updates=3):
    """Update an engine from an FSDP2 PEFT model on every rank; return gap, tokens and sent bytes of each update."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model, reference = adapted(folder, options), adapted(folder, options)
    if dist.is_initialized():
        for block in model.base_model.model.model.layers:
            fully_shard(block)
        fully_shard(model)
    if engine_args.get("exact"):
        exact(reference)
    with SamplingEngine(folder, **TINY_ENGINE, **engine_args) as engine:
        seen = []
        for step in range(num_updates):
            move([model, reference], seed=step)
            report = engine.update(model, step)
            _, gap, tokens = compare(engine, reference)
            seen.append((gap, tokens, report.num_bytes))
    return seen
