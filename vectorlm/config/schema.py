"""The settings of a run: one frozen dataclass per YAML section, one line of explanation under each key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from vectorlm.config.rl import AsyncSettings, RLSettings
from vectorlm.config.rules import (
    AlsoWritten,
    Betas,
    ClippingNorm,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PromptSource,
    Seed,
    Text,
    UnitInterval,
)
from vectorlm.errors import ConfigError

ShardingStrategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]

# transformers' schedules, without the three that cannot be built from a warmup and a length alone
# (cosine_with_min_lr, cosine_warmup_with_min_lr, warmup_stable_decay).
Schedule = Annotated[
    Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "reduce_lr_on_plateau",
        "greedy",
        "plateau-with-warmup",
    ],
    AlsoWritten({"plataeu-with-warmup": "plateau-with-warmup"}),
]

EngineDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    AlsoWritten({"half": "float16", "float": "float32"}),
]

ALIASES: Mapping[str, str] = {
    "lora_peft_config": "train_parameters.lora_peft_config",
    "dataset_preprocess.separator": "dataset_preprocess.seperator",
}
"""Places where an existing file may hold a setting, and the place where the resolved config holds it."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW's arguments; what is left out is as in `torch.optim.AdamW`."""

    lr: NonNegativeFloat
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    betas: Betas = (0.9, 0.999)
    """Decay rates of the running averages of the gradient and of its square."""
    eps: NonNegativeFloat = 1e-8
    """Added to the denominator of the step."""


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """Sampling with vLLM during training; leave the section out to train without it."""

    sample_frequency: PositiveInt
    """Optimizer steps between two samplings."""
    prompts: PromptSource
    """The prompts, or a JSONL file whose lines have a `prompt` and any other columns."""
    output_jsonl_path: Text | None = None
    """File that the samples are appended to; null means `samples.jsonl` in `output_dir`."""
    gpu_memory_utilization: Fraction = 0.35
    """Share of each device's memory that the engine may take."""
    vllm_dtype: EngineDtype = "auto"
    """The engine's dtype; `half` and `float` mean `float16` and `float32`."""
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `vllm.SamplingParams`."""
    inference: Text = "vllm"
    """What samples: `vllm`, a `server` of `vectorlm serve`, `transformers`, or `file.py:NAME` of an `Inference`."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine (`max_model_len`, `enforce_eager`, ...); or of another `inference`."""
    reward: Text | None = None
    """Name of the reward that scores each completion (for example `countdown`), logged as `eval/accuracy`."""
    receiver: Literal["auto", "live", "packed"] = "auto"
    """How the engine takes new weights over: in place (`live`) or repacked for its own kernels (`packed`)."""
    lora_mode: Literal["adapter", "merged"] = "adapter"
    """With `lora_peft_config`: swap the adapters alone (`adapter`), or weights that they are merged into (`merged`)."""
    verify_updates: bool = True
    """Compare a checksum of what the engine computes with against what was sent, after each update."""
    sleep: Literal["none", "kv_cache", "all"] = "none"
    """What of the engine sleeps while the trainer works: nothing, its KV cache, or its weights too (CUDA)."""
    offload_optimizer: bool = False
    """Keep the optimizer's state on the host while the engine samples (CUDA)."""
    timeout_s: PositiveFloat = 300.0
    """Longest silence tolerated from the engine or from a rank, in seconds."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How the model is trained."""

    output_dir: Text
    """Folder for checkpoints, metrics, samples, plots and the final model."""
    max_seq_len: PositiveInt
    """Longest sequence in tokens; at most the model's own limit."""
    epochs: PositiveInt = 1
    """Passes over the training dataset."""
    seed: Seed = 11
    """Seed of every random generator of the run."""
    sharding_strategy: ShardingStrategy = "FULL_SHARD"
    """What FSDP shards: everything, gradients and optimizer state, nothing, or everything within a node."""
    use_mp: bool = False
    """Mixed precision: compute in bfloat16, keep the weights in float32."""
    use_activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    use_flash_attention: bool = False
    """Use Flash Attention where the model supports it."""
    low_cpu_mem_usage: bool = False
    """Materialise the model on one rank alone while loading it."""
    lora_peft_config: Mapping[str, Any] | None = None
    """Arguments of `peft.LoraConfig`; null trains all weights. May also stand at the top of the file."""
    max_grad_norm: ClippingNorm = 1.0
    """Gradient norm above which gradients are scaled down."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches per optimizer step on each rank."""
    optimizer: OptimizerSettings
    """The optimizer's own section."""
    lr_scheduler_type: Schedule = "cosine"
    """Schedule of transformers, or `plateau-with-warmup` (also written `plataeu-with-warmup`)."""
    warmup_ratio: UnitInterval = 0.0
    """Share of all optimizer steps spent on a linear warmup."""
    checkpointing_enabled: bool = False
    """Save checkpoints during training, and resume from the latest one."""
    logging_steps: PositiveInt = 50
    """Optimizer steps between two evaluations."""
    save_frequency: Fraction = 0.25
    """Share of an epoch between two checkpoints."""
    sampler: SamplerSettings | None = None
    """The sampler's own section; null trains without sampling."""

    @property
    def samples_path(self) -> Path:
        """The file that samples are appended to, whether or not it was named."""
        if self.sampler is not None and self.sampler.output_jsonl_path is not None:
            return Path(self.sampler.output_jsonl_path)
        return Path(self.output_dir) / "samples.jsonl"


