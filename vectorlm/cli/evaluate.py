"""``vectorlm evaluate``: how well a model answers, by a run's own questions and rewards or by tasks of a harness."""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectorlm.cli.arguments import add_set_argument
from vectorlm.cli.exam import Exam, read_exam
from vectorlm.cli.sample import (
    add_sampling_arguments,
    ask,
    check_sampling,
    open_engine,
    read_pairs,
    require_model,
)
from vectorlm.data.encoding import asked, is_messages, split_begun
from vectorlm.errors import ConfigError
from vectorlm.packages import is_installed
from vectorlm.ranks.workers.pool import WorkerPool
from vectorlm.report.step_lines import json_text
from vectorlm.rl.rewards.function import RewardFunction, score_answers
from vectorlm.rl.rewards.grade import grade
from vectorlm.rl.rewards.registry import get_reward, short_name
from vectorlm.runs.preflight.user_code import signature_problems
from vectorlm.types import ENVIRONMENT, RewardResult

if TYPE_CHECKING:
    from vectorlm.rl.rollout import Rollout


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(args: argparse.Namespace) -> int:
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
        prompt, begun = split_begun(prompt)
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
    from vectorlm.rl.rollouts.playing import Environments

    model, adapter = require_model(args)
    if exam.environment is None or exam.collect is None:
        prompts = [asked(record) for record in exam.prompt_records]
        longest = {} if exam.max_seq_len == -1 else {"max_model_len": exam.max_seq_len}
        engine_args = {**longest, **exam.engine_args}
        sampled = ask(args.engine, model, adapter, prompts, exam.sampling_params, engine_args)
        return [
            [Rollout.begun(record, each) for each in options]
            for record, options in zip(exam.prompt_records, sampled, strict=True)
        ]
    check_sampling(args.engine, exam.sampling_params)
    engine_args = {"max_model_len": exam.max_seq_len, **exam.engine_args}
    if engine_args["max_model_len"] == -1:
        from transformers import AutoConfig, AutoTokenizer

        from vectorlm.rl.rewards.harness import context_length

        own = AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
        engine_args["max_model_len"] = context_length(*own)
    with open_engine(args.engine, model, adapter, engine_args) as opened, ExitStack() as stack:
        environments = Environments(
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

    from vectorlm.rl.rewards import harness

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
