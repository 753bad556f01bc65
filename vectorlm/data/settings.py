"""The settings of datasets; the config nests them in its sections ``dataset`` and ``dataset_preprocess``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Predicate
from pydantic import Field

from vectorlm.settings import NonNegativeInt, PathText, PositiveInt, ReadIf, Separator, Text

Label = Annotated[int, Field(ge=-(2**31), lt=2**31, description="an integer of 32 bits", examples=["-100"])]
EvaluationFolders = Annotated[
    PathText | Mapping[str, PathText],
    Predicate(bool),
    Field(description="the path of a folder, or `NAME: path` lines", examples=["data/eval"]),
]


@dataclass(frozen=True, kw_only=True)
class DatasetSettings:
    """The preprocessed datasets that are trained and evaluated on."""

    ignore_index: int = -100
    """Label of a token that the loss leaves out."""
    eval_bs: Annotated[PositiveInt | None, ReadIf("dataset.eval_ds")] = None
    """Sequences per rank in one evaluation batch; null takes `train_bs`."""
    train_bs: PositiveInt
    """Sequences per rank in one training micro-batch."""
    train_ds: PathText
    """Folder of the preprocessed training dataset."""
    eval_ds: EvaluationFolders | None = None
    """Folder of the preprocessed evaluation dataset; or several by name, whose losses are `eval/NAME/loss` too. null
    trains without a loss on held-out text."""

    @property
    def held_out(self) -> Mapping[str, str]:
        """The folders of the evaluation datasets by name; a single one has none."""
        return {"": self.eval_ds} if isinstance(self.eval_ds, str) else self.eval_ds or {}


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings:
    """How text becomes the datasets above; only preprocessing reads it."""

    load_path: PathText
    """Folder that `save_to_disk` wrote; JSONL, JSON, Parquet, CSV or plain-text file, or a folder or glob of such
    files; or the name of a dataset on the hub."""
    save_path: PathText
    """Folder that the processed dataset is saved to; a dataset that it holds is replaced when the new one is
    complete."""
    data_field: Text | None = None
    """Column that holds the text, or a list of messages; null takes `messages`, `prompt` with `completion`, or `text`,
    the first of these that is there."""
    examples: Literal["texts", "pairs", "labels", "steps"] = "texts"
    """What a row is: a text to fine-tune on; `chosen` and `rejected`, with or without `prompt` and `margin` (`pairs`);
    `prompt`, `completion` and whether it is a good one, `label` (`labels`); or `prompt`, a list of steps,
    `completions`, and whether each is right, `labels` (`steps`)."""
    step_separator: Annotated[Separator, ReadIf("dataset_preprocess.examples", ("steps",))] = "\n"
    """What is put after each step."""
    ignore_index: Label = -100
    """Label of a token that the loss leaves out; must equal `dataset.ignore_index`."""
    dataset_format: str = "hf"
    """Not read; accepted so that existing files load."""
    dataset_type: str | None = None
    """Not read; accepted so that existing files load."""
    packing_type: Literal["full", "partial", "best_fit"] | None = None
    """Join all texts and cut them into rows of `max_seq_len` (`full`), cut each long text by itself (`partial`), or put
    whole texts together so that rows have the least room left (`best_fit`; texts longer than a row are cut first). No
    text of a row sees the one before it, unless rows are padded (`pack_rows`)."""
    overlap: NonNegativeInt = 0
    """Tokens that one chunk shares with the next while packing; they count in the loss once."""
    add_bos_eos_tokens: bool = True
    """Put the tokenizer's BOS and EOS tokens around each text, or each chunk when packing (where an EOS in the middle
    of a text does not count in the loss). Messages have those of their chat template instead."""
    from_disk: bool = True
    """Not read: what is there at `load_path` decides. Accepted so that existing files load."""
    seperator: str | None = None
    """Up to and including its first occurrence, text is left out of the loss; rows without it are skipped and counted.
    May also be written `separator`."""
    assistant_only_loss: bool = False
    """Of messages, only what the assistant says counts in the loss, up to and including the end of its turn."""
    split: str | None = None
    """Which split to take, such as `train[:10%]` or `train+test`; null takes the only one there is. Files are the split
    `train`, unless the names in a folder say otherwise (`test.jsonl`)."""
    hub_config: str | None = None
    """Configuration of a dataset on the hub that has several, such as `main`."""
    truncate: bool = False
    """Cut texts off at `max_seq_len` tokens, without packing or with `best_fit`; a text that is cut ends in EOS,
    messages do not."""
    pre_pend: str | None = None
    """Text put before each example."""
    num_proc: PositiveInt = 1
    """Processes that tokenise."""
