"""``vectorlm evaluate``: how well a model answers, by a run's own questions and rewards or by tasks of a harness."""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectorlm.cli.arguments import add_set_argument
from vectorlm.cli.sample import (
    MAX_TOKENS,
    add_sampling_arguments,
    ask,
    check_sampling,
    open_engine,
    read_pairs,
    require_model,
    sampling_params,
)
from vectorlm.data.encoding import asked, is_messages, split_unfinished
from vectorlm.data.prompts import read_prompts
from vectorlm.errors import ConfigError
from vectorlm.packages import is_installed
from vectorlm.ranks.topology import has_gpu
from vectorlm.ranks.workers.pool import WorkerPool
from vectorlm.report.step_lines import json_text
from vectorlm.rl.evaluation.grade import grade
from vectorlm.rl.rewards.function import RewardFunction, score_answers
from vectorlm.rl.rewards.registry import get_reward, short_name
from vectorlm.rl.settings import CollectSettings
from vectorlm.runs.config.load import load_config
from vectorlm.runs.config.schema import Config
from vectorlm.runs.preflight.user_code import signature_problems
from vectorlm.types import ENVIRONMENT, PromptRecord, RewardResult

if TYPE_CHECKING:
    from vectorlm.rl.rollout import Rollout


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm evaluate``."""
    help_text = (
        "a run's config file: its held-out questions (sampler.prompts), rewards and sampling parameters"
    )
    parser.add_argument("yaml_path", nargs="?", metavar="my.yaml", help=help_text)
    add_set_argument(parser)
    help_text = "one of the config's rl.sources: its held-out questions and rewards"
    parser.add_argument("--source", metavar="NAME", help=help_text)
    parser.add_argument("--prompts", metavar="FILE", help="questions: a JSONL file, a `prompt` in every line")
    help_text = "what scores the answers: countdown, or file.py:NAME; may be repeated"
    parser.add_argument("--reward", dest="rewards", action="append", metavar="NAME", help=help_text)
    help_text = "the k of pass@k and maj@k, up to --n (default: 2, 4, 8 and so on)"
    parser.add_argument("--at_k", metavar="K,…", type=_ints, default=(), help=help_text)
    help_text = "tasks of the lm-evaluation-harness instead, or YAML files of such tasks"
    parser.add_argument("--tasks", metavar="NAME,…", help=help_text)
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N questions (of each task)")
    parser.add_argument("--output", metavar="FILE", help="write the numbers and every answer there, as JSON")
    help_text = "write there for each question its best and worst answer, as rows for dataset_preprocess.examples=pairs"
    parser.add_argument("--pairs", metavar="FILE", help=help_text)
    help_text = "an argument of vLLM's engine, for example max_model_len=2048; may be repeated"
    parser.add_argument(
        "--engine_arg", dest="engine_args", action="append", default=[], metavar="NAME=VALUE", help=help_text
    )
    add_sampling_arguments(parser)


def evaluate_command(args: argparse.Namespace) -> int:
    """Say how well a model answers questions."""
    require_model(args)
    _require_sense(args)
    start_s = time.perf_counter()
    found, text = _answer_tasks(args) if args.tasks else _answer_questions(args)
    seconds = time.perf_counter() - start_s
    print(f"{text}\n{seconds:.1f} s")
    if args.output is not None:
        result = {"model": args.model, "engine": args.engine, "seconds": seconds, **found}
        # Half a character, as JSON lines may hold it, is written as its escape.
        text = json_text(result, indent=1, ensure_ascii=False) + "\n"
        Path(args.output).write_text(text, encoding="utf-8", errors="backslashreplace")
    if args.pairs is not None:
        pairs = [pair for row in found["answers"] if (pair := _pair_of(row)) is not None]
        text = "".join(json_text(pair, ensure_ascii=False) + "\n" for pair in pairs)
        Path(args.pairs).write_text(text, encoding="utf-8", errors="backslashreplace")
        num_others = len(found["answers"]) - len(pairs)
        print(
            f"{args.pairs}: {len(pairs)} pairs; {num_others} questions have answers that score alike or are cut off"
        )
    return 0


def _pair_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the best whole answer to a question and the worst, by their rewards' sum; None if they score alike."""
    # Of several rewards the last is their weighted sum.
    scores = [list(each["rewards"].values())[-1] for each in row["completions"]]
    scored = [place for place, score in enumerate(scores) if score is not None and not math.isnan(score)]
    # Training would put an end behind an answer that was cut off.
    whole = [place for place in scored if row["completions"][place]["finish_reason"] != "length"]
    best, worst = (
        pick(places, key=lambda place: scores[place], default=None)
        for pick, places in ((max, whole), (min, scored))
    )
    if best is None or worst is None or scores[best] == scores[worst]:
        return None
    prompt, texts = row["prompt"], [row["completions"][place]["text"] for place in (best, worst)]
    if is_messages(prompt):
        prompt, begun = split_unfinished(prompt)
        texts = [[{"role": "assistant", "content": begun + text}] for text in texts]
    pair = {"prompt": prompt, "chosen": texts[0], "rejected": texts[1]}
    # The template renders them before both texts, as it did for the answers.
    tools = {name: value for name, value in row["columns"].items() if name == "tools"}
    return {**pair, "score_chosen": scores[best], "score_rejected": scores[worst], **tools}


