"""Checks and defaults of `SamplingEngine`'s arguments, before any process starts."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vectorlm.data.settings import ChatSettings
from vectorlm.errors import EngineError
from vectorlm.packages import fields_of, versions_of_rank
from vectorlm.ranks.topology import Topology, devices_of_engine, tensor_parallel_size
from vectorlm.sampling.contract import WeightSource
from vectorlm.sampling.settings import (
    DEVICE_SHARE,
    RETURN_ROUTES,
    Channels,
    EngineSettings,
    LoraMode,
    Quantisation,
    Receivers,
    Transports,
)
from vectorlm.sampling.weights.model_size import read_model_size, two_sets_of_weights
from vectorlm.sampling.weights.plan import BASE
from vectorlm.settings import nearest, require_choice
from vectorlm.types import POLICY, InFlight

PLACES = ("url", "token", "download_dir", "device")
"""Arguments of engines that may differ between machines or ranks."""


def merge(
    settings: EngineSettings, engine_args: Mapping[str, Any], constructor: Callable[..., None]
) -> EngineSettings:
    """Return `settings` updated by the keywords of the `constructor`, with all arguments of the engine.

    Raises:
        TypeError: A keyword is neither a field nor an argument of the constructor or of vLLM's engine.
        ValueError: A field has an invalid value, or `lora_mode` contradicts ``enable_lora``.
    """
    names = [field.name for field in dataclasses.fields(EngineSettings)]
    given = dict(engine_args)
    settings = dataclasses.replace(settings, **{name: given.pop(name) for name in names if name in given})
    chat = {
        field.name: given.pop(field.name) for field in dataclasses.fields(ChatSettings) if field.name in given
    }
    settings = dataclasses.replace(settings, chat=dataclasses.replace(settings.chat, **chat))
    arguments = {**settings.engine_args, **given}
    if settings.inference == "vllm":
        if arguments.pop("fp32_head", False):
            if callable(arguments.get("hf_overrides")):
                raise TypeError("fp32_head=True needs hf_overrides to be a dictionary, not a function.")
            arguments["hf_overrides"] = {**(arguments.get("hf_overrides") or {}), "head_dtype": "float32"}
        known = fields_of("engine/arg_utils.py", "EngineArgs")
        for name in arguments if known else ():
            # On CPU the backend captures routes itself, with every version of vLLM.
            if name not in known and name != RETURN_ROUTES:
                near = nearest(name, [*known, *names, *constructor.__annotations__]) or "Leave it out."
                raise TypeError(f"neither SamplingEngine nor vLLM's engine has an argument {name!r}. {near}")
        arguments.setdefault("dtype", settings.dtype)
        arguments.setdefault("gpu_memory_utilization", settings.gpu_memory_utilization)
    elif settings.dtype != "auto":
        arguments.setdefault("dtype", settings.dtype)
    if settings.quantization is not None:
        require_choice("quantization", settings.quantization, Quantisation)
        if settings.inference != "vllm":
            raise ValueError(
                f"inference={settings.inference!r} cannot be used with quantization: it must be vllm."
            )
    for name, value, rule, fix in settings.unsupported(arguments):
        raise ValueError(f"{name}={value!r} {rule}. {fix}")
    if settings.quantization is not None:
        arguments["quantization"] = settings.quantization
        if arguments["dtype"] == "auto":
            arguments["dtype"] = "bfloat16"
    if settings.exact:
        for name, value, rule, fix in settings.exact_problems(arguments):
            raise ValueError(f"{name}={value!r} {rule}. {fix}")
        arguments["exact"] = True
    require_choice("receiver", settings.receiver, Receivers)
    require_choice("transport", settings.transport, Transports)
    require_choice("lora_mode", settings.lora_mode, LoraMode)
    enable_lora = bool(arguments.get("enable_lora"))
    if settings.lora_mode == "adapter" and not enable_lora:
        raise ValueError(
            "lora_mode='adapter' needs an engine with LoRA layers: pass enable_lora=True and max_lora_rank, or use "
            "lora_mode='merged'."
        )
    if settings.lora_mode == "merged" and enable_lora:
        raise ValueError(
            "lora_mode='merged' does not use LoRA layers, which only slow the engine down. Leave enable_lora out."
        )
    lora_mode: LoraMode = "adapter" if enable_lora else "merged"
    return dataclasses.replace(settings, engine_args=arguments, lora_mode=lora_mode)


def require_channel(channel: str, **of_process: Any) -> None:
    """Raise ValueError for an unknown channel, or an argument that needs a separate process."""
    require_choice("channel", channel, Channels)
    given = [name for name, value in of_process.items() if value is not None]
    if channel == "inline" and given:
        raise ValueError(
            f"{given[0]} needs a sampler process, which channel='inline' does not have: leave it out, or use "
            "channel='process'."
        )


def same_on_ranks(settings: EngineSettings, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that must be equal on all ranks: settings, arguments except `PLACES`, and versions."""
    # Sampling parameters are compared at each call.
    fields = {
        key: value for key, value in vars(settings).items() if key not in ("engine_args", "sampling_params")
    }
    return {
        **{name: value for name, value in engine_args.items() if name not in PLACES},
        **fields,
        **versions_of_rank(),
    }


def with_deadlines(engine_args: Mapping[str, Any], settings: EngineSettings) -> dict[str, Any]:
    """Give a server's client shorter time-outs than the ranks; its error, which names the server, then comes first."""
    start_timeout_s = min(600.0, settings.start_timeout_s / 2)
    limits = {"silence_s": 0.9 * settings.timeout_s, "start_timeout_s": start_timeout_s}
    return {**limits, **engine_args}


