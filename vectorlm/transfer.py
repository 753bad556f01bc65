"""Verified weight updates of vLLM engines from any trainer (docs/howto/transfer.md)."""

from vectorlm.sampling.transfer import WeightTransfer

__all__ = ["WeightTransfer"]
