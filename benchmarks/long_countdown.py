"""Countdown problems for async.py: filler after the answer makes lengths equal, or gives them a long tail."""

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
"""Tokens of filler: median and sigma of a log-normal distribution, and the equal length, which is near its mean."""
FILLER = (*string.ascii_letters, *"!#$%&()*;:=?@[]^_`{|}~", *map(str, range(10, 100)))
"""The longest filler; a shorter one is its beginning. Each token determines the next, except where the filler ends."""
LONGEST_COMPLETION, LONGEST = 160, 176
"""Most tokens of a completion, and of a completion with its prompt."""


@dataclass(frozen=True)
class FilledProblem(CountdownProblem):
    """A Countdown problem whose completion is a guess, followed by filler."""

    guess: str = ""
    filler: str = ""

    @property
    def completion(self) -> str:
        """The training text: the guess in its tags, then the filler."""
        return f" <answer>{self.guess}</answer>{self.filler}"


def save_questions(folder: Path, start: Path, lengths: str) -> None:
    """Save problems with guesses and filler as answers, and a model with enough positions for them.

    A guess is the solution with random signs: fine-tuning then leaves something for RL to learn. The first number of
    the question determines the length of the filler.

    Args:
        folder: The output folder.
        start: Folder of the model and tokenizer to start from.
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
    """Return the tokens of filler: the quantile that `number`, the first number of the question, chooses."""
    if lengths == "equal":
        return EQUAL
    place = NormalDist().inv_cdf((number - 0.5) / CountdownRules.highest)
    return min(round(MEDIAN * math.exp(SIGMA * place)), len(FILLER))
