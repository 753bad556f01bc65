"""What a host rank and its sampler process say to each other.

Every message travels as ``(number, message)``. The host numbers its commands, and an answer bears the number of its
command; so the answer to a command that was interrupted is never taken for the answer to a later one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vectorlm.types import InFlight, Prompt
from vectorlm.weights.plan import Layout, TensorSpec


@dataclass(frozen=True)
class Start:
    """Build the engine; the first message of all."""

    model: str
    engine_args: Mapping[str, Any]
    receiver: str
    inference: str = "vllm"
    """What stands for it: `vllm`, `server`, or a class as ``module:Class`` or ``file.py:Class``."""


@dataclass(frozen=True)
class Ready:
    """The engine is built."""

    receiver: str
    """The receiver in use: `live` or `packed`."""
    load_s: float
    """Seconds from the process's start to here."""
    max_num_seqs: int
    """Sequences that the engine samples from at a time."""


@dataclass(frozen=True)
class Generate:
    """Continue these prompts."""

    prompts: Sequence[Prompt]
    sampling_params: Any
    """A mapping, a vllm.SamplingParams, or one of these per prompt."""
    as_request_outputs: bool
    """Whether to answer with `PackedOutputs`, which hold all that vLLM says, instead of `PackedCompletions`."""


@dataclass(frozen=True)
class Generated:
    """All completions of one `Generate`."""

    arrays: Sequence[np.ndarray]
    """Of `PackedCompletions` or `PackedOutputs`."""


@dataclass(frozen=True)
class Abort:
    """Forget this `Generate`; nobody waits for it any more. Has no answer."""

    generate: int
    """The number of the command to forget."""


@dataclass(frozen=True)
class Connect:
    """Match these trainer tensors with the engine's."""

    manifest: Sequence[TensorSpec]
    arena_path: str | None
    """The arena of another engine of this node, to be shared; None makes one."""
    part: str = "base"
    """`base`: the model's own tensors; `adapter`: the LoRA factors on top of them."""


@dataclass(frozen=True)
class Connected:
    """Where the trainer shall write."""

    layout: Layout


@dataclass(frozen=True)
class BeginUpdate:
    """Take no further step until `FinishUpdate`: the ranks are about to write."""

    in_flight: InFlight = "refuse"
    """What becomes of requests under way."""


@dataclass(frozen=True)
class Paused:
    """The engine stands still."""


@dataclass(frozen=True)
class FinishUpdate:
    """Every rank has written; compute with the new weights from here on."""

    version: int
    checksums: Sequence[int] | None
    """Of all tensors that were written, part by part; None if nothing shall be proven."""
    swapped: tuple[str, ...] = ("base",)
    """The parts that were written, `base` before `adapter`."""


@dataclass(frozen=True)
class Updated:
    """The engine holds the new weights."""

    load_s: float
    stall_s: float
    """Seconds that requests under way stood still; 0 without any."""
    busy: tuple[tuple[float, float], ...]
    """When the engine computed since the last update, from and to."""


@dataclass(frozen=True)
class Sleep:
    """Give the memory of these parts away."""

    weights: bool
    kv_cache: bool


@dataclass(frozen=True)
class WakeUp:
    """Take the memory of these parts back."""

    weights: bool
    kv_cache: bool


@dataclass(frozen=True)
class Rested:
    """The parts sleep, or are awake, as they were told to."""


@dataclass(frozen=True)
class Alive:
    """Sent about once a second while the engine steps, without a number: the work goes on."""


@dataclass(frozen=True)
class Failed:
    """The last command raised; the engine lives on."""

    error: Exception
    """Carries the sampler's own traceback in its text."""


@dataclass(frozen=True)
class Stop:
    """End the process."""
