"""The rules that concern several settings, the number of ranks or the files of this machine."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from vectorlm.config.heads import CPU_HEAD_SIZES, head_size_without_kernel
from vectorlm.config.lora import largest_rank, refused_options
from vectorlm.config.problem import describe_refusal, raise_problems
from vectorlm.config.schema import Config, SamplerSettings
from vectorlm.contracts import INFERENCES
from vectorlm.plugin import is_plugin

_ENGINE_SETTINGS_ELSEWHERE = {
    "model": "model",
    "dtype": "train_parameters.sampler.vllm_dtype",
    "gpu_memory_utilization": "train_parameters.sampler.gpu_memory_utilization",
    "enable_lora": "train_parameters.sampler.lora_mode",
}

_SHARDED_OVER_NODES = ("FULL_SHARD", "SHARD_GRAD_OP")


def check_consistency(config: Config) -> None:
    """Raise `ConfigError` with every pair of settings that contradict each other; reads no file."""
    raise_problems([*_purpose_problems(config), *_packing_problems(config), *_engine_problems(config)])


def check_config(config: Config, world_size: int, reward_names: Collection[str], num_nodes: int = 1) -> None:
    """Check a config against the machine, before any process or device is touched.

    Args:
        config: the resolved config.
        world_size: number of ranks of the run, >= 1, on all nodes together.
        reward_names: the rewards that exist.
        num_nodes: number of machines of the run, >= 1.

    Raises:
        ConfigError: lists every problem found: contradictions, an impossible number of ranks, a missing or
            wrong model, dataset or prompt file.
    """
    problems = [*_purpose_problems(config), *_packing_problems(config), *_engine_problems(config)]
    problems += _world_size_problems(config, world_size)
    problems += _node_problems(config, world_size, num_nodes)
    problems += _parallel_problems(config, world_size // max(num_nodes, 1))
    problems += _sampler_problems(config, reward_names)
    problems += _lora_problems(config)
    problems += _model_problems(config)
    problems += _dataset_problems(config)
    problems += _prompt_problems(config)
    problems += _output_problems(config)
    raise_problems(problems)


def _refuse(config: Config, path: str, value: Any, rule: str, fix: str) -> str:
    return describe_refusal(path, value, rule, fix, config.origins.get(path, ""))


def _purpose_problems(config: Config) -> Iterator[str]:
    """A run learns from text, or from rewards."""
    if config.dataset is None and config.rl is None:
        yield (
            "there is nothing to train on: neither the section 'dataset' (supervised fine-tuning) nor 'rl' "
            "(reinforcement learning) is there. Add one."
        )
    if config.rl is not None and config.train_parameters.sampler is None:
        yield (
            "the section 'rl' needs an engine to sample with, and there is no section 'train_parameters.sampler'. "
            "Add it."
        )


def _packing_problems(config: Config) -> Iterator[str]:
    preprocess = config.dataset_preprocess
    if preprocess is None or config.dataset is None:
        return
    if preprocess.ignore_index != config.dataset.ignore_index:
        index = config.dataset.ignore_index
        rule = f"must equal dataset.ignore_index={index}, or the loss would count hidden tokens"
        fix = f"Use {index}."
        yield _refuse(config, "dataset_preprocess.ignore_index", preprocess.ignore_index, rule, fix)
    if preprocess.packing_type is None:
        return
    num_special = 2 if preprocess.add_bos_eos_tokens else 0
    chunk = config.train_parameters.max_seq_len - num_special
    if preprocess.overlap >= max(chunk, 1):
        length = f"max_seq_len={config.train_parameters.max_seq_len}"
        special = " less BOS and EOS" if num_special else ""
        rule = f"must be below the chunk length {chunk} ({length}{special})"
        fix = f"Use {chunk // 8}, for example." if chunk > 0 else "Raise max_seq_len."
        yield _refuse(config, "dataset_preprocess.overlap", preprocess.overlap, rule, fix)


def _engine_problems(config: Config) -> Iterator[str]:
    sampler = config.train_parameters.sampler
    for name, value in (sampler.engine if sampler is not None else {}).items():
        if name in _ENGINE_SETTINGS_ELSEWHERE:
            fix = f"Set '{_ENGINE_SETTINGS_ELSEWHERE[name]}' instead."
            path = f"train_parameters.sampler.engine.{name}"
            yield _refuse(config, path, value, "has a setting of its own", fix)


def _world_size_problems(config: Config, world_size: int) -> Iterator[str]:
    if world_size < 1:
        yield describe_refusal("world_size", world_size, "must be an integer >= 1", "Use 1 or more.")
        return
    train = config.train_parameters
    if train.sharding_strategy == "HYBRID_SHARD" and world_size < 2:
        rule = f"needs at least 2 ranks, and world_size={world_size}"
        fix = "Use NO_SHARD, or start more ranks."
        yield _refuse(config, "train_parameters.sharding_strategy", train.sharding_strategy, rule, fix)


def _parallel_problems(config: Config, ranks_per_node: int) -> Iterator[str]:
    """On CUDA every worker of the engine shares the device of a rank; on CPU there may be more workers than ranks."""
    sampler = config.train_parameters.sampler
    size = sampler.engine.get("tensor_parallel_size", 1) if sampler is not None else 1
    path = "train_parameters.sampler.engine.tensor_parallel_size"
    if type(size) is not int or size < 1:
        yield _refuse(config, path, size, "must be an integer >= 1", "Use 1, or a number of devices.")
    elif size > max(ranks_per_node, 1) and _has_cuda():
        rule = f"must be at most the number of ranks on a node, {ranks_per_node}"
        yield _refuse(config, path, size, rule, "Use fewer, or start more ranks.")


def _has_cuda() -> bool:
    """Whether there is an NVIDIA device to run on; torch could tell too, in ten times the time of the whole check."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    return Path("/dev/nvidiactl").exists() and not hidden


