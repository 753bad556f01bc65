"""What we ask of vLLM's own objects, for versions 0.26 to 0.32."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vectorlm.data.encoding import has_tokenizer
from vectorlm.errors import EngineError, VectorLMError
from vectorlm.sampling.backends.vllm import CPU_KV_CACHE_BYTES
from vectorlm.sampling.backends.vllm.pack import keep_plain_weights
from vectorlm.sampling.settings import DEVICE_SHARE
from vectorlm.settings import nearest


def build_engine(model: str, engine_args: Mapping[str, Any], on_cpu: bool) -> Any:
    """Build vLLM's synchronous engine, its scheduler in this process, with the settings that start fastest.

    A tensor-parallel engine computes in worker processes that vLLM spawns; else it computes in this one. The caller's
    `engine_args` win over the defaults here.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    if unknown := sorted(set(engine_args) - known):
        raise EngineError(f"vLLM's engine knows no argument {', '.join(map(repr, unknown))}.")
    settings = {**default_arguments(model, on_cpu), **engine_args}
    if on_cpu:
        # vLLM has no sleep mode on CPU and would refuse.
        settings.pop("enable_sleep_mode", None)
    if settings.get("tensor_parallel_size", 1) > 1:
        settings.setdefault("distributed_executor_backend", "mp")
    # vLLM's own sizes for sampling offline: on CUDA, four to eight times those of an engine that is only embedded.
    context = UsageContext.ENGINE_CONTEXT if on_cpu else UsageContext.LLM_CLASS
    return LLMEngine.from_engine_args(EngineArgs(**settings), context)


def adapt_to_cpu() -> None:
    """Change what vLLM does in this process if there is no CUDA device; call before it builds anything."""
    import torch

    if not torch.cuda.is_available():
        keep_plain_weights()
        let_seeded_requests_wait()
        expand_for_drafts()


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