def tokenizer_of(model: str | Path, engine_args: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name or folder of the tokenizer, and the options to load it with."""
    name = engine_args.get("tokenizer")
    options = {"trust_remote_code": engine_args.get("trust_remote_code", False)}
    if revision := engine_args.get("tokenizer_revision") or engine_args.get("revision"):
        options["revision"] = revision
    return str(name if isinstance(name, str | Path) else model), options


def parallel_sizes(engine_args: Mapping[str, Any], topology: Topology, model: str | Path) -> dict[str, int]:
    """Return the sizes that let all CUDA devices of a node sample; nothing on CPU.

    An engine gets the devices that `engine_args` name or its weights need; the rest serve further engines.
    """
    if not topology.is_cuda:
        return {}
    size = engine_args.get("tensor_parallel_size")
    if size is None:
        import torch

        try:
            found = read_model_size(model)
        except (OSError, ValueError):
            size = 1
        else:
            total = torch.cuda.get_device_properties(topology.device).total_memory
            share = total * float(engine_args.get("gpu_memory_utilization", DEVICE_SHARE))
            weight_bytes = found.num_parameters * (
                4 if engine_args.get("dtype") in ("float32", "float") else 2
            )
            size = tensor_parallel_size(topology.local_world_size, found.num_heads, weight_bytes, share)
    if not isinstance(size, int) or size < 1:
        return {}
    engines = max(topology.local_world_size // size, 1)
    return {"tensor_parallel_size": size, "data_parallel_size": engines}


def share_of_engine(
    devices: Sequence[int] | None,
    num_engines: int,
    engine_args: Mapping[str, Any],
    topology: Topology,
    inference: str = "vllm",
) -> Sequence[int] | None:
    """Return this engine's share of `devices`; None if the engines use the ranks' devices.

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
    # Other engines do not have the argument, or decide for themselves what it does.
    if inference == "vllm" and topology.is_cuda and size < num_devices and topology.is_main:
        warnings.warn(
            f"tensor_parallel_size={size} uses {size} of the {num_devices} devices of an engine: raise it or "
            "data_parallel_size, or leave both out.",
            stacklevel=3,
        )
    return devices


def require_folder(model: str | Path, inference: str = "vllm") -> None:
    """Raise FileNotFoundError for a missing folder, ValueError for a folder with two sets of weights.

    A possible name of a model hub passes, with a warning if it is not in the cache.
    """
    path = Path(model)
    # A hub's "owner/name" has one slash, and no folder called "owner" next to the script.
    looks_local = str(model).startswith((".", "~")) or path.is_absolute() or len(path.parts) > 2
    if not path.is_dir() and (looks_local or (path.parent != Path() and path.parent.is_dir())):
        raise FileNotFoundError(f"the model folder {model} does not exist (working directory: {Path.cwd()}).")
    if inference == "vllm" and path.is_dir() and (rule := two_sets_of_weights(path)) is not None:
        raise ValueError(f"{model} {rule}. Delete one of them.")
    if str(model).count("/") == 1 and not path.is_dir():
        from huggingface_hub import try_to_load_from_cache

        if not isinstance(try_to_load_from_cache(str(model), "config.json"), str):
            text = (
                f"{model} is neither a folder nor in the Hub's cache, so it will be downloaded from the Hub."
            )
            warnings.warn(text, stacklevel=3)


def require_update(model: Any, train_step: Any, in_flight: Any) -> None:
    """Raise TypeError or ValueError for wrong arguments of `SamplingEngine.update`."""
    import torch

    if not isinstance(model, torch.nn.Module | WeightSource):
        raise TypeError(
            f"model={type(model).__name__} cannot be sent: pass the torch.nn.Module itself, or a WeightSource."
        )
    if isinstance(train_step, bool) or not isinstance(train_step, int):
        raise TypeError(f"train_step={train_step!r} must be an integer.")
    if not 0 <= train_step < 2**31:
        raise ValueError(f"train_step={train_step} must be at least 0 and below 2^31.")
    require_choice("in_flight", in_flight, InFlight)


def require_adapter(name: Any, lora_mode: str) -> None:
    """Raise TypeError or ValueError for a name under which `SamplingEngine.update` cannot send weights."""
    if not isinstance(name, str):
        raise TypeError(f"name={name!r} must be a text.")
    if name in ("", BASE):
        raise ValueError(f"name={name!r} cannot be an adapter's: {BASE!r} is the model without one.")
    if name != POLICY and lora_mode != "adapter":
        raise ValueError(
            f"name={name!r} needs an engine with LoRA layers: pass enable_lora=True, max_lora_rank and max_loras to "
            "SamplingEngine, or leave the name out."
        )


def one_each(params: Any, count: int) -> list[Any]:
    """Return one value of sampling parameters per prompt; raise ValueError for a list of another length."""
    if isinstance(params, Sequence) and not isinstance(params, (str, bytes)):
        if len(params) != count:
            raise ValueError(
                f"sampling_params has {len(params)} entries for {count} prompts: pass one value, or one per prompt."
            )
        return list(params)
    return [params] * count


def copy_params(params: Any) -> Any:
    """Return sampling parameters that the caller cannot change while their requests are in flight."""
    if isinstance(params, Sequence) and not isinstance(params, (str, bytes)):
        values = list(params)
        # One copy for all prompts that share a value, because the parameters are pickled.
        copies = {id(value): copy_params(value) for value in values}
        return [copies[id(value)] for value in values]
    try:
        return copy.deepcopy(dict(params) if isinstance(params, Mapping) else params)
    except Exception as error:
        raise EngineError(f"sampling_params={params!r} must be data that can be copied: {error}.") from error
