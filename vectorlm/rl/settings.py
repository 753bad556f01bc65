"""The settings of reinforcement learning, one dataclass for each component that reads them.

The config nests them in its section ``rl`` (`vectorlm.runs.config.schema`); each is declared here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from vectorlm.algorithms.settings import AlgorithmSettings, TokenSettings
from vectorlm.settings import (
    ClippingNorm,
    CurriculumSettings,
    Fraction,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    PromptSettings,
    PromptSource,
    ReadIf,
    Text,
    UnitInterval,
    also_written,
    in_full,
    inline,
    partial,
)

SAMPLING_DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "max_tokens": 16}
"""Sampling parameters of rollouts where `sampling_params` names none; `max_tokens` is vLLM's own default."""

CPU_PASS_TOKENS = 1024
"""Where a forward pass on CPU takes up no further rows: larger ones are slower there, and take more memory."""

VERIFIERS = "openai:vectorlm.rl.environments.verifiers:play"
"""What plays the tasks of verifiers."""

WITH_ENVIRONMENT = ReadIf("rl.environment", also=("rl.sources",))
WITH_REWARDS = ReadIf("rl.rewards", also=("rl.sources",))


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """One of several sources of prompts."""

    prompts: PromptSource
    """The prompts, as in `rl.prompts`."""
    weight: PositiveFloat | None = None
    """Share of the run's prompts; the shares of all sources add up to 1. null in all of them means equal shares."""
    rewards: Mapping[str, Any] = field(default_factory=dict)
    """Weight of each reward function for these prompts; without any, `rl.rewards`."""
    environment: Text | None = None
    """What answers the policy between its turns; null means `rl.environment`."""
    held_out: PromptSource | None = None
    """Questions to evaluate on, beside `train_parameters.sampler.prompts`; the first of `rewards` scores the answers,
    logged as `eval/accuracy/NAME` too."""

    @property
    def curriculum(self) -> CurriculumSettings | None:
        """How the difficulty follows the scores."""
        return self.prompts.curriculum if isinstance(self.prompts, PromptSettings) else None


