"""What rank 0 and the sampler process say to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vectorlm.types import Prompt
from vectorlm.weights.plan import Layout


@dataclass(frozen=True)
class Start:
    """Build the engine; the first message of all."""

    model: str
    engine_args: Mapping[str, Any]
    receiver: str


@dataclass(frozen=True)
class Ready:
    """The engine is built."""

    receiver: str
    """The receiver in use: `live` or `packed`."""
    load_s: float
    """Seconds from the process's start to here."""


@dataclass(frozen=True)
class Generate:
    """Continue these prompts."""

    request: int
    prompts: Sequence[Prompt]
    sampling_params: Any
    """A mapping, a vllm.SamplingParams, or one of these per prompt."""
    as_request_outputs: bool
    """Whether to answer with vLLM's own objects instead of packed completions."""


@dataclass(frozen=True)
class Generated:
    """All completions of one request."""

    request: int
    payload: bytes


@dataclass(frozen=True)
class Abort:
    """Forget this request; nobody waits for it any more."""

    request: int


@dataclass(frozen=True)
class Connect:
    """Match these trainer tensors (name, shape) with the engine's."""

    manifest: Sequence[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Connected:
    """Where the trainer shall write."""

    layout: Layout


@dataclass(frozen=True)
class BeginUpdate:
    """Take no further step until `FinishUpdate`: the ranks are about to write."""


@dataclass(frozen=True)
class Paused:
    """The engine stands still."""


@dataclass(frozen=True)
class FinishUpdate:
    """Every rank has written; compute with the new weights from here on."""

    version: int
    checksums: Sequence[int] | None


@dataclass(frozen=True)
class Updated:
    """The engine holds the new weights."""

    load_s: float


@dataclass(frozen=True)
class Alive:
    """Sent about once a second while the engine steps: the work goes on."""


@dataclass(frozen=True)
class Failed:
    """The last command raised; the engine lives on."""

    error: Exception
    """Carries the sampler's own traceback in its text."""
    request: int | None = None
    """The generate request that failed, if it was one."""


@dataclass(frozen=True)
class Stop:
    """End the process."""
