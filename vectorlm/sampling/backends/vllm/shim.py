"""All calls into vLLM's internals (for `SUPPORTED_VERSIONS`)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import math
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vectorlm.data.encoding import has_tokenizer
from vectorlm.errors import EngineError, VectorLMError
from vectorlm.packages import is_installed
from vectorlm.sampling.backends.vllm import CPU_KV_CACHE_BYTES
from vectorlm.sampling.backends.vllm.pack import keep_plain_weights
from vectorlm.sampling.settings import DEVICE_SHARE, RETURN_ROUTES
from vectorlm.settings import nearest


def build_engine(
    model: str, engine_args: Mapping[str, Any], on_cpu: bool, returns_routes: bool = False
) -> Any:
    """Build vLLM's synchronous engine, with its scheduler in this process and settings that start fast.

    A tensor-parallel engine computes in worker processes, any other in this process. `engine_args` override the
    defaults. With `returns_routes`, vLLM returns the experts of each token on CUDA if it can with these arguments.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    if unknown := sorted(set(engine_args) - known):
        raise EngineError(f"vLLM's engine has no argument {', '.join(map(repr, unknown))}.")
    settings = {**default_arguments(model, on_cpu), **engine_args}
    if settings.get("quantization") == "int8":
        importlib.import_module("vectorlm.sampling.backends.vllm.int8")  # It registers with vLLM.
    if on_cpu:
        # vLLM has no sleep mode on CPU and would raise.
        settings.pop("enable_sleep_mode", None)
    if settings.get("tensor_parallel_size", 1) > 1:
        settings.setdefault("distributed_executor_backend", "mp")
    # LLM_CLASS has vLLM's batch sizes for offline sampling, on CUDA 4 to 8 times those of ENGINE_CONTEXT.
    context = UsageContext.ENGINE_CONTEXT if on_cpu else UsageContext.LLM_CLASS
    if returns_routes and not on_cpu and RETURN_ROUTES in known:
        # vllm 0.32 needs experts, Model Runner V2 and a prefix cache, and raises before it loads anything.
        with contextlib.suppress(ValueError):
            with_routes = {**settings, RETURN_ROUTES: True}
            EngineArgs(**with_routes).create_engine_config(context)
            settings = with_routes
    return LLMEngine.from_engine_args(EngineArgs(**settings), context)


def adapt_to_cpu() -> None:
    """Patch vLLM in this process if there is no CUDA device; call before it builds anything."""
    import torch

    if not torch.cuda.is_available():
        keep_plain_weights()
        let_seeded_requests_wait()
        expand_for_drafts()
        rotate_every_head()
        convolve_dense_tokens()
        keep_base_rows()
        multiply_fp8_fast()
        # Linux ends a process with SIGILL at its first AMX instruction if it did not ask for AMX. vllm 0.32 uses AMX
        # for 4-bit weights and for attention in bfloat16, and does not ask. Harmless on other CPUs.
        torch.cpu._init_amx()


def multiply_fp8_fast() -> None:
    """Compute vLLM's fp8 products in float32 on CPU; call before the engine is built.

    torch 2.13: ``torch._scaled_mm`` on CPU converts one number at a time. For a weight [1536, 576], one token takes 8
    times as long, and 64 tokens 4 times. Results differ by the order of the sums. Delete when torch is as fast.
    """
    from vllm.model_executor.kernels.linear.scaled_mm import pytorch as kernels

    def apply_scaled_mm(
        self: Any, *, A: Any, B: Any, out_dtype: Any, As: Any, Bs: Any, bias: Any, output_shape: Any
    ) -> Any:
        # vLLM pads the tokens for torch's kernel.
        num_tokens = math.prod(output_shape[:-1])
        found = multiply_fp8(A[:num_tokens], B.t()).mul_(As[:num_tokens]).mul_(Bs.reshape(1, -1))
        return (found if bias is None else found + bias).to(out_dtype).view(*output_shape)

    kernels.ChannelWiseTorchFP8ScaledMMLinearKernel.apply_scaled_mm = apply_scaled_mm  # type: ignore[method-assign]


def multiply_fp8(rows: Any, weight: Any) -> Any:
    """Return ``rows @ weight.t()``, float32 [M, N], of float8_e4m3fn [M, K] and [N, K]; NaN in the weight is lost."""
    import torch

    # Read as float16, which has one exponent bit more, the shifted bits of a float8 are too small by 2^8. The sign is
    # extended into the upper byte, and stays at the top.
    halves = weight.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    return rows.float().mul_(2.0**8) @ halves.view(torch.float16).float().t()