@dataclass(frozen=True, kw_only=True)
class CollectSettings:
    """Which prompts are sampled at each step, and how."""

    prompts: PromptSource | None = None
    """The prompts to learn from: texts; or a JSONL or Parquet file, a folder of `Dataset.save_to_disk` or a dataset on
    the hub, whose rows have a `prompt` and the rewards' columns; or tasks, `reasoning_gym:chain_sum` or
    `verifiers:TASKSET`."""
    sources: Mapping[str, SourceSettings] = field(default_factory=dict)
    """Several sources in place of `prompts`, by names of your own."""
    prompts_per_step: PositiveInt
    """Prompts in a batch of rollouts."""
    group_size: PositiveInt = 1
    """Completions of each prompt."""
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `vllm.SamplingParams`, by default `temperature: 1.0` and `max_tokens: 16`; the trainer follows
    `temperature`, `top_p`, `top_k`, `min_p` and `structured_outputs`."""
    environment: Text | None = None
    """`file.py:NAME` of what answers the policy between its turns, or `openai:file.py:NAME` of an agent that asks the
    policy over HTTP; null makes single turns, and plays prompts of `verifiers` with verifiers."""
    environment_timeout_s: Annotated[PositiveFloat | None, WITH_ENVIRONMENT] = 300.0
    """Longest response of an environment, or time between two requests of an agent, in seconds; null waits without
    limit."""
    max_turns: Annotated[PositiveInt, WITH_ENVIRONMENT] = 4
    """With an environment, turns of the policy after which a rollout ends; an agent decides itself."""
    rollouts_per_engine: PositiveInt | Literal["auto"] = "auto"
    """Rollouts that may ask an engine at once. Those that wait for their environment do not count: others begin
    in their place. By default as many groups as the engine samples sequences at once; with an environment or agent as
    many rollouts as its tokens per second grow with, from 64 on."""
    max_sampling_rounds: PositiveInt = 4
    """Rounds of sampling with `dynamic_sampling`; groups that are still missing then stay missing."""
    overlong_buffer_tokens: NonNegativeInt = 0
    """Tokens before `max_tokens` over which a length penalty grows from 0; 0 turns the penalty off."""
    overlong_penalty: Annotated[NonNegativeFloat, ReadIf("rl.overlong_buffer_tokens")] = 1.0
    """What a completion of `max_tokens` tokens loses, with `overlong_buffer_tokens`."""
    missing_end_penalty: NonNegativeFloat = 0.0
    """What a completion loses that reached its token limit before it ended, or had no room for another turn."""

    def environment_of(self, source: str) -> str | None:
        """The environment of a source's prompts."""
        own = self.sources.get(source)
        given, prompts = (self.environment, self.prompts) if own is None else (own.environment, own.prompts)
        prompts = in_full(prompts)
        if given is None and isinstance(prompts, PromptSettings) and prompts.verifiers is not None:
            return VERIFIERS
        return given or self.environment

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters of rollouts, with their defaults filled in."""
        return {**SAMPLING_DEFAULTS, **self.sampling_params}


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """Which rewards score a completion, and what happens when one fails."""

    rewards: Mapping[str, Any] = field(default_factory=dict)
    """Weight of each reward function, by name or `file.py:NAME`."""
    reward_models: Mapping[str, Any] = field(default_factory=dict)
    """Weight of each sequence-classification model with one label, by folder."""
    step_reward: Annotated[Literal["min", "mean", "last"], ReadIf("rl.reward_models")] = "min"
    """What a model that scores steps gives a completion: of the probabilities that they are right the least, the mean,
    or the last."""
    reward_timeout_s: Annotated[PositiveFloat | None, WITH_REWARDS] = 300.0
    """Longest call of a reward function, in seconds; null waits without limit."""
    reward_workers: Annotated[NonNegativeInt | Literal["auto"], WITH_REWARDS] = "auto"
    """Processes that run reward functions, for each rank; by default its share of the cores, from 2 to 8. 0 runs them
    in the ranks themselves, where nothing ends a call that hangs: for a debugger."""
    on_reward_error: Annotated[Literal["stop", "skip"], WITH_REWARDS] = "stop"
    """Whether a failing reward function ends the run, or its completion is left out."""


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """How a batch of rollouts is trained on."""

    num_epochs: PositiveInt = 1
    """Passes over a batch of rollouts."""
    num_mini_batches: PositiveInt = 1
    """Optimizer steps of each pass."""
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Tokens that one forward pass computes on one rank: never exceeded. A prompt counts once for its group, padding
    counts where there is any. On CPU a pass takes up no further group beyond 1,024."""
    max_kl: PositiveFloat | None = None
    """KL divergence from the rollout's policy, per token, above which the rest of a batch is skipped; null never
    skips."""
    drop_truncated: bool = False
    """Leave truncated completions out of the loss."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    top_entropy_quantile: Fraction = 1.0
    """Share of tokens, those of highest entropy, that the policy learns from; the others count in the denominator."""
    off_policy_mask: PositiveFloat | None = None
    """KL divergence per token, from the engine to the policy, above which a completion with a negative mean advantage
    is left out of the loss; null leaves none out."""

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps on a batch of rollouts."""
        return self.num_epochs * self.num_mini_batches


