"""The lm-evaluation-harness with a `SamplingEngine` as its model: needs the package lm_eval."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs, resolve_max_length
from lm_eval.tasks import TaskManager
from lm_eval.utils import (
    get_rolling_token_windows,
    handle_non_serializable,
    make_disjoint_window,
)

from vectorlm.data.encoding import render_chat
from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import device_of
from vectorlm.settings import nearest

SCORE = {"prompt_logprobs": 0, "max_tokens": 1, "temperature": 0.0}
"""Parameters to score a prompt; vLLM must also sample one token, which nothing reads."""
MAX_NEW_TOKENS = 256
"""Maximum tokens of an answer in tasks without a limit, as with the harness's own models."""


class EngineLM(TemplateLM):
    """A vLLM `SamplingEngine` as a model of the harness, with the tokens and windows of the harness's class ``hf``.

    All ranks make the same calls, because the engine's methods are collective.
    """

    def __init__(self, engine: Any, tokenizer: Any, max_model_len: int) -> None:
        """Take an engine for `max_model_len` tokens of prompt and completion, and its model's tokenizer."""
        super().__init__()
        self._engine, self.tokenizer = engine, tokenizer
        self._max_model_len = max_model_len

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        token: int = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        begin: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def max_length(self) -> int:
        """Longest text that can be scored in one window, in tokens; one token is left for vLLM to sample."""
        return self._max_model_len - 1

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer for the harness's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text, by default with the tokenizer's special tokens."""
        if add_special_tokens is None:
            # The chat template has already added the first token.
            begin = self.tokenizer.decode(self.prefix_token_id)
            add_special_tokens = False if string.startswith(begin) else None
        how = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **how))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render messages as one text."""
        text: str = render_chat(
            self.tokenizer,
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of every text; every token is scored once, with as much context as fits."""
        windows, counts = [], []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            # A window and the token before it fill the engine's context.
            rolling = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length - 1, 1)
            own = [("", *make_disjoint_window(window)) for window in rolling]
            windows += own
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return the answer to every prompt, up to its first stop string."""
        prompts, params = [], []
        for request in requests:
            text, asked = request.args
            wanted: dict[str, Any] = dict(normalize_gen_kwargs(asked, MAX_NEW_TOKENS))
            stop, max_tokens = wanted.pop("until"), wanted.pop("max_gen_toks")
            if not wanted.pop("do_sample"):
                wanted["temperature"] = 0.0
            room = self._max_model_len - max_tokens
            if room < 1:
                raise ConfigError(
                    f"a task wants answers of {max_tokens} tokens, and the engine holds {self._max_model_len} with the "
                    "prompt. Raise the engine's max_model_len, or use a model with a longer context."
                )
            prompts.append(self.tok_encode(text)[-room:])
            params.append({**wanted, "stop": stop, "max_tokens": max_tokens})
        return [answers[0].text for answers in self._engine.sample(prompts, params)]

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of every continuation, and whether all its tokens were the most likely ones.

        If a text is too long for the engine, its beginning is cut off, as the harness does with other models.
        """
        rows = [(context + continuation)[-self.max_length :] for _, context, continuation in requests]
        outputs = self._engine.generate(rows, SCORE)
        return [
            _score(row, output.prompt_logprobs, len(continuation))
            for row, output, (_, _, continuation) in zip(rows, outputs, requests, strict=True)
        ]


def _score(row: Sequence[int], logprobs: Sequence[Any], num_scored: int) -> tuple[float, bool]:
    """Sum the last log-probabilities of a prompt; `logprobs` is None at the first token, which has no context."""
    if num_scored >= len(row):
        raise ConfigError(
            f"a continuation of {num_scored} tokens does not fit into the engine together with a token before it. "
            "Raise the engine's max_model_len, or use a model with a longer context."
        )
    places = range(len(row) - num_scored, len(row))
    found = [logprobs[place][row[place]] for place in places]
    return sum(token.logprob for token in found), all(token.rank == 1 for token in found)


def transformers_model(model: Any, tokenizer: Any = None) -> Any:
    """Return the harness's own transformers model, for machines without vLLM; `model` is a folder, or loaded."""
    from lm_eval.models.huggingface import HFLM

    given = model if isinstance(model, str) else model.to(device_of(0))
    return HFLM(pretrained=given, tokenizer=tokenizer, batch_size=8, device=device_of(0))


def context_length(model_config: Any, tokenizer: Any) -> int:
    """Return the context length of a model, in tokens."""
    return resolve_max_length(model_config, tokenizer)


def load_tasks(names: Sequence[str], where: str = "--tasks") -> Any:
    """Load tasks and groups of the harness with their data, by name or from YAML files.

    Raises:
        ConfigError: A task does not exist, or its data cannot be read.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    for name in files:
        if not Path(name).is_file():
            raise ConfigError(f"{where} {name} is not a file. Name a YAML file, or a task of the harness.")
    manager = TaskManager(include_defaults=len(files) < len(names))
    for name in names:
        if name not in files and name not in manager.all_tasks:
            rule = "is not a task of the lm-evaluation-harness. For your own task, name a .yaml file."
            raise ConfigError(f"{where} {name} {rule} {nearest(name, manager.all_tasks)}".rstrip())
    # The harness does this too; tasks that shuffle then have the same results.
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    try:
        loaded = manager.load(list(names))
    except Exception as error:
        # The harness, a task's code, datasets or a missing network may raise anything.
        raise ConfigError(
            f"{where} {','.join(names)} cannot be loaded: {type(error).__name__}: {str(error).strip()}. A task that "
            "downloads its data needs the network, or the data in the cache of the package datasets."
        ) from error
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    return loaded


def scores_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the results of `run_tasks` as metrics ``eval/TASK/METRIC``."""
    return {
        _metric(task, key): float(value)
        for task, numbers in results.items()
        for key, value in numbers.items()
        if "," in key and isinstance(value, int | float)
    }


def falling_of(found: Mapping[str, Any]) -> dict[str, bool]:
    """Return whether lower is better, for each metric of `run_tasks` whose task defines it."""
    return {
        _metric(task, key): not rises
        for task, numbers in found["results"].items()
        for key in numbers
        if (rises := (found.get("higher_is_better", {}).get(task) or {}).get(key.partition(",")[0]))
        is not None
    }


def _metric(task: str, key: str) -> str:
    metric, _, filtered = key.partition(",")
    return f"eval/{task}/{metric}{'' if filtered == 'none' else f'_{filtered}'}"


def run_tasks(model: Any, tasks: Any, limit: int | None = None) -> tuple[dict[str, Any], str]:
    """Run loaded tasks on a model of the harness; return results and every answer as plain JSON, and lines to print.

    `limit` keeps the first documents of each task. This is the harness's `simple_evaluate` without its collection of
    facts about the machine, which takes seconds.
    """
    # Otherwise every evaluation of a run would draw other examples.
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    found: Any = evaluate(model, tasks, limit=limit, log_samples=True)
    plain: dict[str, Any] = json.loads(json.dumps(found, default=handle_non_serializable))
    lines = []
    for task, numbers in plain["results"].items():
        count = plain["n-samples"].get(task, {}).get("effective", 0)
        for key, value in numbers.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = numbers.get(f"{metric}_stderr,{filtered}")
            name = metric if filtered == "none" else f"{metric} ({filtered})"
            margin = f" ± {error:.4f}" if isinstance(error, float) else ""
            counted = f", {count} documents" if count else ""
            lines.append(f"{task}  {name} {value:{'.4f' if abs(value) < 1e6 else '.4g'}}{margin}{counted}")
    return plain, "\n".join(lines)
