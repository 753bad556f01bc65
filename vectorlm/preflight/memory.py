"""The memory plan of a run, from its config."""

from __future__ import annotations

import psutil

from vectorlm.backends.vllm import CPU_KV_CACHE_BYTES, packs_by_itself
from vectorlm.config import Config, SamplerSettings
from vectorlm.config.schema import TrainSettings
from vectorlm.engine.settings import BUCKET_BYTES
from vectorlm.preflight.container import container_limits
from vectorlm.preflight.memory_plan import GIB, Demand, EngineDemand, MemoryPlan, plan_memory
from vectorlm.preflight.memory_report import check_memory, memory_table
from vectorlm.ranks.placement import tensor_parallel_size
from vectorlm.ranks.topology import has_gpu
from vectorlm.rl.settings import CPU_PASS_TOKENS
from vectorlm.train.optimizers import state_bytes
from vectorlm.train.settings import gathers_once
from vectorlm.weights.model_size import ModelSize, count_adapter_parameters, read_model_size


def memory_report(
    config: Config, world_size: int, *, device_bytes: int | None = None, ranks_per_node: int | None = None
) -> str:
    """Return the memory plan of a run as a table, or why there is none.

    `device_bytes` is the memory of one CUDA device; None plans for CPU, with the memory of this machine. All ranks run
    on one node unless `ranks_per_node` says otherwise.

    Raises:
        ConfigError: The run cannot fit; the text has the numbers and the settings to change.
    """
    try:
        plan = plan_of_config(config, world_size, device_bytes, ranks_per_node)
    except (OSError, ValueError) as error:
        return f"  no memory plan: {error}"
    check_memory(plan)
    return memory_table(plan)


def plan_of_config(
    config: Config, world_size: int, device_bytes: int | None = None, ranks_per_node: int | None = None
) -> MemoryPlan:
    """Plan the memory of a run; raises ValueError where the model's folder does not tell its size."""
    is_cpu = device_bytes is None
    train, near = config.train_parameters, ranks_per_node or world_size
    model = read_model_size(config.model)
    lora = train.lora_peft_config
    shards = {"NO_SHARD": 1, "HYBRID_SHARD": near}.get(train.model.sharding_strategy, world_size)
    micro_batch_size, trained_copies, frozen_copies = _other_models(config, model, is_cpu)
    overlap = config.overlap
    teacher = None if config.rl is None else config.rl.teacher
    # An engine on separate CUDA devices does not share their memory; on CPU there is only one memory.
    is_shared = is_cpu or overlap is None or overlap.placement == "shared"
    num_trainable = model.num_parameters if lora is None else count_adapter_parameters(config.model, lora)
    demand = Demand(
        model=model,
        num_trainable=num_trainable,
        gathers_once=gathers_once(
            model.num_parameters - (model.num_in_blocks if train.model.quantization else 0),
            num_trainable,
            world_size,
        ),
        is_quantized=train.model.quantization is not None,
        num_ranks=near,
        num_shards=shards,
        keeps_gathered=train.model.sharding_strategy in ("SHARD_GRAD_OP", "NO_SHARD"),
        bytes_per_weight=2 if train.model.dtype == "bfloat16" else 4,
        cpu_offload=train.model.cpu_offload,
        loads_on_main=train.model.loads_on_main(world_size),
        is_mixed=train.model.computes_in_bf16(not is_cpu),
        packs=train.model.pack_rows and (is_cpu or not train.model.use_flash_attention),
        num_averages=_num_averages(train, model),
        recomputes=train.model.use_activation_checkpointing,
        micro_batch_size=micro_batch_size,
        context_parallel=train.model.context_parallel,
        num_trained_copies=trained_copies,
        num_frozen_copies=frozen_copies,
        logit_bytes=_logit_bytes(config),
        learns_distributions=teacher is not None and teacher.kind == "full",
        sequence_tokens=train.max_seq_len,
        engine=_engine_demand(train, train.sampler, model, device_bytes, near)
        if train.sampler and is_shared
        else None,
        device_bytes=host_memory_bytes() if device_bytes is None else device_bytes,
        is_cpu=is_cpu,
        host_bytes=host_memory_bytes() if device_bytes == device_memory_bytes() else None,
    )
    return plan_memory(demand)


def _num_averages(train: TrainSettings, model: ModelSize) -> float:
    """Return the size of the optimizer's state, in sizes of the trained weights."""
    is_whole = train.lora_peft_config is None
    per_weight = 2 if is_whole and train.model.dtype == "bfloat16" else 4
    outside = 1 - model.num_in_blocks / model.num_parameters if is_whole else 0.0
    return state_bytes(train.optimizer, per_weight, outside) / per_weight