@dataclass(frozen=True, kw_only=True)
class KLSettings:
    """The penalty on the KL divergence from the reference."""

    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the reference; 0 needs no reference."""
    kl_in: Annotated[Literal["reward", "loss"], ReadIf("rl.kl_coef")] = "loss"
    """Where the KL penalty is applied."""
    kl_kind: Annotated[Literal["k1", "k2", "k3", "abs"], ReadIf("rl.kl_coef")] = "k3"
    """The estimator of the KL divergence."""
    kl_straight_through: Annotated[bool, ReadIf("rl.kl_coef"), ReadIf("rl.kl_in", ("loss",))] = False
    """In the loss, use the gradient of k2 whatever the estimator."""
    kl_importance_weights: Annotated[bool, ReadIf("rl.kl_coef"), ReadIf("rl.kl_in", ("loss",))] = False
    """In the loss, multiply the estimate by the ratio of the policy to the old one, so that the gradient is that of the
    divergence also where the policy has moved on."""
    kl_target: PositiveFloat | None = None
    """KL divergence of a completion, in nats, that `kl_coef` is adapted to keep; null keeps `kl_coef` fixed."""
    kl_horizon: Annotated[PositiveInt, ReadIf("rl.kl_target")] = 10000
    """Completions over which `kl_coef` may change by a fifth."""
    reference_sync_every: PositiveInt | None = None
    """Copy the policy into the reference every N steps; null never does."""


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """The critic, for algorithms that need one."""

    model: PathText | None = None
    """Folder of the model that the critic starts from, its value head at zero; null means the policy's, without
    adapters that it goes on from or has merged."""
    lr: LearningRate = 1e-5
    """Learning rate; the rest of the optimizer is the policy's."""
    warmup_steps: NonNegativeInt = 0
    """Steps at the start that train the critic alone."""
    value_clip: PositiveFloat | None = 0.2
    """Largest change of a value within one batch that the loss rewards; null turns the clip off."""
    max_grad_norm: ClippingNorm = 1.0
    """Norm above which the critic's gradient is scaled down."""


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    """A teacher whose probabilities the policy learns on its own completions: on-policy distillation."""

    model: PathText | None = None
    """Folder of a model with the policy's tokenizer, which is frozen and sharded like the reference."""
    server: Text | None = None
    """URL of a vLLM server that scores completions, in place of `model`; its token is `VECTORLM_TEACHER_TOKEN`."""
    coef: PositiveFloat = 1.0
    """Weight of the divergence from the teacher beside the algorithm's own loss."""
    kind: Literal["sampled", "full"] = "sampled"
    """`sampled` adds log teacher - log policy to the advantage of each token; `full` adds a divergence over the whole
    vocabulary to the loss, and needs `model`."""
    beta: Annotated[UnitInterval, ReadIf("rl.teacher.kind", ("full",))] = 1.0
    """The divergence of `full`: 0 is KL(teacher, policy), 1 is KL(policy, teacher), and a value in between the
    generalised Jensen-Shannon divergence."""
    timeout_s: Annotated[PositiveFloat, ReadIf("rl.teacher.server")] = 300.0
    """Longest answer of the server, in seconds."""


@dataclass(frozen=True, kw_only=True)
class SFTSettings:
    """Texts of a dataset, learned in the same optimizer steps as completions."""

    dataset: PathText
    """Folder that `vectorlm preprocess` wrote, with texts, no preference data and its `ignore_index` of -100."""
    rows_per_step: PositiveInt = 8
    """Rows of the dataset in an optimizer step of all ranks; a multiple of the number of ranks."""
    share: Fraction = 0.1
    """Weight of the mean loss of the rows' target tokens; the loss of the completions has the rest."""
    share_at_end: UnitInterval | None = None
    """The share at the last step, to which it goes in a straight line; null keeps it."""
    weighting: Literal["none", "chord", "luffy"] = "none"
    """What a target token of probability p counts for: its -log p; the same times p (1 - p), as in CHORD; or
    -p / (p + 0.1), the shaping of LUFFY."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """How tokens are weighted or rejected whose probability differs between the engine and the trainer."""

    bypass: bool = False
    """Use the engine's log-probabilities as the old ones, without a forward pass of the trainer."""
    level: Literal["token", "sequence", "geometric"] | None = None
    """The ratio that the bounds of the weights apply to; without one there are no weights."""
    mode: Literal["truncate", "mask"] = "truncate"
    """What happens to weights beyond the bounds."""
    low: NonNegativeFloat | None = None
    """Lower bound of the ratio trainer / engine, at most 1."""
    high: PositiveFloat | None = None
    """Upper bound of the ratio trainer / engine, at least 1."""
    normalise: bool = False
    """Divide the weights by their mean."""
    gate: Literal["ratio", "bernoulli_kl", "tv", "k2", "k3"] | None = None
    """The measure by which a token or completion is rejected; without one none is."""
    gate_level: Literal["token", "sum", "mean", "max"] = "token"
    """Whether the gate is applied to each token, or to the sum, mean or maximum over a completion's tokens."""
    gate_low: NonNegativeFloat | None = None
    """Lower bound of the gate, for `ratio` alone."""
    gate_high: NonNegativeFloat | None = None
    """Upper bound of the gate."""
    veto: UnitInterval | None = None
    """Reject completions that hold a token with a ratio below this value."""

    @property
    def is_on(self) -> bool:
        """Whether tokens are weighted or rejected before the update, which needs the trainer's own forward pass."""
        return not self.bypass and (self.level is not None or self.gate is not None or self.veto is not None)

    @property
    def weighs_rows(self) -> bool:
        """Whether all tokens of a completion have the same weight."""
        return self.level == "sequence" or (self.level == "geometric" and self.mode == "truncate")


