"""The settings of rollouts: where they come from, and how sampling overlaps training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from vectorlm.settings import Fraction, NonNegativeInt, PositiveInt, ReadIf, Text


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """Where the completions that are trained on come from."""

    source: Literal["engine", "file"] = "engine"
    """`engine` samples them with the policy's weights; `file` reads stored ones, of this policy or any other."""
    path: Text | None = None
    """The `rollouts.jsonl` of a run with `save_tokens`, for `file`."""
    replayed_share: Annotated[Fraction, ReadIf("rl.rollout.source", ("file",))] = 1.0
    """With `file`, share of each step's groups that come from the file; the engine samples the rest."""
    save_tokens: bool = False
    """Write tokens and log-probabilities into `rollouts.jsonl`, so that they can be trained on again."""


@dataclass(frozen=True, kw_only=True)
class AsyncSettings:
    """How sampling and training overlap."""

    max_staleness: NonNegativeInt
    """Steps by which the weights that sampled a token may lag behind those being trained; 0 overlaps nothing."""
    update: Literal["keep", "recompute", "drain"] = "keep"
    """What happens to requests in flight when new weights arrive: they keep the KV cache of the old weights, it is
    recomputed, or the update waits until they have finished."""
    overdue: Annotated[Literal["wait", "correct", "drop"], ReadIf("rl.async.max_staleness")] = "wait"
    """What happens to completions still in flight at the last step that may train on them: the step waits for them, a
    later step trains on them anyway, or they are dropped."""
    placement: Literal["shared", "split"] = "shared"
    """Whether engine and ranks compute on the same devices, or each on its own: CUDA devices behind those of the ranks,
    or cores."""
    engine_devices: Annotated[PositiveInt | None, ReadIf("rl.async.placement", ("split",))] = None
    """With `split`, how many devices or cores are the engine's; null means one device, or half of the cores."""
