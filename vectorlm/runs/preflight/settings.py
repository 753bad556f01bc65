"""Rules between settings, and between settings and the number of ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vectorlm.errors import ConfigError, EngineError
from vectorlm.packages import fields_of, is_installed
from vectorlm.plugin import is_plugin, raised_at
from vectorlm.ranks.topology import has_gpu
from vectorlm.report.metrics import short_run
from vectorlm.report.runs import flat
from vectorlm.rl.rewards.registry import short_name
from vectorlm.runs.config.schema import OLD_SECTION, Config, old_names
from vectorlm.runs.config.setting import all_settings, refuse, settings_of, to_plain, value_at
from vectorlm.runs.config.value import describe_refusal, show
from vectorlm.runs.preflight.local_model import (
    HEADS,
    description_of,
    four_bit_method_of,
    is_vision_language,
    number_in,
    vocab_size,
)
from vectorlm.runs.preflight.sampling import sampling_problems
from vectorlm.runs.preflight.shared_base import sharing_problems
from vectorlm.sampling.contract import BACKENDS
from vectorlm.sampling.settings import EXPERTS, EngineSettings, has_experts, why_not_exact
from vectorlm.sampling.weights.lora_factors import (
    SCORES,
    WRITES,
    largest_rank,
    refused_options,
    refused_starts,
)
from vectorlm.settings import closest, nearest
from vectorlm.train.four_bit import four_bit_method, why_not_unpacked
from vectorlm.train.optimizers import OPTIMIZERS, accepted, make_optimizer
from vectorlm.train.settings import BY_LOSS, OptimizerSettings

_LORA = "train_parameters.lora_peft_config"
_ENGINE_SETTINGS_ELSEWHERE = {
    "model": "model",
    "enable_lora": "engine.lora_mode",
    "sampling_params": "evaluation.sampling_params",
}

_SECRETS = {"token": "VECTORLM_SERVER_TOKEN", "hf_token": "HF_TOKEN", "api_key": "WANDB_API_KEY"}
"""Keys of secrets, and the environment variables to use instead."""

PASSWORD = re.compile(r"://[^/\s@]*:[^/\s@]+@")
"""A password in an address: ``http://user:password@host``."""

LORA_CONFIG = (
    ("config.py", "PeftConfigMixin"),
    ("config.py", "PeftConfig"),
    ("tuners/lora/config.py", "LoraConfig"),
)
"""The classes that declare the arguments of `peft.LoraConfig`."""


