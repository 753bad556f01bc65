"""``vectorlm evaluate``: score a model on a run's questions, or on tasks of the lm-evaluation-harness."""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectorlm.cli.arguments import add_set_argument
from vectorlm.cli.export import find_source, load_source
from vectorlm.cli.sample import (
    MAX_TOKENS,
    add_sampling_arguments,
    chat_settings,
    check_sampling,
    open_engine,
    read_pairs,
    require_model,
    sampling_params,
    trusted,
)
from vectorlm.data.encoding import is_messages, split_unfinished
from vectorlm.data.images import with_paths
from vectorlm.data.prompts import fit_prompts, read_prompts
from vectorlm.data.settings import PLAIN_CHAT, ChatSettings, Overlong
from vectorlm.errors import ConfigError
from vectorlm.packages import is_installed
from vectorlm.ranks.topology import has_gpu
from vectorlm.ranks.workers.pool import WorkerPool
from vectorlm.report.step_lines import json_text
from vectorlm.rl.evaluation.grade import grade, weighted_sums
from vectorlm.rl.rewards.function import RewardFunction, score_answers
from vectorlm.rl.rewards.registry import get_reward, short_name
from vectorlm.rl.settings import CollectSettings
from vectorlm.runs.config.load import load_config
from vectorlm.runs.config.schema import Config
from vectorlm.runs.config.value import raise_problems
from vectorlm.runs.preflight.sampling import answer_tokens
from vectorlm.runs.preflight.user_code import (
    SourcePrompts,
    judge_problems,
    signature_problems,
    source_tools,
    taskset_problems,
)
from vectorlm.train.lora import tokenizer_folder
from vectorlm.types import ENVIRONMENT, PromptRecord

