"""The answers to a batch as bytes, cheap to move between processes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from vectorlm.errors import EngineError
from vectorlm.sampling.contract import RequestOutput
from vectorlm.types import Completion


def pack(outputs: Sequence[RequestOutput], as_request_outputs: bool) -> np.ndarray:
    """Return the completions of each prompt, or vLLM's own objects, as uint8.

    Each prompt is a pickle of its own, so that a rank reads those of its prompts alone. The completions are tuples of
    Python's numbers: as fast as arrays, and a backend may answer with numbers of any kind.

    Raises:
        EngineError: vLLM's objects are asked for, and another backend has answered.
    """
    if as_request_outputs and any(output.raw is None for output in outputs):
        raise EngineError(
            "this inference engine has no vllm.RequestOutput objects: call sample instead of generate."
        )
    rows = [output.raw if as_request_outputs else _plain(output.completions) for output in outputs]
    return np.frombuffer(pickle.dumps([pickle.dumps(row) for row in rows]), np.uint8)


def unpack(packed: np.ndarray, first: int = 0, last: int | None = None) -> list[Any]:
    """Return what `pack` was given for prompts `first` to `last` (exclusive)."""
    rows = [pickle.loads(row) for row in pickle.loads(packed.tobytes())[first:last]]
    return [[Completion(*each) for each in row] if isinstance(row, list) else row for row in rows]


def _plain(completions: Sequence[Completion]) -> list[tuple[Any, ...]]:
    prompt = tuple(map(int, completions[0].prompt_token_ids)) if completions else ()
    return [
        (
            prompt,
            tuple(map(int, each.token_ids)),
            tuple(map(float, each.sampler_logprobs)),
            tuple(map(int, each.versions)),
            each.text,
            each.finish_reason,
        )
        for each in completions
    ]
