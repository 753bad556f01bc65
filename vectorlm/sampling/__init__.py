"""The sampling engine of a run, and VectorLM's names for it.

The modules here run in the ranks, `sampler` is the process that samples, and `weights` sends weights to it.
Importing this package loads neither torch nor vLLM.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vectorlm.sampling.engine import SamplingEngine

GONE = {
    "AbstractSamplingEngine": "annotate with vectorlm.types.Engine, or subclass vectorlm.sampling.contract.Backend",
    "ManagedLLM": "SamplingEngine starts vLLM in a separate process",
    "ManagedMultiProcGPUExecutor": "SamplingEngine starts vLLM in a separate process",
    "SampleOutput": "SamplingEngine.sample returns completions, vectorlm.types.Completion",
    "SamplingEngineProvider": "vectorlm.launch(loop, path, world_size=2) starts ranks; each builds a SamplingEngine",
    "SynchronizationBarriers": "SamplingEngine synchronises the ranks in every call",
    "batch_process": "SamplingEngine.sample takes all prompts in one call",
    "handle_sample": "SamplingEngine.sample returns completions; train_parameters.sampler writes samples.jsonl",
    "multiprocess_wrap": "every method of SamplingEngine returns the same result on every rank",
}
"""Removed names of VectorLM's module, with their replacements."""

__all__ = ["LoRASamplingEngine", "SamplingEngine"]


def LoRASamplingEngine(
    model: str | Path | None = None, *, max_lora_rank: int = 16, **arguments: Any
) -> SamplingEngine:
    """Return a `SamplingEngine` for LoRA adapters; deprecated.

    VectorLM's class took a ``vllm.LLM``, barriers and a folder for adapters. The engine now starts from a model folder,
    synchronises the ranks by itself, and swaps adapters in memory.

    Args:
        model: A Hugging Face model folder.
        max_lora_rank: Largest rank of an adapter.
        **arguments: Arguments of `SamplingEngine`.

    Raises:
        TypeError: An argument of VectorLM's class was removed.
    """
    from vectorlm.sampling.engine import SamplingEngine

    new = f"SamplingEngine(model, enable_lora=True, max_lora_rank={max_lora_rank})"
    warnings.warn(f"LoRASamplingEngine is now {new}.", DeprecationWarning, stacklevel=2)
    for name in ("vllm_llm", "synchronization_barriers", "adapter_temp_folder"):
        if name in arguments:
            raise TypeError(f"{name} is no longer an argument. Leave it out: {new} does not need it.")
    if not isinstance(model, str | Path):
        raise TypeError(
            f"LoRASamplingEngine takes the folder of a model, not a {type(model).__name__}. Write {new}: it starts "
            "vLLM itself (docs/from_vectorlm.md)."
        )
    return SamplingEngine(model, enable_lora=True, max_lora_rank=max_lora_rank, **arguments)


def __getattr__(name: str) -> Any:
    """Load the engine at its first use; name the replacement of a removed name.

    Removed names raise ImportError because `from vectorlm.sampling import NAME` hides the text of an AttributeError.
    """
    if name == "SamplingEngine":
        from vectorlm.sampling.engine import SamplingEngine

        return SamplingEngine
    if name in GONE:
        raise ImportError(f"vectorlm.sampling has no {name}: {GONE[name]} (docs/from_vectorlm.md).")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