def _node_problems(config: Config, world_size: int, num_nodes: int) -> Iterator[str]:
    if num_nodes < 1:
        yield describe_refusal("nnodes", num_nodes, "must be an integer >= 1", "Use 1 or more.")
        return
    if world_size % num_nodes:
        rule = f"must be a multiple of nnodes={num_nodes}: it counts the ranks of all nodes"
        fix = f"Use {world_size + num_nodes - world_size % num_nodes}, for example."
        yield describe_refusal("world_size", world_size, rule, fix)
    train = config.train_parameters
    if num_nodes > 1 and train.sampler is not None and train.sharding_strategy in _SHARDED_OVER_NODES:
        rule = f"spreads the weights over {num_nodes} nodes, and the engine of each node needs them all"
        fix = "Use HYBRID_SHARD: it shards within each node."
        yield _refuse(config, "train_parameters.sharding_strategy", train.sharding_strategy, rule, fix)


def _sampler_problems(config: Config, reward_names: Collection[str]) -> Iterator[str]:
    sampler = config.train_parameters.sampler
    if sampler is None:
        return
    # A name with a colon points into somebody's own file, which is read when the run starts.
    if sampler.reward is not None and sampler.reward not in reward_names and ":" not in sampler.reward:
        near = difflib.get_close_matches(sampler.reward, reward_names, n=1)
        fix = f"Did you mean {near[0]!r}?" if near else f"Use one of {', '.join(sorted(reward_names))}."
        path = "train_parameters.sampler.reward"
        yield _refuse(config, path, sampler.reward, "is not a reward that exists", fix)
    yield from _inference_problems(config, sampler)


def _inference_problems(config: Config, sampler: SamplerSettings) -> Iterator[str]:
    path, name = "train_parameters.sampler.inference", sampler.inference
    if name not in INFERENCES and not is_plugin(name):
        near = difflib.get_close_matches(name, INFERENCES, n=1)
        fix = (
            f"Did you mean {near[0]!r}?" if near else f"Use one of {', '.join(INFERENCES)}, or file.py:NAME."
        )
        yield _refuse(config, path, name, "is not known", fix)
    if name == "server" and "url" not in sampler.engine:
        fix = "Add it: train_parameters.sampler.engine={url: 'http://127.0.0.1:8000'}."
        yield _refuse(config, path, name, "needs the server's url among the engine's arguments", fix)
    has_adapters = config.train_parameters.lora_peft_config is not None
    if name != "vllm" and has_adapters and sampler.lora_mode == "adapter":
        path = "train_parameters.sampler.lora_mode"
        rule = f"is for vLLM in the process, and inference is {name!r}"
        yield _refuse(config, path, sampler.lora_mode, rule, "Set it to 'merged'.")


def _lora_problems(config: Config) -> Iterator[str]:
    """Find LoRA options that the engine could not follow; without a sampler, peft alone has to."""
    sampler, options = config.train_parameters.sampler, config.train_parameters.lora_peft_config
    if sampler is None or options is None:
        return
    for option, value, rule, fix in refused_options(options, sampler.lora_mode):
        yield _refuse(config, f"train_parameters.lora_peft_config.{option}", value, rule, fix)
    rank, room = largest_rank(options), sampler.engine.get("max_lora_rank")
    if isinstance(room, int) and rank > room:
        path = "train_parameters.sampler.engine.max_lora_rank"
        rule = f"must be at least the largest rank of the adapters, {rank}"
        yield _refuse(config, path, room, rule, "Leave it out: it follows from lora_peft_config.")


