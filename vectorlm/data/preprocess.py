"""The preprocessing of a dataset: from text or messages to the rows of tokens that training reads."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from vectorlm.data.pack import Frame, TokenisedText, best_fit, frame_texts, join, pack_texts
from vectorlm.data.preference import rows_of_steps, rows_of_two, text_of
from vectorlm.data.settings import PreprocessSettings
from vectorlm.data.source import open_source, write_rows
from vectorlm.data.summary import VALUE_COLUMNS, Summary, add_row, vocabulary_of
from vectorlm.data.tokenise import ROWS_PER_CALL, make_tokeniser
from vectorlm.errors import ConfigError, DatasetError
from vectorlm.packages import is_installed
from vectorlm.ranks.wait import count_rows

if TYPE_CHECKING:
    from datasets import Dataset

_TOKENS_PER_WRITE = 2**18
MAX_NAMED = 5
"""Files that are not read, by name; a folder may hold thousands of pictures."""
_OWN_FILES = ("*.arrow", "state.json", "dataset_info.json")
"""What `save_to_disk` writes, and the caches that datasets puts beside it."""


def preprocess(settings: PreprocessSettings, tokenizer: Any, max_seq_len: int) -> Summary:
    """Make rows of `input_ids`, `labels`, `attention_mask`, `id` and `seq_lengths`, and save them at `save_path`.

    Memory does not grow with the dataset (but for about 100 bytes a text with `best_fit`): what is between the source
    and the rows lies in a hidden folder beside `save_path`, which is gone at the end. The rows appear at `save_path`
    when they are complete.

    Args:
        settings: Where texts are, and how they are packed, framed and masked.
        tokenizer: A transformers tokenizer.
        max_seq_len: Most tokens of a packed or truncated row.

    Returns:
        The numbers of what was made.

    Raises:
        DatasetError: There is nothing to read, a row cannot be read (it is named), or no row is left.
        ConfigError: A setting has no effect or leaves no room, the tokenizer lacks a token or a chat template, there is
            something else than a dataset at `save_path`, or the package datasets is missing.
    """
    if not is_installed("datasets"):
        raise ConfigError("preprocessing needs the package datasets. Run `pip install datasets`.")
    path = Path(settings.save_path).resolve()
    _require_replaceable(path, settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _bars_in_terminals(), TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        scratch = Path(folder)
        source = open_source(settings, scratch)
        tokeniser = make_tokeniser(source, tokenizer, settings)
        frame = _frame(tokenizer, settings, max_seq_len, is_chat=tokeniser.is_chat)
        tokens = tokeniser.map(scratch / "tokens.arrow")
        summary = Summary(
            max_seq_len,
            settings.ignore_index,
            unread=[*tokeniser.unread, *source.unread[:MAX_NAMED]],
            tokenizer=tokenizer.name_or_path,
            vocabulary=vocabulary_of(tokenizer),
        )
        kept = _kept(tokens, summary)
        texts = (text_of(row, settings.ignore_index) for row in kept)
        packing, fits = settings.packing_type, settings.packing_type == "best_fit"
        if settings.examples == "steps":
            rows = rows_of_steps(kept, frame, summary)
        elif settings.examples != "texts":
            rows = rows_of_two(kept, tokens.with_format(None), frame, summary)
        elif packing is None or (fits and settings.truncate):
            rows = frame_texts(texts, frame, summary, truncate=settings.truncate)
        else:
            rows = pack_texts(texts, frame, summary, "full" if packing == "full" else "partial")
            summary.begins_rows_alone = packing == "full" and frame.bos_token_id is not None
        value = VALUE_COLUMNS.get(settings.examples)
        _save(_best_fit(rows, max_seq_len, scratch) if fits else rows, summary, scratch, value)
        if not summary.loss_tokens:
            raise DatasetError(
                f"nothing is left to learn from: of {summary.rows_in:,} rows were skipped {summary.why_skipped()}, and "
                f"no token of the others counts in the loss within max_seq_len={max_seq_len}. Check data_field and "
                "seperator, or raise max_seq_len."
            )
        if path.exists():
            path.rename(scratch / "before")
        (scratch / "rows").rename(path)
    return summary


@contextmanager
def _bars_in_terminals() -> Iterator[None]:
    """Let the library datasets draw its bars in terminals alone."""
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
    """Refuse to replace anything but a dataset."""
    if path == Path(settings.load_path).resolve():
        raise ConfigError(
            f"dataset_preprocess.save_path={settings.save_path!r} is load_path too: the result would replace the "
            "texts. Name another folder."
        )
    if not path.exists():
        return
    files = list(path.iterdir()) if path.is_dir() else [path]
    other = [file for file in files if not (path.is_dir() and any(map(file.match, _OWN_FILES)))]
    if other:
        raise ConfigError(
            f"dataset_preprocess.save_path={settings.save_path!r} holds {other[0].name}, which is no part of a "
            "dataset, and the result would replace it. Name another folder."
        )


def _frame(tokenizer: Any, settings: PreprocessSettings, max_seq_len: int, *, is_chat: bool) -> Frame:
    if is_chat or not settings.add_bos_eos_tokens:
        return Frame(max_seq_len, None, None, settings.overlap, settings.ignore_index)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is None and eos is None:
        raise ConfigError(
            "add_bos_eos_tokens=True has no effect: the tokenizer has neither a bos_token nor an eos_token. Set "
            "add_bos_eos_tokens: False, or add them to the tokenizer."
        )
    return Frame(max_seq_len, bos, eos, settings.overlap, settings.ignore_index)


def _kept(tokens: Dataset, summary: Summary) -> Iterator[dict[str, Any]]:
    """Yield the rows that are not skipped, with their places in `tokens`."""
    batches = tokens.with_format(None).iter(ROWS_PER_CALL)
    rows = (
        dict(zip(batch, row, strict=True)) for batch in batches for row in zip(*batch.values(), strict=True)
    )
    for index, row in enumerate(count_rows(rows, len(tokens), "pack")):
        summary.rows_in += 1
        summary.unread += [each for each in row["unread"] if each not in summary.unread]
        if row["skipped"]:
            add_row(summary.skipped, row["skipped"], row["name"])
        else:
            for remark in row["remarks"]:
                add_row(summary.remarks, remark, row["name"])
            yield {**row, "index": index}


def _best_fit(chunks: Iterable[TokenisedText], max_seq_len: int, scratch: Path) -> Iterator[TokenisedText]:
    """Write the chunks down, which is where rows then take them from in any order."""
    from datasets import Features, Sequence, Value

    lengths = array("i")

    def noting() -> Iterator[dict[str, Any]]:
        for chunk in chunks:
            lengths.append(len(chunk))
            yield {"input_ids": chunk.input_ids, "labels": chunk.labels}

    features = Features(input_ids=Sequence(Value("int32")), labels=Sequence(Value("int32")))
    path = scratch / "chunks.arrow"
    written = write_rows(noting(), features, path, max(1, _TOKENS_PER_WRITE // max_seq_len))
    rows = best_fit(lengths, max_seq_len)
    for places in count_rows(rows, len(rows), "fit"):
        columns = written[places]
        yield join(
            [TokenisedText(*each) for each in zip(columns["input_ids"], columns["labels"], strict=True)]
        )


def _save(rows: Iterable[TokenisedText], summary: Summary, scratch: Path, value: str | None) -> None:
    """Save the rows, and count them; `value` is the name of the column for their values, if they have any."""
    from datasets import Features, Sequence, Value

    def columns() -> Iterator[dict[str, Any]]:
        for index, row in enumerate(rows):
            yield {
                "input_ids": row.input_ids,
                "labels": row.labels,
                "attention_mask": [1] * len(row),
                "id": index,
                "seq_lengths": row.seq_lengths or [len(row)],
                **({} if value is None else {value: row.value}),
            }

    features = Features(
        input_ids=Sequence(Value("int32")),
        labels=Sequence(Value("int32")),
        attention_mask=Sequence(Value("int8")),
        id=Value("int64"),
        seq_lengths=Sequence(Value("int32")),
        **({} if value is None else {value: Value("float32")}),
    )
    path = scratch / "rows.arrow"
    rows_per_write = max(1, _TOKENS_PER_WRITE // summary.max_seq_len)
    dataset = write_rows(columns(), features, path, rows_per_write)
    summary.count(dataset)
    summary.keep_in(dataset)
    dataset.save_to_disk(scratch / "rows")
