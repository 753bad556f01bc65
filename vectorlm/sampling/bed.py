"""Where an engine's memory goes while it sleeps: back to the device on CUDA, nowhere on CPU."""

from __future__ import annotations

from typing import Any

from vectorlm.errors import EngineError
from vectorlm.sampling.rest import Parts

WEIGHTS, KV_CACHE = "weights", "kv_cache"


class CudaBed:
    """Maps and unmaps vLLM's memory pools through its sleep mode (``enable_sleep_mode=True``). Has not run.

    vllm 0.32: level 2 drops both pools and keeps the model's buffers (rotary tables, scales) on the host, level 1
    keeps the weights there too; ``wake_up(tags=…)`` takes single pools back, and scheduling resumes with the last.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def drop(self, parts: Parts, asleep: Parts) -> None:
        """Give the memory of `parts` away, while those in `asleep` sleep already."""
        if not self._engine.vllm_config.model_config.enable_sleep_mode:
            raise EngineError(
                "the engine holds its memory outside vLLM's sleep mode and cannot give it away: build "
                "SamplingEngine with enable_sleep_mode=True."
            )
        if WEIGHTS in asleep:
            # vLLM would take a second sleep for a mistake and do nothing.
            self._engine.wake_up(tags=[WEIGHTS])
        if WEIGHTS in parts | asleep:
            self._engine.sleep(level=2)
            if KV_CACHE not in parts | asleep:
                self._engine.wake_up(tags=[KV_CACHE])
        elif hasattr(self._engine, "release_kv_cache_memory"):
            self._engine.sleep(level=0)
            self._engine.release_kv_cache_memory()
        else:
            # Before vllm 0.32 the KV cache sleeps only together with the weights. Delete when the window begins there.
            self._engine.sleep(level=1)
            self._engine.wake_up(tags=[WEIGHTS])

    def restore(self, parts: Parts) -> None:
        """Take the memory of `parts` back; it holds garbage."""
        for part in sorted(parts, reverse=True):
            self._engine.wake_up(tags=[part])


class CpuBed:
    """Keeps all memory, as vLLM has no sleep mode on CPU, and forgets what a sleeping KV cache would forget."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def drop(self, parts: Parts, asleep: Parts) -> None:
        """Empty the prefix cache, whose blocks would be gone on CUDA."""
        if not self._engine.reset_prefix_cache():
            raise EngineError("the prefix cache cannot be emptied: requests are running.")

    def restore(self, parts: Parts) -> None:
        """Do nothing: the memory never went."""


def make_bed(engine: Any, on_cpu: bool) -> CudaBed | CpuBed:
    """Return the bed for an engine that computes on CPU or on CUDA."""
    return CpuBed(engine) if on_cpu else CudaBed(engine)