def _model_problems(config: Config) -> Iterator[str]:
    if not Path(config.model).is_dir():
        fix = "Download the model and name its folder."
        yield _refuse(config, "model", config.model, "is not a folder", fix)
        return
    try:
        description = json.loads((Path(config.model) / "config.json").read_text(encoding="utf-8"))
        limit = description.get("max_position_embeddings")
    except FileNotFoundError:
        fix = "Name the folder that `save_pretrained` wrote."
        yield _refuse(config, "model", config.model, "holds no config.json", fix)
        return
    except (ValueError, AttributeError) as error:
        rule = f"holds a broken config.json ({error})"
        yield _refuse(config, "model", config.model, rule, "Save the model again.")
        return
    length = config.train_parameters.max_seq_len
    if isinstance(limit, int) and length > limit:
        rule = f"is beyond the model's limit of {limit} tokens"
        yield _refuse(config, "train_parameters.max_seq_len", length, rule, f"Use {limit} or less.")
    if config.train_parameters.sampler is not None and (size := head_size_without_kernel(description)):
        rule = f"has attention heads of {size} dimensions, which vLLM's CPU attention does not support"
        fix = f"Use a model with {', '.join(map(str, CPU_HEAD_SIZES))}, or set train_parameters.sampler to null."
        yield _refuse(config, "model", config.model, rule, fix)


def _dataset_problems(config: Config) -> Iterator[str]:
    if config.dataset is None:
        return
    for name in ("train_ds", "eval_ds"):
        folder = Path(getattr(config.dataset, name))
        path = f"dataset.{name}"
        if not folder.is_dir():
            yield _refuse(config, path, str(folder), "is not a folder", "Preprocess the dataset first.")
        elif (folder / "dataset_dict.json").is_file():
            splits = sorted(child.name for child in folder.iterdir() if child.is_dir())
            fix = f"Name one of: {', '.join(str(folder / split) for split in splits)}."
            yield _refuse(config, path, str(folder), "holds several datasets", fix)
        elif not (folder / "dataset_info.json").is_file():
            fix = "Name a folder written by `datasets.Dataset.save_to_disk`."
            yield _refuse(config, path, str(folder), "holds no dataset_info.json", fix)
        elif missing := _missing_columns(folder / "dataset_info.json"):
            rule = f"has no column {' and no column '.join(map(repr, missing))}"
            yield _refuse(
                config, path, str(folder), rule, "Preprocess it: training reads token ids and labels."
            )


def _missing_columns(description: Path) -> list[str]:
    """Return the columns that training reads and the dataset does not describe; none if it describes nothing."""
    columns = json.loads(description.read_text(encoding="utf-8")).get("features")
    return [name for name in ("input_ids", "labels") if columns and name not in columns]


def _prompt_problems(config: Config) -> Iterator[str]:
    sampler = config.train_parameters.sampler
    if sampler is not None and isinstance(sampler.prompts, str):
        yield from _prompt_file_problems(config, "train_parameters.sampler.prompts", sampler.prompts)
    if config.rl is not None and isinstance(config.rl.prompts, str):
        yield from _prompt_file_problems(config, "rl.prompts", config.rl.prompts)


def _prompt_file_problems(config: Config, path: str, file: str) -> Iterator[str]:
    if not Path(file).is_file():
        fix = "Name a JSONL file, or list the prompts themselves."
        yield _refuse(config, path, file, "is not a file", fix)
        return
    num_prompts = 0
    for number, line in enumerate(Path(file).read_bytes().split(b"\n"), start=1):
        if line.strip():
            num_prompts += 1
            if not _is_prompt(line):
                rule = f"must hold JSON objects with a `prompt`, and line {number} is none"
                yield _refuse(config, path, file, rule, 'Write {"prompt": "..."} there.')
                return
    if not num_prompts:
        yield _refuse(config, path, file, "holds no prompt", 'Write {"prompt": "..."}, one per line.')


def _is_prompt(line: bytes) -> bool:
    try:
        row = json.loads(line)
    except ValueError:
        return False
    return isinstance(row, dict) and bool(row.get("prompt"))


def _output_problems(config: Config) -> Iterator[str]:
    train = config.train_parameters
    if Path(train.output_dir).exists() and not Path(train.output_dir).is_dir():
        rule = "exists and is not a folder"
        yield _refuse(config, "train_parameters.output_dir", train.output_dir, rule, "Name another folder.")
    if train.sampler is not None and train.samples_path.is_dir():
        path = "train_parameters.sampler.output_jsonl_path"
        yield _refuse(config, path, str(train.samples_path), "is a folder", "Name a file in it.")
