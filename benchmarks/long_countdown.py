"""Countdown for async.py: filler follows the answer, so that lengths have a long tail or are all equal."""

from __future__ import annotations

import json
import math
import random
import re
import string
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist

from report import ROOT

sys.path.insert(0, str(ROOT / "examples"))
from countdown_problems import CountdownProblem, CountdownRules, generate_problems

LENGTHS = ("long tail", "equal")
MEDIAN, SIGMA, EQUAL = 5, 1.7, 18
"""Tokens after an answer: log-normal, or always as many, which is about the mean."""
FILLER = (*string.ascii_letters, *"!#$%&()*;:=?@[]^_`{|}~", *map(str, range(10, 100)))
"""What follows an answer, from its beginning: each token says which is next, so that only the end is a choice."""
LONGEST_COMPLETION, LONGEST = 160, 176
"""Tokens: of a completion, and with its prompt."""


@dataclass(frozen=True)
class FilledProblem(CountdownProblem):
    """A problem whose answer is a guess, followed by filler."""

    guess: str = ""
    filler: str = ""

    @property
    def completion(self) -> str:
        """The guess and the filler."""
        return f" <answer>{self.guess}</answer>{self.filler}"


def save_questions(folder: Path, start: Path, lengths: str) -> None:
    """Save problems whose answers have other signs, followed by filler, and a model that can read as far.

    The signs are drawn at random, so that a model which learns this has something left to learn. The question's first
    number says how much filler there is.

    Args:
        folder: Where to.
        start: The model and tokenizer to begin with.
        lengths: One of `LENGTHS`.
    """
    sys.path.insert(0, str(ROOT / "examples"))
    from datasets import disable_progress_bars
    from make_countdown import tokenise
    from transformers import AutoModelForCausalLM, AutoTokenizer

    disable_progress_bars()
    training, held_out = generate_problems(16_384, 512, rules=CountdownRules(), seed=0)
    generator, tokenizer = random.Random(0), AutoTokenizer.from_pretrained(start)
    model = AutoModelForCausalLM.from_pretrained(start, max_position_embeddings=LONGEST)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name, problems in (("train", training), ("eval", held_out)):
        filled = [
            FilledProblem(
                **asdict(problem),
                guess=re.sub("[+-]", lambda _: generator.choice("+-"), problem.solution),
                filler="".join(FILLER[: num_filler(problem.numbers[0], lengths)]),
            )
            for problem in problems
        ]
        tokenise(filled, tokenizer).save_to_disk(folder / name)
        rows = [
            {"prompt": p.prompt, "numbers": list(p.numbers), "target": p.target, "filler": p.filler}
            for p in filled
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def num_filler(number: int, lengths: str) -> int:
    """Return the tokens after the answer to a question that begins with this number: a quantile of the distribution."""
    if lengths == "equal":
        return EQUAL
    place = NormalDist().inv_cdf((number - 0.5) / CountdownRules.highest)
    return min(round(MEDIAN * math.exp(SIGMA * place)), len(FILLER))
