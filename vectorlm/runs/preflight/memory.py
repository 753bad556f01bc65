"""Plan the memory of a run from its config, print it, and advise on settings if it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from vectorlm.algorithms.registry import get_algorithm
from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import has_gpu, tensor_parallel_size
from vectorlm.rl.environments.environment import AGENT
from vectorlm.rl.settings import CPU_PASS_TOKENS, SELF
from vectorlm.runs.config.schema import Config, TrainSettings
from vectorlm.runs.config.setting import to_plain, value_at, with_value
from vectorlm.runs.preflight.local_model import four_bit_method_of
from vectorlm.runs.preflight.memory_plan import (
    FOUR_BIT_BYTES,
    GIB,
    Demand,
    EngineDemand,
    MemoryPlan,
    container_limits,
    plan_memory,
    sequence_kv_bytes,
)
from vectorlm.runs.preflight.settings import setting_problems
from vectorlm.runs.preflight.shared_base import shares_base
from vectorlm.sampling.backends.vllm import CPU_KV_CACHE_BYTES, packs_by_itself
from vectorlm.sampling.settings import BUCKET_BYTES
from vectorlm.sampling.weights.model_size import (
    ModelSize,
    VisionSize,
    count_adapter_parameters,
    empty_model,
    read_model_size,
)
from vectorlm.train.optimizers import state_bytes
from vectorlm.train.settings import gathers_once, stays_plain

MAX_NUM_SEQS = 64
"""Default concurrency of `inference: transformers`."""


def memory_report(
    config: Config, world_size: int, *, device_bytes: int | None = None, ranks_per_node: int | None = None
) -> str:
    """Return the memory plan of a run as a table, or the reason that there is none.

    `device_bytes` is the memory of one CUDA device; None plans for CPU, with the memory of this machine. If
    `ranks_per_node` is None, all ranks run on one node.

    Raises:
        ConfigError: The plan does not fit, and `ignore_memory_plan` is false. The text names settings to change.
    """
    near = ranks_per_node or world_size
    try:
        plan = plan_of_config(config, world_size, device_bytes, near)
    except (OSError, ValueError) as error:
        return f"  no memory plan: {error}"
    shortage = find_shortage(plan)
    if shortage is None:
        return memory_table(plan)
    if config.ignore_memory_plan:
        return f"  note: ignore_memory_plan: {shortage.text} The run starts anyway.\n{memory_table(plan)}"
    fixes = shortage.advice(_changes(config, plan, world_size, near, device_bytes))
    raise ConfigError(f"{shortage.text} {fixes} If you know that the run fits, add --ignore_memory_plan.")


def plan_of_config(
    config: Config, world_size: int, device_bytes: int | None = None, ranks_per_node: int | None = None
) -> MemoryPlan:
    """Plan the memory of a run; raises ValueError if the size of the model is unknown."""
    is_cpu = device_bytes is None
    train, near = config.train_parameters, ranks_per_node or world_size
    model = read_model_size(config.model)
    lora = train.lora_peft_config
    shards = {"NO_SHARD": 1, "HYBRID_SHARD": near}.get(train.model.sharding_strategy, world_size)
    trained_copies, frozen_copies = _other_models(config, model)
    overlap = config.overlap
    teacher = None if config.rl is None else config.rl.teacher
    # An engine on separate CUDA devices does not share their memory; on CPU there is only one memory.
    is_shared = is_cpu or overlap is None or overlap.placement == "shared"
    micro_batch_size = _micro_batch_size(config, is_cpu, max(world_size // train.model.ranks_per_share, 1))
    trained, trains_vision = _count_trained(config, model), "vision" not in train.model.freeze
    num_loaded = model.num_parameters
    if lora is not None:
        num_loaded += trained.num_all
        trains_vision = model.vision is not None and (
            count_adapter_parameters(config.model, lora, only_vision=True) > 0
        )
    engine = _engine_demand(config, model, device_bytes, near) if config.has_engine and is_shared else None
    demand = Demand(
        model=model,
        num_trainable=trained.num_all,
        num_trained_outside=trained.num_outside,
        num_adapted_experts=trained.num_adapted_experts,
        num_frozen=model.num_parameters - trained.num_all if lora is None else 0,
        **({} if model.vision is None else _image_demand(config, model.vision, micro_batch_size)),
        trains_vision=trains_vision,
        gathers_once=gathers_once(
            num_loaded - (model.num_in_blocks if train.model.quantization else 0),
            trained.num_all,
            world_size,
            train.model.computes_in_bf16(not is_cpu),
            device_bytes,
        ),
        is_quantized=train.model.quantization is not None,
        is_plain=stays_plain(world_size, train.model.computes_in_bf16(not is_cpu), train.model.cpu_offload),
        num_ranks=near,
        num_shards=shards,
        keeps_gathered=train.model.sharding_strategy in ("SHARD_GRAD_OP", "NO_SHARD"),
        bytes_per_weight=2 if train.model.dtype == "bfloat16" else 4,
        cpu_offload=train.model.cpu_offload,
        loads_on_main=train.model.loads_on_main(world_size),
        is_mixed=train.model.computes_in_bf16(not is_cpu),
        packs=train.model.pack_rows and (is_cpu or not train.model.use_flash_attention),
        num_averages=_num_averages(train, trained),
        recomputes=train.model.use_activation_checkpointing,
        micro_batch_size=micro_batch_size,
        context_parallel=train.model.context_parallel,
        tensor_parallel=train.model.tensor_parallel,
        expert_parallel=train.model.expert_parallel,
        num_trained_copies=trained_copies,
        num_frozen_copies=frozen_copies,
        logit_bytes=_logit_bytes(config),
        learns_distributions=teacher is not None and teacher.kind == "full",
        sequence_tokens=train.max_seq_len,
        engine=engine,
        # Devices of a parallel engine have pieces of tensors.
        shares_base=engine is not None and engine.tensor_parallel == 1 and shares_base(config, not is_cpu),
        device_bytes=host_memory_bytes() if device_bytes is None else device_bytes,
        is_cpu=is_cpu,
        host_bytes=host_memory_bytes() if device_bytes == device_memory_bytes() else None,
    )
    return plan_memory(demand)


class _Trained(NamedTuple):
    """Numbers of trained parameters."""

    num_all: int
    num_outside: int
    """Those outside the blocks."""
    num_matrices: int
    """Those that Muon steps."""
    num_adapted_experts: int = 0
    """Parameters of stacked experts that have adapters."""


def _count_trained(config: Config, model: ModelSize) -> _Trained:
    """Count trained parameters, if necessary on the model itself, built without memory for its weights."""
    train = config.train_parameters
    lora = train.lora_peft_config
    if train.optimizer.name != "muon":
        if lora is None and model.vision is None:
            return _Trained(model.num_parameters, 0, 0)
        has_more = lora is not None and (lora.get("modules_to_save") or lora.get("target_parameters"))
        if lora is not None and not has_more and not model.experts_per_token:
            return _Trained(count_adapter_parameters(config.model, lora), 0, 0)
    from peft.tuners.lora.layer import ParamWrapper

    from vectorlm.train.images import weights_of_parts
    from vectorlm.train.lora import add_lora
    from vectorlm.train.optimizers import muon_matrices
    from vectorlm.train.shard import transformer_blocks

    built = deepcopy(empty_model(Path(config.model)))
    if lora is None:
        for weight in weights_of_parts(built, train.model.freeze):
            weight.requires_grad_(False)
    else:
        # Some ways to initialise adapters read the weights.
        built = add_lora(built, {**lora, "init_lora_weights": False})
    inside = {weight for block in transformer_blocks(built) for weight in block.parameters()}
    weights = [weight for weight in built.parameters() if weight.requires_grad]
    return _Trained(
        sum(weight.numel() for weight in weights),
        sum(weight.numel() for weight in weights if weight not in inside),
        sum(weight.numel() for weight in muon_matrices(built)),
        sum(layer.get_param().numel() for layer in built.modules() if isinstance(layer, ParamWrapper)),
    )


def _num_averages(train: TrainSettings, trained: _Trained) -> float:
    """Return the size of the optimizer's state as a multiple of the trained weights."""
    per_weight = 2 if train.lora_peft_config is None and train.model.dtype == "bfloat16" else 4
    adamw_share = 1 - trained.num_matrices / max(trained.num_all, 1)
    return state_bytes(train.optimizer, per_weight, adamw_share) / per_weight


