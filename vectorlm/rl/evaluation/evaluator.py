"""Evaluation during training: the engine answers held-out prompts, and rewards score the answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from vectorlm.data.encoding import asked, shown_prompt
from vectorlm.ranks.engine_ranks import capture, gather, results_or_first_error
from vectorlm.ranks.topology import Topology
from vectorlm.report.step_lines import StepLines, report_wait, sample_with_progress
from vectorlm.rl.evaluation.grade import grade, weighted_sums
from vectorlm.rl.rewards.function import RewardFunction, score_answers
from vectorlm.rl.rollout import Rollout, logged_means
from vectorlm.train.handover import DeviceTurn
from vectorlm.types import ENVIRONMENT, Engine, PromptRecord, RewardResult, UpdateReport

Answers = list[Sequence[Rollout]]
Results = list[list[RewardResult]]
"""The result of every answer to every prompt."""
Play = Callable[[Sequence[PromptRecord]], Answers]
"""Plays prompts with their environment and returns the answers."""
NUM_SHOWN = 3
"""Number of answers that an evaluation shows on the console."""


def answer_prompts(
    engine: Engine,
    prompt_records: Sequence[PromptRecord],
    play: Mapping[str, Play],
    sampling_params: Mapping[str, Any] | None = None,
    *,
    what: str = "sampling",
    is_on: bool = True,
) -> Answers:
    """Return the answers to each prompt; functions in `play` play the prompts of their sources with an environment.

    Ranks with `is_on` show the progress of `what`. The functions in `play` have their own sampling parameters.
    """
    return ask_prompts(engine, prompt_records, play, sampling_params, what=what, is_on=is_on, waits=True)()


def ask_prompts(
    engine: Engine,
    prompt_records: Sequence[PromptRecord],
    play: Mapping[str, Play],
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    *,
    what: str,
    is_on: bool,
    waits: bool,
) -> Callable[[], Answers]:
    """Return a function that returns the answers. Without `waits`, prompts without an environment stay in flight."""
    answers: dict[int, Sequence[Rollout]] = {}
    for source, play_prompts in play.items():
        places = [place for place, record in enumerate(prompt_records) if record.source == source]
        with report_wait(f"{what} with their environment", is_on=is_on):
            played = play_prompts([prompt_records[place] for place in places])
        answers |= zip(places, played, strict=True)
    places = [place for place in range(len(prompt_records)) if place not in answers]
    prompts = [asked(prompt_records[place]) for place in places]
    if isinstance(sampling_params, Sequence):
        sampling_params = [sampling_params[place] for place in places]
    # Ask the engine even without prompts: a run that evaluates only tasks must update the engine's weights.
    sampled, batch = None, None
    if waits:
        sampled = sample_with_progress(engine, prompts, sampling_params, what=what, is_on=is_on)
    else:
        batch = engine.submit(prompts, sampling_params)

    def all_answers() -> Answers:
        found = sampled if batch is None else batch.result()
        for place, options in zip(places, found or [], strict=True):
            answers[place] = [Rollout.from_completion(prompt_records[place], option) for option in options]
        return [answers[place] for place in range(len(answers))]

    return all_answers


def seeded(sampling_params: Mapping[str, Any], seed: int, count: int) -> list[dict[str, Any]] | None:
    """Return the parameters with a seed for each of `count` prompts; None if they already have a seed, or are greedy.

    The engine's random state does not survive a restart. With seeds, a resumed run repeats its evaluations.
    """
    if sampling_params.get("seed") is not None or sampling_params.get("temperature") == 0:
        return None
    seeds = np.random.default_rng(seed).integers(0, 2**62, count)
    return [{**sampling_params, "seed": int(drawn)} for drawn in seeds]


class Evaluator:
    """Evaluates a run: swap the weights into the engine, answer the held-out prompts, score and record the answers."""

    def __init__(
        self,
        turn: DeviceTurn,
        prompt_records: Sequence[PromptRecord],
        *,
        samples_path: Path | None,
        resume_step: int | None = None,
        of_source: Mapping[str, RewardFunction] | None = None,
        weights: Mapping[str, Any] | None = None,
        further: Mapping[str, RewardFunction] | None = None,
        at_k: Sequence[int] = (),
        play: Mapping[str, Play] | None = None,
        sampling_params: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: float = 0,
        run_tasks: Callable[[], Mapping[str, float]] | None = None,
        say: Callable[[str], None] = print,
        topology: Topology | None = None,
    ) -> None:
        """Open `samples_path` on rank 0 and keep its lines up to `resume_step`; the other ranks pass None.

        Args:
            turn: The engine and the hand-over of the devices to it.
            prompt_records: The held-out prompts.
            samples_path: The file for the answers.
            resume_step: The step that the run resumes from; None starts a new file.
            of_source: The reward that decides whether an answer is correct, by the prompts' source (``""``: no source).
            weights: Weights in ``eval/reward`` for prompts without a source: first the reward in `of_source`, then the
                rewards in `further`. None counts only the first reward.
            further: More rewards of these prompts, by name.
            at_k: The k of pass@k and maj@k.
            play: Functions that play the prompts of a source with their environment. Without a reward, an answer is
                correct if the metric `acc` is 1, or if its rewards add up to 1.
            sampling_params: The parameters of each prompt; None uses the engine's.
            max_tokens: Limit of an answer; the console shows how many answers the context cut off earlier.
            run_tasks: Evaluates further tasks with the engine, and returns metrics.
            say: Prints to the console.
            topology: The ranks, which share the calls of rewards; None for a single rank.
        """
        self._topology = topology or Topology()
        self._turn = turn
        self._prompt_records = prompt_records
        self._lines = None if samples_path is None else StepLines(samples_path, resume_step)
        self._places: dict[str, list[int]] = {}
        """Indices of the prompts of every source."""
        for place, record in enumerate(prompt_records):
            self._places.setdefault(record.source, []).append(place)
        self._play = {source: player for source, player in (play or {}).items() if source in self._places}
        rewards = {name: (of_source or {}).get(name) for name in sorted(self._places)}
        self._rewards = {
            name: reward for name, reward in rewards.items() if reward is not None or name in self._play
        }
        self._weights = list((weights or {}).values()) or [1.0]
        self._further, self._at_k = further or {}, at_k
        self._sampling_params = sampling_params
        self._max_tokens, self._run_tasks = max_tokens, run_tasks
        self._say = say

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the weights after training step `step`; call it on all ranks."""
        return self.begin(step, waits=True)()

    def begin(self, step: int, *, waits: bool = False) -> Callable[[], dict[str, float]]:
        """Ask the prompts, and return a function that waits for the answers and returns the metrics.

        Call it on all ranks. The engine's weights must not change before the returned function is called, unless
        `waits` is true: all answers are then complete.
        """
        with self._turn.sampling(step) as report:
            start_s = time.perf_counter()
            read = ask_prompts(
                self._turn.engine,
                self._prompt_records,
                self._play,
                self._sampling_params,
                what=f"step {step}: sampling the held-out prompts",
                is_on=self._lines is not None,
                waits=waits,
            )
            end_s = time.perf_counter()
            of_tasks = {} if self._run_tasks is None else self._run_tasks()

        def finish() -> dict[str, float]:
            answers = read()
            generate_s = (end_s if waits else time.perf_counter()) - start_s
            return self._measure(step, report, answers, generate_s, of_tasks)

        return finish

    def _measure(
        self,
        step: int,
        report: UpdateReport,
        answers: Answers,
        generate_s: float,
        of_tasks: Mapping[str, float],
    ) -> dict[str, float]:
        """Score and record the answers; return the metrics."""
        num_tokens = sum(answer.num_policy_tokens for options in answers for answer in options)
        metrics = {
            "sampler/generate_s": generate_s,
            "sampler/tokens_per_s": num_tokens / generate_s,
            **of_tasks,
        }
        if not report.skipped:
            metrics |= {
                "weights/publish_s": report.publish_s,
                "weights/load_s": report.load_s,
                "weights/update_s": report.total_s,
            }
        rewards, of_further = None, {}
        further: dict[str, Mapping[str, RewardFunction | None]] = {
            name: {"": reward} for name, reward in self._further.items()
        }
        if self._play:
            further[ENVIRONMENT] = dict.fromkeys(self._play)
            measured = logged_means(answer.measured for options in answers for answer in options)
            metrics |= {f"eval/logged/{name}": value for name, value in measured.items()}
        for name, of_source in further.items():
            of_further[name] = self._score(answers, of_source)
            metrics |= _graded(name, of_further[name])
        if self._rewards:
            rewards = self._score(answers, self._rewards)
            for source in filter(None, self._rewards):
                metrics |= _graded(source, [rewards[place] for place in self._places[source]])
            if (found := grade(rewards, self._at_k)).num_questions:
                total = self._weighted(rewards, list(of_further.values()))
                metrics |= {"eval/accuracy": found.accuracy, "eval/reward": grade(total).mean}
                metrics |= {f"eval/pass_at_{k}": value for k, value in found.pass_at.items()}
                metrics |= {f"eval/maj_at_{k}": value for k, value in found.majority_at.items()}
        scored = chain(*(rewards or ()), *chain(*of_further.values()))
        errors = [result.error for result in scored if result.error is not None and result.is_counted]
        if errors:
            metrics["eval/errors"] = float(len(errors))
        if self._lines is not None:
            self._lines.write(step, self._samples(answers, rewards, of_further, generate_s))
            self._say(self._summary(step, answers, rewards))
            if errors:
                self._say(f"  failed calls of reward functions: {len(errors)}; the first: {errors[0]}")
            for name, value in of_tasks.items():
                self._say(f"  {name} {value:.4g}")
        return metrics

    def _score(self, answers: Answers, of_source: Mapping[str, RewardFunction | None]) -> Results:
        """Return the result of every answer, on every rank; its reward is NaN if nothing scores the prompt.

        Each rank scores its share: rewards may be random or slow, and all ranks must log the same metrics.
        """
        results = [[RewardResult(math.nan)] * len(options) for options in answers]
        rank, world_size = self._topology.rank, self._topology.world_size
        for source, reward in of_source.items():
            places = self._places.get(source, [])
            first, last = (len(places) * start // world_size for start in (rank, rank + 1))
            here = [answers[place] for place in places[first:last]]
            name = f"the held-out reward of source {source!r}" if source else "the held-out reward"
            found = capture(partial(score_answers, reward, here, name))
            by_rank = results_or_first_error(gather(self._topology, found))
            for place, scored in zip(places, chain(*by_rank), strict=True):
                results[place] = scored
        return results

    def _weighted(self, rewards: Results, further: Sequence[Results]) -> Results:
        """Return `rewards` with the weighted sum of the rewards of prompts without a source."""
        total = list(rewards)
        if self._rewards.get("") is not None:
            places, num = self._places[""], len(self._weights)
            # The environment's reward follows the rewards of the config, and is no part of the sum.
            scored = [[found[place] for place in places] for found in (rewards, *further)[:num]]
            for place, sums in zip(places, weighted_sums(scored, self._weights), strict=True):
                total[place] = sums
        return total

    def _samples(
        self,
        answers: Answers,
        rewards: Results | None,
        of_further: Mapping[str, Results],
        time_taken_s: float,
    ) -> Iterator[dict[str, Any]]:
        for index, (record, options) in enumerate(zip(self._prompt_records, answers, strict=True)):
            line: dict[str, Any] = {
                "prompt": record.prompt,
                "options": [completion.text for completion in options],
                "finish_reasons": [completion.finish_reason for completion in options],
                "time_taken": time_taken_s,
            }
            if record.source:
                line["source"] = record.source
            if rewards is not None:
                line["rewards"] = [result.reward for result in rewards[index]]
            if of_further:
                line["further_rewards"] = {
                    name: [result.reward for result in found[index]] for name, found in of_further.items()
                }
            yield line

    def _summary(self, step: int, answers: Answers, rewards: Results | None) -> str:
        if rewards is None:
            head, marks = f"step {step}: {len(answers)} prompts sampled", [""] * len(answers)
        else:
            marks = [_mark(first) for first, *_ in rewards]
            counts = [
                f"{source}: " * (len(self._rewards) > 1)
                + _counted([rewards[place] for place in self._places[source]])
                for source in self._rewards
            ]
            head = f"step {step}: {'; '.join(counts)}"
        lines = [head]
        num_short = sum(
            answer.finish_reason == "length" and len(answer.token_ids) < self._max_tokens
            for record, options in zip(self._prompt_records, answers, strict=True)
            for answer in options
            if record.source not in self._play
        )
        if num_short:
            lines.append(
                f"  {num_short} answers reached the engine's max_model_len before max_tokens and were cut off"
            )
        for mark, record, options in zip(marks[:NUM_SHOWN], self._prompt_records, answers, strict=False):
            lines.append(f"  {mark}{shown_prompt(record.prompt)!r} → {options[0].text!r}")
        return "\n".join(lines)


def _mark(result: RewardResult) -> str:
    if math.isnan(result.reward):
        return ""
    if result.reward in (0, 1) or "acc" in result.logged or result.is_right:
        return "right: " if result.is_right else "wrong: "
    return f"reward {result.reward:.3g}: "


def _counted(results: Results) -> str:
    scored = [result for options in results for result in options if not math.isnan(result.reward)]
    right = f"{sum(result.is_right for result in scored)}/{len(scored)} right"
    if all(result.reward == result.is_right for result in scored):
        return right
    return f"{right}, mean reward {sum(result.reward for result in scored) / len(scored):.4g}"


def _graded(name: str, results: Results) -> dict[str, float]:
    found = grade(results)
    has_any = found.num_questions > 0
    return {f"eval/accuracy/{name}": found.accuracy, f"eval/reward/{name}": found.mean} if has_any else {}
