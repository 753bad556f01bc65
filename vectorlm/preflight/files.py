"""The rules that concern a run's files: its model, datasets, prompts and output folder."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from shutil import which

from vectorlm.checkpoint.folder import is_held
from vectorlm.config.schema import Config
from vectorlm.config.setting import refuse
from vectorlm.data.prompts import PARQUET
from vectorlm.errors import CheckpointError
from vectorlm.packages import is_installed
from vectorlm.preflight.local_model import describe_absent, missing_weights, number_in, own_length
from vectorlm.preflight.resume import find_resumption
from vectorlm.preflight.vllm import CPU_HEAD_SIZES, head_size_without_kernel
from vectorlm.ranks.topology import has_gpu, with_rank_variables
from vectorlm.weights.model_size import damaged_weights

SAMPLER = "train_parameters.sampler"


def file_problems(config: Config, world_size: int) -> Iterator[str]:
    """Find files that are missing or wrong, for a run of `world_size` ranks."""
    yield from _model_problems(config)
    yield from _dataset_problems(config)
    yield from _prompt_problems(config)
    yield from _output_problems(config, world_size)


def _model_problems(config: Config) -> Iterator[str]:
    if not Path(config.model).is_dir():
        yield refuse(config, "model", *describe_absent(config.model))
        return
    try:
        description = json.loads((Path(config.model) / "config.json").read_text(encoding="utf-8"))
        limit = own_length(description)
    except FileNotFoundError:
        fix = "Name the folder that `save_pretrained` wrote."
        yield refuse(config, "model", "holds no config.json", fix)
        return
    except (ValueError, AttributeError) as error:
        yield refuse(config, "model", f"holds a broken config.json ({error})", "Save the model again.")
        return
    yield from _weight_problems(config, Path(config.model))
    if limit is not None and config.train_parameters.max_seq_len > limit:
        rule = f"is beyond the model's limit of {limit} tokens"
        yield refuse(config, "train_parameters.max_seq_len", rule, f"Use {limit} or less.")
    if config.train_parameters.sampler is not None and (size := head_size_without_kernel(description)):
        rule = f"has attention heads of {size} dimensions, which vLLM's CPU attention does not support"
        fix = f"Use a model with {', '.join(map(str, CPU_HEAD_SIZES))}, or set {SAMPLER} to null."
        yield refuse(config, "model", rule, fix)
    num_tokens, largest = number_in(description, ["vocab_size"]), _largest_token(Path(config.model))
    if num_tokens is not None and largest >= num_tokens:
        rule = f"has embeddings for {num_tokens} tokens, and its tokenizer has a token {largest}"
        fix = "Resize the embeddings (docs/data.md shows how), or save the tokenizer that belongs to it."
        yield refuse(config, "model", rule, fix)
    path = "train_parameters.use_flash_attention"
    if config.train_parameters.model.use_flash_attention and has_gpu() and not is_installed("flash_attn"):
        rule = "needs the package flash-attn on CUDA, and it is not installed"
        yield refuse(config, path, rule, "Run `pip install flash-attn`, or set it to false.")
    if config.train_parameters.model.compile and not (has_gpu() or which(os.environ.get("CXX", "g++"))):
        rule = "needs a C++ compiler on CPU, and none is found here"
        yield refuse(config, "train_parameters.compile", rule, "Install g++, or set it to false.")


def _weight_problems(config: Config, folder: Path) -> Iterator[str]:
    """Find what a download that was cut short lacks; without any weights its description is enough to plan with."""
    wrong = list(damaged_weights(folder))
    if any(folder.glob("*.safetensors*")) and (missing := missing_weights(folder)):
        wrong.append(f"{', '.join(missing)} is missing")
    for what in wrong:
        yield refuse(config, "model", f"has damaged weights ({what})", "Download or save the model again.")


def _largest_token(model: Path) -> int:
    """Return the largest token id of the tokenizer beside a model; -1 where its file does not say."""
    try:
        tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = tokenizer["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return max([-1, *ids, *(token["id"] for token in tokenizer.get("added_tokens", ()))])
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def _dataset_problems(config: Config) -> Iterator[str]:
    if config.dataset is None:
        return
    for name in ("train_ds", "eval_ds"):
        folder = Path(getattr(config.dataset, name))
        path = f"dataset.{name}"
        if str(folder) == os.devnull:
            rule = "is no dataset: VectorLM's benchmarks make rows of zeros instead, and this library reads all rows"
            yield refuse(config, path, rule, f"Name a preprocessed one: --set {path}=VALUE.")
        elif not folder.is_dir():
            yield refuse(config, path, "is not a folder", "Preprocess the dataset first.")
            continue
        fix = "Preprocess it: training reads token ids and labels."
        yield from _saved_dataset_problems(config, path, folder, ["input_ids", "labels"], fix)


def _saved_dataset_problems(
    config: Config, path: str, folder: Path, columns: Collection[str], fix: str
) -> Iterator[str]:
    """Say what is wrong with the folder of a dataset; `fix` is for one without one of the columns."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(child.name for child in folder.iterdir() if child.is_dir())
        fix = f"Name one of: {', '.join(str(folder / split) for split in splits)}."
        yield refuse(config, path, "holds several datasets", fix)
    elif not (folder / "dataset_info.json").is_file():
        fix = "Name a folder written by `datasets.Dataset.save_to_disk`."
        yield refuse(config, path, "holds no dataset_info.json", fix)
    elif (described := _described_columns(folder / "dataset_info.json")) is None:
        yield refuse(config, path, "has a broken dataset_info.json", "Make the dataset again.")
    elif missing := [name for name in columns if described and name not in described]:
        rule = f"has no column {' and no column '.join(map(repr, missing))}"
        yield refuse(config, path, rule, fix)
    elif missing := [name for name in _shards(folder / "state.json") if not (folder / name).is_file()]:
        yield refuse(config, path, f"lacks its {', '.join(missing[:3])}", "Make or copy the dataset again.")


