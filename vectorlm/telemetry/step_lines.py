"""A JSONL file whose lines belong to training steps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class StepLines:
    """Appends lines ``{"train_step": …, …}``; a run that resumes drops the lines of steps that it makes again."""

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        """Open the file.

        Args:
            path: The file; its folder is made.
            resume_step: Keep the lines up to this step; None starts the file anew.
        """
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join([] if resume_step is None else self._lines_until(resume_step)))

    def write(self, step: int, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append the lines of `step`; they are on their way to the disk when the call returns."""
        with self._path.open("a") as file:
            file.writelines(json.dumps({"train_step": step, **line}) + "\n" for line in lines)

    def _lines_until(self, step: int) -> list[str]:
        """Return the lines up to `step`, without a last one that a crash cut short."""
        lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        return [line for line in lines if line.endswith("\n") and json.loads(line)["train_step"] <= step]
