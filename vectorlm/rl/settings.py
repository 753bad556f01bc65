"""Settings for reinforcement learning, one dataclass per component; the config nests them in its section ``rl``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from vectorlm.algorithms.settings import AlgorithmSettings, TokenSettings
from vectorlm.data.settings import CurriculumSettings, Overlong, PromptSettings, PromptSource, in_full
from vectorlm.settings import (
    ClippingNorm,
    Fraction,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    Text,
    UnitInterval,
    also_written,
    inline,
    partial,
)

SAMPLING_DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "max_tokens": 16}
"""Default sampling parameters of rollouts; `max_tokens` is vLLM's own default."""

CPU_PASS_TOKENS = 1024
"""Tokens with which a forward pass on CPU takes no further rows: larger passes are slower and need more memory."""

VERIFIERS = "openai:vectorlm.rl.environments.verifiers:play"
"""The agent that plays tasks of verifiers."""

WITH_ENVIRONMENT = ReadIf("rl.environment", also=("rl.sources",))
WITH_REWARDS = ReadIf("rl.rewards", also=("rl.sources", "evaluation.rewards"))


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """Settings for one of several sources of prompts."""

    prompts: PromptSource
    """The prompts, as in `rl.prompts`."""
    weight: PositiveFloat | None = None
    """Share of the run's prompts; the shares of all sources must add up to 1. null for all sources means equal
    shares."""
    rewards: Mapping[str, Any] = field(default_factory=dict)
    """Weight of each reward function for these prompts; empty means `rl.rewards`."""
    environment: Text | None = None
    """The environment or agent for these prompts; null means `rl.environment`."""
    held_out: PromptSource | None = None
    """Held-out questions in addition to `evaluation.prompts`. The first of `rewards` scores the answers, also logged as
    `eval/accuracy/NAME`."""

    @property
    def curriculum(self) -> CurriculumSettings | None:
        """Settings for difficulty that follows the scores; None without a curriculum."""
        return self.prompts.curriculum if isinstance(self.prompts, PromptSettings) else None


