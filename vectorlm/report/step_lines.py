"""JSONL files with a step in every line, and progress of sampling."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from vectorlm.errors import CheckpointError
from vectorlm.ranks.wait import report_wait
from vectorlm.report.panels import PHASES
from vectorlm.types import Completion, Engine, Prompt


def json_text(value: Any, **options: Any) -> str:
    """Return a value as JSON; NaN and infinity become null, and other objects become their text."""
    try:
        return json.dumps(value, default=str, allow_nan=False, **options)
    except ValueError:
        plain = json.loads(json.dumps(value, default=str), parse_constant=lambda name: None)
        return json.dumps(plain, **options)


BLOCK_BYTES = 1 << 20
"""Number of bytes that a resumed run reads at a time, from the end of a file."""


class StepLines:
    """A file of lines ``{"train_step": 10, …}``; when `write` returns, the operating system has the lines.

    A resumed run drops the lines of steps that it will repeat, and an incomplete last line. Steps in a file only grow.

    Args:
        path: The file; its folder is created.
        resume_step: Keep the lines up to this step. None starts an empty file, and renames an existing file, for
            example to ``metrics.jsonl.1``.
        key: The name of the step in the lines.

    Raises:
        CheckpointError: A line before the last one has no step: the file does not belong to this run. Only the lines of
            repeated steps are read.
    """

    def __init__(self, path: str | Path, resume_step: int | None = None, key: str = "train_step") -> None:
        self._path, self._key = Path(path), key
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and resume_step is not None:
            self._cut_after(resume_step)
            return
        if self._path.exists() and self._path.stat().st_size:
            names = (self._path.with_name(f"{self._path.name}.{number}") for number in itertools.count(1))
            self._path.rename(next(name for name in names if not name.exists()))
        self._path.write_bytes(b"")

    def write(self, step: int, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append the lines of `step`."""
        number = {self._key: step}
        with self._path.open("a", encoding="utf-8") as file:
            # The number of the step comes first, and no value of a line replaces it.
            file.writelines(json_text({**number, **line, **number}) + "\n" for line in lines)

    def _cut_after(self, last_step: int) -> None:
        """Cut off the lines after `last_step`, read from the end: steps only grow, and a file may have gigabytes."""
        with self._path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            is_last = True
            for start, line in _lines_backwards(file, end):
                try:
                    keep = json.loads(line)[self._key] <= last_step and line.endswith(b"\n")
                except (ValueError, TypeError, KeyError) as error:
                    if not is_last:
                        text = line.decode(errors="replace").strip()
                        raise CheckpointError(
                            f"{self._path} has the line {text[:80]!r} at byte {start}, but every line must be a JSON "
                            f"object with a {self._key!r}. Repair the line or move the file away."
                        ) from error
                    keep = False
                if keep:
                    break
                end, is_last = start, False
            file.truncate(end)
            os.fsync(file.fileno())


def _lines_backwards(file: BinaryIO, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file before byte `end`, the last one first, each with the byte at which it starts."""
    rest = b""
    while end > 0:
        size = min(BLOCK_BYTES, end)
        file.seek(end - size)
        first, *lines = (file.read(size) + rest).splitlines(keepends=True)
        # The first line of the block may begin before it.
        start = end - size + len(first) + sum(map(len, lines))
        for line in reversed(lines):
            start -= len(line)
            yield start, line
        rest, end = first, end - size
    if rest:
        yield 0, rest


class Timeline:
    """A log of the spans of every step, in seconds of the host's monotonic clock, which all its processes share."""

    def __init__(self, path: Path | None, resume_step: int | None = None) -> None:
        # None on all ranks but 0.
        self._lines = None if path is None else StepLines(path, resume_step)

    def write(
        self, step: int, trainer: Iterable[tuple[str, float, float]], engine: Sequence[tuple[float, float]]
    ) -> None:
        """Write the trainer's spans of `step`, and the engine's spans up to the hot swap of the step."""
        if self._lines is not None:
            named = [
                (name.removeprefix("time/").removesuffix("_s"), start, end) for name, start, end in trainer
            ]
            spans = [span for span in named if span[0] in PHASES and PHASES[span[0]].colour is not None]
            self._lines.write(step, [{"trainer": spans, "engine": [list(span) for span in engine]}])


NUM_PARTS = 20
"""Number of parts of the prompts; progress is shown after each part."""
MIN_PART = 8
"""Smallest number of prompts per part: every part costs an exchange between the ranks."""


def sample_with_progress(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    *,
    what: str = "sampling",
    is_on: bool = True,
) -> list[list[Completion]]:
    """Return the completions of ``engine.sample``; on ranks with `is_on`, show how many prompts are done.

    All prompts are in flight at the same time: the parts are only for counting.
    """
    size = max(MIN_PART, -(-len(prompts) // NUM_PARTS))
    if len(prompts) <= size:
        with report_wait(what, is_on=is_on):
            return engine.sample(prompts, sampling_params)
    parts = [slice(first, first + size) for first in range(0, len(prompts), size)]
    params: Any = sampling_params
    answers: list[list[Completion]] = []
    with report_wait(f"{what}, prompts", is_on=is_on, done=lambda: len(answers), total=len(prompts)):
        batches = engine.submit_many(
            [(prompts[part], params[part] if isinstance(params, Sequence) else params) for part in parts]
        )
        try:
            for batch in batches:
                answers += batch.result()
        except BaseException:
            # Nobody else can read the answers.
            for batch in batches:
                batch.cancel()
            raise
    return answers
