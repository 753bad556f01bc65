"""Sampling many prompts, with a bar where that takes long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vectorlm.ranks.wait import report_wait
from vectorlm.types import Completion, Engine, Prompt

NUM_PARTS = 20
"""The bar moves in this many parts."""
MIN_PART = 8
"""Prompts of a part, at least: each part costs an exchange between the ranks."""


def sample_with_progress(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling_params: Mapping[str, Any] | None = None,
    *,
    what: str = "sampling",
    is_on: bool = True,
) -> list[list[Completion]]:
    """Return what ``engine.sample`` does, and say on the rank where `is_on` how many prompts have their completions.

    All prompts are in flight at once: the parts are only for counting.
    """
    size = max(MIN_PART, -(-len(prompts) // NUM_PARTS))
    if len(prompts) <= size:
        with report_wait(what, is_on=is_on):
            return engine.sample(prompts, sampling_params)
    parts = [prompts[first : first + size] for first in range(0, len(prompts), size)]
    answers: list[list[Completion]] = []
    with report_wait(f"{what}, prompts", is_on=is_on, done=lambda: len(answers), total=len(prompts)):
        batches = engine.submit_many([(part, sampling_params) for part in parts])
        try:
            for batch in batches:
                answers += batch.result()
        except BaseException:
            # Nobody else could ask for the answers.
            for batch in batches:
                batch.cancel()
            raise
    return answers