@dataclass(frozen=True, kw_only=True)
class CollectSettings:
    """Settings for sampling: prompts, sampling parameters, environments and length penalties."""

    prompts: PromptSource | None = None
    """The prompts to learn from: texts, a dataset, or tasks. A dataset is a JSONL or Parquet file, a folder of
    `Dataset.save_to_disk`, or a name on the hub; its rows have a `prompt` and the rewards' columns. Tasks are
    `reasoning_gym:chain_sum` (or another task) or `verifiers:TASKSET`."""
    sources: Mapping[str, SourceSettings] = field(default_factory=dict)
    """Several sources instead of `prompts`, under names that you choose."""
    prompts_per_step: PositiveInt
    """Prompts per step."""
    group_size: PositiveInt = 1
    """Completions per prompt."""
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `vllm.SamplingParams`, by default `temperature: 1.0` and `max_tokens: 16`. The trainer follows
    `temperature`, `top_p`, `top_k`, `min_p` and `structured_outputs`."""
    overlong_prompts: Overlong = "error"
    """How to treat a prompt that leaves no space for `max_tokens` within the engine's `max_model_len`. `error`
    stops before the run, `drop` leaves the prompt out, and `truncate_left` cuts its beginning off."""
    environment: Text | None = None
    """`file.py:NAME` of an environment, or `openai:file.py:NAME` of an agent that calls the policy over HTTP. null
    means single turns; prompts of `verifiers` then use verifiers."""
    environment_timeout_s: Annotated[PositiveFloat | None, WITH_ENVIRONMENT] = 300.0
    """Seconds to wait for a response of an environment, or between two requests of an agent; null waits forever."""
    max_turns: Annotated[PositiveInt, WITH_ENVIRONMENT] = 4
    """Maximum number of turns with an environment; agents end their rollouts themselves."""
    rollouts_per_engine: PositiveInt | Literal["auto"] = "auto"
    """Concurrency limit: rollouts that may use an engine at the same time. Rollouts that wait for their environment do
    not count. `auto` means as many groups as the engine has concurrent sequences. With an environment or agent, `auto`
    starts at up to 64 rollouts and grows while the engine's throughput grows."""
    max_sampling_rounds: Annotated[PositiveInt, ReadIf("rl.algorithm.dynamic_sampling")] = 4
    """Maximum rounds of sampling with `dynamic_sampling`; after the last one, the step trains on the groups it has."""
    overlong_buffer_tokens: NonNegativeInt = 0
    """Number of tokens before `max_tokens` over which a length penalty grows from 0; 0 turns the penalty off."""
    overlong_penalty: Annotated[NonNegativeFloat, ReadIf("rl.overlong_buffer_tokens")] = 1.0
    """Penalty for a completion of `max_tokens` tokens, with `overlong_buffer_tokens`."""
    missing_end_penalty: NonNegativeFloat = 0.0
    """Penalty for a completion that reached its token limit, or whose next turn did not fit."""

    def environment_of(self, source: str) -> str | None:
        """Return the environment of a source's prompts."""
        own = self.sources.get(source)
        given, prompts = (self.environment, self.prompts) if own is None else (own.environment, own.prompts)
        prompts = in_full(prompts)
        if given is None and isinstance(prompts, PromptSettings) and prompts.verifiers is not None:
            return VERIFIERS
        return given or self.environment

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters of rollouts, defaults included."""
        return {**SAMPLING_DEFAULTS, **self.sampling_params}


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """Settings for rewards."""

    rewards: Mapping[str, Any] = field(default_factory=dict)
    """Weight of each reward function, by name or `file.py:NAME`."""
    reward_models: Mapping[str, Any] = field(default_factory=dict)
    """Weight of each sequence-classification model with one label, by folder."""
    step_reward: Annotated[Literal["min", "mean", "last"], ReadIf("rl.reward_models")] = "min"
    """Reward of a completion from a model that scores its steps: the lowest, mean or last probability of a right
    step."""
    reward_timeout_s: Annotated[PositiveFloat | None, WITH_REWARDS] = 300.0
    """Seconds to wait for a call of a reward function; null waits forever."""
    reward_workers: Annotated[NonNegativeInt | Literal["auto"], WITH_REWARDS] = "auto"
    """Processes per rank that run reward functions. `auto` takes the rank's share of the cores, 2 to 8. With 0 the rank
    runs the functions itself, for a debugger; a call that hangs then never times out."""
    on_reward_error: Annotated[Literal["stop", "skip"], WITH_REWARDS] = "stop"
    """`stop` ends the run if a reward function fails; `skip` leaves the completion, or the held-out answer, without a
    reward."""


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """Settings for training on a batch of rollouts."""

    num_epochs: PositiveInt = 1
    """Passes over a batch of rollouts."""
    num_mini_batches: PositiveInt = 1
    """Optimizer steps per pass over a batch."""
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Maximum number of tokens that one forward pass computes on one rank. A prompt counts once per group, and padding
    counts too. On CPU, a pass with 1,024 tokens takes no further group."""
    max_kl: PositiveFloat | None = None
    """KL divergence per token from the old policy above which the rest of a batch is skipped; null never skips. The
    divergence is a mean over the tokens that the update computes, without groups that have no advantage."""
    drop_truncated: bool = False
    """Leave truncated completions out of the loss."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    top_entropy_quantile: Fraction = 1.0
    """Share of tokens that the policy learns from, highest entropy first; the others stay in the denominator."""
    off_policy_mask: PositiveFloat | None = None
    """KL divergence per token from the engine to the policy, above which the loss ignores a completion with a negative
    mean advantage; null ignores none."""

    router_replay: Annotated[Literal["off", "engine", "old_policy"], also_written({False: "off"})] = "off"
    """Experts that the policy uses in training (mixture-of-experts models). `off`: its own choice; `engine`: the choice
    of the engine when it sampled; `old_policy`: its own choice before the first optimizer step on a batch."""

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps on a batch of rollouts."""
        return self.num_epochs * self.num_mini_batches


