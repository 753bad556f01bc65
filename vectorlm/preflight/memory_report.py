"""Reports of a memory plan: a table, and the settings to change where it does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from vectorlm.errors import ConfigError
from vectorlm.preflight.memory_plan import (
    GIB,
    Demand,
    EngineDemand,
    MemoryPlan,
    plan_memory,
    sequence_kv_bytes,
)

NUM_FIXES = 3
"""Most settings that one error names."""


def check_memory(plan: MemoryPlan) -> None:
    """Raise a ConfigError where a phase needs more memory than there is, or the KV cache cannot hold one sequence.

    The text has the numbers and the settings to change.
    """
    demand = plan.demand
    if demand.engine is not None:
        needed = sequence_kv_bytes(demand, demand.engine)
        if plan.kv_cache_bytes < needed:
            raise ConfigError(
                f"the engine's KV cache has {amount(plan.kv_cache_bytes)}, and one sequence of "
                f"max_model_len={demand.engine.max_model_len} tokens takes {amount(needed)}. Raise "
                f"{_kv_cache_setting(demand, demand.engine)}, or lower train_parameters.sampler.engine.max_model_len."
            )
    needed = max(plan.loading_host, plan.running_host)
    if demand.host_bytes is not None and needed > demand.host_bytes:
        row = max(plan.host, key=lambda row: max(row.loading, row.running))
        fix = "train_parameters.low_cpu_mem_usage: true" if row.loading else "offload less"
        raise ConfigError(
            f"the host of the devices needs {amount(needed)} (an estimate; most of it: {row.name}) and has "
            f"{amount(demand.host_bytes)}. Set {fix}, or use more nodes."
        )
    place = "this machine" if demand.is_cpu else "the device"
    for phase in ("training", "sampling"):
        total = getattr(plan, phase)
        if total > demand.device_bytes:
            largest = sorted(plan.rows, key=lambda row: -getattr(row, phase))[:3]
            parts = ", ".join(f"{row.name} {amount(getattr(row, phase))}" for row in largest)
            raise ConfigError(
                f"{phase} needs {amount(total)} (an estimate; most of it: {parts}) and {place} has "
                f"{amount(demand.device_bytes)}. {_advice(plan, phase)}"
            )


def _advice(plan: MemoryPlan, phase: str) -> str:
    needs = [(getattr(plan_memory(changed), phase), text) for text, changed in _changes(plan.demand)]
    if not any(need <= plan.demand.device_bytes for need, _ in needs):
        needs += [
            (getattr(plan_memory(changed), phase), text) for text, changed in _last_changes(plan.demand)
        ]
    helping = sorted(each for each in needs if each[0] < getattr(plan, phase))
    enough = [each for each in helping if each[0] <= plan.demand.device_bytes]
    if not helping:
        return "Use a smaller model."
    settings = ", or ".join(f"{text} ({amount(need)})" for need, text in (enough or helping)[:NUM_FIXES])
    return f"Set {settings}." if enough else f"No one setting is enough; most is gained by {settings}."


def _changes(demand: Demand) -> Iterator[tuple[str, Demand]]:
    """Yield the settings that a user can change, as written in YAML, with the resulting demand."""
    engine = demand.engine
    if engine is not None:
        path = "train_parameters.sampler"
        yield f"{path}.sleep: all", replace(demand, engine=replace(engine, sleep="all"))
        offload = replace(engine, offload_optimizer=True)
        yield f"{path}.offload_optimizer: true", replace(demand, engine=offload)
        half = engine.kv_cache_bytes and engine.kv_cache_bytes // 2
        smaller_cache = replace(engine, kv_cache_bytes=half, device_share=engine.device_share / 2)
        yield f"{_kv_cache_setting(demand, engine)} to half of it", replace(demand, engine=smaller_cache)
    if not demand.recomputes:
        yield "train_parameters.use_activation_checkpointing: true", replace(demand, recomputes=True)
    elif demand.recomputes != "offload" and not demand.is_cpu:
        yield "train_parameters.use_activation_checkpointing: offload", replace(demand, recomputes="offload")
    if demand.micro_batch_size > 1:
        smaller = max(1, demand.micro_batch_size // 2)
        yield f"dataset.train_bs: {smaller}", replace(demand, micro_batch_size=smaller)
    twice = 2 * demand.context_parallel
    if demand.packs and not demand.num_ranks % twice and not demand.model.num_heads % twice:
        yield f"train_parameters.context_parallel: {twice}", replace(demand, context_parallel=twice)
    if demand.num_shards < demand.num_ranks or demand.keeps_gathered:
        sharded = replace(demand, num_shards=demand.num_ranks, keeps_gathered=False)
        yield "train_parameters.sharding_strategy: FULL_SHARD", sharded
    if not demand.is_cpu:
        more = replace(demand, num_ranks=2 * demand.num_ranks, num_shards=2 * demand.num_shards)
        yield f"--world_size {more.num_ranks}", more


def _last_changes(demand: Demand) -> Iterator[tuple[str, Demand]]:
    """Yield the settings that cost time, or change numbers, as `_changes` does."""
    if not (demand.cpu_offload or demand.is_cpu):
        yield "train_parameters.cpu_offload: true", replace(demand, cpu_offload=True)
    if demand.bytes_per_weight == 4:
        yield "train_parameters.dtype: bfloat16", replace(demand, bytes_per_weight=2, is_mixed=True)


def _kv_cache_setting(demand: Demand, engine: EngineDemand) -> str:
    by_size = demand.is_cpu or engine.kv_cache_bytes is not None
    setting = "engine.kv_cache_memory_bytes" if by_size else "gpu_memory_utilization"
    return f"train_parameters.sampler.{setting}"


def memory_table(plan: MemoryPlan) -> str:
    """Return the plan in GiB, one kind of memory per line."""
    demand = plan.demand
    place = "this machine, all processes together" if demand.is_cpu else "the fullest device"
    uses = [(row.name, row.training, row.sampling) for row in plan.rows]
    heads = ("training", "sampling") if demand.engine is not None else ("training",)
    lines = [f"  memory of {place}, of {gib(demand.device_bytes)} GiB:", *_table(heads, uses)]
    if plan.host:
        of = "" if demand.host_bytes is None else f", of {gib(demand.host_bytes)} GiB"
        host = [(row.name, row.loading, row.running) for row in plan.host]
        lines += [f"  memory of the node's host{of}:", *_table(("loading", "running"), host)]
    return "\n".join(lines)


def _table(heads: Sequence[str], uses: Sequence[tuple[str, int, int]]) -> Iterator[str]:
    """Yield the lines of a table with a column for each head, and the columns' totals."""
    rows = [("GiB (estimate)", *heads)]
    rows += [(name, *map(gib, numbers[: len(heads)])) for name, *numbers in uses]
    totals = [sum(first for _, first, _ in uses), sum(second for _, _, second in uses)]
    rows.append(("total", *map(gib, totals[: len(heads)])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        aligned = (f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        yield f"  {name:<{widths[0]}}" + "".join(aligned)


def gib(num_bytes: int) -> str:
    """Write bytes as GiB, with two decimals below ten."""
    return f"{num_bytes / GIB:.{2 if num_bytes < 10 * GIB else 1}f}"


def amount(num_bytes: int) -> str:
    """Write bytes with their unit: GiB, or MiB below 0.1 GiB."""
    return f"{gib(num_bytes)} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / (1 << 20):.2f} MiB"
