"""A whole reinforcement learning run, from its config to the final model."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils.logging import disable_progress_bar

from vectorlm.algorithms import AdaptiveKL
from vectorlm.algorithms.spec import AlgorithmSpec, Knobs
from vectorlm.build import (
    make_exam,
    make_model,
    make_optimizer,
    make_schedule,
    make_store,
    make_turn,
    open_engine,
    open_sinks,
    place_ranks,
    say_memory,
    shard_as_configured,
)
from vectorlm.checkpoint.export import export_model
from vectorlm.checkpoint.state import CheckpointStore
from vectorlm.config import Config, RLSettings
from vectorlm.data.questions import check_lengths, read_questions
from vectorlm.model.load import load_tokenizer
from vectorlm.plugin import load_plugin
from vectorlm.ranks.group import process_group
from vectorlm.ranks.topology import Topology
from vectorlm.rewards.registry import get_reward
from vectorlm.rl.check import check_rl, own, short_name
from vectorlm.rl.correction import correction_of
from vectorlm.rl.diary import Diary
from vectorlm.rl.feed import Feed
from vectorlm.rl.gather import Gatherer, Source
from vectorlm.rl.models import RewardModel, load_critic, load_reference
from vectorlm.rl.roles import Critic, Policy, Reference, disable_dropout
from vectorlm.rl.score import Assessor
from vectorlm.rl.scorer import Scorer
from vectorlm.rl.trainer import RLTrainer
from vectorlm.rl.update import Updater, UpdateSettings
from vectorlm.rollout.collect import Collector
from vectorlm.rollout.prompts import PromptOrder
from vectorlm.rollout.replay import Replay, read_rollouts
from vectorlm.telemetry.plots import plot_correction, plot_run
from vectorlm.telemetry.timeline import Timeline, plot_timeline

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vectorlm.types import Engine


def reinforce(config: Config, topology: Topology | None = None) -> None:
    """Train as `config` says and leave everything in its ``output_dir``; called on every rank.

    The folder then holds ``final-model``, ``metrics.jsonl``, ``rollouts.jsonl``, ``samples.jsonl``, ``run.png``,
    ``correction.jsonl``, ``correction.png``, ``timeline.jsonl``, ``timeline.png``, ``config.yaml`` and, with
    checkpointing, ``checkpoints``. A run that was killed goes on from its latest checkpoint.

    Args:
        config: The whole run, with a section ``rl``.
        topology: This rank's place, read from the environment when None.

    Raises:
        ConfigError: The config cannot be carried out, or needs more memory than there is.
        CheckpointError: The checkpoints in ``output_dir`` are those of another run, or a node does not see them.
        NonFiniteLoss: Training diverged.
        RewardError: A reward function failed, and that is to stop the run.
        RolloutError: An environment failed.
    """
    topology = topology or Topology.from_environment()
    spec = check_rl(config)
    say_memory(config, topology)
    # The run has one progress bar, its own.
    disable_progress_bar()
    with ExitStack() as stack:
        placement = place_ranks(config, topology, stack)
        stack.enter_context(process_group(topology))
        # First of all: the engine loads in its own process while the ranks load the models.
        # The engine's log-probabilities are those at the temperature of sampling, as the trainer's are.
        longest = config.train_parameters.max_seq_len
        engine = open_engine(
            config,
            topology,
            stack,
            placement,
            logprobs_mode="processed_logprobs",
            max_model_len=longest,
        )
        assert engine is not None
        tokenizer = load_tokenizer(config.model)
        trainer, resume_step = _build(config, spec, topology, tokenizer, engine, stack)
        trainer.run(resume_step)
        output = Path(config.train_parameters.output_dir)
        export_model(trainer.policy.model, tokenizer, output / "final-model")
    if topology.is_main:
        plot_run(output / "metrics.jsonl", output / "run.png")
        plot_timeline(output / "timeline.jsonl", output / "timeline.png")
        plot_correction(
            output / "metrics.jsonl",
            output / "correction.jsonl",
            output / "correction.png",
            trainer.assessor.band,
        )


def _build(
    config: Config,
    spec: AlgorithmSpec,
    topology: Topology,
    tokenizer: PreTrainedTokenizerBase,
    engine: Engine,
    stack: ExitStack,
) -> tuple[RLTrainer, int | None]:
    settings, rl = config.train_parameters, config.rl
    assert rl is not None
    assert settings.sampler is not None
    temperature = float(rl.sampling_params.get("temperature", 1.0)) or 1.0
    knobs = knobs_of(rl, spec)
    policy = Policy(disable_dropout(make_model(config, topology)), temperature)
    policy_optimizer = make_optimizer(config, policy.model.parameters())
    reference = _reference(config, spec, policy, topology)
    critic = critic_optimizer = None
    if spec.needs_critic:
        critic = Critic(load_critic(rl.critic.model or config.model, _shard(config, topology)))
        critic_optimizer = make_optimizer(config, critic.model.parameters(), rl.critic.lr)
    per_batch, warmup_steps = rl.num_epochs * rl.num_mini_batches, _critic_warmup_steps(config, spec)
    num_policy_steps = max(rl.max_steps - warmup_steps, 1) * per_batch
    policy_schedule = make_schedule(config, policy_optimizer, num_policy_steps)
    critic_schedule = None
    if critic_optimizer is not None:
        critic_schedule = make_schedule(config, critic_optimizer, rl.max_steps * per_batch)
    store = _store(config, topology) if settings.checkpointing_enabled else None
    resume_step = store.latest_step() if store else None
    sink, say = open_sinks(config, topology, rl.max_steps, resume_step, stack)
    turn = make_turn(config, topology, engine, policy.model, policy_optimizer)
    correction = correction_of(rl.correction, spec)
    assessor = Assessor(
        policy=policy,
        reference=reference,
        critic=critic,
        spec=spec,
        knobs=knobs,
        kl_in=rl.kl_in,
        kl_kind=rl.kl_kind,
        whitens=own(rl, spec, "whiten_advantages", False),
        is_one_step=rl.num_epochs * rl.num_mini_batches == 1,
        max_tokens=rl.max_tokens_per_micro_batch,
        topology=topology,
        correction=correction,
        band=(rl.correction.band_low, rl.correction.band_high),
    )
    updater = Updater(
        policy,
        policy_optimizer,
        critic,
        critic_optimizer,
        spec=spec,
        knobs=knobs,
        settings=_update_settings(config, spec),
        topology=topology,
        correction=correction,
        policy_schedule=policy_schedule,
        critic_schedule=critic_schedule,
    )
    trainer = RLTrainer(
        spec=spec,
        policy=policy,
        policy_optimizer=policy_optimizer,
        reference=reference,
        critic=critic,
        critic_optimizer=critic_optimizer,
        schedules=[each for each in (policy_schedule, critic_schedule) if each is not None],
        source=_source(config, _gatherer(config, spec, topology, tokenizer, engine)),
        assessor=assessor,
        updater=updater,
        turn=turn,
        sink=sink,
        diary=Diary(
            Path(settings.output_dir) if topology.is_main else None,
            resume_step=resume_step,
            show_every=rl.show_every,
            saves_tokens=rl.rollout.save_tokens,
            min_ess=rl.correction.min_ess,
            say=say,
        ),
        timeline=Timeline(
            Path(settings.output_dir) / "timeline.jsonl" if topology.is_main else None, resume_step
        ),
        max_steps=rl.max_steps,
        kl_coef=rl.kl_coef,
        kl_controller=None if rl.kl_target is None else AdaptiveKL(rl.kl_coef, rl.kl_target, rl.kl_horizon),
        reference_sync_every=rl.reference_sync_every,
        critic_warmup_steps=warmup_steps,
        drops_truncated=rl.drop_truncated,
        pad_token_id=tokenizer.pad_token_id or 0,
        exam=make_exam(config, topology, turn, engine, resume_step, say),
        exam_every=settings.sampler.sample_frequency,
        store=store,
        save_every=rl.save_every,
        peak_flops=rl.device_peak_tflops and rl.device_peak_tflops * 1e12 * topology.world_size,
    )
    return trainer, resume_step


def knobs_of(rl: RLSettings, spec: AlgorithmSpec) -> Knobs:
    """Return the algorithm's numbers: the config's own, else the algorithm's, else the defaults."""
    defaults = Knobs()
    return Knobs(
        **{each.name: own(rl, spec, each.name, getattr(defaults, each.name)) for each in fields(Knobs)}
    )


