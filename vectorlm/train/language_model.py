"""A sharded causal language model as a function from rows of tokens to their log-probabilities."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from vectorlm.algorithms.logprobs import EntropyKind, Head, token_values
from vectorlm.train.packing import PACKED, Packing, Rows, pack
from vectorlm.weights.plan import reshard

KNOWN_LAYERS = {"full_attention", "sliding_attention"}
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.25
"""How far log-probabilities of the same tokens may lie apart; the second for a model that computes in 16 bits."""
Values = tuple[torch.Tensor, torch.Tensor]


class LanguageModel:
    """Computes log-probabilities of rows: laid end to end where the model's attention allows it, else padded."""

    def __init__(self, model: nn.Module, temperature: float = 1.0, *, packs: bool = True) -> None:
        """Take a causal language model; called on all ranks.

        Args:
            model: Plain, or sharded with FSDP2.
            temperature: Divides the logits.
            packs: False pads rows in any case.
        """
        self.model, self.temperature = model, temperature
        causal = inner_model(model)
        self._can_skip_logits = "logits_to_keep" in inspect.signature(causal.forward).parameters
        prepare_packing(model, _packed_values)
        self.why_padded = why_not_packed(model) if packs else "pack_rows is False"
        """Why rows are padded; None where they are not."""
        if self.why_padded is None:
            self.why_padded = self._compared()

    @property
    def packs(self) -> bool:
        """Whether rows are laid end to end."""
        return self.why_padded is None

    def __call__(self, rows: Rows, entropy: EntropyKind = "none") -> Values:
        """Return the log-probability of each token that is asked for, and the entropy of what it was drawn from.

        Args:
            rows: On the CPU.
            entropy: Whether the entropies are computed, else 0, and whether with a gradient.

        Returns:
            float32 [B, T] each, on the model's device; 0 for tokens that are not asked for.
        """
        device = next(self.model.parameters()).device
        compute = self._packed if self.packs else self._padded
        is_asked, values = rows.is_asked.to(device), compute(rows, entropy, device)
        empty = torch.zeros(is_asked.shape, device=device)
        logprobs, entropies = (empty.masked_scatter(is_asked, each.float()) for each in values)
        return logprobs, entropies

    def logprobs(self, rows: Rows) -> torch.Tensor:
        """Return the log-probabilities alone, float32 [B, T]."""
        return self(rows)[0]

    def _packed(self, rows: Rows, entropy: EntropyKind, device: torch.device) -> Values:
        model: Any = self.model
        return model.packed_values(pack(rows), rows.targets.to(device), self.temperature, entropy)

    def _padded(self, rows: Rows, entropy: EntropyKind, device: torch.device) -> Values:
        """As `_packed`, without logits of positions before any that is asked for."""
        first = rows.is_asked.any(dim=0).int().argmax().item() if rows.is_asked.any() else 1
        skipped = max(int(first) - 1, 0) if self._can_skip_logits else 0
        options = {"logits_to_keep": rows.input_ids.shape[1] - skipped} if skipped else {}
        inputs = {"input_ids": rows.input_ids.to(device), "attention_mask": rows.attention_mask.to(device)}
        logits = self.model(**inputs, use_cache=False, **options).logits
        is_before = rows.is_asked.roll(-1, dims=1)[:, skipped:].to(device)
        return token_values(logits[is_before], rows.targets.to(device), self.temperature, entropy=entropy)

    @torch.no_grad()
    def _compared(self) -> str | None:
        """Compute a few rows both ways; say how far they lie apart where that is too far."""
        input_ids = torch.arange(40).view(4, 10) % 37 % inner_model(self.model).config.vocab_size
        input_ids[1:3, :5] = input_ids[0, :5]
        lengths = torch.tensor([7, 10, 6, 9])[:, None]
        attention_mask = (torch.arange(10) < lengths).long()
        is_asked = attention_mask.bool() & (torch.arange(10) > 4)
        rows = Rows(input_ids, attention_mask, is_asked, (0, 0, 0, 1))
        was_training, device = self.model.training, next(self.model.parameters()).device
        self.model.eval()
        (packed, _), (padded, _) = (each(rows, "none", device) for each in (self._packed, self._padded))
        dtype = self.model(input_ids=input_ids[:1].to(device), use_cache=False).logits.dtype
        reshard(self.model)
        self.model.train(was_training)
        gap = (packed - padded).abs().max()
        if dist.is_initialized():
            dist.all_reduce(gap, dist.ReduceOp.MAX)
        limit = TOLERANCE if dtype.itemsize > 2 else HALF_TOLERANCE
        return None if gap <= limit else f"its log-probabilities would be {gap.item():.2g} off"


def inner_model(model: nn.Module) -> Any:
    """Return the model of transformers, without the wrapper of PEFT."""
    inner: Any = model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def prepare_packing(model: Any, compute: Any) -> None:
    """Give the model a method `packed_values`, for which FSDP gathers weights as for its forward pass."""
    if not hasattr(model, "packed_values"):
        model.packed_values = partial(compute, inner_model(model))
        register_fsdp_forward_method(model, "packed_values")


def why_not_packed(model: nn.Module) -> str | None:
    """Say what keeps rows of a model from being packed, as far as its config tells; None for nothing."""
    causal = inner_model(model)
    implementation = causal.config._attn_implementation
    if implementation != PACKED:
        return f"its attention is {implementation}"
    others = set(getattr(causal.config, "layer_types", None) or ()) - KNOWN_LAYERS
    if others:
        return f"it has layers of {', '.join(sorted(others))}"
    parameters = inspect.signature(causal.base_model.forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return "its forward pass does not hand arguments on to its attention"
    return None


def _packed_values(
    causal: Any, packing: Packing, targets: torch.Tensor, temperature: float, entropy: EntropyKind
) -> Values:
    """Return log-probabilities and entropies of the M tokens that are asked for, float32 [M] each."""
    device = targets.device
    states = causal.base_model(**packing.arguments(device)).last_hidden_state[0]
    asked = states.index_select(0, packing.places.to(device))
    return token_values(asked, targets, temperature, head=_head(causal), entropy=entropy)


def _head(causal: Any) -> Head:
    """Return what makes logits of hidden states; `LanguageModel` compares it with the model's own."""
    scaling = getattr(causal.config, "logits_scaling", None)
    cap = getattr(causal.config, "final_logit_softcapping", None)
    layer = causal.get_output_embeddings()

    def head(states: torch.Tensor) -> torch.Tensor:
        logits = layer(states)
        if scaling is not None:
            logits = logits / scaling
        return logits if cap is None else cap * torch.tanh(logits / cap)

    return head
