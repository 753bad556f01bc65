"""Questions: prompts with the columns that their rewards need."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectorlm.errors import DatasetError
from vectorlm.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    # Not splitlines(), which would also cut at separators that stand inside a text.
    for number, line in enumerate(Path(source).read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
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


def check_lengths(
    questions: Sequence[Question], tokenizer: PreTrainedTokenizerBase, max_tokens: int, setting: str
) -> None:
    """Make sure that every prompt leaves room for an answer.

    Args:
        questions: At least one.
        tokenizer: The model's.
        max_tokens: Longest prompt.
        setting: What an error calls the source.

    Raises:
        DatasetError: Names the first prompt that is longer.
    """
    prompts: list[Any] = [question.prompt for question in questions]
    texts = [index for index, prompt in enumerate(prompts) if isinstance(prompt, str)]
    rows: list[Any] = tokenizer([prompts[index] for index in texts])["input_ids"] if texts else []  # type: ignore[assignment]
    lengths = {index: len(row) for index, row in zip(texts, rows, strict=True)}
    for index, prompt in enumerate(prompts):
        if index in lengths:
            length = lengths[index]
        elif prompt and not isinstance(prompt[0], int):
            chat: Any = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
            length = len(chat["input_ids"])
        else:
            length = len(prompt)
        if length > max_tokens:
            raise DatasetError(
                f"prompt {index} of {setting} has {length} tokens, more than the {max_tokens} that leave room for an "
                "answer: leave it out, or raise train_parameters.max_seq_len and sampler.engine.max_model_len."
            )
