"""vLLM's entry point: the weight-transfer backend ``vectorlm`` in every vLLM process.

vLLM imports this module whenever it starts, also for users of other backends. Therefore heavy imports are in functions.
"""

from __future__ import annotations

from typing import Any

BACKEND = "vectorlm"
ENGINE = "vectorlm.sampling.backends.vllm.transfer", "TransferEngine"
CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
OUR_CPU_WORKER = "vectorlm.sampling.backends.vllm.cpu_worker.CPUWorker"


def register() -> None:
    """Register the backend under its name; its module is imported when an engine uses it."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return  # An error would end vLLM, for users of other backends too.
    from vllm import platforms

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, *ENGINE)
    if platforms.current_platform.is_cpu():
        _adapt_workers(type(platforms.current_platform))


def _adapt_workers(platform: Any) -> None:
    """Let workers on CPU import `cpu_worker`, if their engine uses the backend: it adapts vLLM before a model loads."""
    original = platform.check_and_update_config

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        original(vllm_config)
        transfer, parallel = vllm_config.weight_transfer_config, vllm_config.parallel_config
        if transfer is not None and transfer.backend == BACKEND and parallel.worker_cls == CPU_WORKER:
            parallel.worker_cls = OUR_CPU_WORKER

    platform.check_and_update_config = classmethod(check_and_update_config)
