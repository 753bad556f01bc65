"""What `SamplingEngine` accepts, checked before any process is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vectorlm.ranks.topology import Topology
from vectorlm.types import Prompt

RECEIVERS = ("auto", "live", "packed")
LORA_MODES = ("auto", "adapter", "merged")


def require_receiver(receiver: str) -> None:
    """Raise ValueError for a receiver that does not exist."""
    if receiver not in RECEIVERS:
        raise ValueError(f"receiver={receiver!r} is not known: it must be one of {', '.join(RECEIVERS)}.")


def choose_lora_mode(lora_mode: str, enable_lora: bool) -> str:
    """Resolve `auto`, and refuse a mode that the engine is not built for.

    Raises:
        ValueError: The mode is unknown, or contradicts ``enable_lora``.
    """
    if lora_mode not in LORA_MODES:
        raise ValueError(f"lora_mode={lora_mode!r} is not known: it must be one of {', '.join(LORA_MODES)}.")
    if lora_mode == "adapter" and not enable_lora:
        raise ValueError(
            "lora_mode='adapter' needs an engine with LoRA layers: pass enable_lora=True and max_lora_rank, or use "
            "lora_mode='merged'."
        )
    if lora_mode == "merged" and enable_lora:
        raise ValueError(
            "lora_mode='merged' needs no LoRA layers, which would only slow the engine down: leave enable_lora out."
        )
    if lora_mode == "auto":
        return "adapter" if enable_lora else "merged"
    return lora_mode


def require_engines(data_parallel_size: int, topology: Topology) -> None:
    """Raise ValueError if the ranks of a node cannot be shared out among so many engines."""
    per_node = topology.local_world_size
    if data_parallel_size < 1 or per_node % data_parallel_size:
        raise ValueError(
            f"data_parallel_size={data_parallel_size} cannot be spread over {per_node} ranks of a node: it must divide "
            f"{per_node}."
        )


def require_devices(tensor_parallel_size: Any, ranks_per_engine: int, topology: Topology) -> None:
    """Raise ValueError if an engine cannot be split over so many workers: on CUDA each shares the device of a rank."""
    size = tensor_parallel_size
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"tensor_parallel_size={size!r} must be an integer >= 1.")
    if topology.is_cuda and size > ranks_per_engine:
        raise ValueError(
            f"tensor_parallel_size={size} must be at most {ranks_per_engine}, the number of ranks of an engine: every "
            "worker of the engine shares the device of a rank. Use fewer, or start more ranks."
        )


def as_list(prompts: Sequence[Prompt] | str) -> list[Prompt]:
    """Return a list of prompts; one text is one prompt."""
    return [prompts] if isinstance(prompts, str) else list(prompts)


def one_each(params: Any, count: int) -> list[Any]:
    """Give every prompt its own sampling parameters, so that those of several ranks can be put end to end."""
    if isinstance(params, Sequence):
        if len(params) != count:
            raise ValueError(
                f"{len(params)} sampling parameters were given for {count} prompts: pass one, or one each."
            )
        return list(params)
    return [params] * count


def summary(prompts: Sequence[Prompt]) -> str:
    """Describe prompts in a few words, for an error text."""
    first = f", the first {str(prompts[0])[:60]!r}" if prompts else ""
    return f"{len(prompts)} prompts{first}"
