"""The sampler's first token, sampled at start: a model that vLLM cannot run fails before anything is trained."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vectorlm.errors import EngineError, VectorLMError
from vectorlm.sampling.vllm_shim import make_sampling_params


def warm_up(engine: Any) -> None:
    """Sample one token; it leaves nothing behind in the prefix cache, which holds whole blocks only."""
    params = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "detokenize": False}
    engine.add_request("warm-up", {"prompt_token_ids": [0]}, make_sampling_params(params))
    while engine.has_unfinished_requests():
        engine.step()


@contextlib.contextmanager
def naming_the_model(model: str) -> Iterator[None]:
    """Turn whatever vLLM raises into an `EngineError` that names its version and the model's architecture.

    Args:
        model: A Hugging Face model folder.
    """
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
