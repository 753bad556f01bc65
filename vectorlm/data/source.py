"""The source: the rows to preprocess, from wherever `load_path` leads."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectorlm.data.settings import PreprocessSettings
from vectorlm.encoding import without_nulls
from vectorlm.errors import ConfigError, DatasetError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

FORMS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
}
"""The form of a file by the end of its name, before any `.gz`; a `.json` file may turn out to hold JSON lines."""


@dataclass(frozen=True)
class Source:
    """Rows to preprocess."""

    dataset: Dataset
    lines: str | None = None
    """What the column `line` holds, beside `file` and `number`, if rows are lines of files: `text` or `jsonl`; None for
    other rows, which have the columns of the dataset."""

    def rows(self, batch: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> Iterator[tuple[str, Any]]:
        """Yield the name of each row in an error, and its columns.

        Raises:
            DatasetError: A line of a JSONL file is not an object.
        """
        for place, index in enumerate(indices):
            row = {column: values[place] for column, values in batch.items()}
            if self.lines is None:
                # A table gives every object the keys of all others.
                yield f"row {index}", {column: without_nulls(value) for column, value in row.items()}
                continue
            name, line = f"{row['file']}:{row['number']}", row["line"]
            if self.lines == "text":
                yield name, {"text": line}
            elif line.strip():
                yield name, _object(name, line)
            else:
                yield name, None


def open_source(settings: PreprocessSettings, scratch: Path) -> Source:
    """Find out what there is at `load_path`, and take the split that is asked for; `scratch` takes large files.

    Raises:
        DatasetError: There is nothing, something else than rows, or no such split.
    """
    path, split = settings.load_path, settings.split
    named = f"load_path={path!r}"
    folder = Path(path)
    is_local = has_magic(path) or folder.exists()
    if not (is_local or is_hub_name(path)):
        raise DatasetError(
            f"load_path={path!r} is not there: it must be a folder that save_to_disk wrote, a file or a folder of "
            f"{', '.join(FORMS)}, or the name of a dataset on the hub. Correct the path."
        )
    if not is_local:
        return Source(take_split(load_hub(path, settings.hub_config, named), split, named))
    if settings.hub_config is not None:
        raise ConfigError(
            f"hub_config={settings.hub_config!r} has no effect: load_path={path!r} is on this machine. Leave it out."
        )
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return Source(take_split(splits_of(folder, named), split, named))
    files = _files(path)
    form = _only_form([name for names in files.values() for name in names], path)
    if form in ("text", "jsonl"):
        splits = {name: _read_lines(some, scratch / f"lines-{name}.arrow") for name, some in files.items()}
        return Source(take_split(splits, split, named), form)
    return Source(take_split(_read_tables(form, files, path, scratch), split, named))


def _object(name: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"this is a {type(row).__name__}")
    except (ValueError, RecursionError) as error:
        shown = line if len(line) <= 60 else f"{line[:57]}..."
        raise DatasetError(
            f"{name} is {shown!r}, and every line must be a JSON object ({error}). Correct it."
        ) from error
    return row


def is_hub_name(path: str) -> bool:
    """Whether a path that is not there could be a name on the hub: `name` or `owner/name`, with no folder `owner`."""
    owner, _, name = path.rpartition("/")
    is_plain = not path.startswith((".", "~", "/")) and "/" not in owner and Path(name).suffix not in FORMS
    return is_plain and not (owner and Path(owner).is_dir())


def load_hub(name: str, hub_config: str | None, named: str) -> Mapping[str, Dataset]:
    """Load from the cache of datasets, or else from the hub; `named` stands for it in an error."""
    import datasets
    from huggingface_hub import HfApi

    cache = Path(datasets.config.HF_DATASETS_CACHE)
    try:
        if not (cache / name.replace("/", "___")).is_dir():
            # In one try: datasets itself needs half a minute to say that a hub cannot be reached.
            HfApi().dataset_info(name, timeout=10)
        return datasets.load_dataset(name, hub_config)
    # Of the network, the hub, datasets and pyarrow, each with a tree of its own.
    except Exception as error:
        raise DatasetError(
            f"{named} is nothing on this machine, is not in the cache of datasets ({cache}) and cannot be "
            f"loaded from the hub ({type(error).__name__}: {error}). Correct the name, connect to the hub, or set "
            "HF_DATASETS_CACHE."
        ) from error


def load_saved(folder: Path, name: str) -> Dataset | DatasetDict:
    """Load what ``save_to_disk`` wrote; `name` stands for it in an error.

    Raises:
        DatasetError: It cannot be read.
    """
    import pyarrow
    from datasets import load_from_disk

    try:
        return load_from_disk(str(folder))
    # IndexError: datasets (5.2) cannot load a folder without rows.
    except (OSError, ValueError, KeyError, TypeError, IndexError, pyarrow.ArrowException) as error:
        raise DatasetError(
            f"{name} holds no dataset that save_to_disk wrote, or one without rows ({error}). Make it again."
        ) from error


def splits_of(folder: Path, named: str) -> Mapping[str, Dataset]:
    """Load what ``save_to_disk`` wrote, by the names of its splits; `named` stands for it in an error."""
    loaded = load_saved(folder, named)
    if isinstance(loaded, dict):
        return loaded
    name = str(loaded.split)
    return {name if loaded.split is not None and name.isidentifier() else "train": loaded}


def _files(path: str) -> dict[str, list[str]]:
    """List the files of each split."""
    if Path(path).is_file():
        return {"train": [path]}
    if has_magic(path) and not Path(path).exists():
        splits = {"train": sorted(name for name in glob(path, recursive=True) if Path(name).is_file())}
    else:
        from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

        try:
            found = DataFilesDict.from_patterns(get_data_patterns(path), base_path=path)
        except EmptyDatasetError:
            found = {}
        splits = {str(split): sorted(set(names)) for split, names in found.items()}
    known = {split: [name for name in names if _suffix(name) in FORMS] for split, names in splits.items()}
    return {split: names for split, names in known.items() if names}


def _suffix(name: str) -> str:
    return Path(name.removesuffix(".gz")).suffix


def _only_form(files: Sequence[str], path: str) -> str:
    forms = {_form(name) for name in files}
    if len(forms) == 1:
        return forms.pop()
    what = f"files of several forms: {', '.join(sorted(forms))}" if forms else "no such file"
    raise DatasetError(
        f"load_path={path!r} holds {what}. It must be a folder that save_to_disk wrote, or files of one form, by the "
        f"end of their names: {', '.join(FORMS)}. Name the files with a glob, such as 'data/*.jsonl'."
    )


def _form(name: str) -> str:
    form = FORMS.get(_suffix(name), "none of these")
    if form == "json":
        with _open(name) as file:
            first = file.readline().strip()
        try:
            return "jsonl" if first.startswith(b"{") and isinstance(json.loads(first), dict) else form
        except ValueError:
            pass
    return form


def _open(name: str) -> Any:
    return gzip.open(name, "rb") if name.endswith(".gz") else open(name, "rb")


def _read_lines(files: Sequence[str], path: Path) -> Dataset:
    """Copy the lines of files to `path`, with the file and the number of each."""
    from datasets import Features, Value

    def lines() -> Iterator[dict[str, Any]]:
        for name in files:
            with _open(name) as file:
                for number, line in enumerate(file, start=1):
                    try:
                        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                    except UnicodeDecodeError as error:
                        raise DatasetError(
                            f"{name}:{number} is not UTF-8 ({error}). Convert the file."
                        ) from error
                    yield {"line": text.rstrip("\r\n"), "file": name, "number": number}

    features = Features(line=Value("large_string"), file=Value("string"), number=Value("int64"))
    return write_rows(lines(), features, path)


def write_rows(
    rows: Iterator[dict[str, Any]], features: Any, path: Path, rows_per_write: int = 1000
) -> Dataset:
    """Write rows to an Arrow file, which is mapped into memory; only `rows_per_write` are held at once."""
    from datasets import Dataset
    from datasets.arrow_writer import ArrowWriter

    with ArrowWriter(features=features, path=str(path), writer_batch_size=rows_per_write) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()
    return Dataset.from_file(str(path))


def _read_tables(form: str, files: dict[str, list[str]], path: str, scratch: Path) -> Mapping[str, Dataset]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        return load_dataset(form, data_files=files, cache_dir=str(scratch / "tables"))
    except (DatasetGenerationError, OSError, ValueError) as error:
        cause = error.__cause__ or error
        raise DatasetError(
            f"load_path={path!r} cannot be read as {form} ({type(cause).__name__}: {cause}). Correct the file, or "
            "write one JSON object per line into a .jsonl file, whose lines are named in errors."
        ) from error


def take_split(splits: Mapping[str, Dataset], split: str | None, named: str) -> Dataset:
    """Take what an expression such as ``train[:10%]+test`` says from the splits of what is `named` so in an error."""
    from datasets import ReadInstruction, concatenate_datasets

    names = ", ".join(splits)
    if split is None:
        if len(splits) > 1:
            raise DatasetError(f"{named} holds several splits: name one with `split`, of {names}.")
        return next(iter(splits.values()))
    try:
        parts = ReadInstruction.from_spec(split).to_absolute(
            {name: len(each) for name, each in splits.items()}
        )
    except (ValueError, AssertionError, KeyError) as error:
        raise DatasetError(
            f"split={split!r} cannot be taken from {named} ({error}). Use one of {names}, or an expression "
            "such as train[:10%] or train+test."
        ) from error
    chosen = [splits[part.splitname].select(range(part.from_ or 0, part.to)) for part in parts]
    return chosen[0] if len(chosen) == 1 else concatenate_datasets(chosen)
