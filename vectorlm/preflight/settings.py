"""The rules that concern several settings, the number of ranks or the files of this machine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from vectorlm.config.schema import Config, SamplerSettings
from vectorlm.config.setting import all_settings, refuse, to_plain, value_at
from vectorlm.config.value import describe_refusal, raise_problems, show
from vectorlm.contracts import BACKENDS
from vectorlm.lora.options import largest_rank, refused_options
from vectorlm.packages import fields_of
from vectorlm.plugin import is_plugin
from vectorlm.preflight.files import file_problems
from vectorlm.preflight.packages import package_problems
from vectorlm.preflight.vllm import vllm_problems
from vectorlm.ranks.topology import has_gpu
from vectorlm.report.profile import short_run
from vectorlm.settings import nearest

_SAMPLER, _OPTIMIZER = "train_parameters.sampler", "train_parameters.optimizer"
_ENGINE_SETTINGS_ELSEWHERE = {
    "model": "model",
    "dtype": f"{_SAMPLER}.vllm_dtype",
    "gpu_memory_utilization": f"{_SAMPLER}.gpu_memory_utilization",
    "enable_lora": f"{_SAMPLER}.lora_mode",
}

_SECRETS = {"token": "VECTORLM_SERVER_TOKEN", "hf_token": "HF_TOKEN", "api_key": "WANDB_API_KEY"}
"""Keys that hold secrets, and the environment variables that they belong into."""

LORA_CONFIG = (
    ("config.py", "PeftConfigMixin"),
    ("config.py", "PeftConfig"),
    ("tuners/lora/config.py", "LoraConfig"),
)
"""The classes that declare the arguments of `peft.LoraConfig`."""


def check_consistency(config: Config) -> None:
    """Raise `ConfigError` with every pair of settings that contradict each other; reads no file."""
    raise_problems(list(_contradictions(config)))


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
    problems = [
        *_contradictions(config),
        *_rank_problems(config, world_size, num_nodes),
        *_parallel_problems(config, world_size // max(num_nodes, 1)),
        *_sampler_problems(config, reward_names),
        *_optimizer_problems(config),
        *package_problems(config),
        *(refuse(config, *problem) for problem in vllm_problems(config)),
        *_lora_problems(config),
        *file_problems(config, world_size),
    ]
    raise_problems(problems)


def _contradictions(config: Config) -> Iterator[str]:
    if config.dataset is None and config.rl is None:
        yield (
            "there is nothing to train on: neither the section 'dataset' (supervised fine-tuning) nor 'rl' "
            "(reinforcement learning) is there. Add one."
        )
    sampler = config.train_parameters.sampler
    if config.rl is not None and sampler is None:
        yield f"the section 'rl' needs an engine to sample with, and there is no section '{_SAMPLER}'. Add it."
    if config.rl is None and sampler is not None and sampler.evaluation.prompts is None:
        yield (
            f"missing setting '{_SAMPLER}.prompts' (the prompts to answer during fine-tuning). Add it, or leave the "
            f"section '{_SAMPLER}' out to train without sampling."
        )
    yield from _packing_problems(config)
    yield from _compute_problems(config)
    for name, value in (sampler.engine.engine_args if sampler is not None else {}).items():
        if name in _ENGINE_SETTINGS_ELSEWHERE:
            fix = f"Set '{_ENGINE_SETTINGS_ELSEWHERE[name]}' instead."
            yield refuse(config, f"{_SAMPLER}.engine.{name}", "is set in another place", fix, value)
    if sampler is not None:
        yield from _secrets(f"{_SAMPLER}.engine", sampler.engine.engine_args)
    yield from _secrets("wandb_config", config.wandb_config)
    yield from _keep_problems(config)
    for name, arguments in config.trackers.items():
        yield from _secrets(f"trackers.{name}", arguments if isinstance(arguments, Mapping) else {})
    if config.rl is not None:
        profile_steps, num_steps = config.train_parameters.profile.profile_steps, config.rl.max_steps
        if (problem := short_run(profile_steps, num_steps)) is not None:
            yield refuse(config, "train_parameters.profile_steps", *problem)
    yield from _unread_settings(config)


def _unread_settings(config: Config) -> Iterator[str]:
    """Find settings that were changed and have no effect, by what they say of themselves (`ReadIf`)."""
    plain = to_plain(config)
    for path, setting in all_settings().items():
        value = value_at(plain, path)
        if value is None or value == setting.default:
            continue
        for other in setting.read_if:
            found = value_at(plain, other.path)
            if not (found in other.values if other.values else found or other.path in config.origins):
                rule = f"has no effect with {other.path}={show(found)}"
                yield refuse(config, path, rule, other.fix or f"Leave it out, or set {other.path}.", value)


def _keep_problems(config: Config) -> Iterator[str]:
    """Under `rl` only a reward of the held-out prompts says which weights are the best."""
    keep, sampler = config.train_parameters.keep, config.train_parameters.sampler
    if config.rl is None or (sampler is not None and sampler.evaluation.reward is not None):
        return
    for name in ("keep_best", "early_stopping_patience"):
        if getattr(keep, name):
            rule = f"needs {_SAMPLER}.reward, whose eval/accuracy says which weights are the best"
            yield refuse(config, f"train_parameters.{name}", rule, "Name a reward there.")


def _secrets(path: str, given: Mapping[str, Any]) -> Iterator[str]:
    """Refuse secrets by their names: a run saves its config, and sends it to its trackers."""
    for name, value in given.items():
        variable = _SECRETS.get(name)
        if variable is not None and isinstance(value, str):
            rule = "is a secret, and a run saves its config where others may read it"
            fix = f"Set the environment variable {variable} instead."
            # Without its origin: an option of the command line holds the secret.
            yield describe_refusal(f"{path}.{name}", "…", rule, fix)


def _compute_problems(config: Config) -> Iterator[str]:
    """Find what no device can compute: attention in too many bits, an optimizer step in two ways at once."""
    train = config.train_parameters
    if train.model.use_flash_attention and not train.model.computes_in_bf16(is_cuda=True):
        rule = f"computes in 16 bits alone, and use_mp is false with dtype {train.model.dtype}"
        fix = "Set use_mp to true, or use_flash_attention to false."
        yield refuse(config, "train_parameters.use_flash_attention", rule, fix)
    if train.optimizer.fused and train.optimizer.foreach:
        yield refuse(config, f"{_OPTIMIZER}.foreach", "cannot go with fused: true", "Leave one of them out.")


def _packing_problems(config: Config) -> Iterator[str]:
    preprocess = config.dataset_preprocess
    if preprocess is None or config.dataset is None:
        return
    index = config.dataset.ignore_index
    if preprocess.ignore_index != index:
        rule = f"must equal dataset.ignore_index={index}, or the loss would count hidden tokens"
        yield refuse(config, "dataset_preprocess.ignore_index", rule, f"Use {index}.")
    if preprocess.packing_type is None:
        return
    num_special = 2 if preprocess.add_bos_eos_tokens else 0
    chunk = config.train_parameters.max_seq_len - num_special
    if config.train_parameters.max_seq_len != -1 and preprocess.overlap >= max(chunk, 1):
        special = " less BOS and EOS" if num_special else ""
        length = f"max_seq_len={config.train_parameters.max_seq_len}{special}"
        fix = f"Use {chunk // 8}, for example." if chunk > 0 else "Raise max_seq_len."
        rule = f"must be below the chunk length {chunk} ({length})"
        yield refuse(config, "dataset_preprocess.overlap", rule, fix)


def _rank_problems(config: Config, world_size: int, num_nodes: int) -> Iterator[str]:
    path, strategy = "train_parameters.sharding_strategy", config.train_parameters.model.sharding_strategy
    if world_size < 1:
        yield describe_refusal("world_size", world_size, "must be an integer >= 1", "Use 1 or more.")
    elif strategy == "HYBRID_SHARD" and world_size < 2:
        rule = f"needs at least 2 ranks, and world_size={world_size}"
        yield refuse(config, path, rule, "Use NO_SHARD, or start more ranks.")
    if num_nodes < 1:
        yield describe_refusal("nnodes", num_nodes, "must be an integer >= 1", "Use 1 or more.")
        return
    if world_size % num_nodes:
        rule = f"must be a multiple of nnodes={num_nodes}: it counts the ranks of all nodes"
        fix = f"Use {world_size + num_nodes - world_size % num_nodes}, for example."
        yield describe_refusal("world_size", world_size, rule, fix)
    is_spread = strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
    if num_nodes > 1 and config.train_parameters.sampler is not None and is_spread:
        rule = f"spreads the weights over {num_nodes} nodes, and the engine of each node needs all of them"
        yield refuse(config, path, rule, "Use HYBRID_SHARD: it shards within each node.")


def _parallel_problems(config: Config, ranks_per_node: int) -> Iterator[str]:
    """On CUDA every worker of the engine shares the device of a rank; on CPU there may be more workers than ranks."""
    sampler = config.train_parameters.sampler
    size = sampler.engine.engine_args.get("tensor_parallel_size", 1) if sampler is not None else 1
    path = f"{_SAMPLER}.engine.tensor_parallel_size"
    if type(size) is not int or size < 1:
        yield refuse(config, path, "must be an integer >= 1", "Use 1, or a number of devices.")
    elif size > max(ranks_per_node, 1) and has_gpu():
        rule = f"must be at most the number of ranks on a node, {ranks_per_node}"
        yield refuse(config, path, rule, "Use fewer, or start more ranks.")


def _sampler_problems(config: Config, reward_names: Collection[str]) -> Iterator[str]:
    sampler = config.train_parameters.sampler
    if sampler is None:
        return
    reward = sampler.evaluation.reward
    # A name with a colon points into the user's own file, which is read when the run starts.
    if reward is not None and reward not in reward_names and ":" not in reward:
        fix = nearest(reward, reward_names) or f"Use one of {', '.join(sorted(reward_names))}."
        yield refuse(config, f"{_SAMPLER}.reward", "is not a reward that exists", fix)
    yield from _inference_problems(config, sampler)


def _inference_problems(config: Config, sampler: SamplerSettings) -> Iterator[str]:
    path, name = f"{_SAMPLER}.inference", sampler.engine.inference
    if name not in BACKENDS and not is_plugin(name):
        fix = nearest(name, BACKENDS) or f"Use one of {', '.join(BACKENDS)}, or file.py:NAME."
        yield refuse(config, path, "is not known", fix)
    if name == "server" and "url" not in sampler.engine.engine_args:
        fix = f"Add it: {_SAMPLER}.engine={{url: 'http://127.0.0.1:8000'}}."
        yield refuse(config, path, "needs the server's url among the engine's arguments", fix)
    has_adapters = config.train_parameters.lora_peft_config is not None
    if name != "vllm" and has_adapters and sampler.engine.lora_mode == "adapter":
        rule = f"is for vLLM in the process, and inference is {name!r}"
        yield refuse(config, f"{_SAMPLER}.lora_mode", rule, "Set it to 'merged'.")


def _optimizer_problems(config: Config) -> Iterator[str]:
    train = config.train_parameters
    if train.optimizer.capturable and (train.model.cpu_offload or not has_gpu()):
        why = "and cpu_offload steps on the host" if has_gpu() else "and there is no such device here"
        yield refuse(config, f"{_OPTIMIZER}.capturable", f"needs a CUDA device, {why}", "Leave it out.")


def _lora_problems(config: Config) -> Iterator[str]:
    """Find LoRA options that peft does not know, or that an engine could not follow."""
    sampler, options = config.train_parameters.sampler, config.train_parameters.lora_peft_config
    if options is None:
        return
    known = set().union(*(fields_of(path, name, "peft") for path, name in LORA_CONFIG))
    for option in options:
        if known and option not in known:
            fix = nearest(str(option), known) or "Leave it out."
            path = f"train_parameters.lora_peft_config.{option}"
            yield refuse(config, path, "is not an argument of peft.LoraConfig", fix, options[option])
    if sampler is None:
        return
    for option, value, rule, fix in refused_options(options, sampler.engine.lora_mode):
        yield refuse(config, f"train_parameters.lora_peft_config.{option}", rule, fix, value)
    rank, room = largest_rank(options), sampler.engine.engine_args.get("max_lora_rank")
    if isinstance(room, int) and rank > room:
        rule = f"must be at least the largest rank of the adapters, {rank}"
        fix = "Leave it out: it follows from lora_peft_config."
        yield refuse(config, f"{_SAMPLER}.engine.max_lora_rank", rule, fix)
