"""The settings of a run as YAML nests them: the dataclasses of the components, and the keys of the run itself.

The keys of `inline` and `partial` fields (`vectorlm.settings`) are keys of the section around them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from vectorlm.algorithms.registry import SETTINGS, get_algorithm
from vectorlm.algorithms.settings import AlgorithmSettings, PreferenceSettings
from vectorlm.data.settings import DatasetSettings, PreprocessSettings
from vectorlm.errors import ConfigError
from vectorlm.rl.settings import (
    AsyncSettings,
    CollectSettings,
    CorrectionSettings,
    CriticSettings,
    KLSettings,
    RewardSettings,
    RolloutSettings,
    SFTSettings,
    SourceSettings,
    TeacherSettings,
    UpdateSettings,
)
from vectorlm.sampling.settings import EngineSettings
from vectorlm.sampling.weights.lora_factors import engine_arguments
from vectorlm.settings import (
    Length,
    NonNegativeInt,
    PathText,
    PositiveInt,
    ReadIf,
    Seed,
    Text,
    inline,
    partial,
)
from vectorlm.train.settings import (
    WITH_CHECKPOINTS,
    EvaluationSettings,
    HandoverSettings,
    KeepSettings,
    LoopSettings,
    ModelSettings,
    OptimizerSettings,
    ProfileSettings,
    PushSettings,
    RewardModelSettings,
    ScheduleSettings,
)

ALIASES: Mapping[str, str] = {
    "lora_peft_config": "train_parameters.lora_peft_config",
    "rl.device_peak_tflops": "train_parameters.device_peak_tflops",
    "dataset_preprocess.separator": "dataset_preprocess.seperator",
}
"""Older places of settings, and the places in the resolved config."""


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """Sampling with vLLM during training. Left out, `rl` samples with the defaults and fine-tuning does not sample."""

    evaluation: EvaluationSettings = inline(EvaluationSettings)
    engine: EngineSettings = inline(EngineSettings)
    turn: HandoverSettings = inline(HandoverSettings)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How the model is trained."""

    output_dir: PathText
    """Folder for checkpoints, metrics, samples, plots and the final model."""
    max_seq_len: Length
    """Longest sequence in tokens; at most the model's own limit, which -1 stands for."""
    seed: Seed = 11
    """Seed of every random generator of the run."""
    loop: LoopSettings = inline(LoopSettings)
    model: ModelSettings = inline(ModelSettings)
    profile: ProfileSettings = inline(ProfileSettings)
    lora_peft_config: Mapping[str, Any] | None = None
    """Arguments of `peft.LoraConfig`; null trains all weights. May also stand at the top of the file."""
    adapters: PathText | None = None
    """Folder of LoRA adapters on `model` to go on training. A `model` that is such a folder fills this in."""
    merge_adapters: Annotated[bool, ReadIf("train_parameters.adapters", fix="Name a folder of adapters.")] = (
        False
    )
    """Merge `adapters` into the model first, and train all weights."""
    optimizer: OptimizerSettings
    """The arguments of the optimizer."""
    batch_size: int | None = None
    """Not read; accepted so that existing files load."""
    schedule: ScheduleSettings = inline(ScheduleSettings)
    checkpointing_enabled: bool = False
    """Save checkpoints during training, and resume from the latest one."""
    keep: KeepSettings = inline(KeepSettings)
    sampler: SamplerSettings | None = None
    """How the engine samples; null means the defaults with `rl`, and no sampling in fine-tuning."""

    def engine_dtype(self, is_cuda: bool) -> str:
        """Return the dtype of vLLM's engine on this kind of device; on CUDA `auto` leaves the choice to vLLM."""
        given = "auto" if self.sampler is None else self.sampler.engine.vllm_dtype
        if given != "auto" or is_cuda:
            return given
        return self.model.dtype_on(is_cuda)

    @property
    def longest_rollout(self) -> int:
        """The most tokens of a prompt with its completion, in reinforcement learning."""
        engine_args = {} if self.sampler is None else self.sampler.engine.engine_args
        return int(engine_args.get("max_model_len") or self.max_seq_len)

    @property
    def samples_path(self) -> Path:
        """The file that samples are appended to."""
        if self.sampler is not None and self.sampler.evaluation.output_jsonl_path is not None:
            return Path(self.sampler.evaluation.output_jsonl_path)
        return Path(self.output_dir) / "samples.jsonl"


