"""The settings of training; the config nests them in ``train_parameters`` and ``train_parameters.sampler``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from vectorlm.settings import (
    Betas,
    ClippingNorm,
    LearningRate,
    NonNegativeFloat,
    PathText,
    PositiveFloat,
    PositiveInt,
    PromptSource,
    ReadIf,
    SaveFrequency,
    Separator,
    Text,
    UnitInterval,
    also_written,
)

Recomputation = bool | PositiveInt | Literal["keep_attention", "offload"]
ShardingStrategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]

ScheduleName = Annotated[
    Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "reduce_lr_on_plateau",
        "greedy",
        "plateau-with-warmup",
    ],
    also_written({"plataeu-with-warmup": "plateau-with-warmup"}),
]
PLATEAU_NAMES = ("plateau-with-warmup", "plataeu-with-warmup", "reduce_lr_on_plateau")
"""Spellings of the plateau schedule; the second is VectorLM's own."""
BY_LOSS = (*PLATEAU_NAMES, "greedy")
"""Schedules that follow the evaluation loss."""
WARMS_UP = ReadIf(
    "train_parameters.lr_scheduler_type",
    tuple(name for name in get_args(get_args(ScheduleName)[0]) if name != "constant"),
    "Use constant_with_warmup.",
)
WITH_CHECKPOINTS = ReadIf("train_parameters.checkpointing_enabled")
WITH_QUESTIONS = ReadIf(
    "train_parameters.sampler.prompts",
    fix="Leave it out, or name prompts to evaluate on.",
    also=("rl.sources",),
)
BY_TOKENS = "Micro-batches follow from rl.max_tokens_per_micro_batch."

GATHER_ONCE_BYTES = 2 << 30
"""Up to here whole weights and gradients, in fp32, stay on every rank for all micro-batches of an optimizer step."""


def gathers_once(num_parameters: int, num_trainable: int, world_size: int) -> bool:
    """Whether a model is so small that an optimizer step gathers its weights once, and sums its gradients once.

    One rank has nobody to exchange with, and would only hold a copy of its weights and gradients.
    """
    return world_size > 1 and 4 * (num_parameters + num_trainable) <= GATHER_ONCE_BYTES


CHUNK_BYTES = 256 << 20
"""Most bytes of a chunk of logits in fp32."""