@dataclass(frozen=True, kw_only=True)
class DatasetSettings:
    """The preprocessed datasets that are trained and evaluated on."""

    ignore_index: int = -100
    """Label of a token that the loss leaves out."""
    eval_bs: PositiveInt
    """Sequences per rank in one evaluation batch."""
    train_bs: PositiveInt
    """Sequences per rank in one training micro-batch."""
    train_ds: Text
    """Folder of the preprocessed training dataset."""
    eval_ds: Text
    """Folder of the preprocessed evaluation dataset."""


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings:
    """How text becomes the datasets above; only preprocessing reads it."""

    load_path: Text
    """Folder (or, without `from_disk`, hub name) of the dataset to preprocess."""
    save_path: Text
    """Folder that the processed dataset is saved to."""
    data_field: Text
    """Column that holds the text."""
    ignore_index: int = -100
    """Label of a token that the loss leaves out; must equal `dataset.ignore_index`."""
    dataset_format: str = "hf"
    """Not read; accepted so that existing files load."""
    dataset_type: str | None = None
    """Not read; accepted so that existing files load."""
    packing_type: Literal["full", "partial"] | None = None
    """Pack the whole dataset (`full`) or cut each long text (`partial`) into chunks of `max_seq_len`."""
    overlap: NonNegativeInt = 0
    """Tokens that one chunk shares with the next while packing."""
    add_bos_eos_tokens: bool = True
    """Put the tokenizer's BOS and EOS tokens around each text, or each chunk when packing."""
    from_disk: bool = True
    """Load from a folder written by `save_to_disk` instead of the hub."""
    seperator: str | None = None
    """Text up to and including which labels are `ignore_index`. May also be written `separator`."""
    split: str | None = None
    """Which split to take where `load_path` holds several."""
    truncate: bool = False
    """Cut texts longer than `max_seq_len` off instead of packing them."""
    pre_pend: str | None = None
    """Text put before each example."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    model: Text
    """Folder of the model with its tokenizer, in Hugging Face layout."""
    enable_wandb_logging: bool = False
    """Log to Weights & Biases as well."""
    wandb_config: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `wandb.init`."""
    train_parameters: TrainSettings
    """How the model is trained."""
    dataset: DatasetSettings | None = None
    """The preprocessed datasets; needed for supervised fine-tuning."""
    rl: RLSettings | None = None
    """Reinforcement learning instead of supervised fine-tuning."""
    dataset_preprocess: PreprocessSettings | None = None
    """How the datasets are made; null when they exist already."""
    origins: Mapping[str, str] = field(
        default_factory=dict, compare=False, repr=False, metadata={"is_setting": False}
    )
    """Where each setting was written (``my.yaml:5``, ``--set a.b=c``); not a setting itself."""

    @property
    def overlap(self) -> AsyncSettings | None:
        """How sampling and training overlap; None where they take turns."""
        return None if self.rl is None else self.rl.async_

    @property
    def text(self) -> DatasetSettings:
        """The datasets of supervised fine-tuning.

        Raises:
            ConfigError: There are none.
        """
        if self.dataset is None:
            raise ConfigError("there is no section 'dataset': supervised fine-tuning needs one.")
        return self.dataset
