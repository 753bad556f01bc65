"""The export of a trained model in Hugging Face layout."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vectorlm.checkpoint import folder
from vectorlm.dist.wait import report_wait
from vectorlm.lora.folder import lasting_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SHARD = "5GB"
"""Largest safetensors file; a larger model gets several and an index."""


def export_model(
    model: Any, tokenizer: PreTrainedTokenizerBase, path: str | Path, card: str | None = None
) -> None:
    """Write weights (safetensors), configuration and tokenizer to the folder `path`; called on all ranks.

    Rank 0 holds one full copy in host memory, the others one tensor at a time. Of a model with adapters only the
    adapters are written. The folder appears, or replaces an older one, when it is complete. Rank 0's `card` is its
    README.md.

    Raises:
        CheckpointError: The folder cannot be written; no half of it is left.
    """
    with report_wait(f"writing the model {path}", is_on=dist.get_rank() == 0):
        weights = gather_weights(model)
        if dist.get_rank() == 0:
            with folder.exported(Path(path)):
                write_folder(
                    Path(path),
                    folder.begin(Path(path)),
                    lambda work: save(model, tokenizer, work, card, weights),
                )
        dist.barrier()


def save(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    work: Path,
    card: str | None,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write the files of a model into the folder `work`, with its own weights or these."""
    for options in getattr(model, "peft_config", {}).values():
        options.base_model_name_or_path = lasting_name(options.base_model_name_or_path)
    model.save_pretrained(work, state_dict=weights, max_shard_size=MAX_SHARD)
    tokenizer.save_pretrained(work)
    # peft leaves a template of a card.
    (work / "README.md").unlink(missing_ok=True)
    if card is not None:
        (work / "README.md").write_text(card, encoding="utf-8")


def write_folder(path: Path, work: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill the empty folder `work`, which then takes the name `path`, or is deleted where that fails."""
    try:
        write(work)
        folder.finish(path, work)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


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
