"""The settings of datasets; the config nests them in its sections ``dataset`` and ``dataset_preprocess``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vectorlm.settings import NonNegativeInt, PositiveInt, Text


@dataclass(frozen=True, kw_only=True)
class DatasetSettings:
    """The preprocessed datasets that are trained and evaluated on."""

    ignore_index: int = -100
    """Label of a token that the loss leaves out."""
    eval_bs: PositiveInt
    """Sequences per rank in one evaluation batch."""
    train_bs: PositiveInt
    """Sequences per rank in one training micro-batch."""
    train_ds: Text
    """Folder of the preprocessed training dataset."""
    eval_ds: Text
    """Folder of the preprocessed evaluation dataset."""


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings:
    """How text becomes the datasets above; only preprocessing reads it."""

    load_path: Text
    """Folder (or, without `from_disk`, hub name) of the dataset to preprocess."""
    save_path: Text
    """Folder that the processed dataset is saved to."""
    data_field: Text
    """Column that holds the text."""
    ignore_index: int = -100
    """Label of a token that the loss leaves out; must equal `dataset.ignore_index`."""
    dataset_format: str = "hf"
    """Not read; accepted so that existing files load."""
    dataset_type: str | None = None
    """Not read; accepted so that existing files load."""
    packing_type: Literal["full", "partial"] | None = None
    """Pack the whole dataset (`full`) or cut each long text (`partial`) into chunks of `max_seq_len`. No text of a
    chunk sees the one before it, unless rows are padded (`pack_rows`)."""
    overlap: NonNegativeInt = 0
    """Tokens that one chunk shares with the next while packing; they count in the loss once."""
    add_bos_eos_tokens: bool = True
    """Put the tokenizer's BOS and EOS tokens around each text, or each chunk when packing."""
    from_disk: bool = True
    """Load from a folder written by `save_to_disk` instead of the hub."""
    seperator: str | None = None
    """Up to and including its first occurrence, text is left out of the loss. May also be written `separator`."""
    split: str | None = None
    """Which split to take where `load_path` holds several."""
    truncate: bool = False
    """Cut texts off at `max_seq_len` tokens instead of packing them."""
    pre_pend: str | None = None
    """Text put before each example."""
