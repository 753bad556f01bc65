"""Sampling parameters that vLLM would refuse at its first prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

from annotated_types import Predicate
from pydantic import Field

from vectorlm.data.encoding import end_tokens
from vectorlm.errors import ConfigError
from vectorlm.packages import fields_of
from vectorlm.runs.config.source import Entry
from vectorlm.runs.config.value import FOREIGN, convert, describe_refusal
from vectorlm.settings import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, UnitInterval, nearest

Penalty = Annotated[float, Field(ge=-2, le=2, description="a number from -2 to 2", examples=["0.0"])]
TopK = Annotated[int, Field(ge=-1, description="an integer >= 1, or 0 for all tokens", examples=["0"])]
Logprobs = Annotated[int, Field(ge=-1, description="an integer >= 0, or -1 for all", examples=["0"])]
Stop = Annotated[
    Any,
    Predicate(lambda value: all(each and isinstance(each, str) for each in _listed(value))),
    Field(description="a text, or a list of texts, none of them empty"),
]
Tokens = Annotated[
    Any,
    Predicate(lambda value: all(type(each) is int for each in _listed(value))),
    Field(description="a list of integers"),
]
RULES: Mapping[str, Any] = {
    "n": PositiveInt,
    "temperature": Annotated[float, Field(ge=0, le=2, description="a number from 0 to 2", examples=["1.0"])],
    "top_p": Fraction,
    "top_k": TopK,
    "min_p": UnitInterval,
    "presence_penalty": Penalty,
    "frequency_penalty": Penalty,
    "repetition_penalty": PositiveFloat,
    "seed": Annotated[int, Field(ge=-(2**63), lt=2**63, description="an integer of 64 bits")] | None,
    "max_tokens": PositiveInt | None,
    "min_tokens": NonNegativeInt,
    "logprobs": Logprobs | None,
    "prompt_logprobs": Logprobs | None,
    "stop": Stop | None,
    "stop_token_ids": Tokens | None,
    "ignore_eos": bool,
    "skip_special_tokens": bool,
    "include_stop_str_in_output": bool,
}
"""What vLLM checks of each parameter, by its name; a test compares this with vLLM."""


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def sampling_problems(
    parameters: Mapping[str, Any], path: str = "", origins: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Find what vLLM would refuse; nothing where it is not installed. They stand at `path` of the config."""
    known = fields_of("sampling_params.py", "SamplingParams")
    prefix = path and f"{path}."
    for name, value in parameters.items() if known else ():
        here = f"{prefix}{name}"
        origin = (origins or {}).get(here, "")
        if name in RULES:
            try:
                convert(RULES[name], Entry(tuple(value) if isinstance(value, list) else value, origin), here)
            except ConfigError as error:
                yield str(error)
        elif name not in known:
            # Of other libraries, the name may be that of a sampling parameter.
            places = FOREIGN[str(name)].places if str(name) in FOREIGN else ()
            ours = next((place for place in places if place.startswith("rl.sampling_params.")), "")
            there = ours.replace("rl.sampling_params.", prefix)
            fix = f"Did you mean {there!r}?" if there else nearest(str(name), known) or "Leave it out."
            yield describe_refusal(here, value, "is not a sampling parameter of vLLM", fix, origin)
    least, most = parameters.get("min_tokens"), parameters.get("max_tokens", 16)
    if known and isinstance(least, int) and isinstance(most, int) and least > most > 0:
        fix = f"max_tokens is {most}."
        yield describe_refusal(f"{prefix}min_tokens", least, "must be at most max_tokens", fix)
    if known and parameters.get("temperature") == 0 and parameters.get("n") not in (None, 1):
        fix = "Use 1, or a higher temperature."
        yield describe_refusal(f"{prefix}n", parameters["n"], "answers would be equal at temperature 0", fix)


def stop_problems(
    given: Mapping[str, Mapping[str, Any]], origins: Mapping[str, str], tokenizer: Any
) -> Iterator[str]:
    """Find stop strings that end no answer: they hold a special token, which the texts of answers leave out.

    `given` are sampling parameters by their place in the config.
    """
    known = {}
    with suppress(NotImplementedError):  # As tokenizers of mistral-common raise.
        known = {each.content: key for key, each in tokenizer.added_tokens_decoder.items() if each.special}
    for path, parameters in given.items():
        ends = set(parameters.get("stop_token_ids") or ())
        ends |= set() if parameters.get("ignore_eos") else end_tokens(tokenizer)
        for stop in _listed(parameters.get("stop") or ()):
            held = {text: number for text, number in known.items() if text in str(stop)}
            if held and ends.isdisjoint(held.values()) and parameters.get("skip_special_tokens") is not False:
                text, number = next(iter(held.items()))
                rule = (
                    f"holds the special token {text}, which the texts of answers leave out: it would end none"
                )
                fix = f"Set {path}.stop_token_ids: [{number}]."
                yield describe_refusal(f"{path}.stop", stop, rule, fix, origins.get(f"{path}.stop", ""))
