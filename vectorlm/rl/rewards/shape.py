"""Rewards for the form of a completion: its pattern, length, repetitions and instructions."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

FENCE = re.compile(r"```[^\n`]*```|```([^\n`]*)\n(.*?)```", re.DOTALL)
"""Pattern of a fence, with its tag and content; backticks that open and close in one line match without content."""


def fenced(text: str, *tags: str) -> list[str]:
    """Return the contents of the fences with one of these tags; if there are none, of the fences without a tag.

    The contents have no common indentation, which fences in lists have.
    """
    matches = ((tag, textwrap.dedent(inner)) for tag, inner in FENCE.findall(text) if inner)
    found = [(tag.strip().lower().partition(" ")[0], inner) for tag, inner in matches]
    return [inner for tag, inner in found if tag in tags] or [inner for tag, inner in found if not tag]


def format(completion: str, *, pattern: str | None = None, tags: Sequence[str] = ()) -> float:
    """Return 1.0 if the whole completion matches the pattern and has the tags, else 0.0.

    Args:
        completion: The text of the model.
        pattern: A regular expression for the whole text without surrounding white space; a dot matches a newline too.
        tags: Names of tags that must open and close exactly once, in this order: ``[think, answer]``.

    Raises:
        ValueError: Neither `pattern` nor `tags` is given.
    """
    if pattern is None and not tags:
        raise ValueError("the reward format needs a pattern or tags. Add pattern=... or tags=[...]")
    fits = pattern is None or re.fullmatch(pattern, completion.strip(), re.DOTALL) is not None
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    places = [completion.find(mark) for mark in marks]
    once = all(completion.count(mark) == 1 for mark in marks)
    return float(fits and once and places == sorted(places))


def json_schema(completion: str, schema: Mapping[str, Any] | str) -> float:
    """Return 1.0 if the completion, or its first JSON fence, is valid for the schema, else 0.0.

    The fence has the tag ``json``; if there is none, the first fence without a tag is read. JSON that is nested too
    deeply to be read or compared gives 0.0.

    Args:
        completion: The text of the model.
        schema: A JSON schema, or its text; a column of the prompts or an argument.
    """
    validator = _validator(schema if isinstance(schema, str) else json.dumps(schema))
    try:
        return float(validator.is_valid(json.loads(next(iter(fenced(completion, "json")), completion))))
    except Exception as error:
        # The completion may exceed a limit of Python. Errors from these packages are errors of the schema.
        if type(error).__module__.partition(".")[0] in ("jsonschema", "referencing", "re"):
            raise
        return 0.0


def length(
    completion_ids: Sequence[int], completion: str = "", *, target_tokens: int, tolerance_tokens: int = 0
) -> float:
    r"""Return :math:`1 - \max(|n - t| - d, 0) / t`, at least 0: less for each token away from the target.

    Args:
        completion_ids: The n tokens of the completion.
        completion: Not read; the parameter is needed because without it the function would receive lists.
        target_tokens: t, at least 1.
        tolerance_tokens: d, the distance from the target that costs nothing.
    """
    beyond = max(abs(len(completion_ids) - target_tokens) - tolerance_tokens, 0)
    return max(1.0 - beyond / target_tokens, 0.0)


def repetition(completion: str, *, ngram_words: int = 3, penalty: float = 1.0) -> float:
    """Return minus the penalty times the share of repeated n-grams of words; 0 for a text of fewer words.

    *Source*: Yeo et al. 2025, arXiv:2502.03373, the n-gram penalty as a share.

    Args:
        completion: The text of the model.
        ngram_words: n, in words.
        penalty: The penalty of a text that only repeats itself.
    """
    words = completion.lower().split()
    grams = [tuple(words[start : start + ngram_words]) for start in range(len(words) - ngram_words + 1)]
    return -penalty * (1.0 - len(set(grams)) / len(grams)) if grams else 0.0


@cache
def _validator(schema: str) -> Any:
    from jsonschema.validators import validator_for

    described = json.loads(schema)
    kind = validator_for(described)
    kind.check_schema(described)
    return kind(described)


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

    # The language detector draws its own random numbers.
    langdetect.DetectorFactory.seed = 0

    def follows(name: str, arguments: Mapping[str, Any], text: str) -> bool:
        # No check reads the prompt; if a text must be repeated, it is among the arguments.
        example = InputExample(0, [name], "", [dict(arguments)])
        try:
            return bool(test_instruction_following_strict(example, text).follow_all_instructions)
        except Exception:
            if text == PLAIN:
                raise  # The instruction is invalid, or a package that its check needs is missing.
            follows(name, arguments, PLAIN)
            return False

    count = len(instruction_id_list)
    asked = zip(instruction_id_list, kwargs[:count], strict=True)
    return sum(follows(*instruction, completion) for instruction in asked) / count if count else None