if TYPE_CHECKING:
    from vectorlm.rl.rollout import Rollout


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm evaluate``."""
    help_text = (
        "a run's config file: its held-out questions (evaluation.prompts), rewards and sampling parameters"
    )
    parser.add_argument("yaml_path", nargs="?", metavar="my.yaml", help=help_text)
    add_set_argument(parser)
    help_text = "one of the config's rl.sources: its held-out questions and rewards"
    parser.add_argument("--source", metavar="NAME", help=help_text)
    parser.add_argument(
        "--prompts",
        metavar="PATH",
        help="questions with a `prompt` each: a JSONL or Parquet file, or a folder of Dataset.save_to_disk",
    )
    help_text = "a reward for the answers: countdown, or file.py:NAME; may be repeated"
    parser.add_argument("--reward", dest="rewards", action="append", metavar="NAME", help=help_text)
    help_text = "the k of pass@k and maj@k, up to --n (default: 2, 4, 8 and so on)"
    parser.add_argument("--at_k", metavar="K,…", type=_ints, default=(), help=help_text)
    help_text = "tasks of the lm-evaluation-harness instead: their names, or YAML files"
    parser.add_argument("--tasks", metavar="NAME,…", help=help_text)
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N questions (of each task)")
    parser.add_argument("--output", metavar="FILE", help="write the results and all answers to FILE, as JSON")
    help_text = "write the best and worst answer to every question there, as rows for dataset_preprocess.examples=pairs"
    parser.add_argument("--pairs", metavar="FILE", help=help_text)
    help_text = "an argument of vLLM's engine, for example max_model_len=2048; may be repeated"
    parser.add_argument(
        "--engine_arg", dest="engine_args", action="append", default=[], metavar="NAME=VALUE", help=help_text
    )
    add_sampling_arguments(parser)


def evaluate_command(args: argparse.Namespace) -> int:
    """Evaluate a model and print the results."""
    require_model(args)
    _require_sense(args)
    start_s = time.perf_counter()
    found, text = _answer_tasks(args) if args.tasks else _answer_questions(args)
    seconds = time.perf_counter() - start_s
    print(f"{text}\n{seconds:.1f} s")
    if args.output is not None:
        result = {"model": args.model, "engine": args.engine, "seconds": seconds, **found}
        _write(args.output, [result], indent=1)
    if args.pairs is not None:
        pairs = [pair for row in found["answers"] if (pair := _pair_of(row)) is not None]
        _write(args.pairs, pairs)
        others = len(found["answers"]) - len(pairs)
        print(
            f"{args.pairs}: {len(pairs)} pairs; {others} questions have equal scores, no scores, or only answers "
            "that were cut off"
        )
    return 0


def _write(name: str, values: Sequence[Any], **options: Any) -> None:
    """Write values as JSON; write images without a path beside the file, as a run's `rollouts.jsonl` has them."""
    from vectorlm.rl.rollouts.logger import PICTURES

    path = Path(name).absolute()
    found = with_paths(values, path.parent / PICTURES)
    text = "".join(json_text(value, ensure_ascii=False, **options) + "\n" for value in found)
    # A lone surrogate, which JSON lines may contain, is written as its escape.
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def _pair_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the best complete answer to a question and the worst, by the sum of rewards; None if they are equal."""
    # Of several rewards the last is their weighted sum.
    scores = [list(answer["rewards"].values())[-1] for answer in row["completions"]]
    scored = [place for place, score in enumerate(scores) if score is not None and not math.isnan(score)]
    # Training would append an end token to an answer that was cut off.
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
    # The template renders tools before both texts, as it did for the answers.
    tools = {name: value for name, value in row["columns"].items() if name == "tools"}
    return {**pair, "score_chosen": scores[best], "score_rejected": scores[worst], **tools}


def _require_sense(args: argparse.Namespace) -> None:
    """Refuse missing arguments, arguments without effect, and files that could not be written at the end."""
    own = {"my.yaml": args.yaml_path, "--prompts": args.prompts, "--reward": args.rewards}
    own |= {
        "--source": args.source,
        "--set": args.overrides,
        "--max_tokens": args.max_tokens,
        "--temperature": args.temperature,
    }
    own |= {"--chat_template": args.chat_template, "--chat_template_kwarg": args.variables}
    own |= {
        "--pairs": args.pairs,
        "--n": args.n,
        "--at_k": args.at_k or None,
        "--seed": args.seed,
        "--param": args.params,
    }
    given = [name for name, value in own.items() if value not in (None, [])]
    if args.tasks and given:
        raise ConfigError(f"{given[0]} has no effect with --tasks, because a task has its own. Leave it out.")
    if args.tasks and not is_installed("lm_eval"):
        raise ConfigError(
            "--tasks needs the package lm_eval, which is not installed. Run: pip install 'vectorlm[eval]'"
        )
    if not args.tasks and not args.yaml_path and not args.prompts:
        raise ConfigError(
            "the command needs questions. Name a config file, --prompts FILE --reward NAME, or --tasks."
        )
    if args.source is not None and (args.prompts or not args.yaml_path):
        raise ConfigError(
            "--source names one of the config's rl.sources, so it needs a config file and no --prompts."
        )
    if args.overrides and not args.yaml_path:
        raise ConfigError("--set has no effect without a config file. Name one, or leave it out.")
    if args.engine_args and args.engine == "hf":
        raise ConfigError(
            "--engine_arg has no effect with --engine hf, because it is for vLLM's engine. Leave it out."
        )
    if args.prompts and not Path(args.prompts).exists():
        raise ConfigError(
            f"--prompts {args.prompts}: it must be a JSONL or Parquet file, or a folder of Dataset.save_to_disk. "
            "Correct the path."
        )
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit {args.limit}: it must be at least 1. Use a larger number.")
    for name in ("output", "pairs"):
        path = Path(getattr(args, name) or "new")
        if not path.parent.is_dir() or path.is_dir():
            raise ConfigError(f"--{name} {path}: the file needs a folder that exists. Name another file.")
        if getattr(args, name) and not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"--{name} {path} must be a file that you may write to. Name another file.")


def _ints(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and int(number) for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} must be integers >= 1, separated by commas")
    return tuple(map(int, numbers))


def _answer_questions(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Answer and score the questions; return the content of the output file, and the text to print."""
    # This imports torch, which the other commands do not need.
    from vectorlm.rl.rollout import logged_means

    exam = read_exam(args)
    if args.pairs is not None and exam.environment is not None:
        raise ConfigError(
            "--pairs cannot be used with an environment, whose text would be trained on as the policy's. Leave it out."
        )
    # Functions in two files may have the same name.
    short = [short_name(name) for name in exam.rewards]
    labels = short if len(set(short)) == len(short) else list(exam.rewards)
    records = exam.prompt_records
    for name in exam.rewards:
        # Raise before the model is loaded.
        judged = judge_problems(name, has_engine=False)
        for rule, fix in [*judged, *signature_problems(get_reward(name), records, "the questions")]:
            raise ConfigError(f"the reward {name!r} {rule}. {fix}")
    answers = _answers(args, exam)
    records = exam.prompt_records
    with WorkerPool(WorkerPool.auto_size()) as pool:
        functions = [
            RewardFunction(
                name, pool, timeout_s=exam.timeout_s, stops_at_error=True, right_from=exam.threshold_of(name)
            )
            for name in exam.rewards
        ]
        scored = {
            label: score_answers(function, answers, f"the reward {name!r}")
            for label, name, function in zip(labels, exam.rewards, functions, strict=True)
        }
    if exam.environment is not None:
        scored[ENVIRONMENT] = score_answers(None, answers, "")
    if len(scored) > 1:
        # As in training, where an environment's rewards always have weight 1.
        weights = [*exam.rewards.values(), *[1.0] * (exam.environment is not None)]
        scored["sum"] = weighted_sums([*scored.values()], weights)
    grades = {name: grade(results, exam.at_k) for name, results in scored.items()}
    lines = []
    for name, graded in grades.items():
        # A single question has no standard error.
        of_right, of_mean = f" ± {graded.accuracy_error:.1%}", f" ± {graded.mean_error:.4f}"
        if graded.num_questions < 2:
            of_right = of_mean = ""
        right = f"{graded.accuracy:6.1%}{of_right} right, " if name != "sum" else ""
        unscored = f", {graded.num_unscored} answers without a reward" if graded.num_unscored else ""
        mean = f"mean reward {graded.mean:.4f}{of_mean}"
        chances = "".join(f", pass@{k} {value:.1%}" for k, value in graded.pass_at.items() if name != "sum")
        chances += "".join(f", maj@{k} {value:.1%}" for k, value in graded.majority_at.items())
        lines.append(f"{name:{max(map(len, grades))}}  {right}{mean}{chances}{unscored}")
    measured = logged_means(answer.measured for options in answers for answer in options)
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
        "rewards": {name: asdict(graded) for name, graded in grades.items()},
        "logged": measured,
        "answers": rows,
    }
    return found, "\n".join(lines)