def keep_base_rows() -> None:
    """Keep vLLM on CPU from adding an adapter to requests for the base; call before the engine is built.

    vllm 0.32: in a batch with requests for adapters, a request without one has the index -1, which torch takes for the
    last slot. Log-probabilities were 0.67 off. Delete when ``bgmv_expand`` leaves these rows unchanged.
    """
    from vllm.lora.ops import torch_ops
    from vllm.lora.ops.torch_ops import lora_ops

    if hasattr(lora_ops.bgmv_expand, "keeps_base"):
        return

    def keeping_base(expand: Any) -> Any:
        def call(inputs: Any, weights: Any, outputs: Any, indices: Any, *args: Any, **options: Any) -> Any:
            is_base = indices < 0
            if is_base.any():
                inputs = inputs.masked_fill(is_base[:, None], 0)
            return expand(inputs, weights, outputs, indices, *args, **options)

        call.keeps_base = True  # type: ignore[attr-defined]
        return call

    for name in ("bgmv_expand", "bgmv_expand_slice"):
        patched = keeping_base(getattr(lora_ops, name))
        setattr(lora_ops, name, patched)
        setattr(torch_ops, name, patched)


def convolve_dense_tokens() -> None:
    """Give vLLM's convolution on CPU tokens without gaps between them; call before the engine is built.

    vllm 0.32: on processors with AVX512-BF16 its kernel refuses slices of wider rows, which Qwen3.5 passes. Delete when
    ``ops.causal_conv1d_fwd_cpu`` takes them.
    """
    import torch
    from vllm import _custom_ops as ops

    original = ops.causal_conv1d_fwd_cpu
    if hasattr(original, "makes_dense"):
        return

    def convolve(x: Any, *args: Any, **options: Any) -> Any:
        # `contiguous` keeps the strides of a single token.
        return original(x.t().clone(memory_format=torch.contiguous_format).t(), *args, **options)

    convolve.makes_dense = True  # type: ignore[attr-defined]
    ops.causal_conv1d_fwd_cpu = convolve


def rotate_every_head() -> None:
    """Correct vLLM's rotary kernel on CPU for queries and keys [T, H, D]; call before the engine is built.

    vllm 0.32: the kernel takes the distance of two heads for the distance of two tokens. Only [T, H D] is correct.
    DeepSeek-V2 and GLM-4-MoE-Lite pass [T, H, D]; log-probabilities were up to 0.3 off. Delete when
    ``ops.rotary_embedding`` is right for both.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    original = RotaryEmbedding.forward_cpu
    if hasattr(original, "takes_heads"):
        return

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        if query.dim() != 3:
            return original(self, positions, query, key)
        rows = [tensor.reshape(tensor.shape[0], -1) for tensor in (query, key) if tensor is not None]
        original(self, positions, *rows)
        rotated = [row.unflatten(1, (-1, self.head_size)) for row in rows]
        return rotated[0], None if key is None else rotated[1]

    forward_cpu.takes_heads = True  # type: ignore[attr-defined]
    RotaryEmbedding.forward_cpu = forward_cpu  # type: ignore[method-assign]


def let_seeded_requests_wait() -> None:
    """Keep vLLM from rewinding the generator of a seeded request on CPU, which fails; call before the engine is built.

    vllm 0.32: a request whose prompt needs several steps draws a token that is discarded, and vLLM rewinds its
    generator by an offset that CPU generators do not have. Without the rewind the samples depend on how prompts were
    split, but they are still random. Delete when ``_bookkeeping_sync`` ignores CPU generators.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = getattr(GPUModelRunner, "_bookkeeping_sync", None)
    if original is None or hasattr(original, "leaves_generators_alone"):
        return

    def bookkeeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The method uses the generators only to rewind them.
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return original(self, *args, **kwargs)
        finally:
            self.input_batch.generators = generators

    bookkeeping.leaves_generators_alone = True  # type: ignore[attr-defined]
    GPUModelRunner._bookkeeping_sync = bookkeeping  # type: ignore[method-assign]


