"""Run reinforcement learning, from the config to the final model."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vectorlm.algorithms.registry import get_algorithm
from vectorlm.algorithms.spec import AlgorithmSpec
from vectorlm.algorithms.support import WHOLE, Support
from vectorlm.data.encoding import encode, end_tokens
from vectorlm.data.tasks import Tasks
from vectorlm.errors import ConfigError, RewardError
from vectorlm.plugin import file_of
from vectorlm.ranks.topology import Topology
from vectorlm.report.step_lines import Timeline
from vectorlm.rl.adapters import OtherAdapters
from vectorlm.rl.environments.environment import AGENT
from vectorlm.rl.loop import RLLoop, Source
from vectorlm.rl.models import (
    Critic,
    Reference,
    RLModels,
    SelfTeacher,
    ServerTeacher,
    Teacher,
    disable_dropout,
    load_critic,
    load_reference,
    num_logits,
    require_quiet,
)
from vectorlm.rl.prepare import correction_of
from vectorlm.rl.prompts import Curriculum, Demonstrations, PromptMixture
from vectorlm.rl.rewards.judge import OwnJudge
from vectorlm.rl.rewards.registry import (
    COMPLETIONS,
    RewardSignature,
    get_reward,
    given_of,
    short_name,
    without_arguments,
)
from vectorlm.rl.rewards.reward_model import RewardModel
from vectorlm.rl.rewards.scorer import RewardScorer
from vectorlm.rl.rollouts.builder import SamplerBuilder
from vectorlm.rl.rollouts.logger import RolloutLogger
from vectorlm.rl.rollouts.queue import GroupQueue
from vectorlm.rl.rollouts.replay import read_rollouts, replay_order
from vectorlm.rl.rollouts.source import RolloutSource
from vectorlm.rl.settings import CPU_PASS_TOKENS, SELF, StepSettings
from vectorlm.runs.config.schema import Config, RLSettings
from vectorlm.runs.output import finish, open_recorder
from vectorlm.runs.preflight.checked import CheckedConfig
from vectorlm.runs.preflight.resume import content_of
from vectorlm.runs.preflight.rl import reshaped_by, text_alone
from vectorlm.runs.preflight.user_code import source_tools
from vectorlm.runs.start import Run, open_run
from vectorlm.sampling.engine import SamplingEngine
from vectorlm.train.grammar import Grammar
from vectorlm.train.language_model import LanguageModel, inner_model
from vectorlm.train.load import load_model
from vectorlm.train.lora import start_alone
from vectorlm.train.objective import NextTokens
from vectorlm.train.optimizer_step import OptimizerStep
from vectorlm.train.routes import weigh_balance
from vectorlm.types import ENVIRONMENT, InFlight, PromptRecord


def reinforce(
    config: Config | CheckedConfig,
    topology: Topology | None = None,
    engine: SamplingEngine | None = None,
    callbacks: Sequence[Any] = (),
    recorded: Source | None = None,
) -> None:
    """Train on this rank and write the results to the config's ``output_dir``. Call it on every rank.

    The run writes ``final-model``, ``metrics.jsonl``, ``rollouts.jsonl``, ``samples.jsonl``, ``run.png``,
    ``correction.jsonl``, ``correction.png``, ``timeline.jsonl``, ``timeline.png``, ``config.yaml``, ``run.json`` and,
    with checkpointing, ``checkpoints``. A run that was killed resumes from its latest checkpoint.

    Args:
        config: The config of the run, with a section ``rl``. Rank 0 checks it unless it is checked already.
        topology: This rank's position; None reads it from the environment.
        engine: An engine to sample with, which stays open; None starts the engine of the config. It must report
            log-probabilities of the distribution that it samples from, which is every engine's default.
        callbacks: See `vectorlm.reinforce`.
        recorded: A source of recorded rollouts that replaces the engine's.

    Raises:
        ConfigError: The config cannot run, or needs more memory than the machine has.
        CheckpointError: The checkpoints in ``output_dir`` belong to another run, or a node cannot read them.
        NonFiniteLoss: Training diverged.
        RewardError: A reward function failed and `rl.on_reward_error` is ``stop``, or no completion had a reward.
        WorkersDied: The reward workers die again and again.
        RolloutError: An environment failed.
        EngineError: The teacher's server does not answer.
    """
    settings = config.config.rl if isinstance(config, CheckedConfig) else config.rl
    if settings is None:
        raise ConfigError("rl=null: reinforcement learning needs a section 'rl'. Add it.")
    with open_run(config, topology, engine) as run:
        rl = run.config.rl
        assert rl is not None
        loop = _build(run, rl, get_algorithm(rl.algorithm.name), callbacks, recorded)
        loop.run()
        finish(run, loop.models.policy.model, loop.recorder, loop.step)
        if loop.is_unscored:
            raise RewardError(
                f"no completion of this run had a reward, so {run.output / 'final-model'} has learned from none. "
                f"{loop.why_unscored}"
            )


def _build(
    run: Run, rl: RLSettings, spec: AlgorithmSpec, callbacks: Sequence[Any], recorded: Source | None
) -> RLLoop:
    settings = run.config.train_parameters
    models = _models(run, rl, spec)
    turn = run.make_turn(models.policy.model, models.policy_step.optimizer)
    assert run.engine is not None
    assert turn is not None
    # Held-out questions without a source have the environment of prompts without a source.
    names = {source: rl.collect.environment_of(source) for source in ("", *rl.by_source)}
    environments = SamplerBuilder(
        {source: name for source, name in names.items() if name is not None},
        run.engine,
        # A copy: the actors encode in their own threads.
        copy.deepcopy(run.tokenizer),
        max_model_len=run.config.longest_rollout,
        timeout_s=rl.collect.environment_timeout_s,
        stack=run.stack,
        log_path=run.output / "rewards.log",
        asks_adapters=run.config.asks_adapters,
    )
    judges = _judges(run, environments)
    play = environments.player(rl.collect, run.config.evaluation.sampling_params, settings.seed)
    recorder = open_recorder(
        run,
        turn,
        models.policy.model,
        num_steps=rl.num_steps,
        save_every=rl.save_every,
        play=dict.fromkeys(environments.names, play),
        callbacks=callbacks,
        schedule=models.schedules[0],
        rewards=judges,
    )
    recorder.say_padded(models.why_padded)
    rollout_log = RolloutLogger(
        run.output if run.topology.is_main else None,
        resume_step=recorder.resume_step,
        show_every=rl.show_every,
        saves_tokens=rl.rollout.save_tokens,
        min_ess=rl.correction.mismatch.min_ess,
        say=recorder.say,
    )
    timeline = run.output / "timeline.jsonl" if run.topology.is_main else None
    return RLLoop(
        models,
        spec,
        recorded or _source(run, rl, spec, environments, judges),
        _step_settings(run, rl, spec),
        turn,
        recorder,
        rollout_log=rollout_log,
        timeline=Timeline(timeline, recorder.resume_step),
        topology=run.topology,
        demonstrations=_demonstrations(run, rl, models.policy),
        overlaps_sampling=rl.async_ is not None and rl.async_.max_staleness > 0,
        teacher_prompt=_teacher_prompt(run, rl),
        # Recorded rollouts have asked the adapters already.
        adapters=None if recorded is not None else _adapters(run, rl, models),
    )


def _adapters(run: Run, rl: RLSettings, models: RLModels) -> OtherAdapters | None:
    """Return the object that sends the reference and older policies to the engine; None if nothing may ask them."""
    if not run.config.asks_adapters:
        return None
    assert run.engine is not None
    in_flight: InFlight = "refuse" if rl.async_ is None else rl.async_.update
    return OtherAdapters(run.engine, models.policy.model, rl.keep_adapters, in_flight)


def _teacher_prompt(run: Run, rl: RLSettings) -> Callable[[PromptRecord], Sequence[int]] | None:
    """Return the function that encodes the policy's prompts as its own teacher; None without a prompt column."""
    column = None if rl.teacher is None else rl.teacher.prompt_column
    if column is None:
        return None
    return lambda record: list(encode(record.columns[column], lambda: run.tokenizer))


