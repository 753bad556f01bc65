"""A reward for instructions whose obedience a program can check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PLAIN = "This is an answer."
"""A text that every check can read."""


def ifeval(
    completion: str, instruction_id_list: Sequence[str], kwargs: Sequence[Mapping[str, Any]]
) -> float | None:
    """Return the share of the instructions that the completion follows, checked strictly; None if there are none.

    *Source*: Zhou et al. 2023, arXiv:2311.07911, by the checks of the lm-evaluation-harness (``pip install
    'lm_eval[ifeval]'``).

    Args:
        completion: The text of the model.
        instruction_id_list: A column of the prompts: names such as ``punctuation:no_comma``.
        kwargs: A column of the prompts: the arguments of each instruction.
    """
    import langdetect
    from lm_eval.tasks.ifeval.utils import InputExample, test_instruction_following_strict

    # It guesses languages with random numbers of its own.
    langdetect.DetectorFactory.seed = 0

    def follows(name: str, arguments: Mapping[str, Any], text: str) -> bool:
        # No check reads the prompt: what is to be repeated is among the arguments.
        example = InputExample(0, [name], "", [dict(arguments)])
        try:
            return bool(test_instruction_following_strict(example, text).follow_all_instructions)
        except Exception:
            if text == PLAIN:
                raise  # The instruction is at fault, or what its check needs is missing.
            follows(name, arguments, PLAIN)
            return False

    count = len(instruction_id_list)
    asked = zip(instruction_id_list, kwargs[:count], strict=True)
    return sum(follows(*each, completion) for each in asked) / count if count else None
