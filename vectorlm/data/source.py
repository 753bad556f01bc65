"""Read the rows to preprocess from `load_path`: files, saved datasets, or the hub."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape, glob, has_magic
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from vectorlm.data.encoding import without_nulls
from vectorlm.data.settings import PreprocessSettings
from vectorlm.errors import ConfigError, DatasetError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

VALUE_NAMES = {"weight", "margin", "label", "labels"}
"""Columns of CSV files whose cells are JSON values instead of text."""
SAVED = ("state.json", "dataset_dict.json")
"""Files that identify a folder of `save_to_disk`."""
FORMS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
}
"""The form of a file by its suffix, before any `.gz`; a `.json` file may hold JSON lines."""


@dataclass(frozen=True)
class Source:
    """Rows to preprocess."""

    dataset: Dataset
    lines: str | None = None
    """For rows from files: the form of the column `line` (`text` or `jsonl`); the other columns are `file` and
    `number`. None if the dataset has the columns of the rows."""
    unread: Sequence[str] = ()
    """Files at `load_path` whose suffix is not in `FORMS`."""

    def rows(self, batch: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> Iterator[tuple[str, Any]]:
        """Yield each row's name for errors and its columns; None for an empty line.

        Raises:
            DatasetError: A line of a JSONL file is not an object.
        """
        for place, index in enumerate(indices):
            row = {column: values[place] for column, values in batch.items()}
            if self.lines is None:
                # Tables give every object the keys of all others.
                yield f"row {index}", {column: without_nulls(value) for column, value in row.items()}
                continue
            name, line = f"{row['file']}:{row['number']}", row["line"]
            if self.lines == "text":
                yield name, {"text": line}
            elif not line.strip():
                yield name, None
            else:
                try:
                    found = json.loads(line)
                    if not isinstance(found, dict):
                        raise ValueError(f"this is a {type(found).__name__}")
                except (ValueError, RecursionError) as error:
                    shown = line if len(line) <= 60 else f"{line[:57]}..."
                    raise DatasetError(
                        f"{name} is {shown!r}, but must be a JSON object ({error}). Correct it."
                    ) from error
                yield name, found


def open_source(settings: PreprocessSettings, scratch: Path) -> Source:
    """Read `load_path`, and take the split of the settings; large files go to the folder `scratch`.

    Raises:
        DatasetError: `load_path` does not exist or does not hold rows, or there is no such split.
    """
    path, split = settings.load_path, settings.split
    named = f"load_path={path!r}"
    folder = Path(path)
    is_local = has_magic(path) or folder.exists()
    if not (is_local or is_hub_name(path)):
        raise DatasetError(
            f"{named} does not exist: it must be a folder from save_to_disk, a file or folder of {', '.join(FORMS)}, "
            "or the name of a dataset on the hub. Correct the path."
        )
    if not is_local:
        return Source(take_split(load_hub(path, settings.hub_config, named), split, named))
    if settings.hub_config is not None:
        raise ConfigError(
            f"hub_config={settings.hub_config!r} has no effect because {named} is on this machine. Leave it out."
        )
    if any((folder / name).is_file() for name in SAVED):
        return Source(take_split(splits_of(folder, named), split, named))
    files, unread = _files(path)
    forms = {_form(name) for names in files.values() for name in names}
    if len(forms) != 1:
        found = f"files of several formats: {', '.join(sorted(forms))}" if forms else "no such file"
        raise DatasetError(
            f"{named} has {found}. It must be a folder from save_to_disk, or files of one format: {', '.join(FORMS)}. "
            "Name the files with a glob, such as 'data/*.jsonl'."
        )
    (form,) = forms
    if form == "parquet":
        return Source(take_split(_read_parquet(files, path, scratch), split, named), None, unread)
    splits = {name: _read_lines(some, form, scratch / f"lines-{name}.arrow") for name, some in files.items()}
    return Source(take_split(splits, split, named), "text" if form == "text" else "jsonl", unread)


def is_hub_name(path: str) -> bool:
    """Return whether a missing path could be a name on the hub: `name` or `owner/name`, if no folder is `owner`."""
    owner, _, name = path.rpartition("/")
    is_plain = not path.startswith((".", "~", "/")) and "/" not in owner and Path(name).suffix not in FORMS
    return is_plain and not (owner and Path(owner).is_dir())


def load_hub(name: str, hub_config: str | None, named: str) -> Mapping[str, Dataset]:
    """Load a dataset from the cache or the hub; `named` is its name in errors."""
    import datasets
    from huggingface_hub import HfApi

    cache = Path(datasets.config.HF_DATASETS_CACHE)
    try:
        if not (cache / name.replace("/", "___")).is_dir():
            # Fails fast: datasets itself retries an unreachable hub for half a minute.
            HfApi().dataset_info(name, timeout=10)
        return datasets.load_dataset(name, hub_config)
    # The network, the hub, datasets and pyarrow have no common base class of errors.
    except Exception as error:
        raise DatasetError(
            f"{named} is neither on this machine nor in the cache of datasets ({cache}), and cannot be loaded from the "
            f"hub ({type(error).__name__}: {error}). Correct the name, connect to the hub, or set HF_DATASETS_CACHE."
        ) from error


def load_saved(folder: Path, name: str) -> Dataset | DatasetDict:
    """Load a folder of ``save_to_disk``; `name` is its name in errors.

    Raises:
        DatasetError: The folder cannot be read.
    """
    import pyarrow
    from datasets import load_from_disk

    try:
        return load_from_disk(str(folder))
    # IndexError: datasets (5.2) cannot load a folder without rows.
    except (OSError, ValueError, KeyError, TypeError, IndexError, pyarrow.ArrowException) as error:
        raise DatasetError(
            f"{name} must be a dataset from save_to_disk with at least one row ({error}). Save it again."
        ) from error


def splits_of(folder: Path, named: str) -> Mapping[str, Dataset]:
    """Load a folder of ``save_to_disk`` by split; `named` is its name in errors."""
    loaded = load_saved(folder, named)
    if isinstance(loaded, dict):
        return loaded
    name = str(loaded.split)
    return {name if loaded.split is not None and name.isidentifier() else "train": loaded}


def _files(path: str) -> tuple[dict[str, list[str]], list[str]]:
    """List the files of each split, and the unread files."""
    folder = Path(path)
    if folder.is_file():
        return {"train": [path]}, []
    pattern = os.path.join(escape(path), "**") if folder.exists() else path
    found = sorted({name for name in glob(pattern, recursive=True) if Path(name).is_file()})
    saved = {os.path.dirname(name) for name in found if os.path.basename(name) in SAVED}
    # Skip datasets that `vectorlm preprocess` has saved next to the texts.
    found = [name for name in found if saved.isdisjoint(map(str, Path(name).parents))]
    known = [name for name in found if _suffix(name) in FORMS]
    splits = _splits_of_names(known, path) if folder.exists() else {"train": known}
    return splits, [name for name in found if name not in set(known)]


def _splits_of_names(files: Sequence[str], path: str) -> dict[str, list[str]]:
    """Sort files into splits by their names, with the rules of the library datasets.

    Raises:
        DatasetError: Only some files have the name of a split.
    """
    from datasets.data_files import DataFilesDict, get_data_patterns

    if not files:
        return {}
    with TemporaryDirectory(prefix="vectorlm-names-") as names:
        # Empty files with plain names, because datasets reads [ ] * ? and :: in paths as patterns.
        originals = {}
        for index, name in enumerate(files):
            relative = re.sub(r"[^\w./-]", "-", os.path.relpath(name, path))
            link = Path(names, relative)
            if link.exists():
                link = link.with_name(f"{link.stem}-{index}{link.suffix}")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.touch()
            originals[os.path.realpath(link)] = name
        found = DataFilesDict.from_patterns(get_data_patterns(names), base_path=names)
        splits = {
            str(split): sorted({originals[os.path.realpath(link)] for link in links})
            for split, links in found.items()
        }
    read = {name for some in splits.values() for name in some}
    if left := [name for name in files if name not in read]:
        raise DatasetError(
            f"load_path={path!r} has files that belong to no split: {', '.join(left[:3])}, next to files of the "
            f"splits {' and '.join(splits)}, such as {next(iter(read))}. Rename the files, or select files with a "
            "glob, such as 'data/*.jsonl'."
        )
    return splits


def _suffix(name: str) -> str:
    return Path(name.lower().removesuffix(".gz")).suffix


def _form(name: str) -> str:
    form = FORMS.get(_suffix(name), "other")
    if form == "json":
        with _open(name) as file:
            first = file.readline().strip()
        try:
            return "jsonl" if first.startswith(b"{") and isinstance(json.loads(first), dict) else form
        except ValueError:
            pass
    return form


@contextmanager
def _open(name: str) -> Iterator[Any]:
    """Open a file, decompressed; errors while it is read, such as the end of a cut `.gz`, name the file."""
    try:
        with gzip.open(name, "rb") if name.lower().endswith(".gz") else open(name, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(
            f"{name} cannot be read ({type(error).__name__}: {error}). Make it readable, or save it again."
        ) from error


def _read_lines(files: Sequence[str], form: str, path: Path) -> Dataset:
    """Copy the rows of files to `path` as lines, each with its file and number for errors.

    The JSON reader of datasets would change values: it unifies the types of columns, and parses dates.
    """
    from datasets import Features, Value

    read = {"csv": _csv_rows, "json": _json_rows}.get(form, _lines)

    def lines() -> Iterator[dict[str, Any]]:
        for name in files:
            with _open(name) as file:
                for number, line in read(name, file):
                    yield {"line": line, "file": name, "number": number}

    features = Features(line=Value("large_string"), file=Value("string"), number=Value("int64"))
    return write_rows(lines(), features, path)


def _lines(name: str, file: Any) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(file, start=1):
        with _naming(f"{name}:{number}"):
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        yield number, text.rstrip("\r\n")


def _json_rows(name: str, file: Any) -> Iterator[tuple[int, str]]:
    """Yield the objects of a list as JSON text, which keeps all values."""
    with _naming(name):
        rows = json.loads(file.read().decode("utf-8-sig"))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DatasetError(
            f"{name} must hold a list of objects, one per row. Write such a list, or write one JSON object per line to "
            "a .jsonl file."
        )
    yield from enumerate(map(json.dumps, rows), start=1)


def _csv_rows(name: str, file: Any) -> Iterator[tuple[int, str]]:
    """Yield the rows of a table as JSON text; cells such as 02134, 1.50, True and NA stay text."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))
    while True:
        with _naming(f"{name}:{reader.line_num + 1}"):
            if (row := next(reader, None)) is None:
                return
        if None in row:
            raise DatasetError(f"{name}:{reader.line_num} has more cells than the header. Correct it.")
        yield reader.line_num, json.dumps({key: _cell(key, value) for key, value in row.items()})


