"""Whole tensors and shards of a model, which FSDP shards on several ranks."""

from torch.distributed.tensor import DTensor


def full(tensor):
    """Return the whole tensor; all ranks call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor):
    """Return this rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
