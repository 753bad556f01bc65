"""The settings of a run as YAML nests them: the dataclasses of the components, and the keys of the run itself.

The keys of `inline` and `partial` fields (`vectorlm.settings`) are keys of the section around them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from vectorlm.algorithms.registry import SETTINGS, get_algorithm
from vectorlm.algorithms.settings import AlgorithmSettings, DistillationSettings, PreferenceSettings
from vectorlm.data.settings import ChatSettings, DatasetSettings, PreprocessSettings
from vectorlm.errors import ConfigError
from vectorlm.rl.rewards.registry import adapter_of_judge, short_name
from vectorlm.rl.settings import (
    SELF,
    AsyncSettings,
    CollectSettings,
    CorrectionSettings,
    CriticSettings,
    KeptAdapters,
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
    PositiveFloat,
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
    KeepSettings,
    LoopSettings,
    ModelSettings,
    OptimizerSettings,
    ProfileSettings,
    PushSettings,
    RewardModelSettings,
    ScheduleSettings,
)

OLD_SECTION = "train_parameters.sampler"
"""VectorLM's section for the settings that are now in `engine` and `evaluation`."""
_OF_EVALUATION = ("prompts", "sampling_params", "output_jsonl_path", "at_k", "tasks")
ALIASES: Mapping[str, str] = {
    "lora_peft_config": "train_parameters.lora_peft_config",
    "rl.device_peak_tflops": "train_parameters.device_peak_tflops",
    "dataset_preprocess.separator": "dataset_preprocess.seperator",
    "engine.vllm_dtype": "engine.dtype",
    **{f"{OLD_SECTION}.{name}": f"evaluation.{name}" for name in _OF_EVALUATION},
    f"{OLD_SECTION}.sample_frequency": "evaluation.every",
    f"{OLD_SECTION}.reward": "evaluation.rewards",
    f"{OLD_SECTION}.further_rewards": "evaluation.rewards",
    f"{OLD_SECTION}.vllm_dtype": "engine.dtype",
    f"{OLD_SECTION}.engine": "engine",
    OLD_SECTION: "engine",
}
"""Older places of settings and sections, and their places in the resolved config; the longest match counts."""


def old_names(prefix: str) -> Mapping[str, str]:
    """Return the older names of settings that begin with `prefix`, without the prefix, and their current places."""
    return {old.removeprefix(prefix): place for old, place in ALIASES.items() if old.startswith(prefix)}


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings for training the model."""

    output_dir: PathText
    """Folder for checkpoints, metrics, samples, plots and the final model."""
    max_seq_len: Length
    """Longest sequence in tokens, up to the model's own limit; -1 means this limit."""
    seed: Seed = 11
    """Seed of every random generator of the run."""
    loop: LoopSettings = inline(LoopSettings)
    model: ModelSettings = inline(ModelSettings)
    profile: ProfileSettings = inline(ProfileSettings)
    lora_peft_config: Mapping[str, Any] | None = None
    """Arguments of `peft.LoraConfig`; null trains all weights. It may also be a top-level key."""
    adapters: PathText | None = None
    """LoRA adapters of `model` to continue training: a folder, or a name on the Hub. null continues none. If `model` is
    itself a folder of adapters, the run fills this in."""
    merge_adapters: Annotated[bool, ReadIf("train_parameters.adapters", fix="Name a folder of adapters.")] = (
        False
    )
    """Merge `adapters` into the model first, and train all weights."""
    share_base: bool | None = None
    """With LoRA: make the trainer's frozen weights views of the engine's weights, to hold the base in memory once. null
    shares it if possible: the engine must be vLLM with `lora_mode: adapter` and the trainer's `dtype`, must not be
    quantised, and its weights must not sleep (on CUDA: the engine must not sleep)."""
    optimizer: OptimizerSettings
    """Arguments of the optimizer, such as `{lr: 1.0e-5}`."""
    batch_size: int | None = None
    """Not read; accepted because existing files have it."""
    schedule: ScheduleSettings = inline(ScheduleSettings)
    checkpointing_enabled: bool = False
    """Save checkpoints during training, and resume from the latest one."""
    keep: KeepSettings = inline(KeepSettings)