def _logit_bytes(config: Config) -> int:
    """Return the most bytes that each logit of a chunk takes; measured by the tests of what computes them."""
    rl, most = config.rl, 12
    if rl is not None and rl.update.entropy_coef > 0:
        most += 9
    if rl is not None and rl.teacher is not None and rl.teacher.kind == "full":
        most += {0.0: 13, 1.0: 9}.get(rl.teacher.beta, 30)
    return most


def _other_models(config: Config, model: ModelSize, is_cpu: bool) -> tuple[int, int, float]:
    """Return the sequences of a micro-batch, and numbers of other trained and frozen models, in sizes of `model`."""
    train, rl = config.train_parameters, config.rl
    if rl is None:
        return config.text.train_bs * (2 if config.examples in ("pairs", "labels") else 1), 0, 0
    # This imports torch, which the plan of a fine-tuning run does not need.
    from vectorlm.algorithms.registry import get_algorithm

    spec = get_algorithm(rl.algorithm)
    has_reference = (spec.needs_reference or rl.kl.kl_coef > 0) and train.lora_peft_config is None
    tokens = rl.update.max_tokens_per_micro_batch
    if is_cpu:
        # A group that is packed, and any that is compared as one, shares one forward pass.
        tokens = min(tokens, max(CPU_PASS_TOKENS, rl.collect.group_size * train.max_seq_len))
    micro_batch_size = max(tokens // train.max_seq_len, 1)
    frozen: float = int(has_reference) + len(rl.reward.reward_models)
    if rl.teacher is not None and rl.teacher.model is not None:
        frozen += read_model_size(rl.teacher.model).num_parameters / model.num_parameters
    return micro_batch_size, int(spec.needs_critic), frozen


def _engine_demand(
    train: TrainSettings,
    sampler: SamplerSettings,
    model: ModelSize,
    device_bytes: int | None,
    num_devices: int,
) -> EngineDemand:
    is_cpu, arguments = device_bytes is None, sampler.engine.engine_args
    share = sampler.engine.gpu_memory_utilization
    # By default, vLLM computes in bf16 on CUDA with weights that were saved in fp32.
    per_weight = 4 if train.engine_dtype(not is_cpu) == "float32" else 2
    size = arguments.get("tensor_parallel_size") or 1
    step_tokens = step_sequences = 0
    if device_bytes is not None:
        step_tokens, step_sequences = step_sizes(device_bytes)
        if not {"tensor_parallel_size", "data_parallel_size"} & set(arguments):
            weight_bytes = per_weight * model.num_parameters
            size = tensor_parallel_size(num_devices, model.num_heads, weight_bytes, share * device_bytes)
    given = arguments.get("kv_cache_memory_bytes")
    staged = {"push": None, "pull": 0}.get(sampler.engine.transport, BUCKET_BYTES)
    packs = sampler.engine.receiver == "packed" or packs_by_itself(model.num_parameters)
    return EngineDemand(
        bytes_per_weight=per_weight,
        tensor_parallel=size,
        num_engines=arguments.get("data_parallel_size") or max(num_devices // size, 1),
        step_tokens=arguments.get("max_num_batched_tokens") or step_tokens,
        step_sequences=arguments.get("max_num_seqs") or step_sequences,
        kv_cache_bytes=CPU_KV_CACHE_BYTES if given is None and is_cpu else given,
        device_share=share,
        max_model_len=arguments.get("max_model_len") or model.max_length,
        is_packed=is_cpu and sampler.engine.receiver != "live" and packs,
        staged_bytes=staged if sampler.engine.inference == "vllm" else None,
        sleep=sampler.turn.sleep,
        offload_optimizer=sampler.turn.offload_optimizer,
    )


def step_sizes(device_bytes: int) -> tuple[int, int]:
    """Return the most tokens and sequences of a step of vLLM; an A100 of 80 GiB has those of smaller devices."""
    return (16384, 1024) if device_bytes >= 70 * GIB else (8192, 256)


def host_memory_bytes() -> int:
    """Return the memory of this machine, or of its container where that is less."""
    total = psutil.virtual_memory().total
    limit = container_limits().memory_bytes
    return total if limit is None else min(total, limit)


def device_memory_bytes() -> int | None:
    """Return the memory of the smallest CUDA device; None without one, and then torch is not loaded."""
    if not has_gpu():
        return None
    import torch

    totals = [
        torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())
    ]
    return min(totals, default=None)
