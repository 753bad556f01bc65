"""Reports of a memory plan: a table, and the settings to change where it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from vectorlm.runs.preflight.memory_plan import GIB, MemoryPlan, sequence_kv_bytes

NUM_FIXES = 3
"""Most settings that one error names."""


class Change(NamedTuple):
    """A change of a run that may save memory."""

    text: str
    """A setting with its value, as in YAML, or an option of the command."""
    plan: MemoryPlan
    """The plan of the changed run."""
    is_allowed: Callable[[], bool]
    """Whether the changed run passes the check of its settings."""


class Shortage(NamedTuple):
    """A kind of memory of which a plan needs more than there is."""

    kind: str
    plan: MemoryPlan
    text: str

    def advice(self, changes: Iterable[Change]) -> str:
        """Name the first changes that are enough, or those that gain most."""
        before, found = needs_of(self.plan), []
        for change in changes:
            after = needs_of(change.plan)
            short = {kind for kind, (needed, available) in after.items() if needed > available}
            needed, available = after.get(self.kind, (0, 0))
            lacking = needed - available
            if lacking < before[self.kind][0] - before[self.kind][1] and all(
                before[kind][0] > before[kind][1] for kind in short
            ):
                found.append(
                    (bool(short), lacking if short else 0, f"{change.text} ({amount(needed)})", change)
                )
        found.sort(key=lambda each: each[:2])
        allowed = (each for each in found if each[3].is_allowed())
        best = [each for each, _ in zip(allowed, range(NUM_FIXES), strict=False)]
        if not best:
            return "No setting helps. Use a smaller model."
        enough = ", or ".join(text for is_short, _, text, _ in best if not is_short)
        most = ", or ".join(text for _, _, text, _ in best)
        return f"Set {enough}." if enough else f"No one setting is enough; most is gained by {most}."


def needs_of(plan: MemoryPlan) -> dict[str, tuple[int, int]]:
    """Return the bytes that are needed, and those that there are, of each kind of memory."""
    demand, found = plan.demand, {}
    if demand.engine is not None and demand.engine.reserves_kv_cache:
        found["KV cache"] = sequence_kv_bytes(demand, demand.engine), plan.kv_cache_bytes
    if demand.host_bytes is not None:
        found["host"] = max(plan.loading_host, plan.running_host), demand.host_bytes
    phases = {"training": plan.training, "sampling": plan.sampling}
    return found | {phase: (needed, demand.device_bytes) for phase, needed in phases.items()}


def find_shortage(plan: MemoryPlan) -> Shortage | None:
    """Return the first kind of memory of which a run needs more than there is; None where it fits."""
    demand = plan.demand
    for kind, (needed, available) in needs_of(plan).items():
        if needed <= available:
            continue
        what, place = kind, "this machine" if demand.is_cpu else "the device"
        uses = {row.name: row.training if kind == "training" else row.sampling for row in plan.rows}
        if kind == "host":
            what, place = "loading" if plan.loading_host == needed else "running", "the host of the devices"
            uses = {row.name: row.loading if what == "loading" else row.running for row in plan.host}
        largest = sorted(uses, key=lambda name: -uses[name])[:3]
        parts = ", ".join(f"{name} {amount(uses[name])}" for name in largest)
        text = f"{what} needs {amount(needed)} (an estimate; most of it: {parts}) and {place} has"
        if kind == "KV cache" and demand.engine is not None:
            text = f"one sequence of max_model_len={demand.engine.max_model_len} tokens needs {amount(needed)}, and"
            text += " the engine's KV cache has"
        return Shortage(kind, plan, f"{text} {amount(available)}.")
    return None


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
