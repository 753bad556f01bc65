"""What to say of a plan that cannot fit: the numbers, and the settings that would change them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vectorlm.errors import ConfigError
from vectorlm.memory.demand import Demand
from vectorlm.memory.plan import MemoryPlan, plan_memory, sequence_kv_bytes
from vectorlm.memory.table import amount

NUM_FIXES = 3
"""Settings that one refusal names at most."""


def check_memory(plan: MemoryPlan) -> None:
    """Raise where the plan cannot be carried out.

    Raises:
        ConfigError: A phase needs more than the device has, or the KV cache cannot hold one sequence; the text has
            the numbers and the settings to turn.
    """
    demand = plan.demand
    if demand.engine is not None:
        needed = sequence_kv_bytes(demand, demand.engine)
        if plan.kv_cache_bytes < needed:
            raise ConfigError(
                f"the engine's KV cache has {amount(plan.kv_cache_bytes)}, and one sequence of "
                f"max_model_len={demand.engine.max_model_len} tokens takes {amount(needed)}. Raise "
                f"{_kv_cache_setting(demand)}, or lower train_parameters.sampler.engine.max_model_len."
            )
    for phase in ("training", "sampling"):
        total = getattr(plan, phase)
        if total > demand.device_bytes:
            place = "this machine" if demand.is_cpu else "the device"
            largest = sorted(plan.rows, key=lambda row: -getattr(row, phase))[:3]
            parts = ", ".join(f"{row.name} {amount(getattr(row, phase))}" for row in largest)
            raise ConfigError(
                f"{phase} needs {amount(total)} (an estimate; most of it: {parts}) and {place} has "
                f"{amount(demand.device_bytes)}. {_advice(plan, phase)}"
            )


def _advice(plan: MemoryPlan, phase: str) -> str:
    needs = [(getattr(plan_memory(changed), phase), text) for text, changed in _changes(plan.demand)]
    helping = sorted(each for each in needs if each[0] < getattr(plan, phase))
    enough = [each for each in helping if each[0] <= plan.demand.device_bytes]
    if not helping:
        return "Use a smaller model."
    settings = ", or ".join(f"{text} ({amount(need)})" for need, text in (enough or helping)[:NUM_FIXES])
    return f"Set {settings}." if enough else f"No one setting is enough; most is gained by {settings}."


def _changes(demand: Demand) -> Iterator[tuple[str, Demand]]:
    """Yield what a user can turn, as it is written in YAML, with the demand that it leads to."""
    engine = demand.engine
    if engine is not None:
        path = "train_parameters.sampler"
        yield f"{path}.sleep: all", replace(demand, engine=replace(engine, sleep="all"))
        offload = replace(engine, offload_optimizer=True)
        yield f"{path}.offload_optimizer: true", replace(demand, engine=offload)
        yield (
            f"{_kv_cache_setting(demand)} to half of it",
            replace(
                demand,
                engine=replace(
                    engine,
                    kv_cache_bytes=engine.kv_cache_bytes and engine.kv_cache_bytes // 2,
                    device_share=engine.device_share / 2,
                ),
            ),
        )
    if not demand.recomputes:
        yield "train_parameters.use_activation_checkpointing: true", replace(demand, recomputes=True)
    if demand.micro_batch_size > 1:
        smaller = max(1, demand.micro_batch_size // 2)
        yield f"dataset.train_bs: {smaller}", replace(demand, micro_batch_size=smaller)
    if demand.num_shards < demand.num_ranks or demand.keeps_gathered:
        sharded = replace(demand, num_shards=demand.num_ranks, keeps_gathered=False)
        yield "train_parameters.sharding_strategy: FULL_SHARD", sharded
    if not demand.is_cpu:
        more = replace(demand, num_ranks=2 * demand.num_ranks, num_shards=2 * demand.num_shards)
        yield f"--world_size {more.num_ranks}", more


def _kv_cache_setting(demand: Demand) -> str:
    assert demand.engine is not None
    by_size = demand.is_cpu or demand.engine.kv_cache_bytes is not None
    return "train_parameters.sampler." + (
        "engine.kv_cache_memory_bytes" if by_size else "gpu_memory_utilization"
    )
