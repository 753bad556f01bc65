"""vLLM's worker for CPU, in a process where vLLM keeps plain weights.

A worker imports its class before it loads the model, and no other place is early enough.
"""

from vllm.v1.worker.cpu_worker import CPUWorker

from vectorlm.sampling.backends.vllm.shim import adapt_to_cpu

__all__ = ["CPUWorker"]

adapt_to_cpu()
