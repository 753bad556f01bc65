"""Turn the environment variables of ``accelerate launch`` into settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vectorlm.errors import ConfigError
from vectorlm.runs.config.schema import Config
from vectorlm.runs.config.setting import to_plain, value_at
from vectorlm.runs.config.value import raise_problems, show

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
"""Sharding strategies in accelerate's order: its variable may contain their number, counted from 1."""
SWITCHES = {
    "FSDP_OFFLOAD_PARAMS": "train_parameters.cpu_offload",
    "FSDP_ACTIVATION_CHECKPOINTING": "train_parameters.use_activation_checkpointing",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "train_parameters.low_cpu_mem_usage",
}
"""Boolean variables and their settings."""
REFUSED = {
    "ACCELERATE_USE_DEEPSPEED": ("true",),
    "ACCELERATE_USE_MEGATRON_LM": ("true",),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("true",),
    "ACCELERATE_MIXED_PRECISION": ("fp16", "fp8"),
    "FSDP_SHARDING_STRATEGY": ("HYBRID_SHARD_ZERO2", "5"),
    "FSDP_AUTO_WRAP_POLICY": ("SIZE_BASED_WRAP", "NO_WRAP"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("true",),
}
"""Variables with the values that are not supported."""
WHAT_THERE_IS = (
    "The library shards with FSDP2, a transformer block at a time, and computes in float32 or bfloat16."
)


def accelerate_overrides(config: Config, environment: Mapping[str, str], world_size: int) -> list[str]:
    """Return accelerate's settings that the config does not set, as ``name=value``.

    Variables without a setting (prefetching, state dicts) are ignored, and also a mixed precision of ``no``, which is
    accelerate's default. `world_size` is the script's argument.

    Raises:
        ConfigError: A variable is not supported or contradicts the config, or accelerate has started too few processes.
    """
    if not any(name.startswith("ACCELERATE_") for name in environment):
        return []
    if world_size == 1 and "MASTER_ADDR" in environment and "RANK" not in environment:
        raise ConfigError(
            "accelerate launch started this process without a rank: on CPU (--cpu) it ignores --num_processes and "
            "starts one process. Give the script --world_size, or accelerate --multi_gpu in place of --cpu."
        )
    refused = [
        f"{name}={environment[name]}"
        for name, values in REFUSED.items()
        if environment.get(name, "").lower() in {value.lower() for value in values}
    ]
    if environment.get("FSDP_IGNORED_MODULES"):
        refused.append("FSDP_IGNORED_MODULES")
    problems = [
        f"{variable} of accelerate cannot be used. {WHAT_THERE_IS} Change accelerate's config."
        for variable in refused
    ]
    plain, overrides = to_plain(config), []
    for name, path, wanted in _wanted(environment):
        if path not in config.origins:
            overrides.append(f"{path}={show(wanted[0])}")
        elif (written := value_at(plain, path)) not in wanted:
            problems.append(
                f"{path}={show(written)} ({config.origins[path]}) contradicts {name}={environment[name]} of "
                "accelerate. Make them equal, or leave the setting out of the config."
            )
    raise_problems(problems)
    return overrides


def _wanted(environment: Mapping[str, str]) -> Iterator[tuple[str, str, tuple[object, ...]]]:
    """Yield variables, settings and allowed values; if the config sets none, the first value is used."""
    if environment.get("ACCELERATE_MIXED_PRECISION") == "bf16":
        yield "ACCELERATE_MIXED_PRECISION", "train_parameters.use_mp", (True,)
    if environment.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return
    path = "train_parameters.sharding_strategy"
    if environment.get("FSDP_VERSION") == "2":
        # This variable does not show whether weights are sharded over all ranks or within a node.
        name = "FSDP_RESHARD_AFTER_FORWARD"
        if name in environment:
            frees = environment[name].lower() == "true"
            yield name, path, ("FULL_SHARD", "HYBRID_SHARD") if frees else ("SHARD_GRAD_OP", "NO_SHARD")
    elif strategy := environment.get("FSDP_SHARDING_STRATEGY"):
        is_number = strategy in map(str, range(1, len(STRATEGIES) + 1))
        yield "FSDP_SHARDING_STRATEGY", path, (STRATEGIES[int(strategy) - 1] if is_number else strategy,)
    for name, path in SWITCHES.items():
        if name in environment:
            yield name, path, (environment[name].lower() == "true",)
