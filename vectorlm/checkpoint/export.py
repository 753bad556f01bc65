"""The finished model in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vectorlm.checkpoint import folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def export_model(model: Any, tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    """Write weights (safetensors), configuration and tokenizer to the folder `path`; called on all ranks.

    Rank 0 holds one full copy in host memory, the others one tensor at a time. Of a model with adapters the
    adapters alone are written. The folder appears, or replaces an older one, when it is complete.

    Args:
        model: The sharded transformers (or peft) model.
        tokenizer: Saved beside the model.
        path: The folder.
    """
    weights = gather_weights(model)
    if dist.get_rank() == 0:
        work = folder.begin(Path(path))
        model.save_pretrained(work, state_dict=weights)
        tokenizer.save_pretrained(work)
        folder.finish(Path(path))
    dist.barrier()


def gather_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what ``save_pretrained`` writes, in full on rank 0's host and nothing elsewhere.

    A parameter that several modules share comes once, under its first name; frozen weights under adapters are
    left out.
    """
    saved = model.state_dict().keys()
    has_adapters = hasattr(model, "peft_config")
    tensors: dict[str, torch.Tensor] = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or not has_adapters
    }
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        whole = tensor.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        if dist.get_rank() == 0:
            weights[name] = whole.cpu()
    return weights
