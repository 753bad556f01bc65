"""vLLM's engine, scheduler and output processor as on CUDA, with an executor that computes nothing.

For vllm 0.32. The executor answers every step with the same token, tracks mapped memory, and needs it for a step.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

TOKEN = 7
POOLS = frozenset({"weights", "kv_cache"})
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
}


class Later(Future):
    """A step on the device, which ends when its result is requested."""

    def __init__(self, work):
        super().__init__()
        self._work = work

    def result(self, timeout=None):
        if not self.done():
            self.set_result(self._work())
        return super().result()


def idle_engine(folder: str, *, steps_ahead: bool = True, **engine_args: Any) -> Any:
    """Build vLLM's engine for the model in `folder`; the caller has set `VARIABLES`.

    With `steps_ahead` it schedules asynchronously, as on CUDA.
    """
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput
    from vllm.v1.worker.worker_base import CompilationTimes

    from vectorlm.sampling.backends.vllm import shim

    class IdleExecutor(Executor):
        supports_pp = False

        @classmethod
        def supports_async_scheduling(cls):
            return True

        def _init_executor(self):
            self.lengths, self.mapped = {}, POOLS

        def check_health(self): ...

        def collective_rpc(
            self, method, timeout=None, args=(), kwargs=None, non_block=False, single_value=False
        ):
            answer = [getattr(self, f"do_{method}")(*args, **(kwargs or {}))]
            return Later(lambda: answer) if non_block else answer

        def do_get_kv_cache_spec(self):
            spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
            return {"layers.0": spec}

        def do_get_supported_kv_cache_layouts(self):
            return ["NHD"]

        def do_set_kv_cache_layout(self, name):
            from vllm.v1.attention.backends.utils import record_kv_cache_layout

            record_kv_cache_layout(self.cache_config, name)

        def do_determine_available_memory(self):
            return 2 << 30

        def do_compile_or_warm_up_model(self):
            return CompilationTimes(language_model=0.0, encoder=0.0)

        def do_get_supported_tasks(self):
            return ("generate",)

        def do_get_encoder_output_widths(self):
            return {}

        def do_initialize_from_config(self, configs): ...

        def do_synchronize_device(self): ...

        def do_shutdown(self): ...

        def do_reset_mm_cache(self): ...

        def do_reset_encoder_cache(self): ...

        def do_sleep(self, level=1):
            self.mapped = frozenset()

        def do_discard(self, tags):
            self.mapped -= set(tags)

        def do_wake_up(self, tags=None):
            self.mapped |= POOLS if tags is None else set(tags)

        def execute_model(self, step, non_block=False):
            for new in step.scheduled_new_reqs:
                self.lengths[new.req_id] = len(new.prompt_token_ids)
            for name in step.finished_req_ids:
                self.lengths.pop(name, None)
            counts = step.num_scheduled_tokens
            if counts and self.mapped != POOLS:
                raise RuntimeError(f"illegal access: only {sorted(self.mapped)} is mapped")
            known = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
            cached = step.scheduled_cached_reqs
            known |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            self.names = list(counts)
            self.samples = [known[name] + counts[name] >= self.lengths[name] for name in counts]
            for name, samples in zip(self.names, self.samples, strict=True):
                self.lengths[name] += samples
            answer = None if counts else EMPTY_MODEL_RUNNER_OUTPUT
            return Later(lambda: answer) if non_block else answer

        def sample_tokens(self, grammar, non_block=False):
            names, samples = self.names, self.samples

            def read():
                shape = len(names), 1
                logprobs = LogprobsLists(
                    np.full(shape, TOKEN, np.int32),
                    np.full(shape, -1.0, np.float32),
                    np.ones(len(names), np.int32),
                )
                return ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: index for index, name in enumerate(names)},
                    sampled_token_ids=[[TOKEN] * is_sampled for is_sampled in samples],
                    logprobs=logprobs,
                )

            return Later(read) if non_block else read()

    complete = CpuPlatform.check_and_update_config.__func__

    def complete_as_on_cuda(cls, vllm_config):
        complete(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = steps_ahead

    CpuPlatform.check_and_update_config = classmethod(complete_as_on_cuda)
    try:
        arguments = {"dtype": "float32", "distributed_executor_backend": IdleExecutor, **engine_args}
        engine = shim.build_engine(folder, {"kv_cache_memory_bytes": None, **arguments}, on_cpu=True)
    finally:
        CpuPlatform.check_and_update_config = classmethod(complete)
    engine.vllm_config.model_config.enable_sleep_mode = True
    shim.warm_up(engine)
    return engine
