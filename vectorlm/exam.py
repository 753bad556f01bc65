"""An exam: held-out questions that the engine answers with the weights being trained."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectorlm.data.questions import Question
from vectorlm.errors import RewardError
from vectorlm.handover import DeviceTurn
from vectorlm.rewards.runner import Scorable, run_reward
from vectorlm.telemetry.step_lines import StepLines
from vectorlm.types import Completion, Engine, UpdateReport

if TYPE_CHECKING:
    from torch import nn

Answers = list[list[Completion]]

NUM_SHOWN = 3
"""Answers that each exam shows on the console."""


class Exam:
    """Hot-swaps the weights into the engine, asks it all questions, records and marks the answers."""

    def __init__(
        self,
        engine: Engine,
        questions: Sequence[Question],
        *,
        samples_path: Path | None,
        resume_step: int | None = None,
        reward: Callable[..., Any] | None = None,
        say: Callable[[str], None] = print,
        turn: DeviceTurn | None = None,
    ) -> None:
        """Open the samples file.

        Args:
            engine: Answers; its calls are made on all ranks.
            questions: The same on all ranks.
            samples_path: JSONL file that rank 0 writes; None on the other ranks, which then say nothing.
            resume_step: Keep the file's lines up to this training step; None starts the file anew.
            reward: In any form that `vectorlm.rewards.runner` takes; an answer is right when it is 1.
            say: Shows text on the console.
            turn: Hands the devices over to the engine and back; None where nothing has to make room.
        """
        self._engine = engine
        self._questions = questions
        self._lines = None if samples_path is None else StepLines(samples_path, resume_step)
        self._reward = reward
        self._say = say
        self._turn = turn

    def hold(self, model: nn.Module, step: int) -> dict[str, float]:
        """Examine the weights of `model` as they are after training step `step`; called on all ranks.

        Raises:
            RewardError: The reward failed.
        """
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
        if self._lines is not None:
            self._lines.write(step, self._records(answers, rewards, generate_s))
            self._say(self._summary(step, answers, rewards))
        return metrics

    def _mark(self, answers: Answers) -> list[list[float]] | None:
        if self._reward is None:
            return None
        items = [
            Scorable(completion.text, question.prompt, completion.token_ids, question.columns)
            for question, options in zip(self._questions, answers, strict=True)
            for completion in options
        ]
        outcomes = run_reward(self._reward, items)
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome.error is not None:
                raise RewardError(
                    f"sampler.reward failed: {outcome.error} (prompt {str(item.prompt)[:80]!r}, completion "
                    f"{item.text[:80]!r}). Mend the function."
                )
        marks = iter(outcome.reward for outcome in outcomes)
        return [[next(marks) for _ in options] for options in answers]

    def _records(
        self, answers: Answers, rewards: list[list[float]] | None, time_taken_s: float
    ) -> Iterator[dict[str, Any]]:
        for index, (question, options) in enumerate(zip(self._questions, answers, strict=True)):
            line = {
                "prompt": question.prompt,
                "options": [completion.text for completion in options],
                "time_taken": time_taken_s,
            }
            marks = (
                {"rewards": [None if math.isnan(each) else each for each in rewards[index]]}
                if rewards
                else {}
            )
            yield line | marks

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
