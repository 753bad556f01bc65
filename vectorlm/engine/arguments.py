"""What `SamplingEngine` accepts, checked and completed before any process is started."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vectorlm.contracts import WeightSource
from vectorlm.engine.settings import DEVICE_SHARE, Channels, Receivers, Transports
from vectorlm.packages import fields_of, versions_of_rank
from vectorlm.ranks.placement import tensor_parallel_size
from vectorlm.ranks.topology import Topology
from vectorlm.settings import nearest, require_choice
from vectorlm.types import InFlight, Prompt
from vectorlm.weights.model_size import read_model_size

LORA_MODES = ("auto", "adapter", "merged")
PLACES = ("url", "token", "download_dir")
"""Arguments of engines that may be each machine's own."""


def require_names(receiver: str, transport: str) -> None:
    """Raise ValueError for an unknown receiver or transport."""
    require_choice("receiver", receiver, Receivers)
    require_choice("transport", transport, Transports)


def require_channel(channel: str, **of_process: Any) -> None:
    """Raise ValueError for an unknown channel, and for an argument that only a process of the engine's own can heed."""
    require_choice("channel", channel, Channels)
    given = [name for name, value in of_process.items() if value is not None]
    if channel == "inline" and given:
        raise ValueError(
            f"channel='inline' has no process that {given[0]} could apply to: leave it out, or use channel='process'."
        )


def require_known(engine_args: Mapping[str, Any], inference: str, own: Iterable[str]) -> None:
    """Raise TypeError for an argument that is neither vLLM's nor one of the engine's `own`, before vLLM starts."""
    known = fields_of("engine/arg_utils.py", "EngineArgs") if inference == "vllm" else {}
    for name in engine_args if known else ():
        if name not in known:
            near = nearest(name, [*known, *own]) or "Leave it out."
            raise TypeError(f"neither SamplingEngine nor vLLM's engine knows an argument {name!r}. {near}")


