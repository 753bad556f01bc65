"""What `SamplingEngine` accepts, checked and completed before any process is started."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vectorlm.packages import fields_of, versions_of_rank
from vectorlm.ranks.topology import Topology, devices_of_engine, tensor_parallel_size
from vectorlm.sampling.settings import DEVICE_SHARE, Channels, EngineSettings, LoraMode, Receivers, Transports
from vectorlm.sampling.weights.model_size import read_model_size, two_sets_of_weights
from vectorlm.settings import nearest, require_choice

PLACES = ("url", "token", "download_dir")
"""Arguments of engines that may be each machine's own."""


def merge(
    settings: EngineSettings, engine_args: Mapping[str, Any], constructor: Callable[..., None]
) -> EngineSettings:
    """Return `settings` with the fields among the keywords of the `constructor`, and all arguments of the engine.

    Raises:
        TypeError: A keyword is neither a field nor an argument of the constructor or of vLLM's engine.
        ValueError: A field has a value that it does not take.
    """
    names = [field.name for field in dataclasses.fields(EngineSettings)]
    given = dict(engine_args)
    settings = dataclasses.replace(settings, **{name: given.pop(name) for name in names if name in given})
    arguments = {**settings.engine_args, **given}
    if settings.inference == "vllm":
        known = fields_of("engine/arg_utils.py", "EngineArgs")
        for name in arguments if known else ():
            if name not in known:
                near = nearest(name, [*known, *names, *constructor.__annotations__]) or "Leave it out."
                raise TypeError(
                    f"neither SamplingEngine nor vLLM's engine knows an argument {name!r}. {near}"
                )
        arguments.setdefault("dtype", settings.vllm_dtype)
        arguments.setdefault("gpu_memory_utilization", settings.gpu_memory_utilization)
    require_choice("receiver", settings.receiver, Receivers)
    require_choice("transport", settings.transport, Transports)
    lora_mode = _lora_mode(settings.lora_mode, bool(arguments.get("enable_lora")))
    return dataclasses.replace(settings, engine_args=arguments, lora_mode=lora_mode)


def _lora_mode(lora_mode: LoraMode, enable_lora: bool) -> LoraMode:
    """Resolve `auto`; raise ValueError for an unknown mode, or one that contradicts ``enable_lora``."""
    require_choice("lora_mode", lora_mode, LoraMode)
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


def require_channel(channel: str, **of_process: Any) -> None:
    """Raise ValueError for an unknown channel, and for an argument that only a process of the engine's own can heed."""
    require_choice("channel", channel, Channels)
    given = [name for name, value in of_process.items() if value is not None]
    if channel == "inline" and given:
        raise ValueError(
            f"channel='inline' has no process that {given[0]} could apply to: leave it out, or use channel='process'."
        )


def same_on_ranks(settings: EngineSettings, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be the same on all ranks: settings, the engine's arguments but for places, and versions."""
    # Sampling parameters are compared with those of each call.
    fields = {
        key: value for key, value in vars(settings).items() if key not in ("engine_args", "sampling_params")
    }
    return {
        **{name: value for name, value in engine_args.items() if name not in PLACES},
        **fields,
        **versions_of_rank(),
    }


def with_deadlines(
    engine_args: Mapping[str, Any], timeout_s: float, start_timeout_s: float
) -> dict[str, Any]:
    """Tell the client of a server how long to wait: less than the ranks wait for it, so that it names the server."""
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


def share_of_engine(
    devices: Sequence[int] | None, num_engines: int, engine_args: Mapping[str, Any], topology: Topology
) -> Sequence[int] | None:
    """Return this engine's share of the devices that are the engines' own; None where they use the ranks'.

    Raises:
        ValueError: The ranks of a node cannot be divided among its engines, with a device for each worker on CUDA.
    """
    per_node = topology.local_world_size
    if num_engines < 1 or per_node % num_engines:
        raise ValueError(
            f"data_parallel_size={num_engines} cannot be spread over {per_node} ranks of a node: it must divide "
            f"{per_node}."
        )
    devices = devices_of_engine(devices, num_engines, topology)
    num_devices = per_node // num_engines if devices is None else len(devices)
    size = engine_args.get("tensor_parallel_size", 1)
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
    return devices


def require_folder(model: str | Path, inference: str = "vllm") -> None:
    """Raise FileNotFoundError for a missing folder, ValueError for one whose weights are ambiguous.

    A name that may be of a model hub passes, with a warning if new.
    """
    path = Path(model)
    # A hub's "owner/name" has no folder called "owner" beside the script.
    is_local = path.is_absolute() or (path.parent != Path() and path.parent.is_dir())
    if is_local and not path.is_dir():
        raise FileNotFoundError(f"the model folder {model} does not exist.")
    if inference == "vllm" and path.is_dir() and (rule := two_sets_of_weights(path)) is not None:
        raise ValueError(f"{model} {rule}. Delete what is not meant.")
    if str(model).count("/") == 1 and not path.is_dir() and _is_unknown(str(model)):
        text = f"{model} is not a folder here, and not in the cache of the model hub: it is looked for on the hub."
        warnings.warn(text, stacklevel=3)


def _is_unknown(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return not isinstance(try_to_load_from_cache(name, "config.json"), str)


def one_each(params: Any, count: int) -> list[Any]:
    """Return the sampling parameters of each prompt; raises ValueError for a list of another length."""
    if isinstance(params, Sequence) and not isinstance(params, (str, bytes)):
        if len(params) != count:
            raise ValueError(
                f"{len(params)} sampling parameters were given for {count} prompts: pass one, or one each."
            )
        return list(params)
    return [params] * count