def setting_problems(config: Config, world_size: int, num_nodes: int = 1) -> Iterator[str]:
    """Yield settings that contradict each other or the number of ranks."""
    yield from _rank_problems(config, world_size, num_nodes)
    yield from _training_problems(config)
    yield from _engine_problems(config, world_size // max(num_nodes, 1))
    yield from _lora_problems(config)
    if config.train_parameters.model.quantization is not None:
        yield from _quantization_problems(config)
    yield from _four_bit_problems(config)
    if config.train_parameters.model.exact:
        yield from _exact_problems(config)
    yield from _secret_problems(config)
    yield from _unread_settings(config)


def _rank_problems(config: Config, world_size: int, num_nodes: int) -> Iterator[str]:
    strategy = config.train_parameters.model.sharding_strategy
    if world_size < 1:
        yield describe_refusal("world_size", world_size, "must be an integer >= 1", "Use 1 or more.")
    if num_nodes < 1:
        yield describe_refusal("nnodes", num_nodes, "must be an integer >= 1", "Use 1 or more.")
    # Silent: `vectorlm check` would plan the memory of a wrong number of ranks.
    elif world_size % num_nodes:
        rule = f"must be a multiple of nnodes={num_nodes}, because it counts the ranks of all nodes"
        fix = f"Use {world_size + num_nodes - world_size % num_nodes}, for example."
        yield describe_refusal("world_size", world_size, rule, fix)
    # Costs more than a minute: groups of ranks are made, and the heads counted, after the model has been loaded.
    num, path = config.train_parameters.model.context_parallel, "train_parameters.context_parallel"
    num_heads = number_in(description_of(Path(config.model)) or {}, HEADS)
    for what, count in (("the number of ranks", world_size), ("the number of attention heads", num_heads)):
        if count is not None and count % num:
            fix = f"Use {math.gcd(count, num)}, for example."
            yield refuse(config, path, f"must divide {what}, {count}", fix)
    # Costs more than a minute: a rank would have all pixels, and only its share of their tokens.
    if num > 1 and is_vision_language(config.model):
        yield refuse(config, path, "cannot be used with a vision-language model", "Use 1.")
    # Costs more than a minute: the first step comes after models are loaded and completions sampled.
    sft = None if config.rl is None else config.rl.sft
    num_shares = max(world_size // config.train_parameters.model.ranks_per_share, 1)
    if sft is not None and sft.rows_per_step % num_shares:
        rule = f"must be a multiple of the number of ranks with different rows, {num_shares}"
        fix = f"Use {sft.rows_per_step + num_shares - sft.rows_per_step % num_shares}, for example."
        yield refuse(config, "rl.sft.rows_per_step", rule, fix)
    yield from _split_problems(config, world_size // max(num_nodes, 1))
    # Costs more than a minute: weights are sent after the model has been loaded.
    is_spread = num_nodes > 1 and strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
    if is_spread and config.has_engine:
        rule = f"cannot shard over {num_nodes} nodes: the engine of a node needs all weights on that node"
        fix = "Use HYBRID_SHARD: it shards within each node."
        yield refuse(config, "train_parameters.sharding_strategy", rule, fix)


_UNSPLIT_VALUES: Mapping[str, tuple[Any, ...]] = {
    **{f"train_parameters.{name}": (False,) for name in ("exact", "compile")},
    **{"train_parameters.quantization": (None,), "train_parameters.context_parallel": (1,)},
    "train_parameters.sharding_strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"),
    # Every scale belongs to a whole row.
    "engine.quantization": (None,),
}
"""Values of settings that work with a model that is split over ranks."""


def _split_problems(config: Config, ranks_per_node: int) -> Iterator[str]:
    """Yield sizes of tensor and expert parallelism that do not fit, and settings that cannot be used with them."""
    # All of these cost more than a minute: models are loaded first.
    model, description = config.train_parameters.model, description_of(Path(config.model)) or {}
    if model.model_parallel == 1:
        return
    tensor, expert = "train_parameters.tensor_parallel", "train_parameters.expert_parallel"
    heads, ranks = "the number of attention heads", ("the number of ranks on a node", ranks_per_node)
    num_heads = number_in(description, HEADS)
    key_heads = ("num_key_value_heads", number_in(description, ("num_key_value_heads",)) or num_heads)
    for path, size, counts in (
        (tensor, model.tensor_parallel, (key_heads, (heads, num_heads), ranks)),
        (expert, model.expert_parallel, (ranks, ("num_experts", number_in(description, EXPERTS)))),
    ):
        for what, count in counts:
            if count is not None and count % size:
                fix = f"Use {math.gcd(count, size)}, for example."
                yield refuse(config, path, f"must divide {what}, {count}", fix)
    if model.expert_parallel > 1 and model.expert_parallel % model.tensor_parallel:
        rule = f"must be a multiple of tensor_parallel={model.tensor_parallel}, or 1"
        yield refuse(config, expert, rule, f"Use {model.tensor_parallel}, for example.")
    plain, setting = to_plain(config), tensor if model.tensor_parallel > 1 else expert
    for name, allowed in _UNSPLIT_VALUES.items():
        if value_at(plain, name) not in allowed:
            yield refuse(config, name, f"cannot be used with {setting}", f"Use {show(allowed[0])}.")
    if is_vision_language(config.model):
        yield refuse(config, setting, "cannot be used with a vision-language model", "Use 1.")
    row = OPTIMIZERS.get(config.train_parameters.optimizer.name)
    if row is not None and row.per_rank_blocks:
        fix = "Use adamw, adafactor, muon or sgd."
        yield refuse(config, "train_parameters.optimizer.name", f"cannot be used with {setting}", fix)


def _training_problems(config: Config) -> Iterator[str]:
    train, preprocess = config.train_parameters, config.dataset_preprocess
    if config.dataset is None and config.rl is None:
        yield (
            "there is nothing to train on: a run needs the section 'dataset' (supervised fine-tuning) or 'rl' "
            "(reinforcement learning). Add one."
        )
    # Silent: only one section would train, and an engine would not sample from a reward model.
    alone: dict[str, Any] = {"rl": config.rl}
    if config.reward_model is not None:
        alone |= {
            "evaluation.prompts": config.evaluation.prompts,
            "evaluation.tasks": config.evaluation.tasks or None,
        }
        alone |= {"train_parameters.adapters": train.adapters}
        alone |= {"preference": config.preference}
        # Costs more than a minute: the model is loaded first.
        if is_vision_language(config.model):
            yield refuse(
                config, "model", "cannot be a vision-language model with reward_model", "Choose another."
            )
    section = "preference" if config.reward_model is None else "reward_model"
    for name, value in alone.items() if getattr(config, section) is not None else ():
        if value is not None:
            yield refuse(config, name, f"cannot be used with {section}", "Leave one of them out.", "…")
    # Silent: the loss would count hidden tokens.
    if config.dataset is not None and preprocess is not None:
        index = config.dataset.ignore_index
        if preprocess.ignore_index != index:
            rule = f"must equal dataset.ignore_index={index}, or the loss would count hidden tokens"
            yield refuse(config, "dataset_preprocess.ignore_index", rule, f"Use {index}.")
    # Silent: steps would end elsewhere when the model's scores are rewards.
    if preprocess is not None and config.step_separator not in (None, preprocess.step_separator):
        rule = f"must equal reward_model.step_separator={config.step_separator!r}"
        yield refuse(config, "dataset_preprocess.step_separator", rule, "Use the same text.")
    inference = config.engine.inference
    # Silent: the engine would round its logits.
    if train.model.fp32_head and inference not in ("vllm", "transformers"):
        rule = f"does not reach an engine with engine.inference={inference}"
        fix = 'Leave it out. A server of vLLM takes --hf-overrides \'{"head_dtype": "float32"}\' itself.'
        yield refuse(config, "train_parameters.fp32_head", rule, fix)
    # Silent: a reward model has no logits.
    if train.model.fp32_head and config.reward_model is not None:
        yield refuse(config, "train_parameters.fp32_head", "has no effect on a reward model", "Leave it out.")
    # Silent with a reward model; otherwise it costs more than a minute: the model is loaded first.
    if train.model.router_aux_loss_coef:
        description = description_of(Path(config.model))
        is_dense = description is not None and not has_experts(description)
        why = "a mixture-of-experts model" if is_dense else "an objective other than reward_model"
        if is_dense or config.reward_model is not None:
            yield refuse(config, "train_parameters.router_aux_loss_coef", f"needs {why}", "Leave it out.")
    # Costs more than a minute: the first step finds it, after models are loaded and completions sampled.
    if train.model.use_flash_attention and has_gpu() and not train.model.computes_in_bf16(is_cuda=True):
        rule = f"needs 16-bit numbers, and use_mp is false with dtype {train.model.dtype}"
        fix = "Set use_mp to true, or use_flash_attention to false."
        yield refuse(config, "train_parameters.use_flash_attention", rule, fix)
    # Costs more than a minute: the optimizer is made, and first used, after models are loaded.
    path, optimizer = "train_parameters.optimizer", train.optimizer
    if optimizer.fused and optimizer.foreach:
        yield refuse(config, f"{path}.foreach", "cannot be used with fused: true", "Leave one of them out.")
    if optimizer.capturable and (train.model.cpu_offload or not has_gpu()):
        why = "but cpu_offload steps on the host" if has_gpu() else "but there is none here"
        yield refuse(config, f"{path}.capturable", f"needs a CUDA device, {why}", "Leave it out.")
    # Silent: transformers ignores them.
    kind, arguments = train.schedule.lr_scheduler_type, train.schedule.lr_scheduler_kwargs
    if arguments and kind.startswith("constant"):
        rule = f"has no effect with lr_scheduler_type={kind}"
        yield refuse(config, "train_parameters.lr_scheduler_kwargs", rule, "Leave it out.", dict(arguments))
    yield from _optimizer_problems(config)
    yield from _evaluation_problems(config)
    yield from step_problems(config)


def step_problems(config: Config) -> Iterator[str]:
    """Yield settings that do not fit the number of steps, if it is known."""
    rl, num_traced = config.rl, config.train_parameters.profile.profile_steps
    if rl is None or rl.max_steps is None:
        return
    # Costs more than a minute: the profile is opened after models are loaded.
    if (problem := short_run(num_traced, rl.max_steps)) is not None:
        yield refuse(config, "train_parameters.profile_steps", *problem)
    # Silent: the policy would never change.
    if rl.critic.warmup_steps >= rl.max_steps:
        rule = f"must be below rl.max_steps={rl.max_steps}, or the policy is never trained"
        yield refuse(config, "rl.critic.warmup_steps", rule, "Use fewer.")


def weight_problems(config: Config, setting: str, weights: Mapping[str, Any]) -> Iterator[str]:
    """Yield the weights of rewards that are not finite numbers."""
    # Costs more than a minute: the first sum of rewards comes after the first completions.
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            yield refuse(config, f"{setting}.{name}", "must be a finite number", "Use 1.0.", weight)


def _evaluation_problems(config: Config) -> Iterator[str]:
    """Yield settings that depend on evaluations that the run does not make."""
    train, data = config.train_parameters, config.dataset
    if config.rl is None and data is None:
        return  # Another rule reports that there is nothing to train on.
    has_answers = config.evaluation.prompts is not None
    has_loss = config.rl is None and data is not None and data.eval_ds is not None
    # Silent: the learning rate would never change.
    if train.schedule.lr_scheduler_type in BY_LOSS and not has_loss:
        rule = "needs an evaluation loss, and there is none"
        yield refuse(config, "train_parameters.lr_scheduler_type", rule, "Use constant, linear or cosine.")
    if config.rl is None:
        is_evaluated = has_answers or bool(config.evaluation.tasks)
        has_best = has_loss or (is_evaluated and train.keep.best_metric is not None)
        rule, fix = "needs held-out text, where the lowest eval/loss is the best", "Set dataset.eval_ds."
    else:
        asked = [name for name, source in config.rl.by_source.items() if source.held_out]
        asked += [""] if has_answers else []
        is_scored = config.held_out_rewards or any(map(config.rl.collect.environment_of, asked))
        has_best = bool(is_scored) or train.keep.best_metric is not None
        rule = "needs held-out prompts with a reward or an environment"
        fix = "Set evaluation.prompts and evaluation.rewards, or held_out of a source."
    # Silent: no weights would ever be the best, or only the last ones: the evaluation of step 0 does not count.
    if has_best and config.evaluation.every is None and not (has_loss and _follows_loss(config)):
        rule = "follows evaluations of answers, and without evaluation.every only the last step has one"
        has_best, fix = False, "Set evaluation.every."
    for name in ("keep_best", "early_stopping_patience"):
        if getattr(train.keep, name) and not has_best:
            yield refuse(config, f"train_parameters.{name}", rule, fix)


def _follows_loss(config: Config) -> bool:
    """Return whether fine-tuning with held-out text takes the best evaluation's metric from this text."""
    metric, evaluation = config.train_parameters.keep.best_metric, config.evaluation
    if metric is None or config.dataset is None or not (evaluation.prompts or evaluation.tasks):
        return True
    # This imports torch, which other configs do not need.
    from vectorlm.train.objective import GoodAndBad, Pairs, Steps

    prefix, _, name = metric.rpartition("/")
    names = ("loss", *Pairs.names, *Steps.names, *GoodAndBad.names)
    return name in names and prefix in ("eval", *(f"eval/{held_out}" for held_out in config.dataset.held_out))


def _optimizer_problems(config: Config) -> Iterator[str]:
    path, optimizer = "train_parameters.optimizer", config.train_parameters.optimizer
    name, row = optimizer.name, OPTIMIZERS.get(optimizer.name)
    if name == "adamw" and not optimizer.arguments:
        return
    if row is None and not is_plugin(name):
        rule = "must be a known optimizer"
        fix = nearest(name, OPTIMIZERS) or f"Use one of {', '.join(OPTIMIZERS)}, or file.py:NAME."
        if name.startswith("paged_"):
            rule = "cannot be used: it is an optimizer of bitsandbytes, which does not take sharded weights"
            fix = "Use adamw8bit; with an engine also engine.offload_optimizer: true."
        yield refuse(config, f"{path}.name", rule, fix)
        return
    if row is not None and not is_installed(row.package):
        fix = "Run `pip install 'vectorlm[optimizers]'`."
        yield refuse(config, f"{path}.name", f"needs the package {row.package}", fix)
        return
    taken, plain = accepted(name), to_plain(optimizer)
    changed = {
        key for key, setting in settings_of(OptimizerSettings).items() if plain[key] != setting.default
    }
    given = {key: plain[key] for key in changed - {"name", "arguments"}} | dict(optimizer.arguments)
    # Silent: a setting would have no effect.
    for key in sorted(given.keys() - taken):
        fix = nearest(key, taken - plain.keys()) or "Leave it out."
        yield refuse(config, f"{path}.{key}", f"must be an argument of {name}", fix, given[key])
    # Silent: replicas would round to different weights.
    rounds, strategy = optimizer.arguments.get("bf16_stochastic_round"), "train_parameters.sharding_strategy"
    if rounds and config.train_parameters.model.sharding_strategy in ("NO_SHARD", "HYBRID_SHARD"):
        rule = f"cannot keep replicas with {path}.bf16_stochastic_round, which rounds them differently"
        yield refuse(config, strategy, rule, "Use FULL_SHARD.")
    if given.keys() - taken:
        return
    # Check the values. This imports torch, which AdamW does not need.
    import torch

    try:
        make_optimizer(optimizer, torch.nn.ModuleList([torch.nn.Linear(2, 2)]), has_gpu())
    except Exception as error:
        rule = f"cannot be created: {raised_at(error)}"
        yield refuse(config, f"{path}.name", rule, "Correct its arguments.")


def _unused_engine(config: Config) -> Iterator[str]:
    given = [path for path in config.origins if path.startswith(("engine.", "evaluation."))]
    is_off = "evaluation" in config.origins and not any(path.startswith("evaluation.") for path in given)
    # Silent: nothing would be sampled.
    if given and not is_off and "evaluation.prompts" not in given:
        yield (
            f"missing setting 'evaluation.prompts' (the prompts to answer during fine-tuning), which '{given[0]}' "
            f"({config.origins[given[0]]}) needs. Add it, or leave the sections 'engine' and 'evaluation' out."
        )


def _score_problems(config: Config) -> Iterator[str]:
    evaluation = config.evaluation
    yield from weight_problems(config, "evaluation.rewards", evaluation.rewards)
    # Silent: these metrics would not be logged.
    num = evaluation.sampling_params.get("n") or 1
    if (largest := max(evaluation.at_k, default=1)) > num:
        rule = f"must be at most sampling_params.n={num}, the number of answers per question"
        yield refuse(config, "evaluation.at_k", rule, f"Set n to {largest}.")
    # Silent: it would apply to nothing.
    names = {*config.evaluation_rewards, *config.held_out_rewards.values()}
    for name, value in evaluation.thresholds.items():
        if name not in names and name not in map(short_name, names):
            fix = nearest(name, map(short_name, names)) or "Leave it out."
            rule = "does not match a reward of the evaluation"
            yield refuse(config, f"evaluation.thresholds.{name}", rule, fix, value)
    # Silent: one would overwrite the other.
    taken = [short_name(name) for name in [*config.evaluation_rewards][1:]] + list(config.held_out_rewards)
    if len(set(taken)) < len(taken):
        rule = "must have unique names in metrics, which also hold the names of sources"
        yield refuse(config, "evaluation.rewards", rule, "Rename one.")


def _argument_problems(config: Config) -> Iterator[str]:
    """Find arguments of the engine that are unknown, belong elsewhere or have impossible values."""
    engine = config.engine
    known = fields_of("engine/arg_utils.py", "EngineArgs") if engine.inference == "vllm" else ()
    for name, value in engine.engine_args.items():
        # Silent: it overrides the other setting.
        if (place := _ENGINE_SETTINGS_ELSEWHERE.get(name)) and (
            known or name in ("model", "sampling_params")
        ):
            yield refuse(config, f"engine.{name}", "must be set elsewhere", f"Set '{place}' instead.", value)
        # Costs more than a minute: the engine starts after models are loaded.
        elif known and name not in known and name not in _SECRETS:
            # VectorLM's section had settings of evaluations too.
            old = old_names(f"{OLD_SECTION}.")
            near = closest(name, [*settings_of(EngineSettings), *known, *old])
            fix = "Leave it out." if near is None else f"Did you mean {old.get(near, near)!r}?"
            yield refuse(
                config, f"engine.{name}", "is neither a setting nor an argument of vLLM's engine", fix, value
            )


def _engine_problems(config: Config, ranks_per_node: int) -> Iterator[str]:
    engine, evaluation = config.engine, config.evaluation
    if not config.has_engine:
        yield from _unused_engine(config)
        return
    # Costs more than a minute: the engine starts after models are loaded.
    if engine.inference == "server" and engine.dtype != "auto":
        yield refuse(
            config, "engine.dtype", "does not reach a server", "Leave it out, and start the server with it."
        )
    # Costs more than a minute: the ranks wait for the engine after models are loaded.
    if engine.inference not in BACKENDS:
        from vectorlm.sampling.sampler.scheduler import backend_class

        try:
            backend_class(engine.inference)
        except (ConfigError, EngineError) as error:
            yield f"engine.inference: {error}"
    # Costs more than a minute: the first evaluation comes after models are loaded.
    if evaluation.tasks and (inference := engine.inference) in ("transformers", "server"):
        rule = f"needs vLLM's outputs, which inference: {inference} does not have"
        fix = "Use inference: vllm, or `vectorlm evaluate --tasks` on the final model."
        yield refuse(config, "evaluation.tasks", rule, fix)
    yield from _score_problems(config)
    yield from _argument_problems(config)
    yield from _kernel_problems(config)
    yield from _device_problems(config, ranks_per_node)
    # Costs more than a minute: the engine reads them at its first prompt.
    asked = config.sampling_params
    for path, parameters in asked.items() if engine.inference in ("vllm", "server") else ():
        yield from sampling_problems(parameters, path, config.origins)
    if engine.inference == "transformers":
        # This imports torch, which other engines do not need here.
        from vectorlm.sampling.backends.generation import read_parameters

        for path, parameters in asked.items():
            try:
                read_parameters(parameters)
            except EngineError as error:
                yield f"{path} cannot be used with inference: transformers: {error}"
    # Costs more than a minute: vLLM looks at them at the first prompt, and other engines never stop there.
    size = vocab_size(Path(config.model))
    for path, parameters in asked.items():
        # Silent: rewards would read empty texts.
        if parameters.get("detokenize") is False:
            fix = "Leave it out."
            yield refuse(config, f"{path}.detokenize", "must be true, or answers have no text", fix, False)
        stops = parameters.get("stop_token_ids")
        if isinstance(stops, list | tuple) and any(
            isinstance(token, int) and token >= size for token in stops
        ):
            rule = f"must hold tokens of the model, below {size}"
            yield refuse(config, f"{path}.stop_token_ids", rule, "Leave it out.", stops)


def _device_problems(config: Config, ranks_per_node: int) -> Iterator[str]:
    """Find numbers of workers that do not fit the engine's devices."""
    engine = config.engine
    size, num = (engine.engine_args.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "data"))
    counts = {"the number of ranks on a node": ranks_per_node}
    most, rule = ranks_per_node, f"must be at most the number of ranks on a node, {ranks_per_node}"
    fix = "Use less, or start more ranks."
    overlap = config.overlap
    is_split = overlap is not None and overlap.placement == "split"
    if overlap is not None and is_split:
        most = overlap.engine_devices or 1
        counts |= {"rl.async.engine_devices": most} if has_gpu() else {}
        rule, fix = f"must be at most rl.async.engine_devices, {most}", "Use less, or give it more devices."
    are_counts = isinstance(size, int) and isinstance(num, int) and size > 0 < num
    used = size * num if are_counts else most
    # Silent: the engine would take devices that belong to no rank of this run.
    if isinstance(size, int) and size > max(most, 1) and has_gpu():
        yield refuse(config, "engine.tensor_parallel_size", rule, fix)
    # Silent: the other devices would be idle. A server has its own devices, and a user's backend its own rule.
    elif is_split and has_gpu() and engine.inference in ("vllm", "transformers") and used != most:
        rule = f"must equal tensor_parallel_size x data_parallel_size of the engine, {used}"
        fix = f"Use {used}, or change these sizes in the section 'engine'."
        yield refuse(config, "rl.async.engine_devices", rule, fix, most)
    # Costs more than a minute: the engine starts after models are loaded.
    for what, count in counts.items() if isinstance(num, int) and num > 0 else ():
        if count % num:
            fix = f"Use {math.gcd(num, count)}, for example."
            yield refuse(config, "engine.data_parallel_size", f"must divide {what}, {count}", fix, num)


def _kernel_problems(config: Config) -> Iterator[str]:
    engine = config.engine
    # Costs more than a minute: the engine starts after models are loaded. Another method would be silent.
    for name, value, rule, fix in engine.unsupported({"dtype": engine.dtype, **engine.engine_args}):
        yield refuse(config, f"engine.{name}", rule, fix, value)
    # Costs more than a minute: vLLM refuses two of them at the first prompt. The third is not tested: silent.
    if engine.inference == "vllm" and engine.engine_args.get("speculative_config") is not None:
        for path, parameters in config.sampling_params.items():
            for name in ("min_p", "logit_bias", "structured_outputs"):
                if parameters.get(name):
                    rule = "cannot be used with engine.speculative_config"
                    yield refuse(config, f"{path}.{name}", rule, "Leave one of them out.", parameters[name])


def _lora_problems(config: Config) -> Iterator[str]:
    # Costs more than a minute: the engine starts, and the model is read, first.
    if config.train_parameters.share_base:
        yield from (refusal for _, refusal in sharing_problems(config, has_gpu()))
    options = config.train_parameters.lora_peft_config
    if options is None:
        return
    # Silent: the exported adapters would belong to a base that is saved nowhere.
    if config.train_parameters.merge_adapters:
        rule = "cannot be used with lora_peft_config: the merged base is not saved, so nobody could load the adapters"
        fix = "Leave lora_peft_config out, or name a folder of `vectorlm export --merge` as the model."
        yield refuse(config, "train_parameters.merge_adapters", rule, fix)
    # Costs more than a minute: adapters are made after the model has been loaded.
    known = set().union(*(fields_of(path, name, "peft") for path, name in LORA_CONFIG))
    for option, value in options.items():
        if known and option not in known:
            fix = (
                "Did you mean 'r'?"
                if option in ("rank", "lora_r", "lora_rank")
                else nearest(str(option), known)
            )
            rule = "must be an argument of peft.LoraConfig"
            yield refuse(config, f"{_LORA}.{option}", rule, fix or "Leave it out.", value)
    # Silent: an engine would not sample from the trained weights.
    mode = config.engine.lora_mode_of_run if config.has_engine else "merged"
    options = {option: value for option, value in options.items() if not known or option in known}
    kind = WRITES if config.reward_model is None else SCORES
    # `_four_bit_problems` reports these itself.
    refused = [] if four_bit_method_of(config.model) else refused_options(options, mode)
    for option, value, rule, fix in (*refused, *refused_starts(options, kind)):
        yield refuse(config, f"{_LORA}.{option}", rule, fix, value)
    if not config.has_engine:
        return
    # Costs more than a minute: vLLM refuses the adapters at the first update.
    rank, limit = largest_rank(options), config.engine.engine_args.get("max_lora_rank")
    if isinstance(limit, int) and rank > limit:
        rule = f"must be at least the largest rank of the adapters, {rank}"
        fix = "Leave it out: it follows from lora_peft_config."
        yield refuse(config, "engine.max_lora_rank", rule, fix)


def _quantization_problems(config: Config) -> Iterator[str]:
    # All of these cost more than a minute: the model is loaded first.
    train, path = config.train_parameters, "train_parameters.quantization"
    if not is_installed("bitsandbytes"):
        fix = "Run `pip install 'vectorlm[qlora]'`, or leave it out."
        yield refuse(config, path, "needs the package bitsandbytes", fix)
    if train.lora_peft_config is None:
        yield refuse(config, path, "needs adapters to train: the base is frozen", "Add lora_peft_config.")
    if "quantization_config" in (description_of(Path(config.model)) or {}):
        fix = "Name the model in 16 or 32 bits."
        yield refuse(config, "model", f"cannot be quantised already with {path}", fix)
    if has_experts(description_of(Path(config.model)) or {}):
        rule = f"cannot have experts with {path}, which would leave them in 16 or 32 bits"
        yield refuse(config, "model", rule, "Leave quantization out, or choose a dense model.")
    if train.model.cpu_offload:
        fix = "Leave one of them out."
        yield refuse(config, "train_parameters.cpu_offload", f"cannot be used with {path}", fix)
    if train.model.low_cpu_mem_usage:
        fix = "Leave it out."
        rule = f"cannot be used with {path}, where every rank holds the whole model"
        yield refuse(config, "train_parameters.low_cpu_mem_usage", rule, fix)
    # The base is sent once. Merged weights would be sent at every update, and would differ from the trainer's.
    yield from _frozen_base_problems(config, path, names_options=not config.has_engine)


def _frozen_base_problems(config: Config, what: str, names_options: bool) -> Iterator[str]:
    """Yield the settings that would replace or train the base of adapters; `what` is the reason that it is frozen."""
    if config.has_engine and config.engine.lora_mode_of_run != "adapter":
        fix = "Use inference: vllm with lora_mode: adapter."
        yield refuse(config, "engine.lora_mode", f"must be adapter with {what}", fix)
    options = (config.train_parameters.lora_peft_config or {}) if names_options else {}
    for option, value, _, _ in refused_options(options, "adapter"):
        rule = f"cannot be used with {what}: it reads or trains the base"
        yield refuse(config, f"{_LORA}.{option}", rule, "Leave it out.", value)


def _four_bit_problems(config: Config) -> Iterator[str]:
    """Yield the settings that cannot be used with a model in 4 bits; nothing for other models."""
    # All of these cost more than a minute: the engine starts, and the model is read, first.
    for setting, folder in config.model_folders.items():
        described = description_of(Path(folder)) or {}
        is_packed = four_bit_method(described) is not None
        if is_packed and (reason := why_not_unpacked(described)) is not None:
            yield refuse(config, setting, f"cannot be read: {reason}", "Use another checkpoint.", folder)
        if is_packed and has_experts(described):
            rule = "cannot have experts in 4 bits: they are not supported"
            yield refuse(config, setting, rule, "Use the model in 16 bits.", folder)
    train, engine = config.train_parameters, config.engine
    if four_bit_method_of(config.model) is None:
        return
    what = "a model in 4 bits"
    if train.model.exact:
        yield refuse(config, "train_parameters.exact", f"cannot be used with {what}", "Leave it out.")
        return
    if train.lora_peft_config is None:
        yield refuse(config, _LORA, f"must be set with {what}, whose weights are frozen", "Add it.")
        return
    yield from _frozen_base_problems(config, what, names_options=True)
    if not config.has_engine:
        return
    if engine.quantization is not None:
        rule = f"cannot be used with {what}"
        yield refuse(config, "engine.quantization", rule, "Leave it out.")
    if config.engine_dtype(has_gpu()) in ("float32", "float"):
        rule = f"must have 16 bits with {what}, because the kernels compute in them"
        yield refuse(config, "engine.dtype", rule, "Use bfloat16.", config.engine_dtype(has_gpu()))
    if engine.turn.sleep == "all":
        rule = f"cannot be all with {what}: no update would bring the base back"
        yield refuse(config, "engine.sleep", rule, "Use kv_cache.")


_EXACT_VALUES: Mapping[str, tuple[Any, ...]] = {
    **{"train_parameters.dtype": ("float32",), "train_parameters.use_mp": (False, None)},
    **{f"train_parameters.{name}": (False,) for name in ("fp32_head", "compile")},
    **{"train_parameters.quantization": (None,), "train_parameters.context_parallel": (1,)},
    "rl.async.max_staleness": (0, None),
}
"""Values of settings with which training can be exact; `EngineSettings.exact_problems` checks the engine's settings."""


def _exact_problems(config: Config) -> Iterator[str]:
    # All of these cost more than a minute: the models are loaded first, or the first step ends the run.
    path, engine, plain = "train_parameters.exact", config.engine, to_plain(config)
    for name, allowed in _EXACT_VALUES.items():
        if value_at(plain, name) not in allowed:
            yield refuse(config, name, f"cannot be used with {path}", f"Use {show(allowed[0])}.")
    arguments = {"dtype": config.engine_dtype(is_cuda=False), **engine.engine_args}
    for name, value, rule, fix in engine.exact_problems(arguments):
        yield refuse(config, f"engine.{name}", f"{rule} ({path})", fix, value)
    if has_gpu():
        yield refuse(config, path, "needs a machine without CUDA", "Leave it out.")
    description = description_of(Path(config.model))
    if description is not None and (reason := why_not_exact(description)) is not None:
        yield refuse(config, "model", f"cannot be used with {path}: {reason}", "Choose another model.")


def _secret_problems(config: Config) -> Iterator[str]:
    """Yield secrets, found by their names or in an address."""
    # Silent: a run saves its config where others may read it, and sends it to its trackers.
    places: dict[str, Any] = {"wandb_config": config.wandb_config}
    places["engine"] = config.engine.engine_args
    places |= {f"trackers.{name}": arguments for name, arguments in config.trackers.items()}
    for path, given in places.items():
        for name in given if isinstance(given, Mapping) else ():
            if name in _SECRETS and isinstance(given[name], str):
                rule = "cannot be in a config, which a run saves where others may read it"
                fix = f"Set the environment variable {_SECRETS[name]} instead."
                # Without the origin, because a command-line option would hold the secret.
                yield describe_refusal(f"{path}.{name}", "…", rule, fix)
    for path, value in flat(to_plain(config)):
        # The name of a reward may hold an address.
        texts = value if isinstance(value, list | tuple) else (value,)
        if any(PASSWORD.search(str(text)) for text in (path, *texts)):
            rule = "cannot hold a password: a run saves its config where others may read it"
            yield describe_refusal(PASSWORD.sub("://…@", path), "…", rule, "Remove it from the address.")


def _unread_settings(config: Config) -> Iterator[str]:
    """Yield settings that were changed and have no effect, by their `ReadIf`."""
    plain = to_plain(config)
    # Some prompts bring their environment.
    if config.rl is not None and (environment := config.rl.collect.environment_of("")) is not None:
        plain["rl"]["environment"] = environment
    for path, setting in all_settings().items():
        value = value_at(plain, path)
        if value is None or value == setting.default:
            continue
        for other in setting.read_if:
            found = value_at(plain, other.path)
            is_read = found in other.values if other.values else found or other.path in config.origins
            if not (is_read or any(value_at(plain, name) for name in other.also)):
                rule = f"has no effect with {other.path}={show(found)}"
                yield refuse(config, path, rule, other.fix or f"Leave it out, or set {other.path}.", value)
