"""What ``vectorlm evaluate`` asks of a model, from a config file, the command line, or both."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vectorlm.cli.sample import MAX_TOKENS, read_pairs, sampling_params
from vectorlm.data.prompts import read_prompts
from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import has_gpu
from vectorlm.rl.settings import CollectSettings
from vectorlm.runs.config.load import load_config
from vectorlm.runs.config.schema import Config
from vectorlm.types import PromptRecord


@dataclass(frozen=True)
class Exam:
    """What a model is asked, how it samples, and what scores its answers."""

    prompt_records: Sequence[PromptRecord] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The weight of each reward function, by its name."""
    sampling_params: Mapping[str, Any] = field(default_factory=lambda: {"max_tokens": MAX_TOKENS})
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = 300.0
    """Longest call of a reward function, in seconds."""
    at_k: Sequence[int] = ()
    """The k of pass@k and maj@k."""
    environment: str | None = None
    """What plays the questions."""
    collect: CollectSettings | None = None
    """How rollouts are made with it."""
    max_seq_len: int = -1
    """Longest prompt with its answer, where the engine's arguments have no max_model_len; -1 for the model's own."""
    seed: int = 0
    """Where their seeds come from, if the sampling parameters have none."""


def read_exam(args: argparse.Namespace) -> Exam:
    """Read an exam from a config file, the command line, or both; the command line wins.

    Raises:
        ConfigError, DatasetError: There are no questions or no rewards, or they cannot be read.
    """
    exam = Exam()
    if args.yaml_path:
        config = load_config(args.yaml_path, args.overrides)
        exam = _exam_of(config if args.source is None else _of_source(config, args.source), not args.prompts)
    rewards = dict.fromkeys(args.rewards, 1.0) if args.rewards else exam.rewards
    if not rewards and exam.environment is None:
        raise ConfigError("nothing scores the answers. Use --reward countdown, or --reward file.py:NAME.")
    records = read_prompts(args.prompts, "--prompts") if args.prompts else exam.prompt_records
    engine_args = read_pairs("--engine_arg", "max_model_len=2048", args.engine_args)
    exam = replace(
        exam,
        prompt_records=records[: args.limit],
        rewards=rewards,
        sampling_params={**exam.sampling_params, **sampling_params(args)},
        engine_args={**exam.engine_args, **engine_args},
        at_k=args.at_k or exam.at_k,
    )
    if (largest := max(exam.at_k, default=1)) > (num := exam.sampling_params.get("n") or 1):
        raise ConfigError(
            f"--at_k {largest} needs as many answers to each question, and there are {num}. Use --n {largest}."
        )
    if args.pairs and ((exam.sampling_params.get("n") or 1) < 2 or exam.environment is not None):
        raise ConfigError(
            "--pairs needs several answers to each question, and no environment. Use --n 8, for example."
        )
    return exam


def _of_source(config: Config, name: str) -> Config:
    """Return a config whose questions, rewards and environment are those of one of its sources."""
    sources = {} if config.rl is None else config.rl.by_source
    known = [each for each, source in sources.items() if source.held_out is not None]
    if config.rl is None or config.train_parameters.sampler is None or name not in known:
        raise ConfigError(
            f"--source {name}: rl.sources has no source of that name with held_out questions. It has "
            f"{', '.join(known) or 'none at all'}."
        )
    source, sampler = sources[name], config.train_parameters.sampler
    reward = config.held_out_rewards.get(name)
    held_out = replace(sampler.evaluation, prompts=source.held_out, reward=reward, further_rewards=())
    sampler = replace(sampler, evaluation=held_out)
    collect = replace(config.rl.collect, environment=source.environment)
    return replace(
        config,
        train_parameters=replace(config.train_parameters, sampler=sampler),
        rl=replace(config.rl, collect=collect),
    )


def _exam_of(config: Config, reads_prompts: bool) -> Exam:
    """Return the held-out questions of a run with what scores them; without a sampler's reward, that of `rl`."""
    sampler, rl = config.train_parameters.sampler, config.rl
    if sampler is None or (sampler.evaluation.prompts is None and reads_prompts):
        raise ConfigError(
            "the config has no held-out questions (train_parameters.sampler.prompts). Use --source if rl.sources have "
            "some, or --prompts, and --reward if the config has no reward either."
        )
    settings, held_out = sampler.engine, sampler.evaluation
    exam = Exam(sampling_params=settings.sampling_params, timeout_s=settings.timeout_s, at_k=held_out.at_k)
    if settings.inference == "vllm":
        dtype = config.train_parameters.engine_dtype(has_gpu())
        exam = replace(exam, engine_args={"dtype": dtype, **settings.engine_args})
    if rl is not None:
        # Half an answer is a wrong one: it ends where the run ends it.
        exam = replace(exam, max_seq_len=config.train_parameters.longest_rollout)
    if rl is not None and (environment := rl.collect.environment_of("")) is not None:
        exam = replace(exam, environment=environment, collect=rl.collect, seed=config.train_parameters.seed)
    if reads_prompts and held_out.prompts is not None:
        exam = replace(exam, prompt_records=read_prompts(held_out.prompts))
    if held_out.reward is not None:
        return replace(exam, rewards=dict.fromkeys((held_out.reward, *held_out.further_rewards), 1.0))
    if rl is None:
        return exam
    if rl.reward.reward_models:
        raise ConfigError("rl.reward_models cannot be evaluated. Set sampler.reward.")
    return replace(exam, rewards=dict(rl.reward.rewards), timeout_s=rl.reward.reward_timeout_s)