@dataclass(frozen=True, kw_only=True)
class KLSettings:
    """Settings for the penalty on the KL divergence from the reference."""

    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the reference; 0 needs no reference."""
    kl_in: Annotated[Literal["reward", "loss"], ReadIf("rl.kl_coef")] = "loss"
    """Whether the KL penalty is subtracted from the reward or added to the loss."""
    kl_kind: Annotated[Literal["k1", "k2", "k3", "abs"], ReadIf("rl.kl_coef")] = "k3"
    """The estimator of the KL divergence."""
    kl_straight_through: Annotated[bool, ReadIf("rl.kl_coef"), ReadIf("rl.kl_in", ("loss",))] = False
    """With `kl_in: loss`, use the gradient of k2 with any estimator."""
    kl_importance_weights: Annotated[bool, ReadIf("rl.kl_coef"), ReadIf("rl.kl_in", ("loss",))] = False
    """With `kl_in: loss`, multiply the estimate by the ratio of the policy to the old policy. The gradient then stays
    correct after the policy has changed."""
    kl_target: PositiveFloat | None = None
    """Target KL divergence per completion, in nats, to which `kl_coef` is adapted; null keeps `kl_coef` fixed."""
    kl_horizon: Annotated[PositiveInt, ReadIf("rl.kl_target")] = 10000
    """Number of completions over which `kl_coef` may change by a fifth."""
    reference_sync_every: PositiveInt | None = None
    """Steps between two copies of the policy into the reference; null never copies."""


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """Settings for the critic of algorithms that need one."""

    model: PathText | None = None
    """Folder of the model that the critic starts from, with a value head of zeros. null means the policy's model
    without adapters, loaded or merged."""
    lr: LearningRate = 1e-5
    """Learning rate; the other optimizer settings are the policy's."""
    warmup_steps: NonNegativeInt = 0
    """Steps at the start of the run that train only the critic."""
    value_clip: PositiveFloat | None = 0.2
    """Clip range for the change of a value within one batch; null turns the clip off."""
    max_grad_norm: ClippingNorm = 1.0
    """Norm above which the critic's gradient is scaled down."""


SELF = "self"


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    """Settings for on-policy distillation: the policy learns a teacher's probabilities of its own completions."""

    model: PathText | None = None
    """Folder of a model with the policy's tokenizer; the model is frozen, and sharded like the reference. `self` is the
    policy itself, which reads the prompts in `prompt_column`."""
    prompt_column: Annotated[Text | None, ReadIf("rl.teacher.model", (SELF,))] = None
    """With `model: self`, column of the teacher's prompt (text or messages). The prompt may contain the answer, for
    example."""
    server: Text | None = None
    """URL of a vLLM server that scores completions, instead of `model`; `VECTORLM_TEACHER_TOKEN` holds its token."""
    coef: PositiveFloat = 1.0
    """Weight of the divergence from the teacher, added to the algorithm's own loss."""
    kind: Literal["sampled", "full"] = "sampled"
    """`sampled` adds log teacher - log policy to the advantage of each token; `full` adds a divergence over the whole
    vocabulary to the loss, and needs `model`, or `server` and `top_k`."""
    beta: Annotated[UnitInterval, ReadIf("rl.teacher.kind", ("full",))] = 1.0
    """The divergence of `full`: 0 means KL(teacher, policy), 1 means KL(policy, teacher), and a value in between means
    the generalised Jensen-Shannon divergence."""
    top_k: Annotated[PositiveInt | None, ReadIf("rl.teacher.server")] = None
    """Number of the server's most probable tokens that `kind: full` compares; all other tokens count as one token. A
    vLLM server returns at most 20, unless you start it with `--max-logprobs`."""
    timeout_s: Annotated[PositiveFloat, ReadIf("rl.teacher.server")] = 300.0
    """Seconds to wait for an answer from the server."""


