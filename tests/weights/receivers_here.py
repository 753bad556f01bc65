"""`EngineReceiver` over workers in this process."""

from types import SimpleNamespace

from vectorlm.backends.vllm.extension import WeightExtension
from vectorlm.weights.receive import EngineReceiver


def receivers_of(*models):
    """Return the receivers of an engine with one worker for each of `models`, which are plain and on CPU."""
    extensions = [WeightExtension() for _ in models]
    for extension, model in zip(extensions, models, strict=True):
        extension.model_runner = SimpleNamespace(get_model=lambda model=model: model)
    return EngineReceiver(
        lambda method, args=(): [getattr(each, method)(*args) for each in extensions], "live"
    )
