"""Prompts: reading them, and checking that the model has room to answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vectorlm.encoding import asked, encode, require_whole_characters
from vectorlm.errors import ConfigError, DatasetError
from vectorlm.types import PromptRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = TypeVar("Row")
PARQUET = ".parquet"
PROMPT = "'prompt', which is a text, token ids or messages"


def read_prompts(source: str | Path | Sequence[str], setting: str = "sampler.prompts") -> list[PromptRecord]:
    """Take prompts as they are, or read rows with a ``prompt`` and any other columns.

    Args:
        source: Prompts, or the path of a JSONL file, a Parquet file (``.parquet``) or a folder of
            ``datasets.Dataset.save_to_disk``.
        setting: Name of the source in an error.

    Raises:
        DatasetError: The source is missing, empty or broken, or a row has no ``prompt``.
    """
    if not isinstance(source, str | Path):
        return [PromptRecord(prompt) for prompt in source]
    path = Path(source)
    if path.is_dir() or (path.suffix == PARQUET and path.is_file()):
        prompt_records = _read_table(path, setting)
    elif path.is_file():
        rule = f"every line must be a JSON object with a {PROMPT}."
        prompt_records = read_rows(source, _prompt_record_of, rule)
    else:
        raise DatasetError(f"{setting}={str(source)!r} does not exist. Make it first, or list the prompts.")
    if not prompt_records:
        raise DatasetError(f"{setting}={str(source)!r} is empty: it must hold at least one prompt.")
    return prompt_records


def read_rows(path: str | Path, read: Callable[[Any], Row], rule: str) -> list[Row]:
    """Read the JSON values in the lines of a file with `read`, which may raise; blank lines are left out.

    Raises:
        DatasetError: A line cannot be read; `rule` says what each must be.
    """
    rows = []
    # Not splitlines(), which would also cut at separators inside a text.
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(read(json.loads(line.decode("utf-8-sig"))))
        except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError) as error:
            shown = line[:80].decode("utf-8", errors="replace")
            raise DatasetError(
                f"{path}:{number} is {shown!r}, but {rule} ({type(error).__name__}: {error})"
            ) from error
    return rows


def _read_table(path: Path, setting: str) -> list[PromptRecord]:
    """Read a Parquet file, or a folder that the datasets library wrote."""
    try:
        if path.is_dir():
            from datasets import load_from_disk

            table: Any = load_from_disk(str(path))
        else:
            from pyarrow import parquet

            table = parquet.read_table(path)
        rows = table.to_list() if path.is_dir() else table.to_pylist()
    except (OSError, ValueError, AttributeError, IndexError) as error:
        # IndexError: the datasets library cannot load a folder without rows (5.2).
        raise DatasetError(
            f"{setting}={str(path)!r} cannot be read: it must be a Parquet file, or a folder of one dataset written by "
            f"save_to_disk ({type(error).__name__}: {error})"
        ) from error
    records = []
    for number, row in enumerate(rows):
        names = ", ".join(row)
        try:
            records.append(_prompt_record_of(row))
        except (KeyError, TypeError) as error:
            raise DatasetError(
                f"row {number} of {path} has the columns {names}, but every row must have a {PROMPT} "
                f"({type(error).__name__}: {error})"
            ) from error
    return records


def _prompt_record_of(columns: Any) -> PromptRecord:
    prompt = columns.pop("prompt")
    is_list = isinstance(prompt, list)
    of_tokens = is_list and all(type(each) is int and each >= 0 for each in prompt)
    if not (
        isinstance(prompt, str) or of_tokens or (is_list and all(isinstance(each, dict) for each in prompt))
    ):
        raise TypeError(f"the prompt is {str(prompt)[:40]}")
    if not of_tokens:
        require_whole_characters(prompt)
    return PromptRecord(prompt, columns)


def check_lengths(
    prompt_records: Sequence[PromptRecord],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: float,
    setting: str,
) -> None:
    """Encode the prompts of `setting`.

    Raises:
        ConfigError: One cannot be encoded: the tokenizer has no chat template, or it refuses the messages.
        DatasetError: One is longer than `max_tokens`.
    """
    for index, prompt_record in enumerate(prompt_records):
        try:
            length = len(encode(asked(prompt_record), lambda: tokenizer))
        except Exception as error:  # A template may raise whatever its author chose.
            name = tokenizer.name_or_path
            raise ConfigError(
                f"prompt {index} of {setting} cannot be encoded with the tokenizer of {name!r} "
                f"({type(error).__name__}: {error}). Correct the prompt, or the template in {name}/chat_template.jinja."
            ) from error
        if length > max_tokens:
            raise DatasetError(
                f"prompt {index} of {setting} has {length} tokens, more than the {max_tokens} that leave room for an "
                "answer: leave it out, or raise train_parameters.max_seq_len and sampler.engine.max_model_len."
            )
