"""Batches of completions for the transformers backend: sampling, parameters and text."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
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
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from vectorlm.data.encoding import has_tokenizer, load_tokenizer
from vectorlm.errors import EngineError
from vectorlm.settings import nearest
from vectorlm.types import Completion

SLICE_TOKENS = 32
SLICE_S = 1.0
"""Longest slice in seconds; between slices weights may change and requests may be cancelled."""
GREEDY_BELOW = 1e-5
"""Temperatures below this take the likeliest token, as in vLLM."""


@dataclass(eq=False)
class SequenceState:
    """The state of one completion during sampling."""

    prompt_token_ids: tuple[int, ...]
    parameters: Parameters
    seed: str
    max_tokens: int
    """Longest completion, within the model's context."""
    tokenizer: Detokenizer
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the sequence is complete or aborted."""
        return self.finish_reason is not None

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end the completion."""
        stops = frozenset(self.parameters.stop_token_ids or ())
        return stops if self.parameters.ignore_eos else stops | self.tokenizer.end_token_ids

    def make_processors(self, device: Any) -> LogitsProcessorList:
        """Return transformers' processors for the parameters, in vLLM's order: limits, penalty, cuts."""
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
        """Return the next token's random number from seed and position; the process's random state is the trainer's."""
        return random.Random(f"{self.seed}/{len(self.token_ids)}").random()

    def rewind(self, num_tokens: int) -> None:
        """Keep only the first tokens, because transformers may have discarded its last step."""
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:], self.versions[num_tokens:]

    def append(self, token: int, logprob: float, version: int) -> None:
        """Append a token; set `finish_reason` if it is the last."""
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
        """Return the tokens so far as a `Completion`."""
        return Completion(
            prompt_token_ids=self.prompt_token_ids,
            token_ids=tuple(self.token_ids),
            sampler_logprobs=() if self.parameters.logprobs is None else tuple(self.logprobs),
            versions=tuple(self.versions),
            text=self.text,
            finish_reason=self.finish_reason,
        )

    def _find_stop_string(self) -> tuple[int, int] | None:
        """Return start and end of a stop string that the newest token completes in the text.

        transformers' StopStringCriteria also finds strings that begin in the prompt, and ignores `min_tokens`.
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
    """A left-padded batch of sequences, sampled together until the last one has ended.

    ``generate`` runs the model (caches, positions, masks).
    """

    def __init__(
        self, model: Any, sequences: Sequence[SequenceState], raw_logprobs: bool, keeps_cache: bool
    ) -> None:
        """Start a batch.

        `raw_logprobs` are those before penalties, temperature and cuts. With `keeps_cache`, a slice continues with the
        cache of the slice before.
        """
        self._model = model
        self.sequences = sequences
        self._raw_logprobs, self._keeps_cache = raw_logprobs, keeps_cache
        self._token_ids, self._mask = _left_padded(
            [sequence.prompt_token_ids for sequence in sequences], model.device
        )
        self._width = self._token_ids.shape[1]
        self._processors = [sequence.make_processors(model.device) for sequence in sequences]
        self._cache: Any = None

    @property
    def has_ended(self) -> bool:
        """Whether every sequence has ended."""
        return all(sequence.has_ended for sequence in self.sequences)

    @torch.no_grad()
    def sample_slice(self, version: int) -> None:
        """Sample the next tokens with weights of `version`."""
        num_sampled = self._token_ids.shape[1] - self._width
        left = min(sequence.max_tokens - num_sampled for sequence in self.sequences if not sequence.has_ended)
        mask = torch.cat([self._mask, self._mask.new_ones(len(self.sequences), num_sampled)], dim=1)
        has_ended = torch.tensor([sequence.has_ended for sequence in self.sequences], device=mask.device)
        mask[has_ended, :-1] = 0
        # After an interrupt the cache has more tokens than `_token_ids`; the next slice then builds a new one.
        cache, self._cache = self._cache, None
        self._token_ids, cache = _generate(
            self._model,
            self._token_ids,
            mask,
            cache,
            _Sampler(self.sequences, self._processors, self._width, version, self._raw_logprobs),
            _HasEnded(self.sequences),
            # `generate` continues ended sequences. A learned position beyond the context is an IndexError, so a slice
            # ends with the first sequence that reaches its limit, and the next one counts ended sequences from 0.
            max_new_tokens=min(SLICE_TOKENS, left),
            max_time=SLICE_S,
        )
        self._cache = cache if self._keeps_cache else None

    def forget_cache(self) -> None:
        """Make the next slice recompute the cache of all tokens with the new weights."""
        self._cache = None


def _left_padded(prompts: Sequence[Sequence[int]], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids and the mask of a batch, int64 [B, T]."""
    width = max(map(len, prompts))
    token_ids = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
    mask = torch.zeros_like(token_ids)
    for index, prompt in enumerate(prompts):
        token_ids[index, width - len(prompt) :] = torch.tensor(prompt)
        mask[index, width - len(prompt) :] = 1
    return token_ids, mask


