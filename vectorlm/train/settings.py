"""Settings for training: the sections ``train_parameters`` and ``evaluation`` of a config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, get_args

from annotated_types import Predicate
from pydantic import Field

from vectorlm.data.settings import Overlong, PromptSource
from vectorlm.settings import (
    Betas,
    ClippingNorm,
    LearningRate,
    NonNegativeFloat,
    PathText,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    RewardWeights,
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
"""Names of the plateau schedule: ours, the original VectorLM's spelling, and transformers'."""
BY_LOSS = (*PLATEAU_NAMES, "greedy")
"""Schedules that follow the evaluation loss."""
WARMS_UP = ReadIf(
    "train_parameters.lr_scheduler_type",
    tuple(name for name in get_args(get_args(ScheduleName)[0]) if name != "constant"),
    "Use constant_with_warmup.",
)
WITH_CHECKPOINTS = ReadIf("train_parameters.checkpointing_enabled")
WITH_QUESTIONS = ReadIf(
    "evaluation.prompts",
    fix="Leave it out, or name prompts to evaluate on.",
    also=("rl.sources",),
)
KEPT_PASSES = 4
"""Number of passes whose pixels are kept, because several models compute the same pass."""
BY_TOKENS = "Micro-batches follow from rl.max_tokens_per_micro_batch."

GATHER_ONCE_BYTES = 2 << 30
"""Maximum size, in fp32, of weights and gradients that every rank keeps whole for all micro-batches of a step."""
COPY_SHARE = 16
"""Divisor of the device's memory: a single rank on CUDA keeps copies up to 1 / `COPY_SHARE` of the memory."""


def gathers_once(
    num_parameters: int,
    num_trainable: int,
    world_size: int,
    computes_in_bf16: bool = False,
    cuda_bytes: int | None = None,
) -> bool:
    """Return whether an optimizer step gathers the weights once and sums the gradients once; small models do.

    A single rank exchanges nothing. For it, a copy saves only casting all weights to bfloat16 twice in each pass.
    `cuda_bytes` is the memory of the CUDA device; None on CPU.
    """
    if world_size == 1:
        limit = GATHER_ONCE_BYTES if cuda_bytes is None else cuda_bytes // COPY_SHARE
        return computes_in_bf16 and 2 * num_parameters + 4 * num_trainable <= limit
    return 4 * (num_parameters + num_trainable) <= GATHER_ONCE_BYTES


def stays_plain(world_size: int, computes_in_bf16: bool, cpu_offload: bool) -> bool:
    """Return whether a model is trained without FSDP, which on one rank without casts would only copy the weights."""
    return world_size == 1 and not computes_in_bf16 and not cpu_offload


CHUNK_BYTES = 256 << 20
"""Maximum size of a chunk of logits, in fp32."""


