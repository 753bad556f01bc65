"""Write the rollouts of a run to a file, and a few of them to the console."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vectorlm.algorithms.reduce import masked_sum
from vectorlm.data.encoding import shown_prompt
from vectorlm.data.images import with_paths
from vectorlm.report.step_lines import StepLines, json_text
from vectorlm.rl.rollout import Rollout, RolloutGroup, TrainBatch, kept_groups
from vectorlm.rl.rollouts.replay import record_of, row_of

MAX_COLUMNS, MAX_COLUMN = 20, 200
"""Maximum columns of a prompt in a line, and characters per column; no limits with `saves_tokens`."""
PICTURES = "pictures"
"""Name of the folder for pictures without a path."""
NUM_SHOWN = 3
WIDTH = 60
"""Maximum characters of a prompt or completion on the console."""


class RolloutLogger:
    """Writes every rollout with its reward, prints examples, and warns about truncation and mismatch."""

    def __init__(
        self,
        folder: Path | None,
        *,
        resume_step: int | None = None,
        show_every: int = 10,
        saves_tokens: bool = False,
        min_ess: float = 0.0,
        say: Callable[[str], None] = print,
    ) -> None:
        """Open ``rollouts.jsonl`` and ``correction.jsonl`` in `folder`, and keep their lines up to `resume_step`.

        Args:
            folder: The folder to write to; ranks other than 0 pass None, and write and print nothing.
            resume_step: The step to resume from; None starts empty files.
            show_every: Steps between two tables of `NUM_SHOWN` rollouts; 0 prints none.
            saves_tokens: Whether to write the tokens too, which training on stored rollouts needs.
            min_ess: Effective sample size, as a share, below which to warn.
            say: Prints a line.
        """
        self.records: Sequence[Mapping[str, Any]] = ()
        """The rollouts of the last step, as written."""
        self._lines = None if folder is None else StepLines(folder / "rollouts.jsonl", resume_step)
        self._mismatch = None if folder is None else StepLines(folder / "correction.jsonl", resume_step)
        self._pictures = (folder or Path()) / PICTURES
        self._saves_tokens = saves_tokens
        self._min_ess = min_ess
        self._has_warned = self._were_truncated = False
        self._show_every = show_every
        self._say = say

    def write(self, step: int, groups: Sequence[RolloutGroup], batch: TrainBatch | None) -> None:
        """Write the rollouts of `step`; `batch` is None if the step trains on nothing."""
        if self._lines is None or self._mismatch is None:
            return
        kept = kept_groups(groups)
        self.records = [with_paths(record, self._pictures) for record in self._records(kept, batch)]
        self._lines.write(step, self.records)
        if batch is not None and batch.mismatch is not None:
            self._mismatch.write(step, [batch.mismatch])
            self._warn(step, batch.metrics["correction/ess"])
        if batch is None or not batch.rows.mask.any():
            counts = {
                "without a reward": sum(int(group.rewards.isnan().sum()) for group in groups),
                "in groups of equal rewards": sum(
                    int((~group.rewards.isnan()).sum())
                    for group in groups
                    if group.is_dropped or group.is_constant()
                ),
                "truncated": sum(rollout.is_truncated for group in groups for rollout in group.rollouts),
            }
            causes = ", ".join(f"{num} {what}" for what, num in counts.items() if num)
            self._say(
                f"step {step}: nothing to learn from {sum(len(group.rollouts) for group in groups)} completions "
                f"({causes or 'all rejected'})"
            )
        else:
            self._warn_of_truncation(step, [rollout for group in groups for rollout in group.rollouts])
        errors = [error for group in groups for error in group.errors]
        if errors:
            self._say(f"step {step}: {len(errors)} reward calls failed; the first: {errors[0]}")
        if self._show_every and step % self._show_every == 0:
            self._say(self._table(step, kept))

    def _warn(self, step: int, ess: float) -> None:
        is_low = ess < self._min_ess
        if is_low and not self._has_warned:
            self._say(
                f"warning: step {step}: the effective sample size of the tokens is {ess:.0%} of their number, because "
                "the engine and the trainer compute different probabilities. Train on fresher rollouts, set "
                "engine.dtype to the trainer's, or choose an rl.correction.preset "
                "(docs/correction.md); correction.png shows where."
            )
        self._has_warned = is_low

    def _warn_of_truncation(self, step: int, rollouts: Sequence[Rollout]) -> None:
        are_truncated = bool(rollouts) and all(rollout.is_truncated for rollout in rollouts)
        if are_truncated and not self._were_truncated:
            self._say(
                f"warning: step {step}: all {len(rollouts)} completions were truncated by sampling_params.max_tokens "
                "or max_model_len. Raise it, or teach the model to stop. Environments never see truncated turns."
            )
        self._were_truncated = are_truncated

    def _records(self, groups: Sequence[RolloutGroup], batch: TrainBatch | None) -> Iterator[dict[str, Any]]:
        advantages = _advantages(batch)
        for p, group in enumerate(groups):
            for g, rollout in enumerate(group.rollouts):
                record = {
                    "group": p,
                    "prompt": rollout.prompt_record.prompt,
                    "columns": _bounded(rollout.prompt_record.columns),
                    "completion": rollout.text,
                    "reward": group.rewards[g].item(),
                    "rewards": {name: values[g].item() for name, values in group.rewards_by_name.items()},
                    "advantage": advantages.get((p, g)),
                    "version": None if not len(versions := rollout.sampled_versions) else int(versions.min()),
                    "finish_reason": rollout.finish_reason,
                    "num_turns": rollout.num_turns,
                }
                if group.logged and group.logged[g]:
                    record["logged"] = dict(group.logged[g])
                if group.source:
                    record["source"] = group.source
                if rollout.branches or self._saves_tokens:
                    record["branches"] = [self._row(branch) for branch in rollout.branches]
                yield record | record_of(rollout) if self._saves_tokens else record

    def _row(self, branch: Rollout) -> dict[str, Any]:
        record = {
            "completion": branch.text,
            "finish_reason": branch.finish_reason,
            "num_turns": branch.num_turns,
        }
        return record | row_of(branch) if self._saves_tokens else record

    def _table(self, step: int, groups: Sequence[RolloutGroup]) -> str:
        rows = [("reward", "prompt", "completion")]
        for group in groups[:NUM_SHOWN]:
            first = group.rollouts[0]
            prompt = _line(shown_prompt(first.prompt_record.prompt))
            if len(prompt) > WIDTH:
                # The question is usually at the end of a prompt.
                prompt = "…" + prompt[1 - WIDTH :]
            completion = _line(first.text)
            if len(completion) > WIDTH:
                completion = completion[: WIDTH - 1] + "…"
            rows.append((f"{group.rewards[0].item():.2f}", prompt, completion))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = (
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows
        )
        return f"step {step}:\n" + "\n".join(f"  {line.rstrip()}" for line in lines)


def _advantages(batch: TrainBatch | None) -> dict[tuple[int, int], float]:
    """Return the mean advantage of every trained rollout, by its group and its index in the group."""
    if batch is None:
        return {}
    rows = batch.rows
    sums, is_trained = masked_sum(batch.advantages, rows.mask), rows.trained_rollouts.view_as(rows.rewards)
    if rows.owners is not None:
        sums = torch.zeros_like(sums).index_add(0, rows.owners, sums)
    means = (sums / rows.lengths.clamp(min=1)).view(rows.rewards.shape)
    return {
        (p, int(column)): float(means[p, k])
        for p, columns in enumerate(rows.columns.tolist())
        for k, column in enumerate(columns)
        if is_trained[p, k]
    }


def _bounded(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first columns of a prompt, with long values cut to their first characters."""
    found = {name: (value, json_text(value, ensure_ascii=False)) for name, value in columns.items()}
    return {
        name: value if len(text) <= MAX_COLUMN else f"{text[:MAX_COLUMN]}…"
        for name, (value, text) in list(found.items())[:MAX_COLUMNS]
    }


def _line(text: str) -> str:
    return text.replace("\n", "\\n")