def _logit_bytes(config: Config) -> int:
    """Return the largest number of bytes per logit of a chunk; tests of the losses measure it."""
    rl, most = config.rl, 12
    if rl is not None and rl.update.entropy_coef > 0:
        most += 9
    if rl is not None and rl.teacher is not None and rl.teacher.kind == "full":
        most += {0.0: 13, 1.0: 9}.get(rl.teacher.beta, 30)
    return most


def _micro_batch_size(config: Config, is_cpu: bool, num_shares: int) -> int:
    """Return the largest number of sequences of maximum length in one forward pass of a rank."""
    train, rl = config.train_parameters, config.rl
    if rl is None:
        return config.text.train_bs * (2 if config.examples in ("pairs", "labels") else 1)
    size, longest, tokens = rl.collect.group_size, train.max_seq_len, rl.update.max_tokens_per_micro_batch
    if is_cpu:
        # The completions of a packed or compared group share one forward pass.
        tokens = min(tokens, max(CPU_PASS_TOKENS, size * longest))
    environments = [
        environment.environment
        for environment in rl.by_source.values()
        if environment.environment is not None
    ]
    if any(environment.startswith(AGENT) for environment in environments):
        # An agent can produce any number of rows per rollout.
        return max(tokens // longest, 1)
    of_row = config.longest_rollout
    of_group = size * of_row
    if train.model.pack_rows and not environments:
        # The group's prompt is computed once.
        of_group = of_row + (size - 1) * min(rl.collect.sampling["max_tokens"] or of_row, of_row)
    num_groups = -(-rl.collect.prompts_per_step // (rl.update.num_mini_batches * num_shares))
    of_step = max(
        num_groups * of_group, 0 if rl.sft is None else rl.sft.rows_per_step // num_shares * longest
    )
    return max(min(tokens // longest, -(-of_step // longest)), 1)


def _image_tokens(config: Config, micro_batch_size: int) -> int:
    """Return the largest number of image tokens of a pass: all tokens, or in RL without environments the prompts'."""
    rl, tokens = config.rl, micro_batch_size * config.train_parameters.max_seq_len
    if rl is None or any(source.environment is not None for source in rl.by_source.values()):
        return tokens
    of_row = config.longest_rollout
    of_answer = min(rl.collect.sampling["max_tokens"] or of_row, of_row)
    answers = rl.collect.group_size if config.train_parameters.model.pack_rows else 1
    of_prompt = of_row - of_answer
    return tokens * of_prompt // (of_prompt + answers * of_answer)


def _image_demand(config: Config, vision: VisionSize, micro_batch_size: int) -> dict[str, Any]:
    """Return the fields of `Demand` for images, measured on one image with the model's processor."""
    from PIL import Image

    from vectorlm.data.images import image_tokens_of
    from vectorlm.train.images import TEXT_INPUTS
    from vectorlm.train.load import load_tokenizer

    tokens = image_tokens_of(load_tokenizer(config.model, config.chat))
    made = tokens.processed([Image.new("RGB", (448, 448))])
    num = int((made["input_ids"] == tokens.image_token).sum())
    return {
        "num_image_tokens": _image_tokens(config, micro_batch_size),
        "image_token_bytes": sum(x.nbytes for name, x in made.items() if name not in TEXT_INPUTS) / num,
        "image_token_patches": made["pixel_values"].numel() / vision.patch_numbers / num,
    }


def _other_models(config: Config, model: ModelSize) -> tuple[int, float]:
    """Return the number of other trained models, and of frozen models as a multiple of `model`."""
    rl = config.rl
    if rl is None:
        return 0, 0
    has_reference = rl.has_reference and config.train_parameters.lora_peft_config is None
    frozen: float = int(has_reference) + len(rl.reward.reward_models)
    if rl.teacher is not None and rl.teacher.model not in (None, SELF):
        frozen += read_model_size(rl.teacher.model).num_parameters / model.num_parameters
    return int(get_algorithm(rl.algorithm.name).needs_critic), frozen


def _engine_demand(
    config: Config, model: ModelSize, device_bytes: int | None, num_devices: int
) -> EngineDemand:
    is_cpu, is_vllm = device_bytes is None, config.engine.inference == "vllm"
    arguments = config.engine_arguments(not is_cpu)
    share = config.engine.gpu_memory_utilization
    # By default, vLLM computes in bf16 on CUDA with weights that were saved in fp32.
    per_weight = 4 if arguments.get("dtype", "float32") in ("float32", "float") else 2
    size = arguments.get("tensor_parallel_size") or 1
    step_tokens = step_sequences = 0
    num_engines = 1
    if device_bytes is not None and is_vllm:
        step_tokens, step_sequences = step_sizes(device_bytes)
        if not {"tensor_parallel_size", "data_parallel_size"} & set(arguments):
            weight_bytes = per_weight * model.num_parameters
            size = tensor_parallel_size(num_devices, model.num_heads, weight_bytes, share * device_bytes)
        num_engines = max(num_devices // size, 1)
    context = arguments.get("max_model_len") or model.max_length
    kv_cache = arguments.get("kv_cache_memory_bytes")
    if is_vllm and kv_cache is None and is_cpu:
        kv_cache = CPU_KV_CACHE_BYTES
    if not is_vllm:
        kv_cache = 2 * model.num_layers * model.kv_size * per_weight * _tokens_at_once(config, context)
    staged = {"push": None, "pull": 0}.get(config.engine.transport, BUCKET_BYTES)
    packs = config.engine.receiver == "packed" or packs_by_itself(model.num_parameters)
    is_quantised = config.engine.quantization is not None
    in_4_bits = four_bit_method_of(config.model) is not None
    is_server = config.engine.inference == "server"
    return EngineDemand(
        bytes_per_weight=per_weight,
        tensor_parallel=size,
        num_engines=0 if is_server else arguments.get("data_parallel_size") or num_engines,
        step_tokens=arguments.get("max_num_batched_tokens") or step_tokens,
        step_sequences=arguments.get("max_num_seqs") or step_sequences,
        kv_cache_bytes=kv_cache,
        reserves_kv_cache=is_vllm,
        device_share=share,
        max_model_len=context,
        # On CPU, a quantised engine has an arena in addition to its parameters.
        is_packed=is_cpu
        and is_vllm
        and not in_4_bits
        and (is_quantised or (config.engine.receiver != "live" and packs)),
        bytes_in_blocks=FOUR_BIT_BYTES if in_4_bits else 1.0 if is_quantised else None,
        staged_bytes=staged if is_vllm else None,
        sleep=config.engine.turn.sleep,
        offload_optimizer=config.engine.turn.offload_optimizer,
    )


def _tokens_at_once(config: Config, context: int) -> int:
    """Return the largest number of tokens in the KV cache of an engine that does not reserve one."""
    rl, num_sequences = config.rl, config.engine.engine_args.get("max_num_seqs") or MAX_NUM_SEQS
    if rl is None:
        return num_sequences * min(
            config.evaluation.sampling_params.get("max_tokens", 16) or context, context
        )
    return min(num_sequences, rl.collect.prompts_per_step * rl.collect.group_size) * context


def _changes(
    config: Config, before: MemoryPlan, world_size: int, near: int, device_bytes: int | None
) -> Iterator[Change]:
    """Yield changes of settings with their plans, the cheapest first."""
    known, plain = _problems(config, world_size, near), to_plain(config)

    def change(text: str, changed: Config, times: int = 1) -> Change:
        ranks = times * world_size, times * near
        plan = plan_of_config(changed, ranks[0], device_bytes, ranks[1])
        return Change(text, plan, lambda: _problems(changed, *ranks) <= known)

    for path, value in _settings_to_change(config, before):
        if path == "--world_size":
            yield change(f"--world_size {2 * world_size}", config, 2)
        elif value_at(plain, path) != value:
            text = str(value).lower() if isinstance(value, bool) else value
            yield change(f"{path}: {text}", with_value(config, path, value))


def _problems(config: Config, world_size: int, near: int) -> set[str]:
    found = {*setting_problems(config, world_size, world_size // near)}
    if config.rl is None:
        return found
    # This imports torch.
    from vectorlm.runs.preflight.rl import rl_problems

    return found.union(rl_problems(config, config.rl))


def _settings_to_change(config: Config, plan: MemoryPlan) -> Iterator[tuple[str, Any]]:
    """Yield settings with values that may save memory; values that are slow or change results come last."""
    train, demand, engine = "train_parameters", plan.demand, plan.demand.engine
    if engine is not None:
        yield "engine.sleep", "all"
        yield "engine.offload_optimizer", not engine.offload_optimizer
        yield "engine.transport", "auto"
        needed = sequence_kv_bytes(demand, engine)
        if not engine.reserves_kv_cache:
            yield "engine.max_num_seqs", max((engine.step_sequences or MAX_NUM_SEQS) // 2, 1)
        elif engine.kv_cache_bytes is None:
            yield "engine.gpu_memory_utilization", engine.device_share / 2
            yield "engine.gpu_memory_utilization", min(2 * engine.device_share, 0.95)
        else:
            yield "engine.kv_cache_memory_bytes", max(engine.kv_cache_bytes // 2, needed)
        if engine.reserves_kv_cache and 0 < plan.kv_cache_bytes < needed:
            yield "engine.max_model_len", engine.max_model_len * plan.kv_cache_bytes // needed
    recomputes = "offload" if demand.recomputes and not demand.is_cpu else True
    yield f"{train}.use_activation_checkpointing", recomputes
    if demand.recomputes == "offload":
        yield f"{train}.use_activation_checkpointing", True
    if config.rl is None:
        yield "dataset.train_bs", max(config.text.train_bs // 2, 1)
    else:
        tokens = demand.micro_batch_size * demand.sequence_tokens // 2
        yield "rl.max_tokens_per_micro_batch", max(tokens, demand.sequence_tokens)
    if demand.packs:
        yield f"{train}.context_parallel", 2 * demand.context_parallel
    yield f"{train}.sharding_strategy", "FULL_SHARD"
    yield f"{train}.low_cpu_mem_usage", True
    if not demand.is_cpu:
        yield "--world_size", None
    yield f"{train}.cpu_offload", not demand.cpu_offload
    yield f"{train}.dtype", "bfloat16"


def step_sizes(device_bytes: int) -> tuple[int, int]:
    """Return vLLM's default limits of tokens and sequences per step; too high for an A100 of 80 GiB (8192, 256)."""
    return (16384, 1024) if device_bytes >= 70 * GIB else (8192, 256)


def host_memory_bytes() -> int:
    """Return the memory of this machine, or of its container if that is less."""
    total = psutil.virtual_memory().total
    limit = container_limits().memory_bytes
    return total if limit is None else min(total, limit)


def device_memory_bytes() -> int | None:
    """Return the memory of the smallest CUDA device; None, without importing torch, if there is none."""
    if not has_gpu():
        return None
    import torch

    totals = [
        torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())
    ]
    return min(totals, default=None)


NUM_FIXES = 3
"""Largest number of settings that one error names."""


class Change(NamedTuple):
    """A change of a run that may save memory."""

    text: str
    """A setting with its value, as in YAML, or an option of the command."""
    plan: MemoryPlan
    """The plan of the changed run."""
    is_allowed: Callable[[], bool]
    """Whether the changed run passes the check of its settings."""


class Shortage(NamedTuple):
    """A kind of memory that is too small for a plan."""

    kind: str
    plan: MemoryPlan
    text: str

    def advice(self, changes: Iterable[Change]) -> str:
        """Return advice: the first changes that are enough, or the changes that save most."""
        before, found = needs_of(self.plan), []
        for change in changes:
            after = needs_of(change.plan)
            short = {kind for kind, (needed, available) in after.items() if needed > available}
            needed, available = after.get(self.kind, (0, 0))
            lacking = needed - available
            if lacking < before[self.kind][0] - before[self.kind][1] and all(
                before[kind][0] > before[kind][1] for kind in short
            ):
                found.append(
                    (bool(short), lacking if short else 0, f"{change.text} ({amount(needed)})", change)
                )
        found.sort(key=lambda row: row[:2])
        allowed = (row for row in found if row[3].is_allowed())
        best = [row for row, _ in zip(allowed, range(NUM_FIXES), strict=False)]
        if not best:
            return "No setting helps. Use a smaller model."
        enough = ", or ".join(text for is_short, _, text, _ in best if not is_short)
        most = ", or ".join(text for _, _, text, _ in best)
        return (
            f"Set {enough}." if enough else f"No single setting is enough; the most effective one is {most}."
        )


def needs_of(plan: MemoryPlan) -> dict[str, tuple[int, int]]:
    """Return the needed and available bytes by kind of memory."""
    demand, found = plan.demand, {}
    if demand.engine is not None and demand.engine.reserves_kv_cache:
        found["KV cache"] = sequence_kv_bytes(demand, demand.engine), plan.kv_cache_bytes
    if demand.host_bytes is not None:
        found["host"] = max(plan.loading_host, plan.running_host), demand.host_bytes
    phases = {"training": plan.training, "sampling": plan.sampling}
    return found | {phase: (needed, demand.device_bytes) for phase, needed in phases.items()}


def find_shortage(plan: MemoryPlan) -> Shortage | None:
    """Return the first kind of memory that is too small; None if the run fits."""
    demand = plan.demand
    for kind, (needed, available) in needs_of(plan).items():
        if needed <= available:
            continue
        what, place = kind, "this machine" if demand.is_cpu else "the device"
        uses = {row.name: row.training if kind == "training" else row.sampling for row in plan.rows}
        if kind == "host":
            what, place = "loading" if plan.loading_host == needed else "running", "the host of the devices"
            uses = {row.name: row.loading if what == "loading" else row.running for row in plan.host}
        largest = sorted(uses, key=lambda name: -uses[name])[:3]
        parts = ", ".join(f"{name} {amount(uses[name])}" for name in largest)
        text = f"{what} needs {amount(needed)} (an estimate; most of it: {parts}) and {place} has"
        if kind == "KV cache" and demand.engine is not None:
            text = f"one sequence of max_model_len={demand.engine.max_model_len} tokens needs {amount(needed)}, and"
            text += " the engine's KV cache has"
        return Shortage(kind, plan, f"{text} {amount(available)}.")
    return None


def memory_table(plan: MemoryPlan) -> str:
    """Return the plan as a table in GiB."""
    demand = plan.demand
    place = "this machine, all processes together" if demand.is_cpu else "the fullest device"
    uses = [(row.name, row.training, row.sampling) for row in plan.rows]
    heads = ("training", "sampling") if demand.engine is not None else ("training",)
    lines = [f"  memory of {place}, of {gib(demand.device_bytes)} GiB:", *_table(heads, uses)]
    if plan.host:
        of = "" if demand.host_bytes is None else f", of {gib(demand.host_bytes)} GiB"
        host = [(row.name, row.loading, row.running) for row in plan.host]
        lines += [f"  memory of the node's host{of}:", *_table(("loading", "running"), host)]
    return "\n".join(lines)


def _table(heads: Sequence[str], uses: Sequence[tuple[str, int, int]]) -> Iterator[str]:
    """Yield the lines of a table with totals."""
    rows = [("GiB (estimate)", *heads)]
    rows += [(name, *map(gib, numbers[: len(heads)])) for name, *numbers in uses]
    totals = [sum(first for _, first, _ in uses), sum(second for _, _, second in uses)]
    rows.append(("total", *map(gib, totals[: len(heads)])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        aligned = (f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        yield f"  {name:<{widths[0]}}" + "".join(aligned)


def gib(num_bytes: int) -> str:
    """Return bytes in GiB, with two decimals below ten."""
    return f"{num_bytes / GIB:.{2 if num_bytes < 10 * GIB else 1}f}"


def amount(num_bytes: int) -> str:
    """Return bytes with their unit: GiB, or MiB below 0.1 GiB."""
    return f"{gib(num_bytes)} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / (1 << 20):.2f} MiB"
