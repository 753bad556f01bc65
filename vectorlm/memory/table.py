"""A memory plan as a few lines for people."""

from __future__ import annotations

from vectorlm.memory.plan import GIB, MemoryPlan


def memory_table(plan: MemoryPlan) -> str:
    """Return the plan in GiB, one kind of memory a line."""
    demand = plan.demand
    place = "this machine, all processes together" if demand.is_cpu else "the fullest device"
    rows = [(row.name, gib(row.training), gib(row.sampling)) for row in plan.rows]
    rows.append(("total", gib(plan.training), gib(plan.sampling)))
    heads = ("GiB (estimate)", "training", "sampling")
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [
        f"  {name:<{widths[0]}}  {training:>{widths[1]}}  {sampling:>{widths[2]}}"
        for name, training, sampling in (heads, *rows)
    ]
    if demand.engine is None:
        lines = [line[: 4 + widths[0] + widths[1]] for line in lines]
    return "\n".join([f"  memory of {place}, of {gib(demand.device_bytes)} GiB:", *lines])


def gib(num_bytes: int) -> str:
    """Write bytes as GiB, with two decimals below ten."""
    return f"{num_bytes / GIB:.{2 if num_bytes < 10 * GIB else 1}f}"


def amount(num_bytes: int) -> str:
    """Write bytes with their unit: GiB, or MiB below 0.1 GiB."""
    return f"{gib(num_bytes)} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / (1 << 20):.2f} MiB"
