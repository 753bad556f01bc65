"""What a caller asks of the sampling: the parameters of engines other than vLLM."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vectorlm.errors import EngineError


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
    """Keep tokens that have this share of the likeliest one's probability, 0 to 1."""
    repetition_penalty: float = 1.0
    """Shrinks the logits of tokens in prompt and completion, above 0; 1 does nothing."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that the completion has, -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that the completion has it, -2 to 2."""
    seed: int | None = None
    """Makes the completions repeatable; None or -1 draws anew each time."""
    max_tokens: int | None = 16
    """Longest completion, in tokens, at least 1; None goes to the model's own limit."""
    min_tokens: int = 0
    """No end token or stop string before this many tokens."""
    stop: Sequence[str] | str | None = None
    """Texts that end the completion."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the completion, besides the model's own end tokens."""
    ignore_eos: bool = False
    """Whether to go on after the model's end tokens."""
    include_stop_str_in_output: bool = False
    """Whether the text contains what ended it."""
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
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "-2 to 2"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "-2 to 2"),
            "max_tokens": (self.max_tokens is None or self.max_tokens >= 1, "at least 1, or None"),
            "min_tokens": (0 <= self.min_tokens <= (self.max_tokens or self.min_tokens), "0 to max_tokens"),
        }
        for name, (is_right, rule) in ranges.items():
            if not is_right:
                raise EngineError(f"{name}={getattr(self, name)!r} is out of range: it must be {rule}.")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


NAMES = tuple(field.name for field in dataclasses.fields(Parameters))


DEFAULTS = Parameters()


def read_parameters(given: Any, defaults: Parameters = DEFAULTS) -> Parameters:
    """Turn a mapping (or None) into `Parameters`; `defaults` stand where it names none.

    Raises:
        EngineError: A name is unknown here, or a value is out of range; nothing is ever ignored.
    """
    if isinstance(given, Parameters):
        return given
    if not isinstance(given, Mapping | None):
        raise EngineError(f"sampling_params is a {type(given).__name__}: this engine takes a mapping.")
    for name in given or {}:
        if name not in NAMES:
            near = difflib.get_close_matches(str(name), NAMES, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"It takes {', '.join(NAMES)}."
            raise EngineError(f"this engine cannot honour the sampling parameter {name!r}. {hint}")
    try:
        return dataclasses.replace(defaults, **(given or {}))
    except TypeError as error:
        raise EngineError(
            f"sampling_params={dict(given or {})} holds a value of the wrong type: {error}."
        ) from error


def read_each(given: Any, num_prompts: int, defaults: Parameters = DEFAULTS) -> list[Parameters]:
    """Give every prompt its parameters; a sequence must have one for each.

    Raises:
        EngineError: The sequence has another length, or as `read_parameters` raises.
    """
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != num_prompts:
            raise EngineError(
                f"{len(given)} sampling parameters were given for {num_prompts} prompts: pass one, or one each."
            )
        return [read_parameters(each, defaults) for each in given]
    return [read_parameters(given, defaults)] * num_prompts
