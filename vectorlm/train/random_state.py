"""The states of all random generators of a process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture_rng() -> dict[str, Any]:
    """Return the states of Python's, NumPy's, torch's and CUDA's generators, as tensors and plain values."""
    version, words, spare = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    inner = numpy_state["state"]
    return {
        "python": [version, list(words), spare],
        "numpy": numpy_state | {"state": inner | {"key": inner["key"].tolist()}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Restore every generator from a `capture_rng`."""
    version, words, spare = state["python"]
    random.setstate((version, tuple(words), spare))
    key = np.array(state["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state(state["numpy"] | {"state": state["numpy"]["state"] | {"key": key}})
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