def chunk_tokens(vocab_size: int) -> int:
    """Return the number of tokens whose logits exist at a time: 2,048, or fewer for a vocabulary over 32,768."""
    return min(2048, max(1, CHUNK_BYTES // (4 * vocab_size)))


RepoId = Annotated[
    str,
    Predicate(lambda name: re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None),
    Field(description="`owner/name` of a repository", examples=["me/my-model"]),
]


@dataclass(frozen=True, kw_only=True)
class PushSettings:
    """Settings for uploads to the Hugging Face Hub."""

    repo_id: RepoId
    """Repository, `owner/name`; it is created if it does not exist. The final model goes to its branch `main`."""
    private: bool = False
    """Whether a new repository is private."""
    checkpoints: bool = False
    """Whether to upload the model of every checkpoint too, to the revision `step-N`."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Settings for loading and sharding the model."""

    sharding_strategy: ShardingStrategy = "FULL_SHARD"
    """Tensors that FSDP shards: all of them, gradients and optimizer state, none, or all within a node."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights. bfloat16 halves weights and optimizer state, but loses small updates; adapters stay fp32."""
    quantization: Literal["nf4"] | None = None
    """Keep the linear layers of the frozen base in 4 bits, whole on each rank (QLoRA, with `lora_peft_config`)."""
    use_mp: bool | None = None
    """Mixed precision: compute in bfloat16, sum gradients in float32. null means on CUDA only."""
    fp32_head: bool = False
    """Compute logits in float32, in the trainer and in the engine. Useful if the model computes in bfloat16: the
    log-probabilities of engine and trainer then differ less, because logits are not rounded."""
    exact: Annotated[bool, ReadIf("rl")] = False
    """Let trainer and engine compute the same log-probabilities, bit for bit. The run stops if one differs in the first
    optimizer step of a batch. Needs CPU, float32 and vLLM. `receiver: auto` means `live`, `lora_mode: auto` merged."""
    use_activation_checkpointing: Recomputation = False
    """Recompute activations in the backward pass instead of storing them. true: in all blocks; a number k: in every
    k-th block; `keep_attention`: all but attention; `offload`: in all blocks, with their inputs on the host (CUDA)."""
    context_parallel: PositiveInt = 1
    """Ranks that share the tokens of each pass (Ulysses), which saves memory for long sequences. Needs `pack_rows`."""
    tensor_parallel: PositiveInt = 1
    """Ranks that split the matrices of each layer, by transformers' plan for the model. They train on the same rows.
    Must divide the numbers of attention heads, of key-value heads and of a node's ranks."""
    expert_parallel: PositiveInt = 1
    """Ranks that split the experts of each layer, by transformers' plan for the model. They train on the same rows.
    Must be a multiple of `tensor_parallel`, and divide the numbers of experts and of a node's ranks."""
    pack_rows: bool = True
    """Concatenate rows without padding, and compute shared prefixes once, if the model's attention supports it."""
    compile: bool = False
    """Compile the transformer blocks (torch.compile): the first steps take longer. Needs a C++ compiler on CPU."""
    use_flash_attention: bool = False
    """Use Flash Attention if the model supports it (CUDA; elsewhere torch's attention). Rows are padded then."""
    low_cpu_mem_usage: bool | None = None
    """Load the weights on rank 0 only, which sends the other ranks their shards. null means with several ranks."""
    router_aux_loss_coef: NonNegativeFloat | None = None
    """Weight of the load-balancing loss of a mixture-of-experts model; 0 only measures it. null means the
    `router_aux_loss_coef` of its config.json if `output_router_logits` is true there, as in transformers; else 0."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state on the host, and run AdamW there; each block is copied to the device
    when it computes (CUDA)."""

    freeze: Annotated[tuple[Literal["vision", "projector", "language"], ...], Field(strict=False)] = (
        "vision",
    )
    """Parts of a vision-language model that are not trained, except for adapters. The projector is the module between
    vision model and language model; Qwen's merger is part of its vision model."""

    def computes_in_bf16(self, is_cuda: bool) -> bool:
        """Whether the model computes in bfloat16 on this kind of device."""
        return self.dtype == "bfloat16" or (is_cuda if self.use_mp is None else self.use_mp)

    def dtype_on(self, is_cuda: bool) -> Literal["bfloat16", "float32"]:
        """Type of the computation on this kind of device."""
        return "bfloat16" if self.computes_in_bf16(is_cuda) else "float32"

    @property
    def model_parallel(self) -> int:
        """Number of neighbouring ranks that split one model, and train on the same rows."""
        return max(self.tensor_parallel, self.expert_parallel)

    @property
    def ranks_per_share(self) -> int:
        """Number of neighbouring ranks that train on the same rows."""
        return self.context_parallel * self.model_parallel

    @property
    def unsplit(self) -> ModelSettings:
        """The same settings for a model that is sharded over all ranks and not split."""
        return replace(self, tensor_parallel=1, expert_parallel=1)

    def loads_on_main(self, world_size: int) -> bool:
        """Whether only rank 0 reads the weights; with quantisation every rank does."""
        if self.quantization is not None:
            return False
        return world_size > 1 if self.low_cpu_mem_usage is None else self.low_cpu_mem_usage


PROFILE_STEPS = 3
"""Steps that the option `--profile` records."""


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """Settings for profiling a run."""

    profile_steps: Annotated[
        int, Field(ge=0, le=20, description="an integer from 0 to 20", examples=["3"])
    ] = 0
    """Steps of rank 0 that torch's profiler records, after the first two; 0 records none. `--profile` sets 3."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Settings for the optimizer, with the defaults of `torch.optim.AdamW`."""

    name: Text = "adamw"
    """`adamw`, `adamw8bit`, `adamw4bit`, `muon`, `adafactor`, `sgd`, or `file.py:NAME` of a function that takes the
    parameters, and these settings by argument name, and returns a torch optimizer. Paged optimizers of bitsandbytes do
    not support sharded weights."""
    lr: LearningRate
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    betas: Betas = (0.9, 0.999)
    """Decay rates of the running averages of the gradient and its square."""
    eps: NonNegativeFloat = 1e-8
    """Number added to the denominator of the step."""
    amsgrad: bool = False
    """Divide by the largest average of squared gradients seen; stores a third number per trained weight."""
    maximize: bool = False
    """Maximise the loss."""
    foreach: bool | None = None
    """Step all weights in a few calls, with a copy of the state. null means false with `fused`; without it, torch
    decides."""
    capturable: bool = False
    """Let a CUDA graph capture the step (CUDA)."""
    differentiable: Literal[False] = False
    """Only false is supported; the key exists because files may list every argument of AdamW."""
    fused: bool | None = None
    """Step in one kernel. null means true, unless `foreach` is true."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the optimizer, such as `{momentum: 0.9}` for sgd; they may also be written next to `name`."""


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """Settings for the learning rate over the run."""

    lr_scheduler_type: ScheduleName = "cosine"
    """A schedule of transformers, or `plateau-with-warmup` (also written `plataeu-with-warmup`)."""
    lr_scheduler_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the schedule in transformers, such as `{min_lr_rate: 0.1}` for cosine_with_min_lr."""
    warmup_ratio: Annotated[UnitInterval, WARMS_UP] = 0.0
    """Share of all optimizer steps spent on a linear warmup."""


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Settings for the length of fine-tuning, and the intervals of evaluations and checkpoints."""

    epochs: Annotated[PositiveInt, ReadIf("dataset", fix="Use rl.max_steps.")] = 1
    """Passes over the training dataset."""
    max_grad_norm: ClippingNorm = 1.0
    """Gradient norm above which gradients are scaled down."""
    gradient_accumulation_steps: Annotated[PositiveInt, ReadIf("dataset", fix=BY_TOKENS)] = 1
    """Micro-batches per optimizer step on each rank."""
    logging_steps: Annotated[
        PositiveInt, ReadIf("dataset.eval_ds", fix="Set dataset.eval_ds, or evaluation.every.")
    ] = 50
    """Optimizer steps between evaluations."""
    save_frequency: Annotated[
        SaveFrequency, ReadIf("dataset", fix="Use rl.save_every."), WITH_CHECKPOINTS
    ] = 0.25
    """Interval of checkpoints: a share of an epoch up to 1, a number of optimizer steps above 1."""
    device_peak_tflops: PositiveFloat | None = None
    """Peak speed of one device for `perf/mfu`, in 1e12 operations per second; null omits that metric."""


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings:
    """Settings for training a reward model, on pairs (Bradley-Terry loss) or on labels of steps."""

    center_coef: Annotated[NonNegativeFloat, ReadIf("reward_model.step_separator", (None,))] = 0.0
    """Weight of a term that keeps scores near 0, the squared sum of a pair's scores; 0.01 is usual."""
    step_separator: Separator | None = None
    """Text that ends a step; the score there is trained to show whether the step is right. Must equal
    `dataset_preprocess.step_separator`. null trains on pairs."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Evaluations during training: the engine answers prompts, and rewards score the answers."""

    every: Annotated[PositiveInt | None, replace(WITH_QUESTIONS, also=("rl.sources", "evaluation.tasks"))] = (
        None
    )
    """Optimizer steps between evaluations (with `rl`: steps); null evaluates only before and after training."""
    prompts: PromptSource | None = None
    """Prompts to evaluate on: texts, or a source as in `rl.prompts`; null evaluates on none."""
    overlong_prompts: Annotated[Overlong, WITH_QUESTIONS] = "error"
    """How to treat a prompt that is too long, as in `rl.overlong_prompts`."""
    sampling_params: Annotated[Mapping[str, Any], WITH_QUESTIONS] = field(default_factory=dict)
    """Arguments of `vllm.SamplingParams`, by default `temperature: 1.0` and `max_tokens: 16`."""
    rewards: Annotated[RewardWeights, replace(WITH_QUESTIONS, also=())] = field(default_factory=dict)
    """Weight of each reward of an answer. The first gives `eval/accuracy` and pass@k, the others
    `eval/reward/NAME` and `eval/accuracy/NAME`; `eval/reward` is the weighted sum. Empty means `rl.rewards`, or only
    the environment's reward if `rl.environment` is set."""
    thresholds: Annotated[Mapping[str, float], Field(strict=False), WITH_QUESTIONS] = field(
        default_factory=dict
    )
    """Lowest reward of a right answer, by the name of a reward of `evaluation` or `rl`: `{judge: 0.7}`. For other
    rewards, an answer is right at exactly 1."""
    output_jsonl_path: Annotated[PathText | None, WITH_QUESTIONS] = None
    """File for the answers; null means `samples.jsonl` in `output_dir`. An earlier run's file is renamed."""
    at_k: Annotated[tuple[PositiveInt, ...], Field(strict=False), WITH_QUESTIONS] = ()
    """The k of `eval/pass_at_K` and `eval/maj_at_K`, up to `n` of `sampling_params`; empty means 2, 4, 8 …"""
    tasks: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Tasks of the lm-evaluation-harness, by name or YAML file, for every evaluation; logged as `eval/TASK/METRIC`.
    Needs vLLM."""


@dataclass(frozen=True, kw_only=True)
class KeepSettings:
    """Settings for kept checkpoints and early stopping.

    The best evaluation has the lowest `eval/loss` (fine-tuning) or the highest `eval/accuracy` (`rl`), unless
    `best_metric` names another metric.
    """

    keep_checkpoints: Annotated[PositiveInt, WITH_CHECKPOINTS] = 2
    """Number of newest checkpoints to keep."""
    keep_best: Annotated[bool, WITH_CHECKPOINTS] = False
    """Save a checkpoint at every evaluation that is the best one yet, and keep it in addition to the newest
    checkpoints."""
    final_model: Annotated[Literal["last", "best"], ReadIf("train_parameters.keep_best")] = "last"
    """Weights in `final-model`: from the last step, or from the best evaluation."""
    epoch_models: Annotated[bool, ReadIf("dataset", fix="Use rl.save_every and `vectorlm export`.")] = False
    """Also export the model at the end of each epoch, as `epoch-1-model` and so on."""
    best_metric: Annotated[
        Text | None, ReadIf("train_parameters.keep_best", also=("train_parameters.early_stopping_patience",))
    ] = None
    """Metric that decides which evaluation is the best, such as `eval/pass_at_4`."""
    best_metric_mode: Annotated[
        Literal["max", "min"] | None, ReadIf("train_parameters.best_metric", fix="Name best_metric.")
    ] = None
    """Whether the highest or the lowest value of `best_metric` is the best. null means the harness's direction for its
    tasks; for other metrics, the lowest for losses, perplexities and other metrics of errors, else the highest."""
    early_stopping_patience: PositiveInt | None = None
    """Stop after this many evaluations in a row without improvement; null trains to the end."""
    early_stopping_min_delta: Annotated[
        NonNegativeFloat, ReadIf("train_parameters.early_stopping_patience")
    ] = 0.0
    """Minimum improvement over the best earlier evaluation that counts as progress."""