def _critic_warmup_steps(config: Config, spec: AlgorithmSpec) -> int:
    assert config.rl is not None
    return config.rl.critic.warmup_steps if spec.needs_critic else 0


def _shard(config: Config, topology: Topology) -> Any:
    return lambda model: shard_as_configured(model, config, topology)


def _reference(config: Config, spec: AlgorithmSpec, policy: Policy, topology: Topology) -> Reference | None:
    assert config.rl is not None
    if not spec.needs_reference and config.rl.kl_coef == 0:
        return None
    settings = config.train_parameters
    if settings.lora_peft_config is not None:
        return Reference(policy, None)
    shard = _shard(config, topology)
    return Reference(policy, load_reference(config.model, shard, settings.use_flash_attention))


def _gatherer(
    config: Config,
    spec: AlgorithmSpec,
    topology: Topology,
    tokenizer: PreTrainedTokenizerBase,
    engine: Engine,
) -> Gatherer:
    settings, rl = config.train_parameters, config.rl
    assert rl is not None

    assert settings.sampler is not None
    longest = int(settings.sampler.engine.get("max_model_len", settings.max_seq_len))
    questions = read_questions(rl.prompts, "rl.prompts")
    check_lengths(questions, tokenizer, longest - 1, "rl.prompts")

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    collector = Collector(
        engine=engine,
        group_size=rl.group_size,
        sampling_params={"temperature": 1.0, **rl.sampling_params},
        seed=settings.seed,
        max_model_len=longest,
        encode=encode,
        make_environment=None if rl.environment is None else load_plugin(rl.environment),
        max_turns=rl.max_turns,
        topology=topology,
    )
    scorer = Scorer(
        functions={short_name(name): get_reward(name) for name in rl.rewards},
        weights={
            short_name(name): float(weight) for name, weight in {**rl.rewards, **rl.reward_models}.items()
        },
        models={short_name(path): _reward_model(config, path, topology) for path in rl.reward_models},
        timeout_s=rl.reward_timeout_s,
        on_error=rl.on_reward_error,
        topology=topology,
    )
    return Gatherer(
        collector=collector,
        order=PromptOrder(questions, settings.seed),
        scorer=scorer,
        num_groups=rl.prompts_per_step,
        needs_greedy=spec.needs_greedy,
        drops_constant_groups=own(rl, spec, "dynamic_sampling", False),
        max_rounds=rl.max_sampling_rounds,
        max_tokens=rl.sampling_params.get("max_tokens", 16),
        overlong_buffer=rl.overlong_buffer_tokens,
        overlong_penalty=rl.overlong_penalty,
        replay=_replay(config),
        replayed_share=rl.rollout.replayed_share,
    )