@dataclass(frozen=True, kw_only=True)
class AlgorithmChoice:
    """An algorithm and its settings. Instead of the section, you may write only the name: `algorithm: grpo`."""

    name: Text
    """A registered algorithm, or `file.py:NAME` of an `AlgorithmSpec`."""
    settings: AlgorithmSettings = partial(
        *(type(start) for start in SETTINGS.values()), null="the algorithm's own value"
    )


@dataclass(frozen=True, kw_only=True)
class RLSettings:
    """Settings for reinforcement learning on completions that the engine samples; it does not need `dataset`."""

    algorithm: AlgorithmChoice
    """The algorithm: its name, or a section with `name` and the algorithm's settings."""
    max_steps: PositiveInt | None = None
    """Batches of rollouts to train on; null means as many as `num_epochs_over_prompts` takes."""
    num_epochs_over_prompts: PositiveFloat | None = None
    """Passes over the prompts of all sources together. If you also set `max_steps`, the run ends at the earlier limit.
    Replacement groups from `dynamic_sampling` do not count."""
    collect: CollectSettings = inline()
    reward: RewardSettings = inline(RewardSettings)
    update: UpdateSettings = inline(UpdateSettings)
    kl: KLSettings = inline(KLSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    """Source of the completions."""
    critic: CriticSettings = field(default_factory=CriticSettings)
    """Training of the critic."""
    teacher: TeacherSettings | None = None
    """A teacher to learn from, with or without rewards; null learns only from rewards."""
    keep_adapters: KeptAdapters | None = None
    """Older policies that the engine keeps as LoRA adapters, for environments and agents; null keeps none."""
    sft: SFTSettings | None = None
    """A dataset of texts to learn as well; null learns from completions alone."""
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
    """Off-policy correction."""
    async_: AsyncSettings | None = field(default=None, metadata={"key": "async"})
    """Overlap of sampling and training; null alternates them."""
    save_every: Annotated[PositiveInt, WITH_CHECKPOINTS] = 50
    """Steps between two checkpoints, with `train_parameters.checkpointing_enabled`."""
    show_every: NonNegativeInt = 10
    """Steps between two tables of rollouts on the console; 0 shows none."""

    @property
    def num_steps(self) -> int:
        """The steps of a checked config, whose `max_steps` is filled in."""
        assert self.max_steps is not None
        return self.max_steps

    @property
    def by_source(self) -> Mapping[str, SourceSettings]:
        """The sources with the settings that they inherit; `prompts` alone are one source with the name ""."""
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
        return self.kl.kl_coef > 0 or get_algorithm(self.algorithm.name).needs_reference

    @property
    def learns_from_teacher_alone(self) -> bool:
        """Whether all advantages are 0, and the divergence from the teacher's distributions is the only loss."""
        is_full = self.teacher is not None and self.teacher.kind == "full"
        return is_full and isinstance(self.algorithm.settings, DistillationSettings)


_DEFAULT_PRESETS: Mapping[str, Literal["off", "tis", "geometric"]] = {
    "token": "tis",
    "completion": "geometric",
    "group": "off",
}
"""Default of `rl.correction.preset` with a quantised engine, by `AlgorithmSpec.level`."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    model: PathText
    """Folder of the model with its tokenizer, in Hugging Face layout; or its name on the Hub (`google/gemma-2b`, or
    `google/gemma-2b@revision`); or LoRA adapters in either form, which name their model."""
    trust_remote_code: bool = False
    """Run the Python files in a model's folder. Read them first, because they can do anything."""
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
    """Classes `file.py:NAME` with a constructor without arguments, whose methods `on_step`, `on_rollouts`,
    `on_evaluation` and `on_checkpoint` the run calls."""
    chat: ChatSettings = inline(ChatSettings)
    ignore_memory_plan: bool = False
    """Start the run even if the memory plan does not fit (`--ignore_memory_plan`). The run prints the plan."""
    train_parameters: TrainSettings
    """Training of the model."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    """The engine that samples, in reinforcement learning and for evaluations."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    """Evaluations during training, in which the engine answers prompts."""
    dataset: DatasetSettings | None = None
    """The preprocessed datasets, which supervised fine-tuning needs."""
    reward_model: RewardModelSettings | None = None
    """Training of a reward model on pairs or steps instead of supervised fine-tuning; `{}` takes the defaults."""
    preference: PreferenceSettings | None = None
    """Learning from preference data instead of supervised fine-tuning."""
    rl: RLSettings | None = None
    """Reinforcement learning instead of supervised fine-tuning."""
    dataset_preprocess: PreprocessSettings | None = None
    """Preprocessing of text into the datasets; null if they already exist."""
    origins: Mapping[str, str] = field(
        default_factory=dict, compare=False, repr=False, metadata={"is_setting": False}
    )
    """Places of the settings (``my.yaml:5``, ``--set a.b=c``); not a setting itself."""
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False, metadata={"is_setting": False})
    """Notes on values that were replaced; not a setting itself."""

    def __post_init__(self) -> None:
        """Resolve settings whose default depends on others: the engine's `receiver`, and the correction's preset."""
        if self.train_parameters.model.exact and not self.engine.exact:
            receiver = "live" if self.engine.receiver == "auto" else self.engine.receiver
            object.__setattr__(self, "engine", replace(self.engine, exact=True, receiver=receiver))
        if self.rl is not None and self.rl.correction.preset is None:
            given, quantization = self.rl.correction, self.engine.quantization
            correction = replace(given, preset="off")
            if quantization is not None and not given.overrides and not self.rl.learns_from_teacher_alone:
                spec = get_algorithm(self.rl.algorithm.name)
                if spec.samples_from_policy:
                    correction = replace(given, preset=_DEFAULT_PRESETS[spec.level])
            object.__setattr__(self, "rl", replace(self.rl, correction=correction))
            if (preset := correction.preset) != "off":
                note = f"rl.correction.preset: {preset}, the default with engine.quantization: {quantization}"
                object.__setattr__(self, "notes", (*self.notes, note))

    @property
    def model_folders(self) -> Mapping[str, str]:
        """The models that the ranks load, by their setting."""
        found: dict[str, str | None] = {"model": self.model}
        if (rl := self.rl) is not None:
            found["rl.critic.model"] = rl.critic.model
            teacher = None if rl.teacher is None else rl.teacher.model
            found["rl.teacher.model"] = None if teacher == SELF else teacher
            found |= {f"rl.reward_models.{path}": path for path in rl.reward.reward_models}
        return {setting: folder for setting, folder in found.items() if folder is not None}

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
        num_shares = world_size // train.model.ranks_per_share
        return num_shares * self.text.train_bs * train.loop.gradient_accumulation_steps

    @property
    def has_engine(self) -> bool:
        """Whether the run samples: in reinforcement learning, and for evaluations."""
        return self.rl is not None or self.evaluation.prompts is not None or bool(self.evaluation.tasks)

    def engine_dtype(self, is_cuda: bool) -> str:
        """Return the dtype of vLLM's engine on this kind of device; on CUDA `auto` leaves the choice to vLLM."""
        if self.engine.dtype != "auto" or is_cuda:
            return self.engine.dtype
        if self.engine.quantization is not None:
            return "bfloat16"
        return self.train_parameters.model.dtype_on(is_cuda)

    @property
    def longest_rollout(self) -> int:
        """Largest number of tokens of a prompt and its completion, in reinforcement learning."""
        return int(self.engine.engine_args.get("max_model_len") or self.train_parameters.max_seq_len)

    @property
    def samples_path(self) -> Path:
        """The file to which evaluations append their answers."""
        given = self.evaluation.output_jsonl_path
        return Path(self.train_parameters.output_dir) / "samples.jsonl" if given is None else Path(given)

    def engine_arguments(self, is_cuda: bool) -> dict[str, Any]:
        """Return the arguments of the run's engine; the memory plan reads them too."""
        train, engine = self.train_parameters, self.engine
        found: dict[str, Any] = {}
        if engine.inference == "vllm":
            found["dtype"] = self.engine_dtype(is_cuda)
            found["gpu_memory_utilization"] = engine.gpu_memory_utilization
            found |= {"trust_remote_code": True} if self.trust_remote_code else {}
            found["enable_sleep_mode"] = engine.turn.sleep != "none"
            if self.rl is not None and self.rl.collect.sampling.get("structured_outputs"):
                # The trainer computes the masks of xgrammar; vLLM could fall back to another backend.
                found["structured_outputs_config"] = {"backend": "xgrammar"}
            if train.lora_peft_config is not None and engine.lora_mode_of_run == "adapter":
                found |= engine_arguments(train.lora_peft_config)
                if (num := self.num_other_slots) or self.judges:
                    # Otherwise requests of a judge would wait in one queue with the policy's.
                    found |= {"max_loras": 1 + num, "scheduling_policy": "priority"}
        elif engine.dtype != "auto":
            found["dtype"] = engine.dtype
        elif engine.inference == "transformers" and not is_cuda:
            found["dtype"] = self.engine_dtype(is_cuda)
        if self.trust_remote_code and engine.inference == "transformers":
            found["trust_remote_code"] = True
        if train.model.fp32_head and engine.inference in ("vllm", "transformers"):
            found["fp32_head"] = True
        if self.rl is not None:
            found["max_model_len"] = self.longest_rollout
        return {**found, **engine.engine_args}

    @property
    def has_adapters(self) -> bool:
        """Whether the engine holds the policy as a LoRA adapter on the base."""
        is_lora = self.train_parameters.lora_peft_config is not None
        return is_lora and self.engine.inference == "vllm" and self.engine.lora_mode_of_run == "adapter"

    @property
    def judges(self) -> Mapping[str, str]:
        """The names of rewards that ask an adapter of the run's own engine, with the name of the adapter."""
        names = [*self.evaluation_rewards, *self.held_out_rewards.values()]
        names += [] if self.rl is None else self.rl.all_rewards
        return {name: asked for name in names if (asked := adapter_of_judge(name)) is not None}

    @property
    def asks_adapters(self) -> bool:
        """Whether rewards, environments or agents may ask other models than the policy."""
        rl = self.rl
        if rl is None or not self.has_adapters:
            return False
        return bool(self.judges or rl.keep_adapters or any(map(rl.collect.environment_of, rl.by_source)))

    @property
    def num_other_slots(self) -> int:
        """Number of LoRA slots besides the policy's: for older policies, and for a reference that is not the base."""
        if not self.asks_adapters or self.rl is None:
            return 0
        keep = self.rl.keep_adapters
        return (0 if keep is None else keep.last) + int(self.train_parameters.adapters is not None)

    @property
    def overlap(self) -> AsyncSettings | None:
        """Settings for the overlap of sampling and training; None if they alternate."""
        return None if self.rl is None else self.rl.async_

    @property
    def sampling_params(self) -> Mapping[str, Mapping[str, Any]]:
        """The sampling parameters by their setting: for held-out questions, and for training."""
        found: dict[str, Mapping[str, Any]] = {}
        sources = {} if self.rl is None else self.rl.collect.sources
        if self.evaluation.prompts is not None or any(source.held_out for source in sources.values()):
            found["evaluation.sampling_params"] = self.evaluation.sampling_params
        if self.rl is not None:
            found["rl.sampling_params"] = self.rl.collect.sampling_params
        return found

    @property
    def evaluation_rewards(self) -> Mapping[str, Any]:
        """The weights of the rewards for `evaluation.prompts`; the training rewards if the section has none."""
        if self.evaluation.rewards or self.evaluation.prompts is None or self.rl is None:
            return self.evaluation.rewards
        return {} if self.rl.collect.environment_of("") else self.rl.reward.rewards

    @property
    def held_out_rewards(self) -> Mapping[str, str]:
        """The reward that decides whether an answer is right, by source; "" is the name of `evaluation.prompts`."""
        sources = {} if self.rl is None else self.rl.by_source
        found = {"": next(iter(self.evaluation_rewards))} if self.evaluation_rewards else {}
        for name, source in sources.items():
            if source.held_out and source.rewards:
                found[name] = next(iter(source.rewards))
        return found

    def threshold_of(self, reward: str) -> float | None:
        """Return the lowest reward of a right answer; None means exactly 1."""
        given = self.evaluation.thresholds
        return given.get(reward, given.get(short_name(reward)))

    @property
    def held_out_timeout_s(self) -> float | None:
        """Seconds to wait for a reward call in an evaluation; None waits forever."""
        return self.engine.timeout_s if self.rl is None else self.rl.reward.reward_timeout_s

    @property
    def text(self) -> DatasetSettings:
        """The datasets of supervised fine-tuning.

        Raises:
            ConfigError: The config has no datasets.
        """
        if self.dataset is None:
            raise ConfigError("there is no section 'dataset': supervised fine-tuning needs one.")
        return self.dataset
