"""An exam: held-out questions that the engine answers with the weights being trained."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectorlm.errors import DatasetError
from vectorlm.handover import DeviceTurn
from vectorlm.types import Completion, Engine, Prompt, UpdateReport

if TYPE_CHECKING:
    from torch import nn

Answers = list[list[Completion]]

NUM_SHOWN = 3
"""Answers that each exam shows on the console."""


@dataclass(frozen=True)
class Question:
    """One prompt, and what its reward needs to know."""

    prompt: Prompt
    """What the engine has to continue."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of its line, passed to the reward by name."""


def read_questions(source: str | Path | Sequence[str]) -> list[Question]:
    """Take prompts as they are, or read a JSONL file whose lines have a ``prompt`` and any other columns.

    Raises:
        DatasetError: The file is missing or empty, or a line is not an object with a ``prompt``.
    """
    if not isinstance(source, str | Path):
        return [Question(prompt) for prompt in source]
    if not Path(source).is_file():
        raise DatasetError(
            f"sampler.prompts={str(source)!r} is not a file. Make it first, or list the prompts instead."
        )
    questions = []
    for number, line in enumerate(Path(source).read_text().splitlines(), start=1):
        try:
            columns = json.loads(line)
            questions.append(Question(columns.pop("prompt"), columns))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise DatasetError(
                f"{source}:{number} is {line[:80]!r}, but every line must be a JSON object with a 'prompt'."
            ) from error
    if not questions:
        raise DatasetError(f"sampler.prompts={str(source)!r} is empty: it must hold at least one prompt.")
    return questions


class Exam:
    """Hot-swaps the weights into the engine, asks it all questions, records and marks the answers."""

    def __init__(
        self,
        engine: Engine,
        questions: Sequence[Question],
        *,
        samples_path: Path | None,
        resume_step: int | None = None,
        reward: Callable[..., float] | None = None,
        say: Callable[[str], None] = print,
        turn: DeviceTurn | None = None,
    ) -> None:
        """Open the samples file.

        Args:
            engine: Answers; its calls are made on all ranks.
            questions: The same on all ranks.
            samples_path: JSONL file that rank 0 writes; None on the other ranks, which then say nothing.
            resume_step: Keep the file's lines up to this training step; None starts the file anew.
            reward: ``reward(text, **columns)``; an answer is right when it is 1.
            say: Shows text on the console.
            turn: Hands the devices over to the engine and back; None where nothing has to make room.
        """
        self._engine = engine
        self._questions = questions
        self._samples_path = samples_path
        self._reward = reward
        self._say = say
        self._turn = turn
        if samples_path is not None:
            samples_path.parent.mkdir(parents=True, exist_ok=True)
            kept = [] if resume_step is None else _lines_until(samples_path, resume_step)
            samples_path.write_text("".join(kept))

    def hold(self, model: nn.Module, step: int) -> dict[str, float]:
        """Examine the weights of `model` as they are after training step `step`; called on all ranks."""
        turn = self._turn or DeviceTurn(self._engine, model=model)
        with turn.sampling(step) as report:
            start_s = time.perf_counter()
            answers = self._engine.sample([question.prompt for question in self._questions])
            generate_s = time.perf_counter() - start_s
        num_tokens = sum(len(completion.token_ids) for options in answers for completion in options)
        metrics = _update_metrics(report) | {
            "sampler/generate_s": generate_s,
            "sampler/tokens_per_s": num_tokens / generate_s,
        }
        rewards = self._mark(answers)
        if rewards is not None:
            metrics["eval/accuracy"] = sum(options[0] == 1.0 for options in rewards) / len(rewards)
        if self._samples_path is not None:
            self._record(step, answers, rewards, generate_s)
            self._say(self._summary(step, answers, rewards))
        return metrics

    def _mark(self, answers: Answers) -> list[list[float]] | None:
        if self._reward is None:
            return None
        return [
            [self._reward(completion.text, **question.columns) for completion in options]
            for question, options in zip(self._questions, answers, strict=True)
        ]

    def _record(
        self, step: int, answers: Answers, rewards: list[list[float]] | None, time_taken_s: float
    ) -> None:
        assert self._samples_path is not None
        with self._samples_path.open("a") as file:
            for index, (question, options) in enumerate(zip(self._questions, answers, strict=True)):
                line = {
                    "train_step": step,
                    "prompt": question.prompt,
                    "options": [completion.text for completion in options],
                    "time_taken": time_taken_s,
                }
                file.write(json.dumps(line | ({"rewards": rewards[index]} if rewards else {})) + "\n")

    def _summary(self, step: int, answers: Answers, rewards: list[list[float]] | None) -> str:
        if rewards is None:
            head, marks = f"step {step}: {len(answers)} prompts sampled", [""] * len(answers)
        else:
            marks = ["right: " if options[0] == 1.0 else "wrong: " for options in rewards]
            head = f"step {step}: {marks.count('right: ')}/{len(marks)} right"
        shown = zip(marks[:NUM_SHOWN], self._questions, answers, strict=False)
        return "\n".join([head, *(f"  {mark}{q.prompt}{options[0].text}" for mark, q, options in shown)])


def _update_metrics(report: UpdateReport) -> dict[str, float]:
    if report.skipped:
        return {}
    return {
        "weights/publish_s": report.publish_s,
        "weights/load_s": report.load_s,
        "weights/update_s": report.total_s,
    }


def _lines_until(path: Path, step: int) -> list[str]:
    """Return the lines up to training step `step`, without a last one that a crash cut short."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n") and json.loads(line)["train_step"] <= step]