def expand_for_drafts() -> None:
    """Give each draft token its request's temperature, top_k and top_p on CPU; call before the engine is built.

    vllm 0.32: the CPU kernel writes these values into a discarded copy, so speculative decoding divides logits by
    uninitialised memory: wrong tokens and log-probabilities at any temperature but 0. Delete when
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
    # Without drafts there are no rows, and vLLM's maximum over top_k would fail.
    rejection_sampler.apply_sampling_constraints = lambda logits, *args: (
        constrain(logits, *args) if len(logits) else logits
    )


def count_accepted(engine: Any) -> list[int]:
    """Count, from now on, the proposed tokens that are accepted, and the steps in which a sequence gets tokens.

    vLLM's own statistics need ``disable_log_stats=False``, which also logs.
    """
    counts, scheduler = [0, 0], engine.engine_core.engine_core.scheduler
    update = scheduler.update_from_output

    def update_and_count(scheduled: Any, output: Any) -> Any:
        lengths = [len(token_ids) for token_ids in output.sampled_token_ids if len(token_ids)]
        counts[0] += sum(lengths) - len(lengths)
        counts[1] += len(lengths)
        return update(scheduled, output)

    scheduler.update_from_output = update_and_count
    return counts


def default_arguments(model: str, on_cpu: bool) -> dict[str, Any]:
    """Return the default arguments of an engine that shares its device with a trainer."""
    defaults: dict[str, Any] = {
        "model": model,
        "worker_extension_cls": "vectorlm.sampling.backends.vllm.extension.WeightExtension",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        # Training needs log-probabilities of the sampling distribution, which is not vLLM's default.
        "logprobs_mode": "processed_logprobs",
    }
    if on_cpu:
        # Completions share only whole blocks of their prompt, and vLLM's default of 128 tokens exceeds many prompts.
        # vLLM's attention on CPU needs a multiple of 32.
        defaults |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES, "block_size": 32}
    else:
        # vLLM's default share assumes that the engine has the device alone.
        defaults |= {"gpu_memory_utilization": DEVICE_SHARE, "enable_flashinfer_autotune": False}
    if not has_tokenizer(model):
        defaults["skip_tokenizer_init"] = True
    return defaults


OTHER_NAMES = {
    "do_sample": "temperature",
    "max_completion_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "num_generations": "n",
    "num_return_sequences": "n",
}
"""Names of transformers and TRL, with vLLM's name for the same choice."""


def make_sampling_params(given: Any, is_streamed: bool = False) -> Any:
    """Convert a mapping (or None) into ``vllm.SamplingParams`` that report a request once, when it is finished.

    With `is_streamed`, every report contains all tokens so far. Values of a wrong type raise here; vLLM would accept
    them, and its engine may crash later.
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
            of_others = OTHER_NAMES.get(unknown[0])
            hint = nearest(unknown[0], known) if of_others is None else f"Use {of_others!r}."
            raise EngineError(f"vllm.SamplingParams has no argument {unknown[0]!r}. {hint}".rstrip())
        try:
            numbers = {
                name: value.item() if isinstance(value, np.generic) else value
                for name, value in (given or {}).items()
            }
            if numbers.get("logprobs") is not None and "flat_logprobs" in known:
                # One list of numbers, not an object and a dict for each token; for readers it is the same sequence.
                numbers = {"flat_logprobs": True, **numbers}
            params = msgspec.convert(numbers, SamplingParams)
        except Exception as error:  # of msgspec's and vLLM's own classes
            raise EngineError(f"sampling_params={dict(given or {})} cannot be used: {error}") from error
    else:
        raise EngineError(
            f"sampling_params={given!r} is a {type(given).__name__}. Pass a mapping or vllm.SamplingParams, or a list "
            "with one of these per prompt."
        )
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        raise EngineError(
            f"seed={params.seed} is out of range: it must fit into 64 bits, from -2^63 to 2^63 - 1."
        )
    params.output_kind = RequestOutputKind.CUMULATIVE if is_streamed else RequestOutputKind.FINAL_ONLY
    return params


@functools.cache
def _sampling_parameters() -> frozenset[str]:
    """Return the parameter names of ``vllm.SamplingParams``; cached, because reading the signature is slow."""
    from vllm import SamplingParams

    return frozenset(inspect.signature(SamplingParams).parameters)


def finish_steps(engine: Any) -> list[Any]:
    """Wait for the steps that vLLM has started ahead of time (CUDA) without starting others; return their outputs.

    vllm 0.32: with asynchronous scheduling a step is queued on the device while the result of the last one is read. The
    scheduler keeps cancelled requests, and their KV cache, until the next step.
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
    """Sample one token; the prefix cache stays empty, because it keeps whole blocks only."""
    next_tokens(engine, [[0]], "warm-up")