def _shards(state: Path) -> list[str]:
    """Name the files that hold a dataset's rows; none where nothing says it."""
    try:
        return [each["filename"] for each in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _described_columns(description: Path) -> Collection[str] | None:
    """Return the columns that a dataset describes, none if it describes nothing; None where it cannot be read."""
    try:
        columns = json.loads(description.read_text(encoding="utf-8")).get("features") or ()
    except (ValueError, AttributeError):
        return None
    return columns if isinstance(columns, Collection) else None


def _prompt_problems(config: Config) -> Iterator[str]:
    sampler, rl = config.train_parameters.sampler, config.rl
    sources = {
        f"{SAMPLER}.prompts": sampler and sampler.evaluation.prompts,
        "rl.prompts": rl and rl.collect.prompts,
    }
    for path, source in sources.items():
        if not isinstance(source, str):
            continue
        if Path(source).is_dir():
            yield from _saved_dataset_problems(
                config, path, Path(source), ["prompt"], "Name the column `prompt`."
            )
            continue
        if not Path(source).is_file():
            fix = "Name a JSONL or Parquet file or a saved dataset, or list the prompts themselves."
            yield refuse(config, path, "does not exist", fix)
            continue
        if source.endswith(PARQUET):
            continue  # Reading it is left to the run: that takes longer than all checks here.
        lines = enumerate(Path(source).read_bytes().split(b"\n"), start=1)
        filled = [(number, line) for number, line in lines if line.strip()]
        wrong = next((number for number, line in filled if not _is_prompt(line)), None)
        if wrong is not None:
            rule = f"must hold JSON objects with a `prompt`, and line {wrong} is none"
            yield refuse(config, path, rule, 'Write {"prompt": "..."} there.')
        elif not filled:
            yield refuse(config, path, "holds no prompt", 'Write {"prompt": "..."}, one per line.')


def _is_prompt(line: bytes) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and bool(record.get("prompt"))


def _output_problems(config: Config, world_size: int) -> Iterator[str]:
    train, path = config.train_parameters, "train_parameters.output_dir"
    if Path(train.output_dir).exists() and not Path(train.output_dir).is_dir():
        yield refuse(config, path, "exists and is not a folder", "Name another folder.")
    # Under torchrun rank 0 may hold it already when the other ranks come here.
    elif with_rank_variables(os.environ).get("RANK", "0") == "0" and is_held(Path(train.output_dir)):
        yield refuse(config, path, "is in use by another run", "Wait for its end, or name another folder.")
    else:
        try:
            find_resumption(config, world_size)
        except CheckpointError as error:
            yield str(error)
    if train.sampler is not None and train.samples_path.is_dir():
        path = f"{SAMPLER}.output_jsonl_path"
        yield refuse(config, path, "is a folder", "Name a file in it.", str(train.samples_path))
