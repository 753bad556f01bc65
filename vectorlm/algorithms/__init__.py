"""Reinforcement learning as pure functions: tensors and floats in, tensors out.

B sequences, T tokens, V vocabulary, P prompts, G completions of each. Masks are bool or 0/1. The functions, records and
settings of the modules here can be imported from the package; a module is loaded when one of its names is first used.
"""

from importlib import import_module
from typing import Any

_MODULES = (
    *("settings", "spec", "registry", "reduce", "logprobs", "groups", "policy_loss", "kl", "batch", "critic"),
    *("correction", "preference", "support"),
)


def __getattr__(name: str) -> Any:
    """Find a public name in the modules; importing the package alone does not load torch."""
    for module in () if name.startswith("_") else _MODULES:
        found = import_module(f"{__name__}.{module}")
        if getattr(getattr(found, name, None), "__module__", None) == found.__name__:
            return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
