"""Read prompts, and check that they leave room for an answer."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from vectorlm.data import images
from vectorlm.data.chat import chat_in
from vectorlm.data.encoding import (
    TextModelError,
    asked,
    encode,
    is_messages,
    length_bound,
    plain_message,
    require_whole_characters,
    shown_prompt,
    without_nulls,
)
from vectorlm.data.images import (
    ImageError,
    column_images,
    image_tokens_of,
    images_of,
    pictures_of,
    with_images,
)
from vectorlm.data.settings import SHORT_FORMS, Overlong, PromptSettings, in_full
from vectorlm.data.source import is_hub_name, load_hub, splits_of, take_split
from vectorlm.data.tasks import Tasks, read_taskset
from vectorlm.errors import ConfigError, DatasetError
from vectorlm.ranks.wait import count_rows
from vectorlm.types import Prompt, PromptRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = TypeVar("Row")
Found = TypeVar("Found")
PARQUET = ".parquet"
PROMPT = "'prompt', which is a text, token ids or messages"
RULE = f"every line must be a JSON object with a {PROMPT}."
KEYS = {"prompt", "prompt_token_ids", "tools"}
"""Keys of a prompt that is a mapping: the keys of vLLM's ``TextPrompt`` and ``TokensPrompt``, and `tools`."""
MAX_BYTES_IN_MEMORY = 2**28
"""Size of the largest source to keep in memory; rows of larger sources are read from the disk when needed."""


class LazyPrompts(Sequence[PromptRecord]):
    """Prompts that are read on demand."""

    def __init__(self, count: int, read: Callable[[int], PromptRecord]) -> None:
        """Take the function that reads a row by index; it is sent to the ranks."""
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
        return self._read(places) if isinstance(places, int) else [self._read(place) for place in places]