def _source(config: Config, gatherer: Gatherer) -> Source:
    overlap = config.overlap
    if overlap is None or overlap.max_staleness == 0:
        return gatherer
    return Feed(gatherer, max_staleness=overlap.max_staleness, overdue=overlap.overdue)


def _replay(config: Config) -> Replay | None:
    assert config.rl is not None
    if config.rl.rollout.source == "engine":
        return None
    assert config.rl.rollout.path is not None
    groups = read_rollouts(config.rl.rollout.path)
    return Replay(groups, config.rl.group_size, config.train_parameters.seed)


def _reward_model(config: Config, path: str, topology: Topology) -> RewardModel:
    assert config.rl is not None
    return RewardModel(
        path,
        _shard(config, topology),
        topology,
        max_tokens=config.rl.max_tokens_per_micro_batch,
        max_length=config.train_parameters.max_seq_len,
    )


def _update_settings(config: Config, spec: AlgorithmSpec) -> UpdateSettings:
    settings, rl = config.train_parameters, config.rl
    assert rl is not None
    return UpdateSettings(
        num_epochs=rl.num_epochs,
        num_mini_batches=rl.num_mini_batches,
        max_tokens_per_micro_batch=rl.max_tokens_per_micro_batch,
        reduction=rl.reduction or spec.reduction,
        fixed_length=rl.sampling_params.get("max_tokens") or settings.max_seq_len,
        kl_kind=rl.kl_kind,
        kl_straight_through=rl.kl_straight_through,
        entropy_coef=rl.entropy_coef,
        value_clip=rl.critic.value_clip,
        max_grad_norm=settings.max_grad_norm,
        critic_max_grad_norm=rl.critic.max_grad_norm,
        max_kl=rl.max_kl,
        seed=settings.seed,
    )


def _store(config: Config, topology: Topology) -> CheckpointStore:
    assert config.rl is not None
    # Everything that decides what a step does; how much of it is shown or saved may change.
    free = (
        "save_every",
        "show_every",
        "device_peak_tflops",
        "max_tokens_per_micro_batch",
        "reward_timeout_s",
        "on_reward_error",
    )
    decisive = {name: value for name, value in asdict(config.rl).items() if name not in free}
    return make_store(config, topology, rl=decisive)
