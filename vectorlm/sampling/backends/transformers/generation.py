"""A batch of completions that transformers' ``generate`` and its logits processors sample, a slice at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from vectorlm.sampling.backends.transformers.parameters import Detokenizer, Parameters
from vectorlm.types import Completion

SLICE_TOKENS = 32
SLICE_S = 1.0
"""Longest slice; between slices weights may change and requests may be cancelled."""
GREEDY_BELOW = 1e-5
"""Temperatures below this take the likeliest token, as in vLLM."""


@dataclass(eq=False)
class SequenceState:
    """One completion while it is being sampled."""

    prompt_token_ids: tuple[int, ...]
    parameters: Parameters
    seed: str
    max_tokens: int
    """Its longest length, within the model's context."""
    tokenizer: Detokenizer
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it is complete, or aborted."""
        return self.finish_reason is not None

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end it."""
        stops = frozenset(self.parameters.stop_token_ids or ())
        return stops if self.parameters.ignore_eos else stops | self.tokenizer.end_token_ids

    def make_processors(self, device: Any) -> LogitsProcessorList:
        """Return transformers' processors for its parameters, in vLLM's order: limits, penalty, cuts."""
        wanted, processors = self.parameters, LogitsProcessorList()
        if ends := sorted(self.tokenizer.end_token_ids | self.end_token_ids) if wanted.min_tokens else []:
            length = len(self.prompt_token_ids)
            processors.append(
                MinNewTokensLengthLogitsProcessor(length, wanted.min_tokens, ends, device=device)
            )
        if wanted.repetition_penalty != 1:
            processors.append(RepetitionPenaltyLogitsProcessor(float(wanted.repetition_penalty)))
        if wanted.temperature >= GREEDY_BELOW:
            if wanted.temperature != 1:
                processors.append(TemperatureLogitsWarper(float(wanted.temperature)))
            if wanted.min_p > 0:
                processors.append(MinPLogitsWarper(float(wanted.min_p)))
            if wanted.top_k > 0:
                processors.append(TopKLogitsWarper(wanted.top_k))
            if wanted.top_p < 1:
                processors.append(TopPLogitsWarper(float(wanted.top_p)))
        return processors

    def uniform(self) -> float:
        """Return the next token's random number, from seed and position alone: the process's state is the trainer's."""
        return random.Random(f"{self.seed}/{len(self.token_ids)}").random()

    def rewind(self, num_tokens: int) -> None:
        """Forget all but the first tokens: transformers may have discarded its newest step."""
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:], self.versions[num_tokens:]

    def append(self, token: int, logprob: float, version: int) -> None:
        """Append a token, and end if it is the last."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        keeps_stop = self.parameters.include_stop_str_in_output
        if token in self.end_token_ids:
            self.finish_reason = "stop"
            self.text = self._text(self.token_ids if keeps_stop else self.token_ids[:-1])
        elif (found := self._find_stop_string()) is not None:
            self.finish_reason = "stop"
            self.text = self._text(self.token_ids)[: found[1] if keeps_stop else found[0]]
        elif len(self.token_ids) >= self.max_tokens:
            self.finish_reason = "length"
            self.text = self._text(self.token_ids)

    def completion(self) -> Completion:
        """Return what was sampled so far."""
        return Completion(
            prompt_token_ids=self.prompt_token_ids,
            token_ids=tuple(self.token_ids),
            sampler_logprobs=() if self.parameters.logprobs is None else tuple(self.logprobs),
            versions=tuple(self.versions),
            text=self.text,
            finish_reason=self.finish_reason,
        )

    def _find_stop_string(self) -> tuple[int, int] | None:
        """Return where the stop string that the newest token completed starts and ends in the text.

        transformers' StopStringCriteria would also find one that begins in the prompt, and ignores `min_tokens`.
        """
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
        return self.tokenizer.text(self.prompt_token_ids, token_ids, self.parameters.skip_special_tokens)


class Batch:
    """Sequences that are continued together, left-padded, until the last has ended.

    `generate` runs the model (caches, positions, masks) and is resumed with the cache that it returned.
    """

    def __init__(self, model: Any, sequences: Sequence[SequenceState], raw_logprobs: bool) -> None:
        """Take log-probabilities before penalties, temperature and cuts where they are `raw_logprobs`."""
        self._model = model
        self.sequences = sequences
        self._raw_logprobs = raw_logprobs
        self._width = max(len(each.prompt_token_ids) for each in sequences)
        self._token_ids = torch.zeros(len(sequences), self._width, dtype=torch.long, device=model.device)
        self._mask = torch.zeros_like(self._token_ids)
        for index, each in enumerate(sequences):
            start = self._width - len(each.prompt_token_ids)
            self._token_ids[index, start:] = torch.tensor(each.prompt_token_ids)
            self._mask[index, start:] = 1
        self._processors = [each.make_processors(model.device) for each in sequences]
        self._cache: Any = None

    @property
    def has_ended(self) -> bool:
        """Whether every sequence has ended."""
        return all(each.has_ended for each in self.sequences)

    @torch.no_grad()
    def sample_slice(self, version: int) -> None:
        """Sample the next tokens, with weights of `version`."""
        config = GenerationConfig(
            do_sample=False,  # `_SampleEach` has sampled
            pad_token_id=0,
            max_new_tokens=SLICE_TOKENS,
            max_time=SLICE_S,
            return_dict_in_generate=True,
        )
        num_sampled = self._token_ids.shape[1] - self._width
        mask = torch.cat([self._mask, self._mask.new_ones(len(self.sequences), num_sampled)], dim=1)
        # An interrupt leaves it with more than `_token_ids`: the next slice makes another.
        cache, self._cache = self._cache, None
        output = self._model.generate(
            self._token_ids,
            attention_mask=mask,
            past_key_values=cache,
            generation_config=config,
            logits_processor=LogitsProcessorList(
                [_SampleEach(self.sequences, self._processors, self._width, version, self._raw_logprobs)]
            ),
            stopping_criteria=[_HasEnded(self.sequences)],
        )
        self._token_ids, self._cache = output.sequences, output.past_key_values

    def forget_cache(self) -> None:
        """Let the next slice recompute the cache of all tokens, with the weights of that time."""
        self._cache = None


@dataclass(eq=False)
class _SampleEach(LogitsProcessor):
    """Samples each sequence's next token by its own processors and seed, and allows no other token.

    transformers' own sampling draws a whole batch from one random state, with one set of parameters.
    """

    sequences: Sequence[SequenceState]
    processors: Sequence[LogitsProcessorList]
    width: int
    version: int
    raw_logprobs: bool

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raw = scores.float()
        shaped = self._shape(input_ids, raw)
        tokens = self._sample(shaped)
        logprobs = (
            (raw if self.raw_logprobs else shaped).log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()
        )
        for sequence, token, logprob in zip(self.sequences, tokens.tolist(), logprobs, strict=True):
            if not sequence.has_ended:
                sequence.append(token, logprob, self.version)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)

    def _shape(self, input_ids: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        """Return what each sequence draws from, from the raw logits [B, V].

        Of greedy ones they are the logits after penalties: in vLLM, temperature 0 divides and cuts nothing.
        """
        shaped = []
        for index, (sequence, processors) in enumerate(zip(self.sequences, self.processors, strict=True)):
            row = raw[index : index + 1]
            if not sequence.has_ended:
                sequence.rewind(input_ids.shape[1] - self.width)
                # Without the padding: a penalty would count it as tokens of the prompt.
                start = self.width - len(sequence.prompt_token_ids)
                row = processors(input_ids[index : index + 1, start:], row)  # type: ignore[arg-type]
            shaped.append(row)
        return torch.cat(shaped)

    def _sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the next token of each sequence, int64 [B]."""
        likeliest = logits.argmax(-1)
        is_greedy = [each.has_ended or each.parameters.temperature < GREEDY_BELOW for each in self.sequences]
        if all(is_greedy):
            return likeliest
        # One number per sequence instead of noise for the whole vocabulary. In double: in single precision the sum
        # over 150,000 tokens would shift the last ones by a part in a thousand.
        uniforms = torch.tensor([[each.uniform()] for each in self.sequences], dtype=torch.float64)
        sums = logits.double().softmax(-1).cumsum(-1)
        drawn = torch.searchsorted(sums, uniforms.to(logits.device) * sums[:, -1:], right=True)[:, 0]
        drawn = drawn.clamp(max=logits.shape[1] - 1)
        return torch.where(torch.tensor(is_greedy, device=logits.device), likeliest, drawn)


@dataclass(eq=False)
class _HasEnded(StoppingCriteria):
    sequences: Sequence[SequenceState]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([each.has_ended for each in self.sequences], device=input_ids.device)
