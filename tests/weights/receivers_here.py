"""An engine's ``collective_rpc`` over receivers in this process."""

from vectorlm.weights.extension import WeightExtension


def call_of(*receivers):
    """Return what `Receivers` takes: calls the extension of each receiver in turn."""
    extensions = [WeightExtension() for _ in receivers]
    for extension, receiver in zip(extensions, receivers, strict=True):
        extension._vectorlm_receiver = receiver
    return lambda method, args=(): [getattr(extension, method)(*args) for extension in extensions]
