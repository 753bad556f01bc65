"""Reinforcement learning as pure functions: tensors and floats in, tensors out.

B sequences, T tokens, V vocabulary, P prompts, G completions per prompt. Masks are bool or 0/1. Import every function,
record and settings class from this package.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

# The modules without torch come first: a name that one of them defines is found without importing torch.
_MODULES = (
    *("settings", "spec", "registry", "reduce", "logprobs", "groups", "policy_loss", "kl", "batch", "critic"),
    *("correction", "preference", "support"),
)


def __getattr__(name: str) -> Any:
    """Import the module that defines a public name when the name is first used."""
    for module in () if name.startswith("_") or name in _MODULES else _MODULES:
        found = import_module(f"{__name__}.{module}")
        if _defines(found, name):
            return globals().setdefault(name, getattr(found, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names before their first use, for completion in a notebook."""
    modules = [import_module(f"{__name__}.{module}") for module in _MODULES]
    public = {name for found in modules for name in vars(found) if name[0] != "_" and _defines(found, name)}
    return sorted({*globals(), *public} - {*_MODULES})


def _defines(module: ModuleType, name: str) -> bool:
    return getattr(getattr(module, name, None), "__module__", None) == module.__name__
