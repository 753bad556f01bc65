"""The settings of what a run keeps: which checkpoints, which models, and when it stops early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from vectorlm.settings import NonNegativeFloat, PositiveInt, ReadIf, Text
from vectorlm.train.settings import WITH_CHECKPOINTS


@dataclass(frozen=True, kw_only=True)
class KeepSettings:
    """What a run keeps, and whether it stops once it no longer improves.

    The best evaluation is the lowest `eval/loss` of fine-tuning, or the highest `eval/accuracy` under `rl`, unless
    `best_metric` names another metric.
    """

    keep_checkpoints: Annotated[PositiveInt, WITH_CHECKPOINTS] = 2
    """Newest checkpoints that stay on disk."""
    keep_best: Annotated[bool, WITH_CHECKPOINTS] = False
    """Save a checkpoint at each evaluation that is the best so far, and keep the best one beside the newest."""
    final_model: Annotated[Literal["last", "best"], ReadIf("train_parameters.keep_best")] = "last"
    """Which weights `final-model` holds: those of the last step, or of the best evaluation."""
    epoch_models: Annotated[bool, ReadIf("dataset", fix="Use rl.save_every and `vectorlm export`.")] = False
    """Export the model at the end of each epoch too, as `epoch-1-model` and so on."""
    best_metric: Annotated[
        Text | None, ReadIf("train_parameters.keep_best", also=("train_parameters.early_stopping_patience",))
    ] = None
    """Metric of the evaluations that says which is the best, such as `eval/pass_at_4`."""
    best_metric_mode: Annotated[
        Literal["max", "min"] | None, ReadIf("train_parameters.best_metric", fix="Name best_metric.")
    ] = None
    """Whether the highest or the lowest value of `best_metric` is the best. null takes the
    lowest of a loss or a perplexity, what the harness says of its tasks, and the highest of rewards and all others."""
    early_stopping_patience: PositiveInt | None = None
    """Stop after this many evaluations in a row without improvement; null trains to the end."""
    early_stopping_min_delta: Annotated[
        NonNegativeFloat, ReadIf("train_parameters.early_stopping_patience")
    ] = 0.0
    """How much better than the best so far an evaluation must be to count as an improvement."""
