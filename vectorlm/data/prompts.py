"""Prompts: reading them, and checking that the model has room to answer."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from vectorlm.data.encoding import (
    asked,
    chat_in,
    encode,
    plain_message,
    require_whole_characters,
    without_nulls,
)
from vectorlm.data.source import is_hub_name, load_hub, splits_of, take_split
from vectorlm.data.tasks import Tasks, read_taskset
from vectorlm.errors import ConfigError, DatasetError
from vectorlm.settings import SHORT_FORMS, PromptSettings, in_full
from vectorlm.types import PromptRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = TypeVar("Row")
PARQUET = ".parquet"
PROMPT = "'prompt', which is a text, token ids or messages"
RULE = f"every line must be a JSON object with a {PROMPT}."
MAX_HELD_BYTES = 2**28
"""Larger sources stay on the disk, and a row is read when it is asked for."""


class LazyPrompts(Sequence[PromptRecord]):
    """Prompts that are read when they are asked for."""

    def __init__(self, count: int, read: Callable[[int], PromptRecord]) -> None:
        """Take what reads a row by its index; it travels to the ranks."""
        self._count, self._read = count, read

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._count

    @overload
    def __getitem__(self, index: int) -> PromptRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromptRecord]: ...
    def __getitem__(self, index: int | slice) -> PromptRecord | list[PromptRecord]:
        """Read rows."""
        places = range(self._count)[index]
        return self._read(places) if isinstance(places, int) else [self._read(each) for each in places]


def read_prompts(
    source: str | Path | Sequence[str] | PromptSettings,
    setting: str = "sampler.prompts",
    *,
    is_held_out: bool = True,
) -> Sequence[PromptRecord]:
    """Take prompts as they are, or read rows with a ``prompt`` and any other columns.

    Rows of more than `MAX_HELD_BYTES` stay on the disk; every row is looked at once.

    Args:
        source: Prompts; the path of a JSONL file, a Parquet file (``.parquet``) or a folder of
            ``datasets.Dataset.save_to_disk``; the name of a dataset on the hub; ``reasoning_gym:TASK`` or
            ``verifiers:TASKSET``; or settings.
        setting: Name of the source in an error.
        is_held_out: Whether tasks are others than those that are trained on, where the settings name no seed.

    Raises:
        DatasetError: The source is missing, empty or broken, or a row has no ``prompt``.
    """
    settings = in_full(str(source) if isinstance(source, Path) else source)
    if not isinstance(settings, PromptSettings):
        if files := [each for each in settings if each.endswith((PARQUET, ".jsonl")) and Path(each).exists()]:
            raise DatasetError(
                f"{setting} lists the file {files[0]!r} as a prompt. Name each file in a source of rl.sources, or put "
                "them together."
            )
        return [PromptRecord(prompt) for prompt in settings]
    _require_one_kind(settings, setting)
    if settings.reasoning_gym is not None:
        return Tasks.of(settings, setting, is_held_out=is_held_out)
    found = _open(settings, setting) if settings.path is not None else read_taskset(settings, setting)
    if not len(found):
        named = settings.path or settings.verifiers
        raise DatasetError(f"{setting}={named!r} is empty: it must hold at least one prompt.")
    return found


def _require_one_kind(settings: PromptSettings, setting: str) -> None:
    kinds = ("path", *SHORT_FORMS)
    given = [kind for kind in kinds if getattr(settings, kind) is not None]
    if len(given) != 1:
        raise DatasetError(f"{setting} must have one of {', '.join(f'`{kind}`' for kind in kinds)}.")
    names = {each.name for each in fields(settings)}
    read = {"path": {"split", "hub_config"}, "verifiers": {"config"}}
    read["reasoning_gym"] = names - read["path"]
    for name in sorted(names - read[given[0]] - {*kinds}):
        if getattr(settings, name) != getattr(PromptSettings(), name):
            raise DatasetError(f"{setting}.{name} has no effect with {given[0]}. Leave it out.")


def _open(source: PromptSettings, setting: str) -> Sequence[PromptRecord]:
    path = Path(source.path or "")
    named = f"{setting}={source.path!r}"
    is_saved = path.is_dir()
    if path.is_file() and path.suffix != PARQUET:
        if source.split is not None or source.hub_config is not None:
            raise DatasetError(f"{setting}.split has no effect with the lines of a file. Leave it out.")
        if path.stat().st_size <= MAX_HELD_BYTES:
            return read_rows(path, _prompt_record_of, RULE)
        return _lazy_lines(path)
    try:
        if is_saved:
            table: Any = take_split(splits_of(path, named), source.split, named)
        elif path.is_file():
            from datasets import Dataset
            from pyarrow import parquet

            is_large = path.stat().st_size > MAX_HELD_BYTES
            # pyarrow leaves nothing in the cache of datasets.
            table = Dataset.from_parquet(str(path)) if is_large else Dataset(parquet.read_table(path))
        elif is_hub_name(str(source.path)):
            table = take_split(load_hub(str(source.path), source.hub_config, named), source.split, named)
        else:
            raise DatasetError(f"{named} does not exist. Make it first, or list the prompts.")
    except (OSError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(
            f"{named} cannot be read: it must be a Parquet file, or a folder of one dataset written by save_to_disk "
            f"({type(error).__name__}: {error})"
        ) from error
    lazy = LazyPrompts(len(table), functools.partial(_record_in_table, table, str(source.path)))
    if table.data.nbytes <= MAX_HELD_BYTES:
        return list(lazy)
    for _ in lazy:
        pass
    return lazy


def read_rows(path: str | Path, read: Callable[[Any], Row], rule: str) -> list[Row]:
    """Read the JSON values in the lines of a file with `read`, which may raise; blank lines are left out.

    Raises:
        DatasetError: A line cannot be read; `rule` says what each must be.
    """
    # Not splitlines(), which would also cut at separators inside a text.
    lines = enumerate(Path(path).read_bytes().split(b"\n"), start=1)
    return [_read_line(path, number, line, read, rule) for number, line in lines if line.strip()]


def _read_line(path: str | Path, number: int, line: bytes, read: Callable[[Any], Row], rule: str) -> Row:
    try:
        return read(json.loads(line.decode("utf-8-sig")))
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError) as error:
        shown = line[:80].decode("utf-8", errors="replace")
        raise DatasetError(
            f"{path}:{number} is {shown!r}, but {rule} ({type(error).__name__}: {error})"
        ) from error


def _lazy_lines(path: Path) -> LazyPrompts:
    """Look at every line once, and keep where it starts, 16 bytes a line."""
    starts, start = [], 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                _read_line(path, number, line, _prompt_record_of, RULE)
                starts.append((start, number))
            start += len(line)
    table = np.array(starts, dtype=np.int64).reshape(-1, 2)
    return LazyPrompts(len(table), functools.partial(_record_at, path, table))


def _record_at(path: Path, starts: np.ndarray, index: int) -> PromptRecord:
    start, number = starts[index].tolist()
    with path.open("rb") as file:
        file.seek(start)
        return _read_line(path, number, file.readline(), _prompt_record_of, RULE)


def _record_in_table(table: Any, name: str, number: int) -> PromptRecord:
    row = without_added_nulls(table[number])
    names = ", ".join(row)
    try:
        return _prompt_record_of(row)
    except (KeyError, TypeError, ValueError) as error:
        raise DatasetError(
            f"row {number} of {name} has the columns {names}, but every row must have a {PROMPT} "
            f"({type(error).__name__}: {error})"
        ) from error


def without_added_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table without nulls in messages and tools, where the table may have added them."""
    return {
        column: without_nulls(value) if column in ("prompt", "tools") else value
        for column, value in row.items()
    }