def _answers(args: argparse.Namespace, exam: Exam) -> list[Sequence[Rollout]]:
    """Return the answers to each question, from rollouts with the environment if there is one."""
    from vectorlm.rl.evaluation.evaluator import answer_prompts
    from vectorlm.rl.rollouts.builder import SamplerBuilder

    model, adapter = require_model(args)
    check_sampling(args.engine, exam.sampling_params)
    longest = exam.engine_args.get("max_model_len", exam.max_seq_len)
    if longest == -1 and (exam.environment is not None or exam.overlong_prompts != "error"):
        from transformers import AutoConfig, AutoTokenizer

        from vectorlm.rl.evaluation.harness import context_length

        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(model, adapter))
        longest = context_length(AutoConfig.from_pretrained(model), tokenizer)
    engine_args = {
        **trusted(args),
        **exam.engine_args,
        **({} if longest == -1 else {"max_model_len": longest}),
    }
    with open_engine(args.engine, model, adapter, engine_args, exam.chat) as engine, ExitStack() as stack:
        engine.wait_until_ready()
        if exam.overlong_prompts != "error":
            exam.prompt_records, note = fit_prompts(
                exam.prompt_records,
                engine.tokenizer,
                longest - answer_tokens(exam.sampling_params),
                "evaluation.prompts",
                exam.overlong_prompts,
                exam.tools,
            )
            if note:
                print(note, file=sys.stderr)
        play = {}
        if exam.environment is not None and exam.collect is not None:
            environments = SamplerBuilder(
                {"": exam.environment},
                engine,
                copy.deepcopy(engine.tokenizer),
                max_model_len=longest,
                timeout_s=exam.collect.environment_timeout_s,
                stack=stack,
            )
            play[""] = environments.player(exam.collect, exam.sampling_params, exam.seed)
        return answer_prompts(engine, exam.prompt_records, play, exam.sampling_params)