NO_CORRECTION = Correction()
"""Every token counts once."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "off": {},
    "tis": {"level": "token", "mode": "truncate", "high": 2.0},
    "icepop": {"level": "token", "mode": "mask", "low": 0.5, "high": 5.0},
    "seq_mask_tis": {
        "level": "token",
        "mode": "truncate",
        "high": 2.0,
        "gate": "ratio",
        "gate_level": "mean",
        "gate_low": 0.5,
        "gate_high": 2.0,
    },
    "mis": {"level": "geometric", "mode": "mask", "low": 0.5, "high": 2.0},
    "geometric": {"level": "geometric", "mode": "truncate", "low": 0.5, "high": 2.0},
    "decoupled": {"level": "token", "mode": "truncate", "high": 5.0},
    "bypass": {"bypass": True},
}
"""The fields of `Correction` that each preset sets; the config's own values win."""


@dataclass(frozen=True, kw_only=True)
class MismatchSettings:
    """What is reported about the mismatch between engine and trainer."""

    band_low: UnitInterval = 0.5
    """Ratios below this value count as out of band in the metrics."""
    band_high: PositiveFloat = 2.0
    """Ratios above this value count as out of band in the metrics."""
    min_ess: UnitInterval = 0.5
    """Effective sample size, as a share, below which a warning is printed; 0 prints none."""


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings:
    """What is done where the engine sampled tokens with other probabilities than the trainer computes."""

    preset: Annotated[
        Literal["off", "tis", "icepop", "seq_mask_tis", "mis", "geometric", "decoupled", "bypass"],
        # YAML takes an `off` without quotes for false.
        also_written({False: "off"}),
    ] = "off"
    """A row of the table in correction.md; the keys below replace single values of that row."""
    overrides: Mapping[str, Any] = partial(Correction, null="the preset's value")
    mismatch: MismatchSettings = inline(MismatchSettings)


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """Where the completions that are trained on come from."""

    source: Literal["engine", "file"] = "engine"
    """`engine` samples them with the policy's weights; `file` reads stored ones, of this policy or any other."""
    path: PathText | None = None
    """The `rollouts.jsonl` of a run with `save_tokens`, for `file`."""
    replayed_share: Annotated[Fraction, ReadIf("rl.rollout.source", ("file",))] = 1.0
    """With `file`, share of each step's groups that come from the file; the engine samples the rest."""
    save_tokens: bool = False
    """Write tokens and log-probabilities into `rollouts.jsonl`, so that they can be trained on again."""


@dataclass(frozen=True, kw_only=True)
class AsyncSettings:
    """How sampling and training overlap."""

    max_staleness: NonNegativeInt
    """Steps by which the weights that sampled a token may lag behind those being trained; 0 overlaps nothing."""
    update: Literal["keep", "recompute", "drain"] = "keep"
    """What happens to requests in flight when new weights arrive: they keep the KV cache of the old weights, it is
    recomputed, or the update waits until they have finished."""
    overdue: Annotated[Literal["wait", "correct", "mask", "drop"], ReadIf("rl.async.max_staleness")] = "wait"
    """What happens to completions still in flight at the last step that may train on them: the step waits for them, a
    later step trains on them anyway, or on their tokens that are not too old, or they are dropped."""
    placement: Literal["shared", "split"] = "shared"
    """Whether engine and ranks compute on the same devices, or each on its own: CUDA devices behind those of the ranks,
    or cores."""
    engine_devices: Annotated[PositiveInt | None, ReadIf("rl.async.placement", ("split",))] = None
    """With `split`, how many devices or cores are the engine's; null means one device, or half of the cores."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What a step reads, resolved for one algorithm; the config nests its fields, and not this dataclass."""

    hparams: AlgorithmSettings = field(default_factory=TokenSettings)
    correction: Correction = NO_CORRECTION
    mismatch: MismatchSettings = MismatchSettings()
    update: UpdateSettings = UpdateSettings()
    kl: KLSettings = KLSettings()
    critic: CriticSettings = CriticSettings()
    teacher: TeacherSettings | None = None
    max_tokens: int = SAMPLING_DEFAULTS["max_tokens"]
    """Longest completion; with `sequence_sum_fixed`, the tokens that each completion counts for."""
    seed: int = 0
    """With the step and the epoch, this decides which groups share a mini-batch."""
    pad_token_id: int = 0
    peak_flops: float | None = None
    """Operations per second that all devices together are capable of; None leaves `perf/mfu` out."""