def read_prompts(
    source: str | Path | Sequence[str] | PromptSettings,
    setting: str = "evaluation.prompts",
    *,
    is_held_out: bool = True,
) -> Sequence[PromptRecord]:
    """Return prompts from a list, or from rows with a ``prompt`` and any other columns.

    A source over `MAX_BYTES_IN_MEMORY` is not kept in memory. All rows are checked once.

    Args:
        source: Prompts; the path of a JSONL file, a Parquet file (``.parquet``) or a folder of
            ``datasets.Dataset.save_to_disk``; the name of a dataset on the hub; ``reasoning_gym:TASK`` or
            ``verifiers:TASKSET``; or settings.
        setting: Name of the source in errors.
        is_held_out: Whether tasks differ from the training tasks, unless the settings name a seed.

    Raises:
        DatasetError: The source is missing, empty or broken, or a row has no ``prompt``.
    """
    settings = in_full(str(source) if isinstance(source, Path) else source)
    if not isinstance(settings, PromptSettings):
        files = [text for text in settings if text.endswith((PARQUET, ".jsonl")) and Path(text).exists()]
        if files:
            raise DatasetError(
                f"{setting} lists the file {files[0]!r} as a prompt. Use one source in rl.sources per file, or join "
                "the files."
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
        raise DatasetError(f"{setting} needs exactly one of {', '.join(f'`{kind}`' for kind in kinds)}.")
    names = {item.name for item in fields(settings)}
    read = {"path": {"split", "hub_config"}, "verifiers": {"config"}}
    read["reasoning_gym"] = names - read["path"]
    for name in sorted(names - read[given[0]] - {*kinds}):
        if getattr(settings, name) != getattr(PromptSettings(), name):
            raise DatasetError(f"{setting}.{name} has no effect with {given[0]}. Leave it out.")


def _open(source: PromptSettings, setting: str) -> Sequence[PromptRecord]:
    path = Path(source.path or "")
    named = f"{setting}={source.path!r}"
    fix = f"Write {{path: {source.path}, split: NAME}}, where NAME is"
    if source.hub_config is not None and path.exists():
        raise DatasetError(
            f"{setting}.hub_config has no effect because {source.path!r} is on this machine. Leave it out."
        )
    if path.is_file() and path.suffix != PARQUET:
        if source.split is not None:
            raise DatasetError(f"{setting}.split has no effect with a JSONL file. Leave it out.")
        if path.stat().st_size <= MAX_BYTES_IN_MEMORY:
            return read_rows(path, _prompt_record_of, RULE)
        return _lazy_lines(path)
    try:
        if path.is_dir():
            splits: Mapping[str, Any] = splits_of(path, named)
        elif path.is_file():
            from datasets import Dataset
            from pyarrow import parquet

            is_large = path.stat().st_size > MAX_BYTES_IN_MEMORY
            # pyarrow does not write to the cache of datasets.
            rows = Dataset.from_parquet(str(path)) if is_large else Dataset(parquet.read_table(path))
            splits = {"train": rows}
        elif is_hub_name(str(source.path)):
            splits = load_hub(str(source.path), source.hub_config, named)
        else:
            raise DatasetError(f"{named} does not exist. Make it first, or list the prompts.")
        table: Any = take_split(splits, source.split, named, fix)
    except (OSError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(
            f"{named} must be a Parquet file, or a folder with one dataset from save_to_disk ({type(error).__name__}: "
            f"{error})"
        ) from error
    lazy = LazyPrompts(len(table), functools.partial(_record_in_table, table, str(source.path)))
    if table.data.nbytes <= MAX_BYTES_IN_MEMORY:
        return list(lazy)
    for _ in lazy:
        pass
    return lazy


def read_rows(path: str | Path, read: Callable[[Any], Row], rule: str) -> list[Row]:
    """Convert the JSON values in the lines of a file with `read`; blank lines are skipped.

    Raises:
        DatasetError: A line cannot be read, or `read` raises; the message holds `rule`.
    """
    # splitlines() would also cut at separators inside a text.
    lines = enumerate(Path(path).read_bytes().split(b"\n"), start=1)
    return [_read_line(path, number, line, read, rule) for number, line in lines if line.strip()]


def _read_line(path: str | Path, number: int, line: bytes, read: Callable[[Any], Row], rule: str) -> Row:
    try:
        return read(json.loads(line.decode("utf-8-sig")))
    except ImageError as error:
        raise DatasetError(f"{path}:{number}: {error}. Correct the row.") from error
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError) as error:
        shown = line[:80].decode("utf-8", errors="replace")
        raise DatasetError(
            f"{path}:{number} is {shown!r}, but {rule} ({type(error).__name__}: {error})"
        ) from error


def _lazy_lines(path: Path) -> LazyPrompts:
    """Check every line once, and keep its start and number: 16 bytes per line."""
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
    except ImageError as error:
        raise DatasetError(f"row {number} of {name}: {error}. Correct the row.") from error
    except (KeyError, TypeError, ValueError) as error:
        raise DatasetError(
            f"row {number} of {name} has the columns {names}, but needs a {PROMPT} ({type(error).__name__}: {error})"
        ) from error


def without_added_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table without nulls in messages and tools, which the table may have added."""
    return {
        column: without_nulls(value) if column in ("prompt", "tools") else value
        for column, value in row.items()
    }


_VERL_COLUMNS = {"reward_model": ("ground_truth",), "extra_info": ("tools_kwargs", "interaction_kwargs")}
"""Columns of verl's datasets, with the keys inside them that become columns of the prompt."""


def _prompt_record_of(columns: Any) -> PromptRecord:
    prompt = chat_in(columns.pop("prompt"))
    for place, names in _VERL_COLUMNS.items():
        held = columns.get(place)
        for name in names if isinstance(held, Mapping) else ():
            if name in held:
                columns.setdefault(name, held[name])
    is_list = isinstance(prompt, list)
    is_tokens = is_list and all(type(token) is int and token >= 0 for token in prompt)
    is_chat = is_list and all(isinstance(message, dict) for message in prompt)
    if not (isinstance(prompt, str) or is_tokens or is_chat):
        raise TypeError(f"the prompt is {str(prompt)[:40]}")
    if not prompt:
        raise TypeError("the prompt is empty")
    if is_chat:
        try:
            prompt = with_images(prompt, column_images(columns))
        except ValueError as error:
            raise ImageError(str(error)) from error
        columns = {name: value for name, value in columns.items() if name not in images.COLUMNS}
    for message in prompt if is_chat else ():
        if message.get("content") is None and not message.get("tool_calls"):
            raise TypeError(f"a message has no content: {str(message)[:40]}")
        plain_message(message, is_data=True)
    if not is_tokens:
        require_whole_characters(prompt)
    return PromptRecord(prompt, columns)


def check_lengths(
    prompt_records: Sequence[PromptRecord],
    tokenizer: PreTrainedTokenizerBase,
    room: float,
    setting: str,
    vocab_size: float = math.inf,
    tools: Sequence[Any] = (),
) -> None:
    """Check that the prompts of `setting` have at most `room` tokens; encode only prompts that may be longer.

    `tools` are the tools of the prompts' environment.

    Raises:
        ConfigError: The tokenizer has no chat template, or the template refuses the messages.
        DatasetError: A prompt is longer than `room`, or contains a token beyond `vocab_size`.
    """
    # Not the length of the vocabulary, because token ids may have gaps.
    may_be_beyond = max(tokenizer.get_vocab().values(), default=0) >= vocab_size
    for index, record in enumerate(prompt_records):
        prompt = asked(record, tools)
        is_ids = not (isinstance(prompt, str | Mapping) or is_messages(prompt))
        bound = _bound(record, index, tokenizer, setting, tools)
        if bound <= room and not (is_ids or may_be_beyond):
            continue
        token_ids = _encoded(record, index, tokenizer, setting, tools)
        if (largest := max(token_ids, default=0)) >= vocab_size:
            raise DatasetError(
                f"prompt {index} of {setting} holds the token {largest}, but the model has {vocab_size} tokens. Encode "
                "it with the model's own tokenizer."
            )
        if len(token_ids) > room:
            raise DatasetError(
                f"prompt {index} of {setting} has {len(token_ids)} tokens, but at most {room} leave room for "
                "max_tokens. Raise train_parameters.max_seq_len and engine.max_model_len, or set overlong_prompts."
            )


def longest_prompt(
    prompt_records: Sequence[PromptRecord], tokenizer: PreTrainedTokenizerBase, setting: str
) -> int:
    """Return the length of the longest prompt of `setting`, in tokens; raises `ConfigError` as `check_lengths` does."""
    return max(
        (len(_encoded(record, index, tokenizer, setting, ())) for index, record in enumerate(prompt_records)),
        default=0,
    )


def _encoded(
    record: PromptRecord, index: int, tokenizer: PreTrainedTokenizerBase, setting: str, tools: Sequence[Any]
) -> list[int]:
    def encoded() -> list[int]:
        token_ids = encode(asked(record, tools), lambda: tokenizer)
        if pictures := pictures_of(token_ids):
            return image_tokens_of(tokenizer).expand(token_ids, pictures)[0]
        return token_ids

    return _with_advice(encoded, index, tokenizer, setting)


def _bound(
    record: PromptRecord, index: int, tokenizer: PreTrainedTokenizerBase, setting: str, tools: Sequence[Any]
) -> int:
    if images_of(record.prompt):
        return len(_encoded(record, index, tokenizer, setting, tools))
    return _with_advice(
        lambda: length_bound(asked(record, tools), lambda: tokenizer), index, tokenizer, setting
    )


def _with_advice(
    work: Callable[[], Found], index: int, tokenizer: PreTrainedTokenizerBase, setting: str
) -> Found:
    """Return the result of `work`; raise its errors with the index of the prompt."""
    try:
        return work()
    except ImageError as error:
        raise DatasetError(
            f"prompt {index} of {setting}: {error}. Correct the file, or remove the row."
        ) from error
    except TextModelError as error:
        raise ConfigError(f"prompt {index} of {setting}: {error}") from error
    except Exception as error:  # Templates may raise any exception.
        name = tokenizer.name_or_path
        raise ConfigError(
            f"prompt {index} of {setting} cannot be encoded with the tokenizer of {name!r} "
            f"({type(error).__name__}: {error}). Correct the prompt, or the template in {name}/chat_template.jinja."
        ) from error


def fit_prompts(
    prompt_records: Sequence[PromptRecord],
    tokenizer: PreTrainedTokenizerBase,
    room: float,
    setting: str,
    overlong: Overlong,
    tools: Sequence[Any] = (),
) -> tuple[Sequence[PromptRecord], str]:
    """Drop prompts of more than `room` tokens, or cut their beginnings off; return prompts and a note ("" if all fit).

    Raises:
        ConfigError: See `check_lengths`.
        DatasetError: No prompt fits.
    """
    kept, cut, example = [], dict[int, tuple[int, ...]](), ""
    for index, record in enumerate(count_rows(prompt_records, len(prompt_records), f"measuring {setting}")):
        if _bound(record, index, tokenizer, setting, tools) <= room:
            kept.append(index)
            continue
        token_ids = _encoded(record, index, tokenizer, setting, tools)
        has_images = images_of(record.prompt)
        if len(token_ids) <= room or (overlong == "truncate_left" and not has_images):
            kept.append(index)
        if len(token_ids) > room:
            example = (
                example or f"prompt {index}, {len(token_ids)} tokens: {shown_prompt(record.prompt)[:60]!r}"
            )
            cut[index] = tuple(token_ids[len(token_ids) - int(room) :])
    if not cut:
        return prompt_records, ""
    if not kept or room < 1:
        raise DatasetError(
            f"{setting}: none of {len(prompt_records)} prompts leaves room for max_tokens ({example}). Raise "
            "train_parameters.max_seq_len and engine.max_model_len, or lower max_tokens."
        )
    num_dropped = len(prompt_records) - len(kept)
    counted = [
        (num_dropped, "are dropped" if overlong == "drop" else "are dropped because they have images"),
        (len(cut) - num_dropped, f"lose all but their last {room} tokens"),
    ]
    what = " and ".join(f"{num} of {len(prompt_records)} prompts {fate}" for num, fate in counted if num)
    note = f"{setting}: {what}, to leave room for max_tokens ({example})"
    read = functools.partial(_fitted, prompt_records, np.array(kept), cut)
    fitted = LazyPrompts(len(kept), read)
    return list(fitted) if isinstance(prompt_records, list) else fitted, note


def _fitted(
    records: Sequence[PromptRecord], kept: np.ndarray, cut: Mapping[int, tuple[int, ...]], place: int
) -> PromptRecord:
    index = int(kept[place])
    return replace(records[index], token_ids=cut[index]) if index in cut else records[index]


def as_list(prompts: Sequence[Prompt] | str) -> list[Prompt]:
    """Return a list of prompts; a text is one prompt. Raises TypeError that names the first wrong prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        keys = ", ".join(map(repr, prompts))
        fix = "Pass a list of texts, token ids or conversations."
        if "input_ids" in prompts:
            fix = "Pass its lists of token ids, made without padding: prompts['input_ids']."
        elif "role" in prompts:
            fix = "Pass a list of conversations: [[message]]."
        raise TypeError(f"prompts must be a list, not a {type(prompts).__name__} with the keys {keys}. {fix}")
    if not isinstance(prompts, Iterable):
        raise TypeError(f"prompts={prompts!r} must be a text or a list of prompts.")
    listed = list(prompts)
    for index, prompt in enumerate(listed):
        if not _is_prompt(prompt):
            fix = ""
            if isinstance(prompt, Mapping) and "role" in prompt:
                fix = " Put the conversation in a list: [messages]."
            elif hasattr(prompt, "__index__"):
                fix = " Put the token ids in a list: [token_ids]."
            elif isinstance(prompt, Mapping) and prompt.keys() & KEYS:
                others = ", ".join(map(repr, sorted(prompt.keys() - KEYS, key=str)))
                fix = f" Leave out {others}: a mapping has only a prompt and `tools`. Images are parts of messages."
            raise TypeError(
                f"prompt {index} is {str(prompt)[:60]!r}, a {type(prompt).__name__}: a prompt is text, token ids or "
                f"chat messages ({{'role': …, 'content': …}}).{fix}"
            )
    return listed


def _is_prompt(prompt: Any) -> bool:
    """Return whether a value is a prompt; only its first element is checked, because prompts may be long."""
    if isinstance(prompt, str):
        return True
    if isinstance(prompt, Mapping):
        return bool(prompt) and prompt.keys() <= KEYS
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        # Arrays and tensors of token ids are not a `Sequence`.
        return hasattr(prompt, "tolist") and hasattr(prompt, "__len__") and getattr(prompt, "ndim", 1) == 1
    if not len(prompt):
        return True
    if isinstance(prompt[0], Mapping):
        return {"role", "content"} <= prompt[0].keys()
    return hasattr(prompt[0], "__index__")