def _answer_tasks(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Run tasks of the harness; return the results, and the text to print."""
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging

    from vectorlm.rl.evaluation import harness

    logging.disable_progress_bar()
    model, adapter = require_model(args)
    tasks = harness.load_tasks(args.tasks.split(","))
    if args.engine == "hf":
        loaded = (model,) if adapter is None else load_source(find_source(Path(adapter)))
        return harness.run_tasks(harness.transformers_model(*loaded), tasks, args.limit)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(model, adapter))
    longest = harness.context_length(AutoConfig.from_pretrained(model), tokenizer)
    given = read_pairs("--engine_arg", "max_model_len=2048", args.engine_args)
    engine_args = {"max_model_len": longest, **trusted(args), **given}
    with open_engine("vllm", model, adapter, engine_args) as engine:
        scored = harness.EngineLM(engine, tokenizer, engine_args["max_model_len"])
        return harness.run_tasks(scored, tasks, args.limit)


@dataclass(kw_only=True)
class Exam:
    """Questions, sampling parameters and rewards of an evaluation."""

    prompt_records: Sequence[PromptRecord] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Weight of each reward function, by its name."""
    threshold_of: Callable[[str], float | None] = lambda reward: None
    """Function that returns the lowest reward of a right answer; None means exactly 1."""
    sampling_params: Mapping[str, Any] = field(default_factory=lambda: {"max_tokens": MAX_TOKENS})
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    overlong_prompts: Overlong = "error"
    tools: Sequence[Any] = ()
    """Tools of the environment that prompts describe."""
    chat: ChatSettings = PLAIN_CHAT
    timeout_s: float | None = 300.0
    """Seconds to wait for a call of a reward function; None waits forever."""
    at_k: Sequence[int] = ()
    """Values of k for pass@k and maj@k."""
    environment: str | None = None
    """The environment of the questions; None for single turns."""
    collect: CollectSettings | None = None
    """Settings for rollouts with the environment."""
    max_seq_len: int = -1
    """Limit of prompt and answer in tokens, unless the engine has max_model_len; -1 means the model's own limit."""
    seed: int = 0
    """Seed of the questions with an environment, if the sampling parameters have none."""


def read_exam(args: argparse.Namespace) -> Exam:
    """Read an exam from a config file, the command line, or both; the command line takes precedence.

    Raises:
        ConfigError, DatasetError: There are no questions or no rewards, or they cannot be read.
    """
    exam = Exam()
    if args.yaml_path:
        config = load_config(args.yaml_path, args.overrides)
        args.trust_remote_code |= config.trust_remote_code
        exam = _exam_of(config, args)
    if args.rewards:
        exam.rewards = dict.fromkeys(args.rewards, 1.0)
    if not exam.rewards and exam.environment is None:
        raise ConfigError(
            "--reward: the answers need a reward. Use --reward countdown, or --reward file.py:NAME."
        )
    records = read_prompts(args.prompts, "--prompts") if args.prompts else exam.prompt_records
    exam.prompt_records = records[: args.limit]
    exam.sampling_params = {**exam.sampling_params, **sampling_params(args)}
    engine_args = read_pairs("--engine_arg", "max_model_len=2048", args.engine_args)
    exam.engine_args = {**exam.engine_args, **engine_args}
    exam.chat = chat_settings(args, exam.chat)
    exam.at_k = args.at_k or exam.at_k
    num_answers = exam.sampling_params.get("n") or 1
    if (largest := max(exam.at_k, default=1)) > num_answers:
        raise ConfigError(
            f"--at_k {largest} needs {largest} answers to every question, not {num_answers}. Use --n {largest}."
        )
    if args.pairs and (num_answers < 2 or exam.environment is not None):
        raise ConfigError(
            "--pairs needs several answers to every question, and no environment. Use --n 8, for example."
        )
    return exam


def _exam_of(config: Config, args: argparse.Namespace) -> Exam:
    """Return the held-out questions of a run, or of one of its sources, with their rewards.

    The rewards of `rl` score them if no reward is set for them. `args` may replace questions and rewards.
    """
    evaluation, rl, source, reads_prompts = config.evaluation, config.rl, args.source, not args.prompts
    sources = {} if rl is None else rl.by_source
    known = [name for name, settings in sources.items() if settings.held_out is not None]
    if source is not None and source not in known:
        raise ConfigError(
            f"--source {source}: rl.sources must have a source of that name with held_out questions. It has "
            f"{', '.join(known) or 'none at all'}."
        )
    if source is None and evaluation.prompts is None and reads_prompts:
        raise ConfigError(
            "evaluation.prompts=null: the config has no held-out questions. Use --source if rl.sources "
            "have some, or --prompts, and --reward if the config has no reward either."
        )
    if source is None:
        prompts, rewards = evaluation.prompts, dict(config.evaluation_rewards)
        environment = None if rl is None else rl.collect.environment_of("")
        if rl is not None and not reads_prompts:
            # The agent of verifiers plays only its own tasks, and not the prompts of a file.
            environment = rl.collect.environment
    else:
        prompts = sources[source].held_out
        rewards = {config.held_out_rewards[source]: 1.0} if source in config.held_out_rewards else {}
        environment = sources[source].environment
    settings = config.engine
    exam = Exam(
        sampling_params=evaluation.sampling_params,
        timeout_s=config.held_out_timeout_s,
        at_k=evaluation.at_k,
        chat=config.chat,
        threshold_of=config.threshold_of,
        overlong_prompts=evaluation.overlong_prompts,
        environment=environment,
        tools=source_tools(rl, source or "")[0],
        collect=None if rl is None else rl.collect,
        seed=config.train_parameters.seed,
    )
    if settings.inference == "vllm":
        dtype = config.engine_dtype(has_gpu())
        exam.engine_args = {"dtype": dtype, **settings.engine_args}
        if settings.quantization is not None:
            exam.engine_args["quantization"] = settings.quantization
    if rl is not None:
        # Answers have the run's length limit, because a truncated answer is wrong.
        exam.max_seq_len = config.longest_rollout
    if reads_prompts and prompts is not None:
        exam.prompt_records = read_prompts(prompts)
        asked = SourcePrompts(source or "", True, exam.prompt_records, exam.prompt_records)
        raise_problems([*taskset_problems(config, [asked])])
    if rewards:
        exam.rewards = rewards
    elif rl is not None:
        if rl.reward.reward_models and not args.rewards:
            raise ConfigError(
                "rl.reward_models cannot be used by this command. Set evaluation.rewards, or pass --reward."
            )
        exam.rewards = dict(rl.reward.rewards)
    return exam
