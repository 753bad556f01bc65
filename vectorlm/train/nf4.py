"""Frozen linear layers whose weights are held in 4 bits, by bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from vectorlm.train.shard import transformer_blocks


class NF4Linear(nn.Linear):
    """A linear layer with a frozen weight in NF4, whose scales are quantised again.

    The packed weight is a buffer: FSDP2 leaves it alone, so each rank holds all of it, and no checkpoint has it.

    Source: Dettmers et al. 2023, arXiv 2305.14314, eq. 5.
    """

    def __init__(self, layer: nn.Linear, device: str) -> None:
        from bitsandbytes.functional import quantize_4bit

        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        weight = layer.weight.detach().to(device)
        packed, self.quant_state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        self.packed: torch.Tensor
        self.register_buffer("packed", packed.view(self.out_features, -1), persistent=False)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The packed weight: PEFT asks where it lies, and what it is."""
        return self.packed

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute in the dtype of the input."""
        from bitsandbytes import matmul_4bit

        return matmul_4bit(input, self.packed.view(-1, 1).t(), self.quant_state, bias=self.bias)

    def dequantize(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the rows of the weight behind some rows of `self.packed`, in the dtype that it was loaded in."""
        from bitsandbytes.functional import dequantize_4bit

        # A scale is of 64 numbers, which may go over the end of a row.
        first = (packed.storage_offset() - self.packed.storage_offset()) // self.packed.shape[1]
        return dequantize_4bit(self.packed.view(-1, 1), self.quant_state)[first : first + len(packed)]


def quantize_blocks(model: nn.Module, device: str) -> nn.Module:
    """Put `NF4Linear` layers on `device` in the place of all linear ones inside the transformer blocks."""
    for owner, name, layer in list(_linear_layers(model)):
        setattr(owner, name, NF4Linear(layer, device))
    return model


@torch.no_grad()
def round_blocks(model: nn.Module) -> None:
    """Give the linear layers inside the transformer blocks, without adapters, the weights that NF4 makes of theirs."""
    for _, _, layer in _linear_layers(model):
        quantized = NF4Linear(layer, str(layer.weight.device))
        layer.weight.copy_(quantized.dequantize(quantized.packed))


def _linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for block in transformer_blocks(model):
        for path, owner in block.named_modules():
            for name, layer in owner.named_children():
                if type(layer) is nn.Linear and layer.in_features % 2 == 0 and "lora_" not in path:
                    yield owner, name, layer