def next_tokens(
    engine: Any, prompts: Sequence[Sequence[int]], salt: str, lora_request: Any = None
) -> np.ndarray:
    """Return the most likely next token of each prompt and its log-probability, float64 [P, 2].

    Nothing else may be in flight. Prompts of one salt share cached blocks.
    """
    params = make_sampling_params({"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "detokenize": False})
    for index, token_ids in enumerate(prompts):
        request = {"prompt_token_ids": list(token_ids), "cache_salt": salt}
        engine.add_request(f"{salt}-{index}", request, params.clone(), lora_request=lora_request)
    found: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
    finish_steps(engine)
    answers = [found[f"{salt}-{index}"] for index in range(len(prompts))]
    return np.array(
        [(answer.token_ids[0], answer.logprobs[0][answer.token_ids[0]].logprob) for answer in answers]
    )


UNKNOWN_WEIGHTS = re.compile(r"no module or parameter named '([^']+)' in .*? are: (\{.*)", re.DOTALL)


@contextlib.contextmanager
def naming_the_model(model: str) -> Iterator[None]:
    """Convert vLLM's exceptions into an `EngineError` that names its version and the model's architecture."""
    try:
        yield
    except VectorLMError:
        raise
    except Exception as error:
        import vllm

        # vLLM does not name the package whose import failed.
        needs = not is_installed("torchvision") and "failed to be inspected" in str(error)
        hint = " It may need torchvision, which is not installed (docs/families.md)." if needs else ""
        if found := UNKNOWN_WEIGHTS.search(str(error)):
            some = ", ".join(sorted(re.findall(r"'([^']+)'", found[2]))[:2])
            hint = f" The folder has weights named {found[1]}.…, and vLLM reads {some}, … Use another model, or save "
            hint += "these weights with the names that vLLM reads."
            reason = "the names of the weights differ."
        else:
            reason = f"{type(error).__name__}: {error}"
        raise EngineError(
            f"vLLM {vllm.__version__} cannot run {_architecture(model)} on this machine with these arguments: "
            f"{reason}{hint}\n\nIn the sampler process:\n{traceback.format_exc()}"
        ) from error


def _architecture(model: str) -> str:
    """Return the architecture in the folder's config.json, and the folder."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        names = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["architectures"]
        return f"{', '.join(names)} ({model})"
    return model


class CudaSleep:
    """vLLM's sleep mode (``enable_sleep_mode=True``), which unmaps and maps its memory pools.

    vllm 0.32: level 2 drops both pools and keeps the model's buffers (rotary tables, scales) on the host. Level 1 keeps
    the weights on the host too. ``wake_up(tags=…)`` maps single pools; scheduling resumes with the last one.

    Below vllm 0.29, waking the KV cache while the weights sleep writes to unmapped memory. Delete
    `_require_weights_alone` when we require 0.29.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._weights_sleep = False

    def sleep(self, parts: frozenset[str], asleep: frozenset[str]) -> None:
        """Free the memory of `parts`; those in `asleep` are already free."""
        if not self._engine.vllm_config.model_config.enable_sleep_mode:
            raise EngineError(
                "sleep() needs vLLM's sleep mode. Build SamplingEngine with enable_sleep_mode=True."
            )
        if "kv_cache" not in parts | asleep:
            _require_weights_alone("sleep(kv_cache=False)", "Let the KV cache sleep too")
        if asleep:
            # vLLM ignores a second sleep; 0.26 does so while any part sleeps.
            self.wake_up(asleep)
        if "weights" in parts | asleep:
            self._engine.sleep(level=2)
            self._weights_sleep = True
            if "kv_cache" not in parts | asleep:
                self._engine.wake_up(tags=["kv_cache"])
        elif hasattr(self._engine, "release_kv_cache_memory"):
            self._engine.sleep(level=0)
            try:
                self._engine.release_kv_cache_memory()
            except RuntimeError as error:
                self._engine.wake_up(tags=["scheduling"])
                raise EngineError(
                    f"vLLM cannot free its KV cache, and the engine stays awake: {error}"
                ) from error
        else:
            # Before vllm 0.32 the KV cache sleeps only with the weights. Delete when we require 0.32.
            self._engine.sleep(level=1)
            self._engine.wake_up(tags=["weights"])

    def wake_up(self, parts: frozenset[str]) -> None:
        """Allocate the memory of `parts` again, uninitialised."""
        if self._weights_sleep and "weights" not in parts:
            _require_weights_alone("wake_up(weights=False)", "Wake the weights first")
        for part in sorted(parts, reverse=True):
            self._engine.wake_up(tags=[part])
            self._weights_sleep &= part != "weights"


def _require_weights_alone(call: str, fix: str) -> None:
    """Raise for a vLLM whose weights cannot sleep while the KV cache is awake."""
    import vllm
    from packaging.version import Version

    if Version(vllm.__version__) < Version("0.29"):
        raise EngineError(
            f"{call} needs vLLM 0.29 or newer, but {vllm.__version__} is installed: its KV cache cannot be awake while "
            f"the weights sleep. {fix}."
        )
