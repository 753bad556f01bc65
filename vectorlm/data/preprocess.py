"""Preprocess a dataset: turn text or messages into the rows of tokens that training reads."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectorlm.data.images import takes_images
from vectorlm.data.pack import (
    Frame,
    TokenisedText,
    best_fit,
    frame_texts,
    join,
    pack_texts,
    rows_of_steps,
    rows_of_two,
    text_of,
)
from vectorlm.data.settings import PreprocessSettings
from vectorlm.data.source import open_source, write_rows
from vectorlm.data.summary import VALUE_COLUMNS, Summary, add_row, vocabulary_of
from vectorlm.data.tokenise import ROWS_PER_CALL, make_tokeniser
from vectorlm.errors import ConfigError, DatasetError
from vectorlm.packages import is_installed
from vectorlm.ranks.process_end import scratch_folder
from vectorlm.ranks.wait import count_rows

if TYPE_CHECKING:
    from datasets import Dataset

_TOKENS_PER_WRITE = 2**18
MAX_NAMED = 5
"""Largest number of unread files to name; a folder may contain thousands of pictures."""
_OWN_FILES = ("*.arrow", "state.json", "dataset_info.json")
"""Files of `save_to_disk`, and caches that the library datasets puts next to them."""


def preprocess(settings: PreprocessSettings, tokenizer: Any, max_seq_len: int) -> Summary:
    """Make rows of `input_ids`, `labels`, `attention_mask`, `id` and `seq_lengths`, and save them at `save_path`.

    Memory does not grow with the dataset, except for about 100 bytes per text with `best_fit`: intermediate rows are in
    a temporary folder next to `save_path`. The rows appear at `save_path` once they are complete.

    Args:
        settings: The source of the texts, and the rules for packing, special tokens and the loss.
        tokenizer: A transformers tokenizer.
        max_seq_len: Largest number of tokens of a packed or truncated row.

    Returns:
        Counts of the rows.

    Raises:
        DatasetError: There is nothing to read, a row cannot be read (it is named), or no row is left.
        ConfigError: A setting has no effect or does not fit, the tokenizer lacks a token or a chat template,
            `save_path` contains files that are not a dataset's, or the package datasets is missing.
    """
    if not is_installed("datasets"):
        raise ConfigError("preprocessing needs the package datasets. Run `pip install datasets`.")
    path = Path(settings.save_path).resolve()
    _require_replaceable(path, settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _bars_in_terminals(), scratch_folder(path.parent, f".{path.name}.") as scratch:
        source = open_source(settings, scratch)
        tokeniser = make_tokeniser(source, tokenizer, settings)
        bos = eos = None
        if settings.add_bos_eos_tokens and not tokeniser.is_chat:
            bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
            if bos is None and eos is None:
                raise ConfigError(
                    "add_bos_eos_tokens=True needs a bos_token or an eos_token, and the tokenizer has neither. Set "
                    "add_bos_eos_tokens: False, or add them to the tokenizer."
                )
        frame = Frame(max_seq_len, bos, eos, settings.overlap)
        tokens = tokeniser.map(scratch / "tokens.arrow")
        summary = Summary(
            max_seq_len,
            settings.ignore_index,
            unread=[*tokeniser.unread, *source.unread[:MAX_NAMED]],
            tokenizer=tokenizer.name_or_path,
            vocabulary=vocabulary_of(tokenizer),
        )
        kept = _kept(tokens, summary)
        texts = map(text_of, kept)
        packing, fits = settings.packing_type, settings.packing_type == "best_fit"
        if settings.examples == "steps":
            rows = rows_of_steps(kept, frame, summary)
        elif settings.examples != "texts":
            rows = rows_of_two(kept, tokens.with_format(None), frame, summary, settings.overlong_prompts)
        elif packing is None or (fits and settings.truncate):
            rows = frame_texts(texts, frame, summary, truncate=settings.truncate)
        else:
            rows = pack_texts(texts, frame, summary, "full" if packing == "full" else "partial")
            summary.begins_rows_alone = packing == "full" and frame.bos_token_id is not None
        value = VALUE_COLUMNS.get(settings.examples)
        has_images = tokeniser.is_chat and takes_images(tokenizer)
        rows = _best_fit(rows, max_seq_len, scratch) if fits else rows
        _save(rows, summary, scratch, value, has_images=has_images)
        if not summary.loss_tokens:
            raise DatasetError(
                f"no token counts in the loss within max_seq_len={max_seq_len} ({summary.rows_in:,} rows, skipped "
                f"{summary.why_skipped()}). Raise max_seq_len, or check data_field and separator."
            )
        if path.exists():
            path.rename(scratch / "before")
        (scratch / "rows").rename(path)
    return summary


@contextmanager
def _bars_in_terminals() -> Iterator[None]:
    """Show the progress bars of the library datasets in terminals only."""
    import datasets

    if sys.stderr.isatty() or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def _require_replaceable(path: Path, settings: PreprocessSettings) -> None:
    """Raise ConfigError if `path` is anything but a dataset, which the new one replaces."""
    if path == Path(settings.load_path).resolve():
        raise ConfigError(
            f"dataset_preprocess.save_path={settings.save_path!r} must differ from load_path, whose texts it would "
            "replace. Name another folder."
        )
    if not path.exists():
        return
    files = list(path.iterdir()) if path.is_dir() else [path]
    other = [file for file in files if not (path.is_dir() and any(map(file.match, _OWN_FILES)))]
    if other:
        raise ConfigError(
            f"dataset_preprocess.save_path={settings.save_path!r} must be a new folder or an older dataset, which is "
            f"replaced, but it contains {other[0].name}. Name another folder."
        )


def _kept(tokens: Dataset, summary: Summary) -> Iterator[dict[str, Any]]:
    """Yield the rows that are not skipped, with their index in `tokens`."""
    batches = tokens.with_format(None).iter(ROWS_PER_CALL)
    rows = (
        dict(zip(batch, row, strict=True)) for batch in batches for row in zip(*batch.values(), strict=True)
    )
    for index, row in enumerate(count_rows(rows, len(tokens), "pack")):
        summary.rows_in += 1
        summary.unread += [name for name in row["unread"] if name not in summary.unread]
        if row["skipped"]:
            add_row(summary.skipped, row["skipped"], row["name"])
        else:
            for remark in row["remarks"]:
                add_row(summary.remarks, remark, row["name"])
            yield {**row, "index": index}


def _best_fit(chunks: Iterable[TokenisedText], max_seq_len: int, scratch: Path) -> Iterator[TokenisedText]:
    """Write the chunks to a file, and join them to rows by best fit."""
    from datasets import Features, Sequence, Value

    lengths = array("i")

    def with_lengths() -> Iterator[dict[str, Any]]:
        for chunk in chunks:
            lengths.append(len(chunk))
            yield {"input_ids": chunk.input_ids, "counted": chunk.counted}

    features = Features(input_ids=Sequence(Value("int32")), counted=Sequence(Value("bool")))
    path = scratch / "chunks.arrow"
    written = write_rows(with_lengths(), features, path, max(1, _TOKENS_PER_WRITE // max_seq_len))
    rows = best_fit(lengths, max_seq_len)
    for places in count_rows(rows, len(rows), "fit"):
        columns = written[places]
        yield join(list(map(TokenisedText, columns["input_ids"], columns["counted"])))


def _save(
    rows: Iterable[TokenisedText], summary: Summary, scratch: Path, value: str | None, *, has_images: bool
) -> None:
    """Save and count the rows; `value` is the column for their values, None if they have no values."""
    from datasets import Features, Sequence, Value

    def columns() -> Iterator[dict[str, Any]]:
        for index, row in enumerate(rows):
            yield {
                "input_ids": row.input_ids,
                "labels": row.labels(summary.ignore_index),
                "attention_mask": [1] * len(row),
                "id": index,
                "seq_lengths": row.seq_lengths or [len(row)],
                **({} if value is None else {value: row.value}),
                **(images_of_row(row) if has_images else {}),
            }

    def images_of_row(row: TokenisedText) -> dict[str, Any]:
        images, starts = [image for image, _ in row.images], [start for _, start in row.images]
        return {"images": images, "image_starts": starts}

    image_features = {"images": Sequence(Value("string")), "image_starts": Sequence(Value("int32"))}
    features = Features(
        input_ids=Sequence(Value("int32")),
        labels=Sequence(Value("int32")),
        attention_mask=Sequence(Value("int8")),
        id=Value("int64"),
        seq_lengths=Sequence(Value("int32")),
        **({} if value is None else {value: Value("float32")}),
        **(image_features if has_images else {}),
    )
    path = scratch / "rows.arrow"
    rows_per_write = max(1, _TOKENS_PER_WRITE // summary.max_seq_len)
    dataset = write_rows(columns(), features, path, rows_per_write)
    summary.count(dataset)
    summary.keep_in(dataset)
    dataset.save_to_disk(scratch / "rows")