def _cell(name: str, text: str) -> Any:
    if name not in VALUE_NAMES:
        return text
    try:
        return json.loads(text.lower()) if text else None
    except ValueError:
        return text


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Raise `DatasetError` with the `place` in a file that cannot be read."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DatasetError(f"{place} is not UTF-8 ({error}). Convert the file.") from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise DatasetError(
            f"{place} cannot be read ({type(error).__name__}: {error}). Correct it."
        ) from error


def write_rows(
    rows: Iterator[dict[str, Any]], features: Any, path: Path, rows_per_write: int = 1000
) -> Dataset:
    """Write rows to an Arrow file and map it into memory; at most `rows_per_write` rows are in memory at a time."""
    from datasets import Dataset
    from datasets.arrow_writer import ArrowWriter

    with ArrowWriter(features=features, path=str(path), writer_batch_size=rows_per_write) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()
    return Dataset.from_file(str(path))


def _read_parquet(files: dict[str, list[str]], path: str, scratch: Path) -> Mapping[str, Dataset]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    with TemporaryDirectory(prefix="vectorlm-names-") as names:
        # Links with plain names, because datasets reads some characters as patterns.
        links: dict[str, list[str]] = {split: [] for split in files}
        for split, name in ((split, name) for split, some in files.items() for name in some):
            link = Path(names, f"{split}-{len(links[split])}.parquet")
            link.symlink_to(os.path.abspath(name))
            links[split].append(str(link))
        try:
            return load_dataset("parquet", data_files=links, cache_dir=str(scratch / "tables"))
        except (DatasetGenerationError, OSError, ValueError) as error:
            cause = error.__cause__ or error
            raise DatasetError(
                f"load_path={path!r} cannot be read as parquet ({type(cause).__name__}: {cause}). Correct the file, "
                "or write a .jsonl file, whose errors have line numbers."
            ) from error


def take_split(
    splits: Mapping[str, Dataset], split: str | None, named: str, fix: str = "Set `split` to"
) -> Dataset:
    """Select rows by an expression such as ``train[:10%]+test``; `named` is the dataset's name in errors.

    `fix` is the advice in an error for a missing expression; the names of the splits follow.
    """
    from datasets import ReadInstruction, concatenate_datasets

    names = ", ".join(splits)
    if split is None:
        if len(splits) > 1:
            raise DatasetError(f"{named} holds several splits. {fix} one of {names}.")
        return next(iter(splits.values()))
    try:
        sizes = {name: len(rows) for name, rows in splits.items()}
        parts = ReadInstruction.from_spec(split).to_absolute(sizes)
    except (ValueError, AssertionError, KeyError) as error:
        raise DatasetError(
            f"split={split!r} does not fit {named} ({error}). Use one of {names}, or an expression such as train[:10%] "
            "or train+test."
        ) from error
    chosen = [splits[part.splitname].select(range(part.from_ or 0, part.to)) for part in parts]
    return chosen[0] if len(chosen) == 1 else concatenate_datasets(chosen)