def _require_sense(args: argparse.Namespace) -> None:
    """Refuse arguments that are missing, would have no effect, or fail only after the work."""
    own = {"my.yaml": args.yaml_path, "--prompts": args.prompts, "--reward": args.rewards}
    own |= {
        "--source": args.source,
        "--set": args.overrides,
        "--max_tokens": args.max_tokens,
        "--temperature": args.temperature,
    }
    own |= {
        "--pairs": args.pairs,
        "--n": args.n,
        "--at_k": args.at_k or None,
        "--seed": args.seed,
        "--param": args.params,
    }
    given = [name for name, value in own.items() if value not in (None, [])]
    if args.tasks and given:
        raise ConfigError(f"{given[0]} has no effect with --tasks: each task brings its own. Leave it out.")
    if args.tasks and not is_installed("lm_eval"):
        raise ConfigError(
            "--tasks needs the package lm_eval, which is not installed. pip install 'vectorlm[eval]'"
        )
    if not args.tasks and not args.yaml_path and not args.prompts:
        raise ConfigError(
            "there are no questions. Name a config file, --prompts FILE --reward NAME, or --tasks."
        )
    if args.source is not None and (args.prompts or not args.yaml_path):
        raise ConfigError(
            "--source needs a config file and no --prompts: it names one of the config's rl.sources."
        )
    if args.overrides and not args.yaml_path:
        raise ConfigError("--set has no effect without a config file. Name one, or leave it out.")
    if args.engine_args and args.engine == "hf":
        raise ConfigError(
            "--engine_arg is for vLLM's engine, and has no effect with --engine hf. Leave it out."
        )
    if args.prompts and not Path(args.prompts).is_file():
        raise ConfigError(
            f"--prompts {args.prompts} is not a file: name a JSONL file with a prompt in every line."
        )
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit {args.limit} leaves no question: it must be at least 1.")
    for name in ("output", "pairs"):
        path = Path(getattr(args, name) or "new")
        if not path.parent.is_dir() or path.is_dir():
            raise ConfigError(f"--{name} {path} cannot be written: name a file in a folder that exists.")


def _ints(text: str) -> tuple[int, ...]:
    found = tuple(map(int, text.split(",")))
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be integers >= 1")
    return found