def _demonstrations(run: Run, rl: RLSettings, policy: LanguageModel) -> Demonstrations | None:
    if (sft := rl.sft) is None:
        return None
    longest, num_rows = (
        run.config.train_parameters.max_seq_len,
        sft.rows_per_step // run.topology.num_data_shares,
    )
    max_tokens = rl.update.max_tokens_per_micro_batch
    if not run.topology.is_cuda:
        max_tokens = min(max_tokens, CPU_PASS_TOKENS)
    # Every pass has the same number of rows.
    per_pass = max(
        size
        for size in range(1, num_rows + 1)
        if num_rows % size == 0 and (size * longest <= max_tokens or size == 1)
    )
    loader = run.make_loader(
        sft.dataset, NextTokens.ignore_index, per_pass, num_rows // per_pass, shuffle=True
    )
    return Demonstrations(policy.untruncated(temperature=1.0), loader, sft, rl.num_steps)


def _models(run: Run, rl: RLSettings, spec: AlgorithmSpec) -> RLModels:
    settings, sampling, grammar = run.config.train_parameters, rl.collect.sampling, None
    dtype, flash_attention = settings.model.dtype, settings.model.use_flash_attention
    warmup_steps = rl.critic.warmup_steps if spec.needs_critic else 0

    def optimizer_step(
        model: Any, num_batches: int, max_norm: float, name: str, lr: float | None
    ) -> OptimizerStep:
        optimizer = run.make_optimizer(model, lr)
        schedule = run.make_schedule(optimizer, num_batches * rl.update.steps_per_batch)
        is_cast = settings.model.computes_in_bf16(run.topology.is_cuda)
        return OptimizerStep(model, optimizer, schedule, max_norm, run.topology, name, is_cast)

    # Losses that accept completions of any policy read probabilities among all tokens.
    support = Support.of(sampling) if spec.samples_from_policy else WHOLE
    model = disable_dropout(run.load_model(keeps_start=rl.has_reference or run.config.asks_adapters))
    if sampling.get("structured_outputs") and spec.samples_from_policy:
        ends = end_tokens(run.tokenizer) | set(sampling.get("stop_token_ids") or ())
        grammar = Grammar(sampling["structured_outputs"], run.tokenizer, num_logits(model), ends)
    policy = LanguageModel(
        model,
        float(sampling["temperature"]),
        support=support,
        grammar=grammar,
        packs=settings.model.pack_rows,
        device=run.topology.device,
        context=run.context,
        image_tokens=run.image_tokens,
    )
    weigh_balance(policy.routers, inner_model(model), settings.model.router_aux_loss_coef)
    if rl.update.router_replay != "off" and policy.routers is None:
        raise ConfigError(
            f"rl.router_replay={rl.update.router_replay} needs routers that choose experts by topk, and this model has "
            "none. Leave it out."
        )
    require_quiet("policy", model, policy.untruncated())
    num_batches = max(rl.num_steps - warmup_steps, 1)
    policy_step = optimizer_step(policy.model, num_batches, settings.loop.max_grad_norm, "policy", None)
    reference = critic = critic_step = None
    if rl.has_reference:
        # With LoRA the reference is the policy with its initial adapters.
        is_copy = settings.lora_peft_config is None
        frozen = load_reference(run.read_model, run.load_sharded) if is_copy else None
        reference = Reference(policy, frozen, start_alone)
    if spec.needs_critic:
        critic_model = load_critic(rl.critic.model or run.config.model, run.load_sharded, dtype)
        critic = Critic(critic_model, policy)
        require_quiet("critic", critic_model, critic)
        critic_step = optimizer_step(
            critic.model, rl.num_steps, rl.critic.max_grad_norm, "critic", rl.critic.lr
        )
    teacher: Teacher | ServerTeacher | None = None
    if rl.teacher is not None and rl.teacher.model == SELF:
        teacher = SelfTeacher(policy)
    elif rl.teacher is not None and rl.teacher.model is not None:
        fp32_head = settings.model.fp32_head
        read = partial(
            load_model, rl.teacher.model, flash_attention=flash_attention, dtype=dtype, fp32_head=fp32_head
        )
        teacher = Teacher(policy, load_reference(read, run.load_sharded, num_logits(policy.model)))
    elif rl.teacher is not None and rl.teacher.server is not None:
        # This imports the HTTP client, which other runs do not need.
        from vectorlm.sampling.backends.server.client import ScoringServer

        server = ScoringServer(rl.teacher.server, rl.teacher.timeout_s)
        teacher = ServerTeacher(server.logprobs, run.topology, num_logits(policy.model), server.top_logprobs)
    return RLModels(policy, policy_step, reference, critic, critic_step, teacher)