@dataclass(frozen=True, kw_only=True)
class KeptAdapters:
    """Settings for older policies that the engine keeps as adapters, for environments and agents."""

    every: PositiveInt
    """Steps between two kept policies; `policy@S` is the policy after step S."""
    last: PositiveInt = 1
    """Number of kept policies, which are the newest ones; each needs a LoRA slot of the engine."""

    def kept_at(self, step: int) -> list[int]:
        """Return the steps of the policies that the engine keeps after `step`."""
        return list(range(self.every, step + 1, self.every))[-self.last :]


@dataclass(frozen=True, kw_only=True)
class SFTSettings:
    """Settings for learning from texts of a dataset in the same optimizer steps as from completions."""

    dataset: PathText
    """Folder that `vectorlm preprocess` wrote, with texts (not preference data) and an `ignore_index` of -100."""
    rows_per_step: PositiveInt = 8
    """Rows of the dataset per optimizer step of all ranks; a multiple of the number of ranks."""
    share: Fraction = 0.1
    """Weight of the mean loss of the rows' target tokens; the loss of the completions has the weight 1 - share."""
    share_at_end: UnitInterval | None = None
    """The share at the last step, reached linearly; null keeps the share constant."""
    weighting: Literal["none", "chord", "luffy"] = "none"
    """Loss of a target token of probability p: -log p; -p (1 - p) log p, as in CHORD; or -p / (p + 0.1), as in
    LUFFY."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Settings for tokens whose probability differs between engine and trainer: weights and rejection."""

    bypass: bool = False
    """Use the engine's log-probabilities as the old ones, without a forward pass of the trainer."""
    level: Literal["token", "sequence", "geometric"] | None = None
    """The ratio to which the bounds of the weights apply: a token's, or a completion's product or geometric mean.
    Without a level there are no weights."""
    mode: Literal["truncate", "mask"] = "truncate"
    """`truncate` weights at the bounds, or reject tokens or completions outside the bounds (`mask`)."""
    low: NonNegativeFloat | None = None
    """Lower bound of the ratio trainer / engine, at most 1."""
    high: PositiveFloat | None = None
    """Upper bound of the ratio trainer / engine, at least 1."""
    normalise: bool = False
    """Divide the weights by their mean."""
    gate: Literal["ratio", "bernoulli_kl", "tv", "k2", "k3"] | None = None
    """The measure of the gate, which rejects tokens or completions."""
    gate_level: Literal["token", "sum", "mean", "max"] = "token"
    """Apply the gate to each token, or to the sum, mean or maximum over a completion's tokens."""
    gate_low: NonNegativeFloat | None = None
    """Lower bound of the gate, only for `ratio`."""
    gate_high: NonNegativeFloat | None = None
    """Upper bound of the gate."""
    veto: UnitInterval | None = None
    """Ratio below which a token rejects its whole completion."""

    @property
    def is_on(self) -> bool:
        """Whether tokens are weighted or rejected before the update, which needs a forward pass of the trainer."""
        return not self.bypass and (self.level is not None or self.gate is not None or self.veto is not None)

    @property
    def weighs_rows(self) -> bool:
        """Whether all tokens of a completion have the same weight."""
        return self.level == "sequence" or (self.level == "geometric" and self.mode == "truncate")


NO_CORRECTION = Correction()
"""Settings without any correction: every token has the weight 1."""

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
"""The fields of `Correction` that each preset sets; values in the config win."""