def expand_for_drafts() -> None:
    """Give each draft token its request's temperature, top_k and top_p on CPU; call before the engine is built.

    vllm 0.32: the kernel for CPU writes them into a copy that is dropped, so speculative decoding divides logits by
    memory that nothing has written: wrong tokens and log-probabilities at any temperature but 0. Delete when
    ``_expand_kernel_impl`` writes into its argument.
    """
    import torch
    from vllm.v1.sample import rejection_sampler

    constrain = getattr(rejection_sampler, "apply_sampling_constraints", None)
    if constrain is None or constrain.__module__ == __name__:
        return

    def expand(
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        values = torch.where(x == replace_from, replace_to, x).to(x.dtype)
        return values.repeat_interleave(counts.long(), output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand
    # A step in which no request has a draft has no row, of which top_k's maximum would be an error.
    rejection_sampler.apply_sampling_constraints = lambda logits, *args: (
        constrain(logits, *args) if len(logits) else logits
    )


def default_arguments(model: str, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments that an engine has beside a trainer, unless its caller names others."""
    defaults: dict[str, Any] = {
        "model": model,
        "worker_extension_cls": "vectorlm.sampling.backends.vllm.extension.WeightExtension",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        # Of what was drawn from, which training corrects for and vLLM alone does not report.
        "logprobs_mode": "processed_logprobs",
    }
    if on_cpu:
        # Completions share the whole blocks of their prompt: vLLM's own, of 128 tokens, are longer than many prompts.
        # Its attention on CPU takes multiples of 32.
        defaults |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES, "block_size": 32}
    else:
        # vLLM's own share is that of an engine which has the device to itself.
        defaults |= {"gpu_memory_utilization": DEVICE_SHARE, "enable_flashinfer_autotune": False}
    if not has_tokenizer(model):
        defaults["skip_tokenizer_init"] = True
    return defaults


def make_sampling_params(given: Any, is_streamed: bool = False) -> Any:
    """Turn a mapping (or None) into ``vllm.SamplingParams`` that report a request once, when it is finished.

    Where it is streamed, each report has all that there is.
    A value of another type than vLLM declares is an error here: vLLM takes it, and may end the engine over it later.
    """
    import msgspec
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if isinstance(given, SamplingParams):
        params = given.clone()
        try:
            plain = msgspec.to_builtins(msgspec.structs.replace(params, extra_args=None))
            msgspec.convert(plain, SamplingParams)
        except Exception as error:  # of msgspec's and vLLM's own classes
            raise EngineError(f"sampling_params={given!r} cannot be used: {error}") from error
    elif isinstance(given, Mapping | None):
        known = _sampling_parameters()
        if unknown := [name for name in given or {} if name not in known]:
            hint = nearest(unknown[0], known)
            raise EngineError(f"vllm.SamplingParams knows no {unknown[0]!r}. {hint}".rstrip())
        try:
            numbers = {
                name: each.item() if isinstance(each, np.generic) else each
                for name, each in (given or {}).items()
            }
            params = msgspec.convert(numbers, SamplingParams)
        except Exception as error:  # of msgspec's and vLLM's own classes
            raise EngineError(f"sampling_params={dict(given or {})} cannot be used: {error}") from error
    else:
        raise EngineError(
            f"sampling_params={given!r} is a {type(given).__name__}: pass a mapping or vllm.SamplingParams, or one of "
            "these for each prompt."
        )
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        raise EngineError(
            f"seed={params.seed} is out of range: it must fit into 64 bits, from -2^63 to 2^63 - 1."
        )
    params.output_kind = RequestOutputKind.CUMULATIVE if is_streamed else RequestOutputKind.FINAL_ONLY
    return params


@functools.cache
def _sampling_parameters() -> frozenset[str]:
    """Return the names that ``vllm.SamplingParams`` takes; finding them takes 25 times as long as making one."""
    from vllm import SamplingParams

    return frozenset(inspect.signature(SamplingParams).parameters)


def finish_steps(engine: Any) -> list[Any]:
    """Wait for the steps that vLLM has begun ahead of time (CUDA), beginning no other; return what they finished.

    vllm 0.32: with asynchronous scheduling a step is queued on the device while the one before is read; and the
    scheduler keeps requests that were cancelled until a next step, before which it does not let the KV cache go.
    """
    from vllm.v1.core.sched.interface import PauseState

    core, outputs = engine.engine_core.engine_core, []
    before = core.scheduler.pause_state
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    try:
        while core.batch_queue or core.scheduler.has_finished_requests():
            outputs += engine.step()
    finally:
        core.scheduler.set_pause_state(before)
    return outputs


def warm_up(engine: Any) -> None:
    """Sample one token; it leaves nothing behind in the prefix cache, which holds whole blocks only."""
    params = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "detokenize": False}
    engine.add_request("warm-up", {"prompt_token_ids": [0]}, make_sampling_params(params))
    while engine.has_unfinished_requests():
        engine.step()
    finish_steps(engine)


@contextlib.contextmanager
def naming_the_model(model: str) -> Iterator[None]:
    """Turn whatever vLLM raises into an `EngineError` that names its version and the architecture of the folder."""
    try:
        yield
    except VectorLMError:
        raise
    except Exception as error:
        import vllm

        raise EngineError(
            f"vLLM {vllm.__version__} cannot run {_architecture(model)} on this machine as it was asked to: "
            f"{type(error).__name__}: {error}\n\nIn the sampler process:\n{traceback.format_exc()}"
        ) from error


def _architecture(model: str) -> str:
    """Return the architecture that the folder's config.json names, and the folder."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        names = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["architectures"]
        return f"{', '.join(names)} ({model})"
    return model


class CudaSleep:
    """Unmaps and maps vLLM's memory pools through its sleep mode (``enable_sleep_mode=True``).

    vllm 0.32: level 2 drops both pools and keeps the model's buffers (rotary tables, scales) on the host, level 1
    keeps the weights there too; ``wake_up(tags=…)`` takes single pools back, and scheduling resumes with the last.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def sleep(self, parts: frozenset[str], asleep: frozenset[str]) -> None:
        """Give the memory of `parts` away, while those in `asleep` sleep already."""
        if not self._engine.vllm_config.model_config.enable_sleep_mode:
            raise EngineError(
                "the engine holds its memory outside vLLM's sleep mode and cannot give it away: build "
                "SamplingEngine with enable_sleep_mode=True."
            )
        if asleep:
            # vLLM would take a second sleep for a mistake and do nothing; 0.26 does so while any part sleeps.
            self.wake_up(asleep)
        if "weights" in parts | asleep:
            self._engine.sleep(level=2)
            if "kv_cache" not in parts | asleep:
                self._engine.wake_up(tags=["kv_cache"])
        elif hasattr(self._engine, "release_kv_cache_memory"):
            self._engine.sleep(level=0)
            try:
                self._engine.release_kv_cache_memory()
            except RuntimeError as error:
                self._engine.wake_up(tags=["scheduling"])
                raise EngineError(f"vLLM keeps its KV cache, and the engine is awake: {error}") from error
        else:
            # Before vllm 0.32 the KV cache sleeps only together with the weights. Delete when the window begins there.
            self._engine.sleep(level=1)
            self._engine.wake_up(tags=["weights"])

    def wake_up(self, parts: frozenset[str]) -> None:
        """Take the memory of `parts` back; it holds garbage."""
        for part in sorted(parts, reverse=True):
            self._engine.wake_up(tags=[part])