def chunk_tokens(vocab_size: int) -> int:
    """Return how many tokens' logits exist at a time: 2,048, or fewer of a vocabulary above 32,768."""
    return min(2048, max(1, CHUNK_BYTES // (4 * vocab_size)))


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """How the model is loaded and sharded."""

    sharding_strategy: ShardingStrategy = "FULL_SHARD"
    """What FSDP shards: everything, gradients and optimizer state, nothing, or everything within a node."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights. bfloat16 halves them and optimizer state, and loses small updates; adapters stay fp32."""
    quantization: Literal["nf4"] | None = None
    """Hold the linear layers of the frozen base in 4 bits, whole on each rank (QLoRA: with `lora_peft_config`)."""
    use_mp: bool | None = None
    """Mixed precision: compute in bfloat16, sum gradients in float32. null means on CUDA alone."""
    use_activation_checkpointing: Recomputation = False
    """Recompute activations in the backward pass instead of keeping them: of all blocks, of every k-th, of all but
    attention (`keep_attention`), or with what blocks begin with on the host (`offload`, CUDA)."""
    context_parallel: PositiveInt = 1
    """Ranks that share the tokens of each pass (Ulysses): long sequences in less memory each. Rows must be packed."""
    pack_rows: bool = True
    """Lay rows end to end, without padding, and compute what a group's rows begin with once, where attention allows."""
    compile: bool = False
    """Compile the transformer blocks (torch.compile): the first steps take minutes. Needs a C++ compiler on CPU."""
    use_flash_attention: bool = False
    """Use Flash Attention where the model supports it (CUDA; elsewhere torch's attention); rows are padded then."""
    low_cpu_mem_usage: bool | None = None
    """Load the weights on rank 0 alone; other ranks receive their shards from it. null means with several ranks."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state on the host, where AdamW steps (CUDA); blocks visit the device."""

    def computes_in_bf16(self, is_cuda: bool) -> bool:
        """Whether the model computes in bfloat16 on this kind of device."""
        return self.dtype == "bfloat16" or (is_cuda if self.use_mp is None else self.use_mp)

    def dtype_on(self, is_cuda: bool) -> Literal["bfloat16", "float32"]:
        """What the model computes in, on this kind of device."""
        return "bfloat16" if self.computes_in_bf16(is_cuda) else "float32"

    def loads_on_main(self, world_size: int) -> bool:
        """Whether rank 0 alone reads the weights; quantised, each rank holds them whole."""
        if self.quantization is not None:
            return False
        return world_size > 1 if self.low_cpu_mem_usage is None else self.low_cpu_mem_usage


PROFILE_STEPS = 3
"""How many steps the option `--profile` records."""


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """Whether a run is profiled."""

    profile_steps: Annotated[
        int, Field(ge=0, le=20, description="an integer from 0 to 20", examples=["3"])
    ] = 0
    """Steps of rank 0 that torch's profiler records, after two others; 0 records none. `--profile` sets 3."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The optimizer and its arguments; the defaults are those of `torch.optim.AdamW`."""

    name: Text = "adamw"
    """`adamw`, `adamw8bit`, `adamw4bit`, `muon`, `adafactor`, `sgd`, or `file.py:NAME` of a function of the parameters
    that returns an optimizer of torch. Paged ones of bitsandbytes take no sharded weights and are refused."""
    lr: LearningRate
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    betas: Betas = (0.9, 0.999)
    """Decay rates of the running averages of the gradient and of its square."""
    eps: NonNegativeFloat = 1e-8
    """Added to the denominator of the step."""
    amsgrad: bool = False
    """Divide by the largest average of squared gradients so far: a third number for each trained weight."""
    maximize: bool = False
    """Step up the gradient, so that the loss grows."""
    foreach: bool | None = None
    """Step all weights in few calls, with a copy of the state; null leaves the choice to torch."""
    capturable: bool = False
    """Let a CUDA graph capture the step (CUDA)."""
    differentiable: Literal[False] = False
    """Let autograd follow the step; accepted as false, so that files may list every argument."""
    fused: bool | None = None
    """Step in one kernel. null means on CUDA, unless `foreach` is true."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the optimizer, such as `{momentum: 0.9}` of sgd; they may also stand beside `name`."""


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """How the learning rate changes over the run."""

    lr_scheduler_type: ScheduleName = "cosine"
    """Schedule of transformers, or `plateau-with-warmup` (also written `plataeu-with-warmup`)."""
    lr_scheduler_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The schedule's own arguments in transformers, such as `{min_lr_rate: 0.1}` of cosine_with_min_lr."""
    warmup_ratio: Annotated[UnitInterval, WARMS_UP] = 0.0
    """Share of all optimizer steps spent on a linear warmup."""


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How long fine-tuning trains, and how often it evaluates and saves."""

    epochs: Annotated[PositiveInt, ReadIf("dataset", fix="Use rl.max_steps.")] = 1
    """Passes over the training dataset."""
    max_grad_norm: ClippingNorm = 1.0
    """Gradient norm above which gradients are scaled down."""
    gradient_accumulation_steps: Annotated[PositiveInt, ReadIf("dataset", fix=BY_TOKENS)] = 1
    """Micro-batches per optimizer step on each rank."""
    logging_steps: Annotated[
        PositiveInt, ReadIf("dataset.eval_ds", fix="Set dataset.eval_ds, or sampler.sample_frequency.")
    ] = 50
    """Optimizer steps between two evaluations."""
    save_frequency: Annotated[
        SaveFrequency, ReadIf("dataset", fix="Use rl.save_every."), WITH_CHECKPOINTS
    ] = 0.25
    """Up to 1 the share of an epoch between two checkpoints, above 1 the optimizer steps between them."""
    device_peak_tflops: PositiveFloat | None = None
    """Peak speed of one device, in 1e12 operations per second, for `perf/mfu`; null leaves that metric out."""


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings:
    """Training of a reward model on pairs, by the Bradley-Terry loss, or on labels of steps."""

    center_coef: Annotated[NonNegativeFloat, ReadIf("reward_model.step_separator", (None,))] = 0.0
    """Weight of the squared sum of a pair's scores in the loss, which keeps scores near 0; 0.01 is usual."""
    step_separator: Separator | None = None
    """Trains on steps, each of which this text ends, and its score says whether the step is right; must equal
    `dataset_preprocess.step_separator`. null trains on pairs."""


@dataclass(frozen=True, kw_only=True)
class HandoverSettings:
    """What makes room on the devices while the other side works."""

    sleep: Literal["none", "kv_cache", "all"] = "none"
    """What the engine gives up while the trainer works: nothing, its KV cache, or its weights too (CUDA)."""
    offload_optimizer: bool = False
    """Keep the optimizer's state on the host while the engine samples (CUDA)."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Which prompts the engine answers during training, and how the answers are scored."""

    sample_frequency: Annotated[
        PositiveInt | None, replace(WITH_QUESTIONS, also=("rl.sources", "train_parameters.sampler.tasks"))
    ] = None
    """Optimizer steps between two evaluations (with `rl` steps); null evaluates before and after training alone."""
    prompts: PromptSource | None = None
    """The prompts to evaluate on: texts, or a source like `rl.prompts`. With `rl` null evaluates nothing."""
    output_jsonl_path: Annotated[PathText | None, WITH_QUESTIONS] = None
    """File of the samples; null means `samples.jsonl` in `output_dir`. A file of another run is kept beside it."""
    reward: Annotated[Text | None, replace(WITH_QUESTIONS, also=())] = None
    """Name of the reward that scores each completion (for example `countdown`), logged as `eval/accuracy`."""
    further_rewards: Annotated[
        tuple[str, ...], Field(strict=False), ReadIf("train_parameters.sampler.reward")
    ] = ()
    """More rewards of these completions, logged as `eval/reward/NAME` and `eval/accuracy/NAME`."""
    at_k: Annotated[tuple[PositiveInt, ...], Field(strict=False), WITH_QUESTIONS] = ()
    """The k of `eval/pass_at_K` and `eval/maj_at_K`, up to `n` of `sampling_params`; none stand for 2, 4, 8 …"""
    tasks: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Tasks of the lm-evaluation-harness, by name or YAML file, that vLLM's engine answers at each evaluation too; they
    are logged as `eval/TASK/METRIC`."""


@dataclass(frozen=True, kw_only=True)
class KeepSettings:
    """What a run keeps, and whether it stops once it no longer improves.

    The best evaluation is the lowest `eval/loss` of fine-tuning, or the highest `eval/accuracy` under `rl`, unless
    `best_metric` names another metric.
    """

    keep_checkpoints: Annotated[PositiveInt, WITH_CHECKPOINTS] = 2
    """Newest checkpoints that stay on disk."""
    keep_best: Annotated[bool, WITH_CHECKPOINTS] = False
    """Save a checkpoint at each evaluation that is the best so far, and keep the best one beside the newest."""
    final_model: Annotated[Literal["last", "best"], ReadIf("train_parameters.keep_best")] = "last"
    """Which weights `final-model` holds: those of the last step, or of the best evaluation."""
    epoch_models: Annotated[bool, ReadIf("dataset", fix="Use rl.save_every and `vectorlm export`.")] = False
    """Export the model at the end of each epoch too, as `epoch-1-model` and so on."""
    best_metric: Annotated[
        Text | None, ReadIf("train_parameters.keep_best", also=("train_parameters.early_stopping_patience",))
    ] = None
    """Metric of the evaluations that says which is the best, such as `eval/pass_at_4`."""
    best_metric_mode: Annotated[
        Literal["max", "min"] | None, ReadIf("train_parameters.best_metric", fix="Name best_metric.")
    ] = None
    """Whether the highest or the lowest value of `best_metric` is the best. null takes the
    lowest of a loss or a perplexity, what the harness says of its tasks, and the highest of rewards and all others."""
    early_stopping_patience: PositiveInt | None = None
    """Stop after this many evaluations in a row without improvement; null trains to the end."""
    early_stopping_min_delta: Annotated[
        NonNegativeFloat, ReadIf("train_parameters.early_stopping_patience")
    ] = 0.0
    """How much better than the best so far an evaluation must be to count as an improvement."""
