"""Everything that depends on the vLLM version, from 0.26 to 0.32."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vectorlm.errors import EngineError
from vectorlm.memory.demand import CPU_KV_CACHE_BYTES
from vectorlm.types import Prompt

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def build_engine(model: str, engine_args: Mapping[str, Any], on_cpu: bool) -> Any:
    """Build vLLM's synchronous engine, its scheduler in this process, with the settings that start fastest.

    A tensor-parallel engine computes in worker processes that vLLM spawns; else it computes in this one.

    Args:
        model: A Hugging Face model folder.
        engine_args: The caller's ``vllm.EngineArgs``; they win over the defaults here.
        on_cpu: Whether the engine computes on CPU.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    if unknown := sorted(set(engine_args) - known):
        raise EngineError(f"vLLM's engine knows no argument {', '.join(map(repr, unknown))}.")
    settings = {**_defaults(model, on_cpu), **engine_args}
    if on_cpu:
        # vLLM has no sleep mode on CPU and would refuse; `vectorlm.sampling.bed` keeps the order all the same.
        settings.pop("enable_sleep_mode", None)
    if settings.get("tensor_parallel_size", 1) > 1:
        settings.setdefault("distributed_executor_backend", "mp")
    return LLMEngine.from_engine_args(EngineArgs(**settings))


def let_seeded_requests_wait() -> None:
    """Keep vLLM from rewinding the generator of a seeded request on CPU, which fails; call before the engine is built.

    vllm 0.32: a request whose prompt does not fit into one step draws a token that is thrown away, and its generator is
    set back by an offset that CPU generators do not have. Without that the draw stays used up: what is sampled depends
    on how prompts were cut, and is as random. Delete when ``_bookkeeping_sync`` leaves CPU generators alone.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = getattr(GPUModelRunner, "_bookkeeping_sync", None)
    if original is None or hasattr(original, "leaves_generators_alone"):
        return

    def bookkeeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The rewinding is all that this method wants of them.
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return original(self, *args, **kwargs)
        finally:
            self.input_batch.generators = generators

    bookkeeping.leaves_generators_alone = True  # type: ignore[attr-defined]
    GPUModelRunner._bookkeeping_sync = bookkeeping  # type: ignore[method-assign]


def _defaults(model: str, on_cpu: bool) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "model": model,
        "worker_extension_cls": "vectorlm.weights.extension.WeightExtension",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        # One batch may otherwise be in flight on the device when the weights change.
        "async_scheduling": False,
    }
    if on_cpu:
        defaults |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
    if Path(model).is_dir() and not any((Path(model) / name).exists() for name in TOKENIZER_FILES):
        defaults["skip_tokenizer_init"] = True
    return defaults


def make_sampling_params(given: Any) -> Any:
    """Turn a mapping (or None) into ``vllm.SamplingParams`` that report a request once, when it is finished."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if isinstance(given, SamplingParams):
        params = given.clone()
    elif isinstance(given, Mapping | None):
        known = set(inspect.signature(SamplingParams).parameters)
        if unknown := [name for name in given or {} if name not in known]:
            near = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise EngineError(f"vllm.SamplingParams knows no {unknown[0]!r}.{hint}")
        try:
            params = SamplingParams(**(given or {}))
        except (TypeError, ValueError) as error:
            raise EngineError(f"sampling_params={dict(given or {})} cannot be used: {error}") from error
    else:
        raise EngineError(
            f"sampling_params={given!r} is a {type(given).__name__}: pass a mapping or vllm.SamplingParams, or one of "
            "these for each prompt."
        )
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def make_prompt(engine: Any, prompt: Prompt) -> Any:
    """Turn text, token ids or chat messages into a prompt that the engine takes."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if len(prompt) and isinstance(prompt[0], Mapping):
        tokenizer = engine.get_tokenizer()
        text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        return {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
    return {"prompt_token_ids": list(prompt)}