@dataclass(frozen=True, kw_only=True)
class MismatchSettings:
    """Settings for metrics of the mismatch between engine and trainer."""

    band_low: UnitInterval = 0.5
    """Ratios below this value count as out of band in the metrics."""
    band_high: PositiveFloat = 2.0
    """Ratios above this value count as out of band in the metrics."""
    min_ess: UnitInterval = 0.5
    """Effective sample size, as a share, below which the run prints a warning; 0 prints none."""


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings:
    """Settings for tokens whose probabilities differ between engine and trainer."""

    preset: (
        Annotated[
            Literal["off", "tis", "icepop", "seq_mask_tis", "mis", "geometric", "decoupled", "bypass"],
            # YAML reads `off` without quotes as false.
            also_written({False: "off"}),
        ]
        | None
    ) = None
    """A preset from the table in correction.md; the keys below replace single values of the preset. null means `off`.
    If `engine.quantization` is set and none of these keys is, null means `tis`, `geometric` for a loss per
    completion, or `off` for a loss without weights."""
    overrides: Mapping[str, Any] = partial(Correction, null="the preset's value")
    mismatch: MismatchSettings = inline(MismatchSettings)


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """Settings for the source of completions: the engine or a file."""

    source: Literal["engine", "file"] = "engine"
    """`engine` samples with the policy's weights; `file` reads stored completions of any policy."""
    path: PathText | None = None
    """The `rollouts.jsonl` of a run with `save_tokens`, for `file`."""
    replayed_share: Annotated[Fraction, ReadIf("rl.rollout.source", ("file",))] = 1.0
    """With `file`, share of each step's groups that come from the file; the engine samples the others."""
    save_tokens: bool = False
    """Write tokens and log-probabilities to `rollouts.jsonl`. Another run can then train on them."""


@dataclass(frozen=True, kw_only=True)
class AsyncSettings:
    """Settings for asynchronous training, where sampling and training overlap."""

    max_staleness: NonNegativeInt
    """Steps by which the weights that sampled a token may be older than the trained weights; 0 turns overlap off."""
    update: Literal["keep", "recompute", "drain"] = "keep"
    """How to treat requests in flight at a hot swap: `keep` the KV cache of the old weights, `recompute` it, or `drain`
    (wait until the requests have finished)."""
    overdue: Annotated[Literal["wait", "correct", "mask", "drop"], ReadIf("rl.async.max_staleness")] = "wait"
    """How to treat completions that are still in flight at the last step that may train on them: `wait` for them, train
    on them later (`correct`) or only on their tokens that are not too old (`mask`), or `drop` them."""
    placement: Literal["shared", "split"] = "shared"
    """Whether engine and ranks use the same devices (`shared`), or separate CUDA devices or cores (`split`)."""
    engine_devices: Annotated[PositiveInt | None, ReadIf("rl.async.placement", ("split",))] = None
    """With `split`, number of devices or cores for the engine; null means one device, or half of the cores."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Settings for a step, resolved for one algorithm; the config has the nested settings, but not this dataclass."""

    hparams: AlgorithmSettings = field(default_factory=TokenSettings)
    correction: Correction = NO_CORRECTION
    mismatch: MismatchSettings = MismatchSettings()
    update: UpdateSettings = UpdateSettings()
    kl: KLSettings = KLSettings()
    critic: CriticSettings = CriticSettings()
    teacher: TeacherSettings | None = None
    max_tokens: int = SAMPLING_DEFAULTS["max_tokens"]
    """Maximum tokens of a completion; with `sequence_sum_fixed`, every completion counts as this many tokens."""
    seed: int = 0
    """Seed of the split of groups into mini-batches, together with step and epoch."""
    pad_token_id: int = 0
    exact: bool = False
    """Whether to stop if trainer and engine differ in a log-probability of the first optimizer step of a batch."""
    logs_mismatch: bool = True
    """Whether to log how log-probabilities of trainer and engine differ; False if only the engine truncates them."""
    reads_text_alone: str | None = None
    """The setting that does not allow images in rollouts; None allows images."""
    peak_flops: float | None = None
    """Peak operations per second of all devices together; None leaves `perf/mfu` out."""
