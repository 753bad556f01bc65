"""What `SamplingEngine` accepts, checked before any process is started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from vectorlm.contracts import WeightSource
from vectorlm.errors import EngineError
from vectorlm.ranks.topology import Topology
from vectorlm.types import InFlight, Prompt

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


def require_folder(model: str | Path) -> None:
    """Raise FileNotFoundError for a name that can only be a folder and is none; others may be of a model hub."""
    path = Path(model)
    # A hub's "owner/name" has no folder called "owner" beside the script.
    is_local = path.is_absolute() or (path.parent != Path() and path.parent.is_dir())
    if is_local and not path.is_dir():
        raise FileNotFoundError(f"the model folder {model} does not exist.")


def require_model(model: Any) -> None:
    """Raise TypeError for what is not a model, a state dict for example."""
    import torch

    if not isinstance(model, torch.nn.Module | WeightSource):
        raise TypeError(
            f"update takes the model itself, a torch.nn.Module, or a WeightSource, not a {type(model).__name__}."
        )


def require_step(train_step: Any) -> None:
    """Raise TypeError or ValueError for a step that is no version: completions carry it as 32 bits."""
    if isinstance(train_step, bool) or not isinstance(train_step, int):
        raise TypeError(f"train_step={train_step!r} is not a version: it must be an integer.")
    if not 0 <= train_step < 2**31:
        raise ValueError(f"train_step={train_step} is not a version: it must be at least 0 and below 2^31.")


def require_in_flight(in_flight: str) -> None:
    """Raise ValueError for a way to treat requests under way that does not exist."""
    if in_flight not in get_args(InFlight):
        known = ", ".join(get_args(InFlight))
        raise ValueError(f"in_flight={in_flight!r} is not known: it must be one of {known}.")


def require_room_for_update(num_under_way: int, in_flight: InFlight) -> None:
    """Raise EngineError where an update would meet requests and nobody has said what becomes of them."""
    if num_under_way and in_flight == "refuse":
        raise EngineError(
            f"{num_under_way} requests are under way: wait for them, or say what becomes of them (in_flight)."
        )


def as_list(prompts: Sequence[Prompt] | str) -> list[Prompt]:
    """Return a list of prompts; one text is one prompt.

    Raises:
        TypeError: Something is not a prompt; the text says which.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise TypeError(f"prompts={prompts!r} must be a text or a list of prompts.")
    listed = list(prompts)
    for index, prompt in enumerate(listed):
        if not _is_prompt(prompt):
            raise TypeError(
                f"prompt {index} is {str(prompt)[:60]!r}, a {type(prompt).__name__}: a prompt is text, token ids or "
                "chat messages ({'role': …, 'content': …})."
            )
    return listed


def _is_prompt(prompt: Any) -> bool:
    """Look at the first element alone: prompts may be long."""
    if isinstance(prompt, str):
        return True
    if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Sequence):
        # Arrays and tensors of token ids are no `Sequence`, and taken as they come.
        return hasattr(prompt, "tolist") and hasattr(prompt, "__len__")
    if not len(prompt):
        return True
    if isinstance(prompt[0], Mapping):
        return {"role", "content"} <= prompt[0].keys()
    return hasattr(prompt[0], "__index__")


def one_each(params: Any, count: int) -> list[Any]:
    """Give every prompt its own sampling parameters, as it is given or shared by all."""
    if isinstance(params, Sequence) and not isinstance(params, (str, bytes)):
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
