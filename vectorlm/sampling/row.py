"""One completion while it is being written."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from vectorlm.sampling.parameters import Parameters
from vectorlm.sampling.vocabulary import Vocabulary
from vectorlm.types import Completion


@dataclass
class Row:
    """One completion of one prompt, and when it ends."""

    prompt_token_ids: tuple[int, ...]
    parameters: Parameters
    seed: str
    """What its random numbers are made from: the same seed, the same numbers."""
    max_tokens: int
    """Its longest length, with the model's own limit minded."""
    vocabulary: Vocabulary
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end this completion."""
        stops = frozenset(self.parameters.stop_token_ids or ())
        return stops if self.parameters.ignore_eos else stops | self.vocabulary.end_token_ids

    @property
    def forbidden(self) -> list[int]:
        """Tokens that may not come next: those that would end it too early."""
        if len(self.token_ids) >= self.parameters.min_tokens:
            return []
        return sorted(self.vocabulary.end_token_ids | self.ends)

    def uniform(self) -> float:
        """Return the random number of the next token: a function of seed and position, so of nothing else."""
        return random.Random(f"{self.seed}/{len(self.token_ids)}").random()

    def rewind(self, num_tokens: int) -> None:
        """Forget all but the first tokens: transformers may have thrown its newest step away."""
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:], self.versions[num_tokens:]

    def take(self, token: int, logprob: float, version: int) -> None:
        """Append a token, and see whether it is the last."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        keeps_stop = self.parameters.include_stop_str_in_output
        if token in self.ends:
            self.text = self._text(self.token_ids if keeps_stop else self.token_ids[:-1])
            self.finish_reason = "stop"
        elif (end := self._end_of_stop_string()) is not None:
            self.text = self._text(self.token_ids)[: end[1] if keeps_stop else end[0]]
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_tokens:
            self.text = self._text(self.token_ids)
            self.finish_reason = "length"

    def completion(self) -> Completion:
        """Return what has been written."""
        return Completion(
            prompt_token_ids=self.prompt_token_ids,
            token_ids=tuple(self.token_ids),
            sampler_logprobs=() if self.parameters.logprobs is None else tuple(self.logprobs),
            versions=tuple(self.versions),
            text=self.text,
            finish_reason=self.finish_reason,
        )

    def _end_of_stop_string(self) -> tuple[int, int] | None:
        """Return where the stop string that the newest token completed starts and ends in the text."""
        if not self.parameters.stop_strings or len(self.token_ids) <= self.parameters.min_tokens:
            return None
        text, num_old = self._text(self.token_ids), len(self._text(self.token_ids[:-1]))
        found = []
        for stop in self.parameters.stop_strings:
            start = text.find(stop, max(0, num_old + 1 - len(stop)))
            if start >= 0:
                found.append((start, start + len(stop)))
        return min(found, key=lambda place: place[1], default=None)

    def _text(self, token_ids: list[int]) -> str:
        return self.vocabulary.text(self.prompt_token_ids, token_ids, self.parameters.skip_special_tokens)
