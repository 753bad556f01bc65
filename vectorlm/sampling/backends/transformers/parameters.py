"""Sampling parameters as transformers takes them, and the text of sampled tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vectorlm.data.encoding import has_tokenizer, load_tokenizer
from vectorlm.errors import EngineError
from vectorlm.settings import nearest

NUM_CONTEXT_TOKENS = 8
"""Prompt tokens that are decoded with a completion: they decide whether its text begins with a space."""


@dataclass(frozen=True)
class Parameters:
    """How one prompt is continued; names, defaults and meanings are those of ``vllm.SamplingParams``."""

    n: int = 1
    """Completions of each prompt, at least 1."""
    temperature: float = 1.0
    """Divides the logits, from 0; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Keep the likeliest tokens that make up this probability, above 0 and up to 1."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the likeliest token's probability, 0 to 1."""
    repetition_penalty: float = 1.0
    """Shrinks the logits of tokens in prompt and completion, above 0; 1 does nothing."""
    seed: int | None = None
    """Makes the completions repeatable; None or -1 draws a new seed each time."""
    max_tokens: int | None = 16
    """Longest completion, in tokens, at least 1; None is the model's own limit."""
    min_tokens: int = 0
    """No end token or stop string before this many tokens."""
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
    """Any number asks for the log-probabilities of the sampled tokens."""

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
"""Values that change nothing, of parameters that transformers has no logits processor for."""


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
    """Turns completions into text as vLLM does, with the model's tokenizer; into none if it has none."""

    def __init__(self, model_path: str, model: Any) -> None:
        """Read a folder's tokenizer, if it has one, and the end tokens of tokenizer and model."""
        self._tokenizer = load_tokenizer(model_path) if has_tokenizer(model_path) else None
        ends = model.generation_config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        if self._tokenizer is not None and self._tokenizer.eos_token_id is not None:
            ends.add(self._tokenizer.eos_token_id)
        self.end_token_ids = frozenset(ends)

    def text(
        self, prompt_token_ids: Sequence[int], token_ids: Sequence[int], skip_special_tokens: bool
    ) -> str:
        """Return the text that `token_ids` add to the prompt's."""
        if self._tokenizer is None:
            return ""
        context = list(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        before = self._tokenizer.decode(context, skip_special_tokens=skip_special_tokens)
        after = self._tokenizer.decode([*context, *token_ids], skip_special_tokens=skip_special_tokens)
        # A character whose last bytes have not been sampled is not text yet.
        return after[len(before) :].rstrip("\N{REPLACEMENT CHARACTER}")