def of_rank(engine_args: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """Return what must be the same on all ranks: arguments of the engine, but no places, and versions."""
    return {name: each for name, each in engine_args.items() if name not in PLACES} | own | versions_of_rank()


def warn_of_another(model: str) -> None:
    """Warn that an engine of this process is open already."""
    warnings.warn(
        f"another engine of this process is open, with {model}: both hold weights and a KV cache. If you do not need "
        "it any more, call its close() first. A notebook also keeps what a cell has displayed: `%reset out` drops it.",
        stacklevel=3,
    )


def choose_lora_mode(lora_mode: str, enable_lora: bool) -> str:
    """Resolve `auto`; raise ValueError for an unknown mode, or one that contradicts ``enable_lora``."""
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
    return "adapter" if enable_lora else "merged"


def with_deadlines(
    engine_args: Mapping[str, Any], inference: str, timeout_s: float, start_timeout_s: float
) -> Mapping[str, Any]:
    """Tell an engine that waits for a server how long; less than the ranks wait for it, so that it names the server."""
    if inference != "server":
        return engine_args
    limits = {"silence_s": 0.9 * timeout_s, "start_timeout_s": min(600.0, start_timeout_s / 2)}
    return {**limits, **engine_args}


def tokenizer_of(model: str | Path, engine_args: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return whose tokenizer makes token ids of the prompts, and how it is read."""
    name = engine_args.get("tokenizer")
    options = {"trust_remote_code": engine_args.get("trust_remote_code", False)}
    if revision := engine_args.get("tokenizer_revision") or engine_args.get("revision"):
        options["revision"] = revision
    return str(name if isinstance(name, str | Path) else model), options


def parallel_sizes(engine_args: Mapping[str, Any], topology: Topology, model: str | Path) -> dict[str, int]:
    """Return the sizes with which all CUDA devices of a node sample; none on CPU.

    An engine gets as many devices as `engine_args` say, or its weights need; there are as many engines as that allows.
    """
    if not topology.is_cuda:
        return {}
    size = engine_args.get("tensor_parallel_size")
    size = _devices_needed(engine_args, topology, model) if size is None else size
    if not isinstance(size, int) or size < 1:
        return {}
    engines = max(topology.local_world_size // size, 1)
    return {"tensor_parallel_size": size, "data_parallel_size": engines}


def _devices_needed(engine_args: Mapping[str, Any], topology: Topology, model: str | Path) -> int:
    import torch

    try:
        found = read_model_size(model)
    except (OSError, ValueError):
        return 1
    total = torch.cuda.get_device_properties(topology.device).total_memory
    weight_bytes = found.num_parameters * (4 if engine_args.get("dtype") in ("float32", "float") else 2)
    room = total * float(engine_args.get("gpu_memory_utilization", DEVICE_SHARE))
    return tensor_parallel_size(topology.local_world_size, found.num_heads, weight_bytes, room)


def require_engines(data_parallel_size: int, topology: Topology) -> None:
    """Raise ValueError if the ranks of a node cannot be divided among this many engines."""
    per_node = topology.local_world_size
    if data_parallel_size < 1 or per_node % data_parallel_size:
        raise ValueError(
            f"data_parallel_size={data_parallel_size} cannot be spread over {per_node} ranks of a node: it must divide "
            f"{per_node}."
        )


def require_devices(size: Any, num_devices: int, topology: Topology) -> None:
    """Raise ValueError if an engine has too few devices for its workers: on CUDA each shares the device of a rank."""
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"tensor_parallel_size={size!r} must be an integer >= 1.")
    if topology.is_cuda and size > num_devices:
        raise ValueError(
            f"tensor_parallel_size={size} must be at most {num_devices}, the number of ranks of an engine: every "
            "worker of the engine shares the device of a rank. Use fewer, or start more ranks."
        )
    if topology.is_cuda and size < num_devices and topology.is_main:
        warnings.warn(
            f"an engine has {num_devices} devices and samples on {size} of them: raise data_parallel_size or "
            "tensor_parallel_size, or leave both out.",
            stacklevel=3,
        )


def require_folder(model: str | Path) -> None:
    """Raise FileNotFoundError for a missing folder; a name that may be of a model hub passes, with a warning if new."""
    path = Path(model)
    # A hub's "owner/name" has no folder called "owner" beside the script.
    is_local = path.is_absolute() or (path.parent != Path() and path.parent.is_dir())
    if is_local and not path.is_dir():
        raise FileNotFoundError(f"the model folder {model} does not exist.")
    if str(model).count("/") == 1 and not path.is_dir() and _is_unknown(str(model)):
        text = f"{model} is not a folder here, and not in the cache of the model hub: it is looked for on the hub."
        warnings.warn(text, stacklevel=3)


def _is_unknown(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return not isinstance(try_to_load_from_cache(name, "config.json"), str)


def require_update(model: Any, train_step: Any, in_flight: str) -> None:
    """Raise TypeError or ValueError for arguments that `update` does not take, a state dict for example."""
    import torch

    if not isinstance(model, torch.nn.Module | WeightSource):
        raise TypeError(
            f"update takes the model itself, a torch.nn.Module, or a WeightSource, not a {type(model).__name__}."
        )
    if isinstance(train_step, bool) or not isinstance(train_step, int):
        raise TypeError(f"train_step={train_step!r} is not a version: it must be an integer.")
    if not 0 <= train_step < 2**31:  # Completions carry it as int32.
        raise ValueError(f"train_step={train_step} is not a version: it must be at least 0 and below 2^31.")
    require_choice("in_flight", in_flight, InFlight)


def one_each(params: Any, count: int) -> list[Any]:
    """Return the sampling parameters of each prompt; raises ValueError for a list of another length."""
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


def log_of_this_host(path: str | Path | None, topology: Topology) -> Path | None:
    """Return the log of this rank's engine: those that share a folder must not write into one file."""
    if path is None or topology.is_main:
        return None if path is None else Path(path)
    return Path(path).with_suffix(f".{topology.rank}{Path(path).suffix}")
