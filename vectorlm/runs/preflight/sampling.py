"""Check sampling parameters that vLLM would refuse at its first prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

from annotated_types import Predicate
from pydantic import Field

from vectorlm.data.encoding import end_tokens
from vectorlm.errors import ConfigError
from vectorlm.packages import fields_of
from vectorlm.runs.config.schema import Config
from vectorlm.runs.config.setting import refuse
from vectorlm.runs.config.value import FOREIGN, Entry, convert, describe_refusal
from vectorlm.settings import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, UnitInterval, nearest

Penalty = Annotated[float, Field(ge=-2, le=2, description="a number from -2 to 2", examples=["0.0"])]
TopK = Annotated[int, Field(ge=-1, description="an integer >= 1, or 0 for all tokens", examples=["0"])]
Logprobs = Annotated[int, Field(ge=-1, description="an integer >= 0, or -1 for all", examples=["0"])]
Stop = Annotated[
    Any,
    Predicate(lambda value: all(text and isinstance(text, str) for text in _listed(value))),
    Field(description="a text, or a list of texts, none of them empty"),
]
Tokens = Annotated[
    Any,
    Predicate(lambda value: all(type(token) is int for token in _listed(value))),
    Field(description="a list of integers"),
]


class Parameter(NamedTuple):
    """A sampling parameter of vLLM."""

    type: Any = None
    """Its type and range; None if only vLLM checks it. A test compares them with vLLM's."""
    neutral: tuple[Any, ...] = ()
    """Values that leave the distribution as it is."""
    is_followed: bool = True
    """Whether the trainer applies this parameter when it computes log-probabilities."""


PARAMETERS: Mapping[str, Parameter] = {
    "n": Parameter(PositiveInt),
    "temperature": Parameter(
        Annotated[float, Field(ge=0, le=2, description="a number from 0 to 2", examples=["1.0"])], (1,)
    ),
    "top_p": Parameter(Fraction, (1,)),
    "top_k": Parameter(TopK, (0, -1)),
    "min_p": Parameter(UnitInterval, (0,)),
    "presence_penalty": Parameter(Penalty, (0,), False),
    "frequency_penalty": Parameter(Penalty, (0,), False),
    "repetition_penalty": Parameter(PositiveFloat, (1,), False),
    "logit_bias": Parameter(None, (None,), False),
    "allowed_token_ids": Parameter(None, (None,), False),
    "bad_words": Parameter(None, (None, []), False),
    "thinking_token_budget": Parameter(None, (None, -1), False),
    "seed": Parameter(
        Annotated[int, Field(ge=-(2**63), lt=2**63, description="an integer of 64 bits")] | None
    ),
    "max_tokens": Parameter(PositiveInt | None),
    "min_tokens": Parameter(NonNegativeInt, (0,), False),
    "logprobs": Parameter(Logprobs | None),
    "prompt_logprobs": Parameter(Logprobs | None),
    "stop": Parameter(Stop | None),
    "stop_token_ids": Parameter(Tokens | None),
    "ignore_eos": Parameter(bool),
    "skip_special_tokens": Parameter(bool),
    "include_stop_str_in_output": Parameter(bool),
}
"""Parameters that the checks of a config read, by name."""


def answer_tokens(parameters: Mapping[str, Any]) -> int:
    """Return the number of answer tokens to leave room for: `max_tokens` (vLLM's default is 16), or 1 if it is null."""
    asked = parameters.get("max_tokens", 16)
    return asked if type(asked) is int else 1


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def sampling_problems(
    parameters: Mapping[str, Any], path: str = "", origins: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield the sampling parameters that vLLM would refuse, if vLLM is installed; `path` is their setting."""
    known = fields_of("sampling_params.py", "SamplingParams")
    prefix = path and f"{path}."
    for name, value in parameters.items() if known else ():
        here = f"{prefix}{name}"
        origin = (origins or {}).get(here, "")
        kind = PARAMETERS[name].type if name in PARAMETERS else None
        if kind is not None:
            try:
                convert(kind, Entry(tuple(value) if isinstance(value, list) else value, origin), here)
            except ConfigError as error:
                yield str(error)
        elif name not in known:
            # The name may be another library's name of a sampling parameter.
            places = FOREIGN[str(name)].places if str(name) in FOREIGN else ()
            ours = next((place for place in places if place.startswith("rl.sampling_params.")), "")
            there = ours.replace("rl.sampling_params.", prefix)
            fix = f"Did you mean {there!r}?" if there else nearest(str(name), known) or "Leave it out."
            yield describe_refusal(here, value, "must be a sampling parameter of vLLM", fix, origin)
    least, most = parameters.get("min_tokens"), parameters.get("max_tokens", 16)
    if known and isinstance(least, int) and isinstance(most, int) and least > most > 0:
        fix = f"Use {most} or less."
        yield describe_refusal(f"{prefix}min_tokens", least, "must be at most max_tokens", fix)
    if known and parameters.get("temperature") == 0 and parameters.get("n") not in (None, 1):
        fix = "Use 1, or a higher temperature."
        yield describe_refusal(f"{prefix}n", parameters["n"], "must be 1 at temperature 0", fix)


def stop_problems(config: Config, tokenizer: Any) -> Iterator[str]:
    """Yield stop strings that never end an answer, because they contain a special token, which answers leave out."""
    known = {}
    with suppress(NotImplementedError):  # Raised by tokenizers of mistral-common.
        known = {token.content: key for key, token in tokenizer.added_tokens_decoder.items() if token.special}
    for path, parameters in config.sampling_params.items():
        ends = set(parameters.get("stop_token_ids") or ())
        ends |= set() if parameters.get("ignore_eos") else end_tokens(tokenizer)
        for stop in _listed(parameters.get("stop") or ()):
            special = {text: number for text, number in known.items() if text in str(stop)}
            is_left_out = parameters.get("skip_special_tokens") is not False
            if special and is_left_out and ends.isdisjoint(special.values()):
                text, number = next(iter(special.items()))
                rule = f"cannot end an answer: it contains the special token {text}, which is not part of answers"
                fix = f"Set {path}.stop_token_ids: [{number}]."
                yield refuse(config, f"{path}.stop", rule, fix, stop)