@dataclass(frozen=True, kw_only=True)
class RLSettings:
    """Reinforcement learning on completions that the engine samples; with it, `dataset` is not needed."""

    algorithm: Text
    """A registered algorithm, or `file.py:NAME` of an `AlgorithmSpec`."""
    max_steps: PositiveInt
    """Batches of rollouts to train on."""
    collect: CollectSettings = inline()
    reward: RewardSettings = inline(RewardSettings)
    update: UpdateSettings = inline(UpdateSettings)
    kl: KLSettings = inline(KLSettings)
    hyperparameters: AlgorithmSettings = partial(
        *(type(start) for start in SETTINGS.values()), null="the algorithm's own value"
    )
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    """Where completions come from."""
    critic: CriticSettings = field(default_factory=CriticSettings)
    """How the critic is trained."""
    teacher: TeacherSettings | None = None
    """A teacher to learn from, beside rewards or alone; null learns from rewards."""
    sft: SFTSettings | None = None
    """A dataset of texts to learn as well; null learns from completions alone."""
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
    """Off-policy correction."""
    async_: AsyncSettings | None = field(default=None, metadata={"key": "async"})
    """How sampling and training overlap; null lets them take turns."""
    save_every: Annotated[PositiveInt, WITH_CHECKPOINTS] = 50
    """Steps between two checkpoints, with `train_parameters.checkpointing_enabled`."""
    show_every: NonNegativeInt = 10
    """Steps between two tables of rollouts on the console; 0 shows none."""

    @property
    def by_source(self) -> Mapping[str, SourceSettings]:
        """The sources with the settings that they inherit; `prompts` are one source with the name ""."""
        given = self.collect.sources
        if not given and self.collect.prompts is not None:
            given = {"": SourceSettings(prompts=self.collect.prompts)}
        return {
            name: replace(
                source,
                weight=source.weight or 1 / len(given),
                rewards=source.rewards or self.reward.rewards,
                environment=self.collect.environment_of(name),
            )
            for name, source in given.items()
        }

    @property
    def all_rewards(self) -> list[str]:
        """The reward functions of all sources, without duplicates."""
        return list(dict.fromkeys(name for source in self.by_source.values() for name in source.rewards))

    @property
    def has_reference(self) -> bool:
        """Whether training needs a reference: the algorithm's loss reads it, or there is a KL penalty."""
        return self.kl.kl_coef > 0 or get_algorithm(self.algorithm).needs_reference


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    model: PathText
    """Folder of the model with its tokenizer, in Hugging Face layout; or its name on the Hub (`google/gemma-2b`); or a
    folder of LoRA adapters, which name their model."""
    enable_wandb_logging: bool = False
    """Log to Weights & Biases as well."""
    wandb_config: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `wandb.init`."""
    trackers: Mapping[str, Any] = field(default_factory=dict)
    """More trackers with their arguments: `tensorboard` (of tensorboardX's writer), `trackio` (of its `init`); `aim`,
    `clearml`, `comet_ml`, `dvclive`, `mlflow` or `swanlab` (of their classes in `accelerate.tracking`); or
    `file.py:NAME` of your own."""
    push_to_hub: PushSettings | None = None
    """Upload the final model to the Hugging Face Hub; null uploads nothing."""
    callbacks: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Classes `file.py:NAME`, made without arguments, whose methods `on_step`, `on_rollouts`, `on_evaluation` and
    `on_checkpoint` the run calls."""
    ignore_memory_plan: bool = False
    """Start although the memory plan does not fit: print its numbers and go on (`--ignore_memory_plan`)."""
    train_parameters: TrainSettings
    """How the model is trained."""
    dataset: DatasetSettings | None = None
    """The preprocessed datasets; needed for supervised fine-tuning."""
    reward_model: RewardModelSettings | None = None
    """Training of a reward model on pairs or steps instead of supervised fine-tuning; `{}` takes the defaults."""
    preference: PreferenceSettings | None = None
    """Learning from preference data instead of supervised fine-tuning."""
    rl: RLSettings | None = None
    """Reinforcement learning instead of supervised fine-tuning."""
    dataset_preprocess: PreprocessSettings | None = None
    """How the datasets are made; null when they exist already."""
    origins: Mapping[str, str] = field(
        default_factory=dict, compare=False, repr=False, metadata={"is_setting": False}
    )
    """Places of the settings (``my.yaml:5``, ``--set a.b=c``); not a setting itself."""
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False, metadata={"is_setting": False})
    """Notes on values that were replaced; not a setting itself."""

    @property
    def examples(self) -> str:
        """The kind of rows that `dataset` must have: a value of `dataset_preprocess.examples`."""
        if self.preference is not None and self.preference.loss == "kto":
            return "labels"
        if self.step_separator is not None:
            return "steps"
        return "texts" if self.preference is None and self.reward_model is None else "pairs"

    @property
    def step_separator(self) -> str | None:
        """The text that ends a step for a reward model; None without scores of steps."""
        return None if self.reward_model is None else self.reward_model.step_separator

    def rows_per_step(self, world_size: int) -> int:
        """Return the rows per optimizer step of fine-tuning, over all ranks and micro-batches."""
        train = self.train_parameters
        num_shares = world_size // train.model.context_parallel
        return num_shares * self.text.train_bs * train.loop.gradient_accumulation_steps

    def engine_arguments(self, is_cuda: bool) -> dict[str, Any]:
        """Return the arguments of the run's engine; the memory plan reads them too."""
        train = self.train_parameters
        sampler = train.sampler or SamplerSettings()
        found: dict[str, Any] = {}
        if sampler.engine.inference == "vllm":
            found["dtype"] = train.engine_dtype(is_cuda)
            found["gpu_memory_utilization"] = sampler.engine.gpu_memory_utilization
            found["enable_sleep_mode"] = sampler.turn.sleep != "none"
            if self.rl is not None and self.rl.collect.sampling.get("structured_outputs"):
                # The trainer computes the masks of xgrammar; vLLM could fall back to another backend.
                found["structured_outputs_config"] = {"backend": "xgrammar"}
            if train.lora_peft_config is not None and sampler.engine.lora_mode_of_run == "adapter":
                found |= engine_arguments(train.lora_peft_config)
        if train.model.fp32_head and sampler.engine.inference in ("vllm", "transformers"):
            found["fp32_head"] = True
        if self.rl is not None:
            found["max_model_len"] = train.longest_rollout
        return {**found, **sampler.engine.engine_args}

    @property
    def overlap(self) -> AsyncSettings | None:
        """How sampling and training overlap; None if they alternate."""
        return None if self.rl is None else self.rl.async_

    @property
    def sampling_params(self) -> Mapping[str, Mapping[str, Any]]:
        """The sampling parameters by their setting: for held-out questions, and for training."""
        sampler = self.train_parameters.sampler
        found: dict[str, Mapping[str, Any]] = {}
        if sampler is not None:
            found["train_parameters.sampler.sampling_params"] = sampler.engine.sampling_params
        if self.rl is not None:
            found["rl.sampling_params"] = self.rl.collect.sampling_params
        return found

    @property
    def held_out_rewards(self) -> Mapping[str, str]:
        """The reward for held-out questions by source; the name "" stands for the sampler's prompts."""
        sampler = self.train_parameters.sampler
        sources = {} if self.rl is None else self.rl.by_source
        found = {
            name: next(iter(source.rewards))
            for name, source in sources.items()
            if source.held_out and source.rewards
        }
        reward = None if sampler is None else sampler.evaluation.reward
        return found if reward is None else {"": reward, **found}

    @property
    def text(self) -> DatasetSettings:
        """The datasets of supervised fine-tuning.

        Raises:
            ConfigError: There are none.
        """
        if self.dataset is None:
            raise ConfigError("there is no section 'dataset': supervised fine-tuning needs one.")
        return self.dataset