def _generate(
    model: Any,
    token_ids: torch.Tensor,
    mask: torch.Tensor,
    cache: Any,
    processor: LogitsProcessor,
    *stops: StoppingCriteria,
    **limits: Any,
) -> tuple[torch.Tensor, Any]:
    """Continue a batch within transformers' limits; return its token ids and its cache."""
    output = model.generate(
        token_ids,
        attention_mask=mask,
        # Some models have no such argument.
        **({} if cache is None else {"past_key_values": cache}),
        generation_config=GenerationConfig(
            do_sample=False,  # `processor` allows one token
            pad_token_id=0,
            return_dict_in_generate=True,
            **limits,
        ),
        logits_processor=LogitsProcessorList([processor]),
        stopping_criteria=StoppingCriteriaList(stops),
    )
    return output.sequences, output.past_key_values


PROBES = ((5, 9), (3, 4, 5, 6, 7, 8, 9, 10))
"""Prompts of different lengths, to compare a batch with its prompts alone."""
NUM_PROBED = 4
"""Tokens that continue each of the `PROBES`."""


def computes_alike(model: Any, together: bool, keeps_cache: bool) -> bool:
    """Return whether a model gives the `PROBES` the same probabilities in slices as in passes over all tokens.

    The slices are of one padded batch (`together`) or of single prompts. Recurrent layers may count padding as tokens,
    and some models have no cache that the next slice can continue.
    """
    batches = [PROBES] if together else [(prompt,) for prompt in PROBES]
    expected = torch.cat([_probabilities(model, [prompt], 1, False) for prompt in PROBES])
    try:
        found = torch.cat([_probabilities(model, batch, 2, keeps_cache) for batch in batches])
    except Exception:  # The model's code may raise anything.
        return False
    divergence = (expected.exp() * (expected - found)).sum(-1)
    # In 16 bits, batches are rounded differently than their rows, and tokens may get other experts.
    return bool((divergence < (1e-4 if model.dtype == torch.float32 else 0.1)).all())


@torch.no_grad()
def _probabilities(
    model: Any, prompts: Sequence[Sequence[int]], num_per_slice: int, keeps_cache: bool
) -> torch.Tensor:
    """Return the log-probabilities of all tokens after prompts, float64 [B, NUM_PROBED, V], in slices."""
    token_ids, mask = _left_padded(prompts, model.device)
    recorder, cache = _Recorder(), None
    while len(recorder.found) < NUM_PROBED:
        token_ids, cache = _generate(model, token_ids, mask, cache, recorder, max_new_tokens=num_per_slice)
        cache = cache if keeps_cache else None
        mask = torch.nn.functional.pad(mask, (0, num_per_slice), value=1)
    return torch.stack(recorder.found, dim=1)


@dataclass(eq=False)
class _Recorder(LogitsProcessor):
    """A processor that records the distributions, and allows only the token of the next number."""

    found: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # A model may forbid tokens, with a probability of 0.
        self.found.append(scores.double().log_softmax(-1).clamp(min=-100))
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, len(self.found)] = 0.0
        return allowed


@dataclass(eq=False)
class _Sampler(LogitsProcessor):
    """A processor that samples every sequence with its own parameters and seed, and allows only the sampled token.

    transformers itself samples a whole batch with one random state and one set of parameters.
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
        """Return the logits of the sampling distributions, from the raw logits [B, V].

        Greedy sequences have the logits after penalties: as in vLLM, temperature 0 neither divides nor cuts.
        """
        shaped = []
        for index, (sequence, processors) in enumerate(zip(self.sequences, self.processors, strict=True)):
            row = raw[index : index + 1]
            if not sequence.has_ended:
                sequence.rewind(input_ids.shape[1] - self.width)
                # Without the padding, which a penalty would count as prompt tokens.
                start = self.width - len(sequence.prompt_token_ids)
                row = processors(input_ids[index : index + 1, start:], row)  # type: ignore[arg-type]
            shaped.append(row)
        return torch.cat(shaped)

    def _sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the next token of each sequence, int64 [B]."""
        likeliest = logits.argmax(-1)
        is_greedy = [
            sequence.has_ended or sequence.parameters.temperature < GREEDY_BELOW
            for sequence in self.sequences
        ]
        if all(is_greedy):
            return likeliest
        # One number per sequence instead of noise for the whole vocabulary. In float64, because a float32 sum over
        # 150,000 tokens would shift the last ones by a part in a thousand.
        uniforms = torch.tensor([[sequence.uniform()] for sequence in self.sequences], dtype=torch.float64)
        sums = logits.double().softmax(-1).cumsum(-1)
        drawn = torch.searchsorted(sums, uniforms.to(logits.device) * sums[:, -1:], right=True)[:, 0]
        drawn = drawn.clamp(max=logits.shape[1] - 1)
        return torch.where(torch.tensor(is_greedy, device=logits.device), likeliest, drawn)