def _answer_questions(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Answer the questions of an exam; return what is written to a file, and the text to print."""
    # It imports torch, which the other commands do without.
    from vectorlm.rl.rollout import logged_means

    exam = read_exam(args)
    if args.pairs is not None and exam.environment is not None:
        raise ConfigError(
            "--pairs cannot be used with an environment: its words would be trained on as the policy's. Leave it out."
        )
    # Functions of two files may have one name.
    short = [short_name(name) for name in exam.rewards]
    labels = short if len(set(short)) == len(short) else list(exam.rewards)
    records = exam.prompt_records
    for name in exam.rewards:
        # Refused before the model is loaded.
        for rule, fix in signature_problems(get_reward(name), records, "the questions"):
            raise ConfigError(f"the reward {name!r} {rule}. {fix}")
    answers = _answers(args, exam)
    with WorkerPool(WorkerPool.auto_size()) as pool:
        functions = [
            RewardFunction(name, pool, timeout_s=exam.timeout_s, stops_at_error=True) for name in exam.rewards
        ]
        scored = {
            label: score_answers(function, answers, f"the reward {name!r}")
            for label, name, function in zip(labels, exam.rewards, functions, strict=True)
        }
    if exam.environment is not None:
        scored[ENVIRONMENT] = score_answers(None, answers, "")
    if len(scored) > 1:
        # As in training, where an environment's rewards have no other weight.
        weights = [*exam.rewards.values(), *[1.0] * (exam.environment is not None)]
        scored["sum"] = _weighted_sums([*scored.values()], weights)
    grades = {name: grade(results, exam.at_k) for name, results in scored.items()}
    lines = []
    for name, each in grades.items():
        # One question has no error.
        of_right, of_mean = f" ± {each.accuracy_error:.1%}", f" ± {each.mean_error:.4f}"
        if each.num_questions < 2:
            of_right = of_mean = ""
        right = f"{each.accuracy:6.1%}{of_right} right, " if name != "sum" else ""
        unscored = f", {each.num_unscored} answers without a reward" if each.num_unscored else ""
        mean = f"mean reward {each.mean:.4f}{of_mean}"
        chances = "".join(f", pass@{k} {value:.1%}" for k, value in each.pass_at.items() if name != "sum")
        chances += "".join(f", maj@{k} {value:.1%}" for k, value in each.majority_at.items())
        lines.append(f"{name:{max(map(len, grades))}}  {right}{mean}{chances}{unscored}")
    measured = logged_means(each.measured for options in answers for each in options)
    lines += [f"{name}  {value:.4f}, measured by the environment" for name, value in measured.items()]
    num_answers = sum(map(len, answers))
    lines.append(f"{len(records)} questions, {num_answers} answers")
    rows = [
        {
            "prompt": record.prompt,
            "columns": record.columns,
            "completions": [
                {
                    "text": completion.text,
                    "finish_reason": completion.finish_reason,
                    "rewards": {name: results[row][column].reward for name, results in scored.items()},
                }
                for column, completion in enumerate(answers[row])
            ],
        }
        for row, record in enumerate(records)
    ]
    found = {
        "sampling_params": exam.sampling_params,
        "num_questions": len(records),
        "num_answers": num_answers,
        "rewards": {name: asdict(each) for name, each in grades.items()},
        "logged": measured,
        "answers": rows,
    }
    return found, "\n".join(lines)


def _weighted_sums(
    scored: Sequence[Sequence[Sequence[RewardResult]]], weights: Sequence[float]
) -> list[list[RewardResult]]:
    """Add up the rewards of each answer; as in training, a None is left out."""

    def total(found: Sequence[RewardResult]) -> RewardResult:
        addends = [weight * each.reward for weight, each in zip(weights, found, strict=True)]
        known = [each for each in addends if not math.isnan(each)]
        return RewardResult(sum(known) if known else math.nan)

    return [
        [total(answer) for answer in zip(*question, strict=True)] for question in zip(*scored, strict=True)
    ]


def _answers(args: argparse.Namespace, exam: Exam) -> list[Sequence[Rollout]]:
    """Return the answers to each question: one turn, or rollouts with the environment."""
    from vectorlm.rl.rollout import Rollout
    from vectorlm.rl.rollouts.builder import SamplerBuilder

    model, adapter = require_model(args)
    if exam.environment is None or exam.collect is None:
        prompts = [asked(record) for record in exam.prompt_records]
        longest = {} if exam.max_seq_len == -1 else {"max_model_len": exam.max_seq_len}
        engine_args = {**longest, **exam.engine_args}
        sampled = ask(args.engine, model, adapter, prompts, exam.sampling_params, engine_args)
        return [
            [Rollout.from_completion(record, each) for each in options]
            for record, options in zip(exam.prompt_records, sampled, strict=True)
        ]
    check_sampling(args.engine, exam.sampling_params)
    engine_args = {"max_model_len": exam.max_seq_len, **exam.engine_args}
    if engine_args["max_model_len"] == -1:
        from transformers import AutoConfig, AutoTokenizer

        from vectorlm.rl.evaluation.harness import context_length

        own = AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
        engine_args["max_model_len"] = context_length(*own)
    with open_engine(args.engine, model, adapter, engine_args) as opened, ExitStack() as stack:
        environments = SamplerBuilder(
            {"": exam.environment},
            opened,
            copy.deepcopy(opened.tokenizer),
            max_model_len=engine_args["max_model_len"],
            timeout_s=exam.collect.environment_timeout_s,
            stack=stack,
        )
        return environments.player(exam.collect, exam.sampling_params, exam.seed)(exam.prompt_records)


def _answer_tasks(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Run tasks of the harness; return its results, and the text to print."""
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging

    from vectorlm.rl.evaluation import harness

    logging.disable_progress_bar()
    model, adapter = require_model(args)
    tasks = harness.load_tasks(args.tasks.split(","))
    if args.engine == "hf":
        return harness.run_tasks(harness.transformers_model(model, adapter), tasks, args.limit)
    tokenizer = AutoTokenizer.from_pretrained(model)
    longest = harness.context_length(AutoConfig.from_pretrained(model), tokenizer)
    given = read_pairs("--engine_arg", "max_model_len=2048", args.engine_args)
    engine_args = {"max_model_len": longest, **given}
    with open_engine("vllm", model, adapter, engine_args) as engine:
        scored = harness.EngineLM(engine, tokenizer, engine_args["max_model_len"])
        return harness.run_tasks(scored, tasks, args.limit)


@dataclass(frozen=True)
class Exam:
    """The questions, sampling parameters and rewards of an evaluation."""

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
    """The environment of the questions."""
    collect: CollectSettings | None = None
    """How rollouts are made with it."""
    max_seq_len: int = -1
    """Longest prompt with its answer, where the engine's arguments have no max_model_len; -1 for the model's own."""
    seed: int = 0
    """The seed from which seeds are drawn if the sampling parameters have none."""


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
