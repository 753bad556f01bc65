"""The export of a trained model in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vectorlm.checkpoint import folder
from vectorlm.dist.wait import aloud

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def export_model(model: Any, tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    """Write weights (safetensors), configuration and tokenizer to the folder `path`; called on all ranks.

    Rank 0 holds one full copy in host memory, the others one tensor at a time. Of a model with adapters only the
    adapters are written. The folder appears, or replaces an older one, when it is complete.
    """
    with aloud(f"writing the model {path}", is_on=dist.get_rank() == 0):
        weights = gather_weights(model)
        if dist.get_rank() == 0:
            work = folder.begin(Path(path))
            model.save_pretrained(work, state_dict=weights)
            tokenizer.save_pretrained(work)
            folder.finish(Path(path))
        dist.barrier()


def gather_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that ``save_pretrained`` writes, in full on rank 0's host and none elsewhere.

    A shared parameter comes once, under its first name; frozen weights under adapters are left out.
    """
    saved = model.state_dict().keys()
    has_adapters = hasattr(model, "peft_config")
    trained = [
        (name, each) for name, each in model.named_parameters() if each.requires_grad or not has_adapters
    ]
    buffers = [(name, each) for name, each in model.named_buffers() if name in saved]
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in trained + buffers:
        whole = tensor.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        if dist.get_rank() == 0:
            weights[name] = whole.cpu()
    return weights