@dataclass(eq=False)
class _HasEnded(StoppingCriteria):
    sequences: Sequence[SequenceState]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([sequence.has_ended for sequence in self.sequences], device=input_ids.device)


NUM_CONTEXT_TOKENS = 8
"""Prompt tokens decoded before a completion; they decide whether its text begins with a space."""


@dataclass(frozen=True)
class Parameters:
    """Sampling parameters of one prompt, with the names, defaults and meanings of ``vllm.SamplingParams``."""

    n: int = 1
    """Completions per prompt, at least 1."""
    temperature: float = 1.0
    """Divisor of the logits, at least 0; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Keep the likeliest tokens that make up this probability, above 0 and up to 1."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the likeliest token's probability, 0 to 1."""
    repetition_penalty: float = 1.0
    """Penalty on the logits of tokens in prompt and completion, above 0; 1 does nothing."""
    seed: int | None = None
    """Seed of the completions; None or -1 draws a new seed each time."""
    max_tokens: int | None = 16
    """Longest completion, in tokens, at least 1; None is the model's own limit."""
    min_tokens: int = 0
    """Number of tokens before which no end token or stop string ends the completion."""
    stop: Sequence[str] | str | None = None
    """Texts that end the completion."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the completion, besides the model's end tokens."""
    ignore_eos: bool = False
    """Whether the model's end tokens do not end the completion."""
    include_stop_str_in_output: bool = False
    """Whether the text includes the stop string or stop token."""
    skip_special_tokens: bool = True
    """Whether the text leaves special tokens out."""
    logprobs: int | None = None
    """Any number returns the log-probabilities of the sampled tokens; None returns none."""

    def __post_init__(self) -> None:
        ranges = {
            "n": (self.n >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < float("inf"), "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k >= -1, "at least 1, or 0 for all tokens"),
            "min_p": (0 <= self.min_p <= 1, "0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < float("inf"), "above 0"),
            "max_tokens": (self.max_tokens is None or self.max_tokens >= 1, "at least 1, or None"),
            "stop": (all(self.stop_strings), "texts that are not empty"),
            "min_tokens": (0 <= self.min_tokens <= (self.max_tokens or self.min_tokens), "0 to max_tokens"),
        }
        for name, (is_right, rule) in ranges.items():
            if not is_right:
                raise EngineError(f"{name}={getattr(self, name)!r} is out of range: it must be {rule}.")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return `stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


NAMES = tuple(field.name for field in dataclasses.fields(Parameters))
DEFAULTS = Parameters()
NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0}
"""Parameters that transformers does not support, with the values that change nothing."""


def read_parameters(given: Any, defaults: Parameters = DEFAULTS) -> Parameters:
    """Turn a mapping (or None) into `Parameters`; raises `EngineError` for an unknown name or a wrong value."""
    if isinstance(given, Parameters):
        return given
    if not isinstance(given, Mapping | None):
        raise EngineError(f"sampling_params is a {type(given).__name__}: this engine takes a mapping.")
    given = {name: value for name, value in (given or {}).items() if (name, value) not in NEUTRAL.items()}
    for name in given:
        if name not in NAMES:
            hint = nearest(str(name), NAMES) or f"It takes {', '.join(NAMES)}."
            raise EngineError(f"this engine cannot honour the sampling parameter {name!r}. {hint}")
    try:
        return dataclasses.replace(defaults, **given)
    except TypeError as error:
        raise EngineError(f"sampling_params={given} holds a value of the wrong type: {error}.") from error


class Detokenizer:
    """A detokenizer that decodes completions as vLLM does; without a tokenizer texts are empty."""

    def __init__(self, model_path: str, model: Any, **options: Any) -> None:
        """Load the tokenizer of a folder, if there is one, and the end tokens of tokenizer and model.

        `options` are arguments of transformers' ``from_pretrained``.
        """
        self._tokenizer = load_tokenizer(model_path, **options) if has_tokenizer(model_path) else None
        ends = model.generation_config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        if self._tokenizer is not None and self._tokenizer.eos_token_id is not None:
            ends.add(self._tokenizer.eos_token_id)
        self.end_token_ids = frozenset(ends)

    def text(
        self, prompt_token_ids: Sequence[int], token_ids: Sequence[int], skip_special_tokens: bool
    ) -> str:
        """Return the text that `token_ids` add to the prompt."""
        if self._tokenizer is None:
            return ""
        context = list(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        before = self._tokenizer.decode(context, skip_special_tokens=skip_special_tokens)
        after = self._tokenizer.decode([*context, *token_ids], skip_special_tokens=skip_special_tokens)
        # Without an incomplete character at the end.
        return after[len(before) :].rstrip("\N{REPLACEMENT CHARACTER}")
