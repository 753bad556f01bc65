"""Train a language model and sample from it with vLLM on the same devices, hot-swapping the weights in between."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vectorlm.ranks.launcher import launch
    from vectorlm.ranks.topology import Topology
    from vectorlm.runs.calls import finetune, reinforce
    from vectorlm.runs.config.load import load_config
    from vectorlm.sampling.engine import SamplingEngine
    from vectorlm.sampling.inline_engines import FakeEngine, HFEngine
    from vectorlm.sampling.settings import EngineSettings
    from vectorlm.train.checkpoint.export import save_model
    from vectorlm.train.exact import exact
    from vectorlm.train.handover import DeviceTurn
    from vectorlm.types import Completion, UpdateReport

__version__ = "0.1.0"

_HOMES = {
    "Completion": "vectorlm.types",
    "DeviceTurn": "vectorlm.train.handover",
    "EngineSettings": "vectorlm.sampling.settings",
    "FakeEngine": "vectorlm.sampling.inline_engines",
    "HFEngine": "vectorlm.sampling.inline_engines",
    "SamplingEngine": "vectorlm.sampling.engine",
    "Topology": "vectorlm.ranks.topology",
    "UpdateReport": "vectorlm.types",
    "exact": "vectorlm.train.exact",
    "finetune": "vectorlm.runs.calls",
    "launch": "vectorlm.ranks.launcher",
    "load_config": "vectorlm.runs.config.load",
    "reinforce": "vectorlm.runs.calls",
    "save_model": "vectorlm.train.checkpoint.export",
}

__all__ = [
    "Completion",
    "DeviceTurn",
    "EngineSettings",
    "FakeEngine",
    "HFEngine",
    "SamplingEngine",
    "Topology",
    "UpdateReport",
    "exact",
    "finetune",
    "launch",
    "load_config",
    "reinforce",
    "save_model",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use: importing the package loads neither torch nor vLLM."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names before their first use, for completion in a notebook."""
    return sorted({*globals(), *__all__})
