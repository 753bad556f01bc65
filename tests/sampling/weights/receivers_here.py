"""An `EngineReceiver` over workers in this process, and a sender that replaces the ranks."""

from types import SimpleNamespace

import torch

from vectorlm.sampling.backends.vllm.extension import WeightExtension
from vectorlm.sampling.weights.arena import Arena
from vectorlm.sampling.weights.inspection import checksum
from vectorlm.sampling.weights.receive import EngineReceiver


def receivers_of(*models):
    """Return the receivers of an engine with one worker for each of `models`, plain modules on CPU."""
    extensions = [WeightExtension() for _ in models]
    for extension, model in zip(extensions, models, strict=True):
        extension.model_runner = SimpleNamespace(
            get_model=lambda model=model: model, model_config=SimpleNamespace(dtype=torch.float32)
        )
    return EngineReceiver(
        lambda method, args=(): [getattr(worker, method)(*args) for worker in extensions], "live"
    )


def send(layout):
    """Fill the arena as ranks do; return the sent tensors and the ranks' checksums."""
    arena = Arena.open(layout.path, layout.num_bytes)
    sent = {slot.name: torch.randn(slot.shape) for slot in layout.slots}
    for slot in layout.slots:
        arena.view(slot).copy_(sent[slot.name])
    return sent, [checksum(sent[slot.name], word_bytes=slot.word_bytes) for slot in layout.slots]
