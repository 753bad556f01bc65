"""The settings of reinforcement learning: the section ``rl``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vectorlm.config.rules import (
    ClippingNorm,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PromptSource,
    Text,
    UnitInterval,
)


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """The critic, for algorithms that need one."""

    model: Text | None = None
    """Folder of the model that it starts from, its value head at zero; null means the policy's."""
    lr: NonNegativeFloat = 1e-5
    """Learning rate; the rest of the optimizer is the policy's."""
    warmup_steps: NonNegativeInt = 0
    """Steps at the start that train the critic alone."""
    value_clip: PositiveFloat | None = 0.2
    """Largest useful step of a value within one batch; null leaves the clip out."""
    max_grad_norm: ClippingNorm = 1.0
    """Norm above which its gradient is scaled down."""


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings:
    """What is done about tokens that the engine sampled with other probabilities than the trainer finds."""

    preset: Literal["off", "tis", "icepop", "seq_mask_tis", "mis", "geometric", "decoupled", "bypass"] = "off"
    """A row of the table in correction.md; every other key, where it is not null, takes the place of the row's."""
    bypass: bool | None = None
    """Take the engine's log-probabilities for the old ones, without a forward pass of the trainer."""
    level: Literal["token", "sequence", "geometric"] | None = None
    """What the bounds of the weights are compared with; null makes no weights."""
    mode: Literal["truncate", "mask"] | None = None
    """What happens to weights beyond the bounds."""
    low: NonNegativeFloat | None = None
    """Lower bound of the ratio trainer / engine, at most 1."""
    high: PositiveFloat | None = None
    """Upper bound of the ratio, at least 1."""
    normalise: bool | None = None
    """Divide the weights by their mean."""
    gate: Literal["ratio", "bernoulli_kl", "tv", "k2", "k3"] | None = None
    """What a token or completion may not exceed without being rejected."""
    gate_level: Literal["token", "sum", "mean", "max"] | None = None
    """Whose: single tokens, or of a completion's tokens the sum, mean or largest."""
    gate_low: NonNegativeFloat | None = None
    """Lower bound of the gate, for `ratio` alone."""
    gate_high: NonNegativeFloat | None = None
    """Upper bound of the gate."""
    veto: UnitInterval | None = None
    """Reject completions that hold a token with a ratio below this."""
    band_low: UnitInterval = 0.5
    """Ratios below count as out of band in the metrics."""
    band_high: PositiveFloat = 2.0
    """Ratios above count as out of band in the metrics."""
    min_ess: UnitInterval = 0.5
    """Effective sample size, as a share, below which a warning is printed; 0 prints none."""


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """Where the completions that are trained on come from."""

    source: Literal["engine", "file"] = "engine"
    """`engine` samples them with the policy's weights; `file` takes stored ones, of this policy or any other."""
    path: Text | None = None
    """The `rollouts.jsonl` of a run with `save_tokens`, for `file`."""
    replayed_share: Fraction = 1.0
    """With `file`, share of each step's groups that come from there; the engine samples the rest."""
    save_tokens: bool = False
    """Write tokens and log-probabilities into `rollouts.jsonl`, so that they can be trained on again."""


@dataclass(frozen=True, kw_only=True)
class AsyncSettings:
    """How sampling and training overlap."""

    max_staleness: NonNegativeInt
    """Steps by which the weights that sampled a token may lag behind those being trained; 0 overlaps nothing."""
    update: Literal["keep", "recompute", "drain"] = "keep"
    """What becomes of completions under way when new weights arrive: they keep the KV cache of the old weights, it is
    computed anew, or the weights wait for their end."""
    overdue: Literal["wait", "correct", "drop"] = "wait"
    """What becomes of completions still under way at the last step that may train on them: the step waits for them, a
    later step trains on them all the same, or they are dropped."""
    placement: Literal["shared", "split"] = "shared"
    """Whether engine and ranks compute on the same devices, or each on its own: CUDA devices behind those of the ranks,
    or cores."""
    engine_devices: PositiveInt | None = None
    """With `split`, how many devices or cores are the engine's; null means one device, or half of the cores."""