def _prompt_record_of(columns: Any) -> PromptRecord:
    prompt = chat_in(columns.pop("prompt"))
    # As verl's datasets hold it.
    graded = columns.get("reward_model")
    if isinstance(graded, Mapping) and "ground_truth" in graded:
        columns.setdefault("ground_truth", graded["ground_truth"])
    is_list = isinstance(prompt, list)
    of_tokens = is_list and all(type(each) is int and each >= 0 for each in prompt)
    if not (
        isinstance(prompt, str) or of_tokens or (is_list and all(isinstance(each, dict) for each in prompt))
    ):
        raise TypeError(f"the prompt is {str(prompt)[:40]}")
    if not prompt:
        raise TypeError("the prompt is empty")
    for each in prompt if is_list and not of_tokens else ():
        if each.get("content") is None and not each.get("tool_calls"):
            raise TypeError(f"a message has no content: {str(each)[:40]}")
        plain_message(each, is_data=True)
    if not of_tokens:
        require_whole_characters(prompt)
    return PromptRecord(prompt, columns)


def check_lengths(
    prompt_records: Sequence[PromptRecord],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: float,
    setting: str,
    vocab_size: float = math.inf,
    tools: Sequence[Any] = (),
) -> None:
    """Encode the prompts of `setting`, with the `tools` of their environment.

    Raises:
        ConfigError: One cannot be encoded: the tokenizer has no chat template, or it refuses the messages.
        DatasetError: One is longer than `max_tokens`, or holds a token that a model of `vocab_size` does not have.
    """
    for index, prompt_record in enumerate(prompt_records):
        try:
            token_ids = encode(asked(prompt_record, tools), lambda: tokenizer)
        except Exception as error:  # A template may raise whatever its author chose.
            name = tokenizer.name_or_path
            raise ConfigError(
                f"prompt {index} of {setting} cannot be encoded with the tokenizer of {name!r} "
                f"({type(error).__name__}: {error}). Correct the prompt, or the template in {name}/chat_template.jinja."
            ) from error
        if (largest := max(token_ids, default=0)) >= vocab_size:
            raise DatasetError(
                f"prompt {index} of {setting} holds the token {largest}, and the model has {vocab_size}: encode it "
                "with the model's own tokenizer."
            )
        if len(token_ids) > max_tokens:
            raise DatasetError(
                f"prompt {index} of {setting} has {len(token_ids)} tokens, more than the {max_tokens} that leave room "
                "for an answer: leave it out, or raise train_parameters.max_seq_len and sampler.engine.max_model_len."
            )