def _step_settings(run: Run, rl: RLSettings, spec: AlgorithmSpec) -> StepSettings:
    settings = run.config.train_parameters
    peak_tflops = settings.loop.device_peak_tflops
    return StepSettings(
        hparams=rl.algorithm.settings,
        correction=correction_of(rl.correction, spec),
        mismatch=rl.correction.mismatch,
        update=rl.update,
        kl=rl.kl,
        critic=rl.critic,
        teacher=rl.teacher,
        # Without a limit, a completion can fill the sequence.
        max_tokens=rl.collect.sampling["max_tokens"] or settings.max_seq_len,
        seed=settings.seed,
        pad_token_id=run.tokenizer.pad_token_id or 0,
        exact=settings.model.exact,
        logs_mismatch=not any(reshaped_by(run.config, rl)),
        reads_text_alone=next((path for path, _, _ in text_alone(run.config, rl)), None),
        peak_flops=peak_tflops and peak_tflops * 1e12 * run.topology.world_size,
    )


def _judges(run: Run, environments: SamplerBuilder) -> dict[str, OwnJudge]:
    """Return the rewards that ask the run's own engine, by name; called on all ranks."""
    if not run.config.judges:
        return {}
    gateway, ranks = environments.gateway, environments.engine.engine_ranks
    found = ranks.on_all_ranks(
        "find the gateways", lambda: ("", "") if gateway is None else (gateway.url, gateway.key)
    )
    url, key = found[run.topology.rank // ranks.ranks_per_engine * ranks.ranks_per_engine]
    # Without a template, the model continues texts.
    is_chat = run.tokenizer.chat_template is not None
    return {
        name: OwnJudge(given_of(name), adapter, url, key, is_chat)
        for name, adapter in run.config.judges.items()
    }


def _source(
    run: Run,
    rl: RLSettings,
    spec: AlgorithmSpec,
    environments: SamplerBuilder,
    judges: Mapping[str, OwnJudge],
) -> RolloutSource:
    seed = run.config.train_parameters.seed
    assert run.engine is not None
    replay = None
    if rl.rollout.path is not None:
        signatures = [RewardSignature.of(get_reward(name)) for name in rl.all_rewards]
        reads = {name for signature in signatures for name in signature.kinds}
        if any(signature.takes_lists for signature in signatures):
            reads.add(COMPLETIONS)
        stored = read_rollouts(rl.rollout.path, reads)
        rows = (row for group in stored for rollout in group for row in rollout.rows)
        if rl.update.router_replay == "engine" and any(row.routes is None for row in rows):
            raise ConfigError(
                "rl.router_replay=engine needs the experts of every token, and some rollouts of rl.rollout.path have "
                "none. Use old_policy or off, or write them with a run whose engine returns them (docs/moe.md)."
            )
        replay = replay_order(stored, rl.collect.group_size, seed)
    scorer = _scorer(run, rl, spec, judges)
    prompts, sources = run.checked.prompts, rl.by_source
    others = spec.needs_teacher or any(rl.reward.reward_models.values())
    sampler = environments.sampler(
        rl.collect,
        seed,
        needs_greedy=spec.needs_greedy,
        score=scorer.score_group,
        unscored=[] if others else [name for name in sources if not any(sources[name].rewards.values())],
    )
    curricula = {
        name: Curriculum(tasks, source.curriculum)
        for name, source in sources.items()
        if source.curriculum is not None and isinstance(tasks := prompts[name], Tasks)
    }
    groups = GroupQueue(run.engine, sampler)
    run.stack.callback(groups.close)
    return RolloutSource(
        groups,
        scorer,
        PromptMixture(
            prompts, seed, {name: source.weight or 0.0 for name, source in sources.items()}, curricula
        ),
        curricula=curricula,
        overlap=rl.async_,
        replay=replay,
        replayed_share=rl.rollout.replayed_share,
        origin=origin_of(run.config, rl),
    )


def origin_of(config: Config, rl: RLSettings) -> str:
    """Return the code and the settings that scored rollouts come from as text, with digests of the user's files."""
    found: list[Any] = []
    for source, settings in rl.by_source.items():
        for given in filter(None, (*settings.rewards, settings.environment)):
            name = without_arguments(given.removeprefix(AGENT))
            where = name.rpartition(":")[0]
            # Without the folder, because a run may move.
            label = given.replace(where, Path(where).name)
            found.append((source, label, content_of(file_of(name))))
    limits = (rl.collect.max_turns, config.longest_rollout)
    return json.dumps([found, rl.collect.sampling, limits], sort_keys=True, default=str)


def _scorer(run: Run, rl: RLSettings, spec: AlgorithmSpec, judges: Mapping[str, OwnJudge]) -> RewardScorer:
    train, engine = run.config.train_parameters, run.engine
    asked = {name: judges[name].adapter for name in rl.all_rewards if name in judges}
    assert engine is not None

    def require() -> None:
        for name, adapter in asked.items():
            if adapter not in (known := engine.adapters):
                raise RewardError(
                    f"rl.rewards.{name}: the engine does not hold the adapter {adapter!r}, only "
                    f"{', '.join(sorted(known))}. Name one of these."
                )

    def weights_of(rewards: Mapping[str, Any], environment: str | None) -> dict[str, float]:
        both = {**rewards, **rl.reward.reward_models}
        of_environment = {} if environment is None else {ENVIRONMENT: 1.0}
        return {short_name(name): float(weight) for name, weight in both.items()} | of_environment

    return RewardScorer(
        settings=rl.collect,
        functions={short_name(name): judges.get(name, name) for name in rl.all_rewards},
        require=require,
        weights=weights_of(rl.reward.rewards, rl.collect.environment_of("")),
        of_source={
            name: weights_of(source.rewards, source.environment)
            for name, source in rl.by_source.items()
            if name
        },
        models={
            short_name(path): RewardModel(
                path,
                run.load_sharded,
                # Every rank scores its own rows.
                replace(run.topology, context_parallel=1, model_parallel=1),
                run.tokenizer,
                max_tokens=rl.update.max_tokens_per_micro_batch,
                max_length=train.max_seq_len,
                dtype=train.model.dtype,
                step_reward=rl.reward.step_reward,
                source_tools={source: source_tools(rl, source)[0] for source in rl.by_source},
            )
            for path in rl.reward.reward_models
        },
        pool=run.reward_workers,
        timeout_s=rl.reward.reward_timeout_s,
        on_error=rl.reward.on_reward_error,
        drops_constant_groups=rl.algorithm.settings.dynamic_sampling,
        compared=spec.compared,
        topology=run.topology,
    )
