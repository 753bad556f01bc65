"""The rollouts of a run, kept in a file, and a few of them on the console."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from vectorlm.algorithms.ratio import masked_mean
from vectorlm.rl.gather import Gathered
from vectorlm.rl.update import TrainBatch
from vectorlm.rollout.replay import record_of
from vectorlm.telemetry.step_lines import StepLines

WIDTH = 60
"""Characters of a prompt or completion on the console."""


class Diary:
    """Writes every rollout with its reward, and how far engine and trainer were apart; shows a few, and warns."""

    def __init__(
        self,
        folder: Path | None,
        *,
        resume_step: int | None = None,
        show_every: int = 10,
        num_shown: int = 3,
        saves_tokens: bool = False,
        min_ess: float = 0.0,
        say: Callable[[str], None] = print,
    ) -> None:
        """Open the files.

        Args:
            folder: Where rank 0 writes ``rollouts.jsonl`` and ``correction.jsonl``; None on the other ranks, which then
                say nothing.
            resume_step: Keep the lines up to this step; None starts the files anew.
            show_every: Steps between two tables on the console; 0 shows none.
            num_shown: Rollouts in a table.
            saves_tokens: Write what training on a rollout again needs.
            min_ess: Effective sample size, as a share, below which a warning is shown, once until it has recovered.
            say: Shows text on the console.
        """
        self._lines = None if folder is None else StepLines(folder / "rollouts.jsonl", resume_step)
        self._drift = None if folder is None else StepLines(folder / "correction.jsonl", resume_step)
        self._saves_tokens = saves_tokens
        self._min_ess, self._has_warned = min_ess, False
        self._show_every, self._num_shown, self._say = show_every, num_shown, say

    def write(self, step: int, gathered: Gathered, batch: TrainBatch | None) -> None:
        """Keep the rollouts of `step`; `batch` is None where nothing was trained on."""
        if self._lines is None or self._drift is None:
            return
        self._lines.write(step, self._records(gathered, batch))
        if batch is not None and batch.drift is not None:
            self._drift.write(step, [batch.drift])
            self._warn(step, batch.metrics["correction/ess"])
        if batch is None or not batch.rows.mask.any():
            sampled = gathered.sampled or gathered
            num_unscored = int(sampled.rewards.isnan().sum())
            self._say(
                f"step {step}: nothing to learn from {sampled.rewards.numel()} completions, {num_unscored} of them "
                "without a reward; the weights stay as they are"
            )
        if gathered.first_error is not None:
            self._say(
                f"step {step}: {gathered.num_errors} reward calls failed; the first: {gathered.first_error}"
            )
        if self._show_every and step % self._show_every == 0:
            self._say(self._table(step, gathered))

    def _warn(self, step: int, ess: float) -> None:
        is_low = ess < self._min_ess
        if is_low and not self._has_warned:
            self._say(
                f"warning: step {step}: the effective sample size of the tokens is {ess:.0%} of their number: the "
                "engine samples with other probabilities than the trainer finds. Train on fresher rollouts, set "
                "train_parameters.sampler.vllm_dtype to the trainer's, or choose an rl.correction.preset "
                "(docs/correction.md); correction.png shows where."
            )
        self._has_warned = is_low

    def _records(self, gathered: Gathered, batch: TrainBatch | None) -> Iterator[dict[str, Any]]:
        advantages = _advantages(gathered, batch)
        for p, group in enumerate(gathered.groups):
            for g, rollout in enumerate(group):
                record = {
                    "group": p,
                    "prompt": rollout.question.prompt,
                    "completion": rollout.text,
                    "reward": _number(gathered.rewards[p, g]),
                    "rewards": {name: _number(values[p, g]) for name, values in gathered.parts.items()},
                    "advantage": advantages.get((p, g)),
                    "version": min((v for v in rollout.versions if v >= 0), default=None),
                    "finish_reason": rollout.finish_reason,
                    "num_turns": rollout.num_turns,
                }
                yield record | record_of(rollout) if self._saves_tokens else record

    def _table(self, step: int, gathered: Gathered) -> str:
        rows = [("reward", "prompt", "completion")]
        for p, group in enumerate(gathered.groups[: self._num_shown]):
            reward = gathered.rewards[p, 0].item()
            rows.append((f"{reward:.2f}", _short(str(group[0].question.prompt)), _short(group[0].text)))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = (
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows
        )
        return f"step {step}:\n" + "\n".join(f"  {line.rstrip()}" for line in lines)


def _advantages(gathered: Gathered, batch: TrainBatch | None) -> dict[tuple[int, int], float]:
    """Return the mean advantage of each rollout that was trained on, by its place."""
    if batch is None:
        return {}
    means = masked_mean(batch.advantages, batch.rows.mask).view(batch.rewards.shape)
    return {
        (p, int(column)): float(means[p, k])
        for p, columns in enumerate(batch.rows.columns.tolist())
        for k, column in enumerate(columns)
        if batch.rows.valid[p, k]
    }


def _number(value: torch.Tensor) -> float | None:
    """Return a number that JSON can hold."""
    return None if value.isnan() else value.item()


def _short(text: str) -> str:
    line = text.replace("\n", "\\n")
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"