@dataclass(frozen=True, kw_only=True)
class RLSettings:
    """Reinforcement learning on completions that the engine samples; with it, `dataset` is not needed."""

    algorithm: Text
    """A registered algorithm, or `file.py:NAME` of an `AlgorithmSpec`."""
    max_steps: PositiveInt
    """Batches of rollouts to train on."""
    prompts: PromptSource
    """The questions to learn from: a JSONL file whose lines have a `prompt` and the rewards' columns, or texts."""
    prompts_per_step: PositiveInt
    """Questions in a batch of rollouts."""
    group_size: PositiveInt = 1
    """Completions of each question."""
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `vllm.SamplingParams`; the trainer follows `temperature`."""
    rewards: Mapping[str, Any] = field(default_factory=dict)
    """Weight of each reward function, by name or `file.py:NAME`."""
    reward_models: Mapping[str, Any] = field(default_factory=dict)
    """Weight of each sequence-classification model with one label, by folder."""
    reward_timeout_s: PositiveFloat | None = None
    """Longest call of a reward function, in seconds; null waits for ever."""
    on_reward_error: Literal["stop", "skip"] = "stop"
    """Whether a reward function that fails ends the run, or its completion counts for nothing."""
    environment: Text | None = None
    """`file.py:NAME` of what answers the policy between its turns; null makes single turns."""
    max_turns: PositiveInt = 4
    """With an environment, turns of the policy after which a rollout ends."""

    num_epochs: PositiveInt = 1
    """Passes over a batch of rollouts."""
    num_mini_batches: PositiveInt = 1
    """Optimizer steps of each pass."""
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Tokens of one forward pass on one rank, padding included: never exceeded. Passes are shorter where rows would be
    padded for more than a pass costs."""
    reduction: (
        Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_sum_fixed"]
        | None
    ) = None
    """How losses of tokens become one number; null means the algorithm's own way."""
    whiten_advantages: bool | None = None
    """Bring advantages to mean 0 and deviation 1 over the batch; null means the algorithm's own way."""
    max_kl: PositiveFloat | None = None
    """Divergence from the rollout's policy per token at which the rest of a batch is left; null goes on."""
    drop_truncated: bool = False
    """Leave completions that were cut off out of the loss."""
    overlong_buffer_tokens: NonNegativeInt = 0
    """Tokens before the longest length over which a penalty grows from 0; 0 leaves it out."""
    overlong_penalty: NonNegativeFloat = 1.0
    """What a completion of the longest length loses, with `overlong_buffer_tokens`."""
    dynamic_sampling: bool | None = None
    """Drop groups of equal rewards and sample others in their place; null means the algorithm's own way."""
    max_sampling_rounds: PositiveInt = 4
    """Rounds of sampling with `dynamic_sampling`; what is missing then stays missing."""

    gamma: UnitInterval | None = None
    """Discount per token; null, here and below, means the algorithm's own value."""
    lam: UnitInterval | None = None
    """Lambda of generalised advantage estimation."""
    clip_low: NonNegativeFloat | None = None
    """The ratio of policies is clipped to at least 1 - clip_low."""
    clip_high: NonNegativeFloat | None = None
    """The ratio of policies is clipped to at most 1 + clip_high."""
    dual_clip: PositiveFloat | None = None
    """Bound of the loss where the advantage is negative, above 1; null leaves it out."""
    beta: PositiveFloat | None = None
    """How little a preference loss or CoPG lets the policy leave the reference."""
    label_smoothing: UnitInterval | None = None
    """Share of pairs that the preference loss takes to be the wrong way round."""
    preference: Literal["sigmoid", "ipo"] | None = None
    """The preference loss of online DPO."""
    temperature_positive: PositiveFloat | None = None
    """SAPO's temperature where the advantage is positive."""
    temperature_negative: PositiveFloat | None = None
    """SAPO's temperature elsewhere."""

    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the divergence from the reference; 0 needs no reference."""
    kl_in: Literal["reward", "loss"] = "loss"
    """Where that divergence is punished."""
    kl_kind: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Its estimate."""
    kl_straight_through: bool = False
    """In the loss, take the gradient of k2, whatever the estimate."""
    kl_target: PositiveFloat | None = None
    """Divergence of a completion, in nats, that `kl_coef` is moved to keep; null leaves it as it is."""
    kl_horizon: PositiveInt = 10000
    """Completions over which `kl_coef` may move by a fifth."""
    reference_sync_every: PositiveInt | None = None
    """Steps between two moments at which the reference becomes the policy; null leaves it where it began."""
    rollout: RolloutSettings = RolloutSettings()
    """The section of where completions come from."""
    critic: CriticSettings = CriticSettings()
    """The critic's own section."""
    correction: CorrectionSettings = CorrectionSettings()
    """The section of off-policy correction."""
    async_: AsyncSettings | None = None
    """The section of overlapping sampling and training; null lets them take turns."""

    save_every: PositiveInt = 50
    """Steps between two checkpoints, with `train_parameters.checkpointing_enabled`."""
    show_every: NonNegativeInt = 10
    """Steps between two tables of rollouts on the console; 0 shows none."""
    device_peak_tflops: PositiveFloat | None = None
    """What one device could compute at best, in 1e12 operations per second, for `perf/mfu`; null leaves that out."""
