"""The algorithms by name."""

from __future__ import annotations

from vectorlm.algorithms.rows import ROWS
from vectorlm.algorithms.spec import AlgorithmSpec
from vectorlm.errors import ConfigError
from vectorlm.plugin import is_plugin, load_plugin
from vectorlm.settings import nearest

_SPECS: dict[str, AlgorithmSpec] = {spec.name: spec for spec in ROWS}


def register(spec: AlgorithmSpec) -> AlgorithmSpec:
    """Register an algorithm under its name.

    Raises:
        ValueError: The name is taken.
    """
    if spec.name in _SPECS:
        raise ValueError(f"an algorithm named {spec.name!r} exists already: choose another name.")
    _SPECS[spec.name] = spec
    return spec


def get_algorithm(name: str) -> AlgorithmSpec:
    """Return the algorithm of this name, or the one at ``file.py:NAME`` or ``package.module:NAME``.

    Raises:
        ConfigError: There is none.
    """
    if name in _SPECS:
        return _SPECS[name]
    if is_plugin(name):
        spec = load_plugin(name)
        if not isinstance(spec, AlgorithmSpec):
            raise ConfigError(f"{name!r} is a {type(spec).__name__}: it must be an AlgorithmSpec.")
        return spec
    rule = f"is not known: use one of {', '.join(algorithm_names())}, or file.py:NAME for your own."
    raise ConfigError(f"rl.algorithm={name!r} {rule} {nearest(name, _SPECS)}".rstrip())


def algorithm_names() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_SPECS)
