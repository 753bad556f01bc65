"""The memory plan of a run that a config describes."""

from __future__ import annotations

from vectorlm.config import Config, SamplerSettings
from vectorlm.memory.demand import CPU_KV_CACHE_BYTES, Demand, EngineDemand
from vectorlm.memory.device import host_memory_bytes
from vectorlm.memory.model_size import ModelSize, count_adapter_parameters, read_model_size
from vectorlm.memory.plan import MemoryPlan, plan_memory
from vectorlm.memory.refusal import check_memory
from vectorlm.memory.table import memory_table
from vectorlm.receiver import packs_by_itself


def memory_report(
    config: Config, world_size: int, *, device_bytes: int | None = None, ranks_per_node: int | None = None
) -> str:
    """Return the memory plan of a run as a table, or why there is none, before anything is started.

    Args:
        config: The run.
        world_size: Ranks in all.
        device_bytes: Memory of one CUDA device; None plans for CPU, and for the memory of this machine.
        ranks_per_node: Ranks of one node; all of them when omitted.

    Raises:
        ConfigError: The run cannot fit; the text has the numbers and the settings to turn.
    """
    try:
        plan = plan_of_config(
            config,
            world_size,
            device_bytes=host_memory_bytes() if device_bytes is None else device_bytes,
            is_cpu=device_bytes is None,
            ranks_per_node=ranks_per_node,
        )
    except (OSError, ValueError) as error:
        return f"  no memory plan: {error}"
    check_memory(plan)
    return memory_table(plan)


def plan_of_config(
    config: Config, world_size: int, *, device_bytes: int, is_cpu: bool, ranks_per_node: int | None = None
) -> MemoryPlan:
    """Plan the memory of a run; reads the model's folder and nothing else.

    Args:
        config: The run.
        world_size: Ranks in all.
        device_bytes: Memory of one device; on CPU of the machine.
        is_cpu: Whether the run is on CPU.
        ranks_per_node: Ranks of one node; all of them when omitted.

    Raises:
        ValueError: The size of the model cannot be read; the text says what is missing.
    """
    train, near = config.train_parameters, ranks_per_node or world_size
    model = read_model_size(config.model)
    lora = train.lora_peft_config
    shards = {"NO_SHARD": 1, "HYBRID_SHARD": near}.get(train.sharding_strategy, world_size)
    micro_batch_size, trained_copies, frozen_copies = _other_models(config)
    overlap = config.overlap
    # On CUDA devices of its own the engine is in nobody's way; on CPU there is one memory.
    is_shared = is_cpu or overlap is None or overlap.placement == "shared"
    demand = Demand(
        model=model,
        num_trainable=model.num_parameters if lora is None else count_adapter_parameters(config.model, lora),
        num_ranks=near,
        num_shards=shards,
        keeps_gathered=train.sharding_strategy in ("SHARD_GRAD_OP", "NO_SHARD"),
        is_mixed=train.use_mp,
        recomputes=train.use_activation_checkpointing,
        micro_batch_size=micro_batch_size,
        num_trained_copies=trained_copies,
        num_frozen_copies=frozen_copies,
        sequence_tokens=train.max_seq_len,
        engine=_engine_demand(train.sampler, model, is_cpu) if train.sampler and is_shared else None,
        device_bytes=device_bytes,
        is_cpu=is_cpu,
    )
    return plan_memory(demand)


def _other_models(config: Config) -> tuple[int, int, int]:
    """Return the sequences of a micro-batch, the models trained beside the policy, and those that only compute."""
    train, rl = config.train_parameters, config.rl
    if rl is None:
        return config.text.train_bs, 0, 0
    # torch is imported for this, which a plan of fine-tuning does without.
    from vectorlm.algorithms.registry import get_algorithm

    spec = get_algorithm(rl.algorithm)
    has_reference = (spec.needs_reference or rl.kl_coef > 0) and train.lora_peft_config is None
    micro_batch_size = max(rl.max_tokens_per_micro_batch // train.max_seq_len, 1)
    return micro_batch_size, int(spec.needs_critic), int(has_reference) + len(rl.reward_models)


def _engine_demand(sampler: SamplerSettings, model: ModelSize, is_cpu: bool) -> EngineDemand:
    # Left to itself, vLLM computes in bf16 with weights that were saved in fp32.
    is_wide = sampler.vllm_dtype == "float32"
    given = sampler.engine.get("kv_cache_memory_bytes")
    packs = sampler.receiver == "packed" or packs_by_itself(model.num_parameters)
    return EngineDemand(
        bytes_per_weight=4 if is_wide else 2,
        tensor_parallel=sampler.engine.get("tensor_parallel_size", 1),
        kv_cache_bytes=CPU_KV_CACHE_BYTES if given is None and is_cpu else given,
        device_share=sampler.gpu_memory_utilization,
        max_model_len=sampler.engine.get("max_model_len") or model.max_length,
        is_packed=is_cpu and sampler.receiver != "live" and packs,
        sleep=sampler.sleep,
        offload_optimizer=sampler.offload_optimizer,
    )
