"""The preprocessing of a dataset: from a column of text to rows of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectorlm.data.pack import Frame, TokenisedText, frame_texts, pack_texts
from vectorlm.data.settings import PreprocessSettings
from vectorlm.errors import ConfigError, DatasetError

if TYPE_CHECKING:
    from datasets import Dataset

_TEXTS_PER_CALL = 1000
_ROWS_PER_TABLE = 1000


def preprocess(dataset: Dataset, tokenizer: Any, settings: PreprocessSettings, max_seq_len: int) -> Dataset:
    """Turn text into rows of `input_ids`, `labels`, `attention_mask`, `id` and `seq_lengths`; save with `save_to_disk`.

    Args:
        dataset: Rows of text.
        tokenizer: A transformers tokenizer.
        settings: Which column holds the text, and how it is packed, framed and masked.
        max_seq_len: Most tokens of a packed or truncated row.

    Raises:
        DatasetError: The column is missing, holds something other than text, or lacks the separator; or no row is left.
        ConfigError: The tokenizer has no BOS or EOS, or `overlap` leaves no room.
    """
    data_field = settings.data_field
    if data_field not in dataset.column_names:
        raise DatasetError(
            f"the dataset has no column {data_field!r}: data_field must be one of {', '.join(dataset.column_names)}."
        )
    bos, eos = _special_tokens(tokenizer) if settings.add_bos_eos_tokens else (None, None)
    frame = Frame(max_seq_len, bos, eos, settings.overlap, settings.ignore_index)
    texts = _tokenise(dataset.select_columns([data_field]).with_format(None), tokenizer, settings)
    if settings.packing_type is None:
        return _as_dataset(frame_texts(texts, frame, truncate=settings.truncate))
    return _as_dataset(pack_texts(texts, frame, settings.packing_type))


def load_text(load_path: str, *, from_disk: bool = True, split: str | None = None) -> Dataset:
    """Load the dataset to preprocess, from a folder that `save_to_disk` wrote or from the hub.

    Raises:
        DatasetError: There is no such folder, or it holds several splits and `split` does not name one.
    """
    from datasets import DatasetDict, load_dataset, load_from_disk

    if from_disk and not Path(load_path).is_dir():
        raise DatasetError(
            f"dataset folder '{load_path}' does not exist: with from_disk it must be one that save_to_disk wrote. "
            "Correct load_path, or set from_disk: False to load it from the hub."
        )
    loaded = load_from_disk(load_path) if from_disk else load_dataset(load_path)
    if not isinstance(loaded, DatasetDict):
        return loaded
    if split not in loaded:
        raise DatasetError(
            f"'{load_path}' holds several splits, and split={split!r} is none of them. Use one of {', '.join(loaded)}."
        )
    return loaded[split]


def _tokenise(dataset: Dataset, tokenizer: Any, settings: PreprocessSettings) -> Iterator[TokenisedText]:
    """Tokenise the column of text, without special tokens.

    Text up to and including the first `seperator` is the prompt: tokenised by itself, as it will be when the model
    continues it, and left out of the loss.
    """
    for start in range(0, len(dataset), _TEXTS_PER_CALL):
        texts = dataset[start : start + _TEXTS_PER_CALL][settings.data_field]
        pairs = [_split(index, text, settings) for index, text in enumerate(texts, start)]
        prompts = _encode([prompt for prompt, _ in pairs], tokenizer)
        completions = _encode([completion for _, completion in pairs], tokenizer)
        for prompt, completion in zip(prompts, completions, strict=True):
            yield TokenisedText.ignored(prompt, settings.ignore_index) + TokenisedText.counted(completion)


def _split(index: int, text: str, settings: PreprocessSettings) -> tuple[str, str]:
    if not isinstance(text, str):
        raise DatasetError(
            f"row {index} holds {text!r}: it must be text. Remove the row, or choose another data_field."
        )
    whole, seperator = (settings.pre_pend or "") + text, settings.seperator
    if not seperator:
        return "", whole
    before, found, after = whole.partition(seperator)
    if not found:
        shown = whole if len(whole) <= 60 else f"{whole[:57]}..."
        raise DatasetError(
            f"row {index} ({shown!r}) does not contain the separator {seperator!r}: every text must. "
            "Correct `seperator`, or remove the row."
        )
    return before + found, after


def _encode(texts: list[str], tokenizer: Any) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def _special_tokens(tokenizer: Any) -> tuple[int, int]:
    missing = [name for name in ("bos_token", "eos_token") if getattr(tokenizer, f"{name}_id") is None]
    if missing:
        raise ConfigError(
            f"add_bos_eos_tokens=True needs both tokens, but the tokenizer has no {' and no '.join(missing)}. "
            "Set add_bos_eos_tokens: False, or add them to the tokenizer."
        )
    return tokenizer.bos_token_id, tokenizer.eos_token_id


def _as_dataset(rows: Iterator[TokenisedText]) -> Dataset:
    from datasets import Dataset, Features, Sequence, Value, concatenate_datasets

    token = Sequence(Value("int64"))
    mask = Sequence(Value("int8"))
    features = Features(
        input_ids=token, labels=token, attention_mask=mask, id=Value("int64"), seq_lengths=token
    )
    tables: list[Dataset] = []
    num_rows = 0
    while some := list(islice(rows, _ROWS_PER_TABLE)):
        columns = {
            "input_ids": [row.input_ids for row in some],
            "labels": [row.labels for row in some],
            "attention_mask": [[1] * len(row) for row in some],
            "id": list(range(num_rows, num_rows + len(some))),
            "seq_lengths": [row.seq_lengths or [len(row)] for row in some],
        }
        tables.append(Dataset.from_dict(columns, features=features))
        num_rows += len(some)
    if not tables:
        raise DatasetError("no row is left after preprocessing: all texts are empty. Check data_field.")
    return concatenate_datasets(tables)
