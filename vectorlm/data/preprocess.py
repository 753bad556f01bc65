"""The preprocessing of a dataset: from a column of text to rows that can be trained on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vectorlm.data.pack import Frame, frame_texts, pack_texts
from vectorlm.data.tokenise import TokenisedText, tokenise
from vectorlm.errors import ConfigError, DatasetError

if TYPE_CHECKING:
    from datasets import Dataset

_ROWS_PER_TABLE = 1000


def preprocess(
    dataset: Dataset,
    tokenizer: Any,
    *,
    data_field: str,
    max_seq_len: int,
    packing_type: Literal["full", "partial"] | None = None,
    overlap: int = 0,
    add_bos_eos_tokens: bool = True,
    seperator: str | None = None,
    truncate: bool = False,
    pre_pend: str | None = None,
    ignore_index: int = -100,
) -> Dataset:
    """Turn text into rows of `input_ids`, `labels`, `attention_mask` and `id`; save them with `save_to_disk`.

    Args:
        dataset: Rows of text.
        tokenizer: A transformers tokenizer.
        data_field: The column that holds the text.
        max_seq_len: Tokens of a packed or truncated row, at most.
        packing_type: ``full`` joins all texts and cuts them into chunks, ``partial`` cuts each text by itself,
            None makes each text one row.
        overlap: Tokens that one chunk shares with the next; they count in the loss once.
        add_bos_eos_tokens: Put BOS and EOS around each row, and EOS between texts that share a row.
        seperator: Text up to and including its first occurrence is left out of the loss.
        truncate: Cut rows off at `max_seq_len`; packed rows fit anyway.
        pre_pend: Text put before each text.
        ignore_index: Label of a token that does not count in the loss.

    Raises:
        DatasetError: The column is missing, holds something else than text, or lacks the separator; or nothing is left.
        ConfigError: The tokenizer has no BOS or EOS, or `overlap` leaves no room.
    """
    if data_field not in dataset.column_names:
        raise DatasetError(
            f"the dataset has no column {data_field!r}: data_field must be one of {', '.join(dataset.column_names)}."
        )
    bos, eos = _special_tokens(tokenizer) if add_bos_eos_tokens else (None, None)
    frame = Frame(max_seq_len, bos, eos, overlap, ignore_index)
    column = dataset.select_columns([data_field]).with_format(None)
    texts = chain.from_iterable(batch[data_field] for batch in column.iter(batch_size=1000))
    tokenised = tokenise(texts, tokenizer, seperator=seperator, pre_pend=pre_pend, ignore_index=ignore_index)
    if packing_type is None:
        return _as_dataset(frame_texts(tokenised, frame, truncate=truncate))
    return _as_dataset(pack_texts(tokenised, frame, packing_type))


def load_text(load_path: str, *, from_disk: bool = True, split: str | None = None) -> Dataset:
    """Load the dataset to preprocess, from a folder that `save_to_disk` wrote or from the hub.

    Raises:
        DatasetError: There is no such folder, or a split must be named and is not.
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


def _special_tokens(tokenizer: Any) -> tuple[int, int]:
    """Return the ids of BOS and EOS."""
    missing = [name for name in ("bos_token", "eos_token") if getattr(tokenizer, f"{name}_id") is None]
    if missing:
        raise ConfigError(
            f"add_bos_eos_tokens=True needs both tokens, but the tokenizer has no {' and no '.join(missing)}. "
            "Set add_bos_eos_tokens: False, or add them to the tokenizer."
        )
    return tokenizer.bos_token_id, tokenizer.eos_token_id


def _as_dataset(rows: Iterator[TokenisedText]) -> Dataset:
    """Write rows as Arrow tables, numbered from 0."""
    from datasets import Dataset, Features, Sequence, Value, concatenate_datasets

    token = Sequence(Value("int64"))
    features = Features(
        input_ids=token, labels=token, attention_mask=Sequence(Value("int8")), id=Value("int64")
    )
    tables: list[Dataset] = []
    num_rows = 0
    while some := list(islice(rows, _ROWS_PER_TABLE)):
        columns = {
            "input_ids": [row.input_ids for row in some],
            "labels": [row.labels for row in some],
            "attention_mask": [[1] * len(row) for row in some],
            "id": list(range(num_rows, num_rows + len(some))),
        }
        tables.append(Dataset.from_dict(columns, features=features))
        num_rows += len(some)
    if not tables:
        raise DatasetError(
            "no row is left after preprocessing: at least one text must not be empty. Check data_field."
        )
    return concatenate_datasets(tables)
