"""Questions: prompts with the columns that their rewards need."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vectorlm.errors import DatasetError
from vectorlm.types import Prompt


@dataclass(frozen=True)
class Question:
    """One prompt, and what its reward needs to know."""

    prompt: Prompt
    """What the engine has to continue."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of its line, passed to the reward by name."""


def read_questions(source: str | Path | Sequence[str], setting: str = "sampler.prompts") -> list[Question]:
    """Take prompts as they are, or read a JSONL file whose lines have a ``prompt`` and any other columns.

    Args:
        source: Prompts, or the path of a file.
        setting: What an error calls the source.

    Raises:
        DatasetError: The file is missing or empty, or a line is not an object with a ``prompt``.
    """
    if not isinstance(source, str | Path):
        return [Question(prompt) for prompt in source]
    if not Path(source).is_file():
        raise DatasetError(
            f"{setting}={str(source)!r} is not a file. Make it first, or list the prompts instead."
        )
    questions = []
    for number, line in enumerate(Path(source).read_text().splitlines(), start=1):
        try:
            columns = json.loads(line)
            questions.append(Question(columns.pop("prompt"), columns))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise DatasetError(
                f"{source}:{number} is {line[:80]!r}, but every line must be a JSON object with a 'prompt'."
            ) from error
    if not questions:
        raise DatasetError(f"{setting}={str(source)!r} is empty: it must hold at least one prompt.")
    return questions
