"""A sharded causal language model as a function from rows of tokens to their log-probabilities."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from vectorlm.algorithms.logprobs import Comparison, EntropyKind, Head, TokenValues, token_values
from vectorlm.algorithms.support import WHOLE, Support
from vectorlm.errors import ConfigError
from vectorlm.sampling.weights.model_tensors import reshard
from vectorlm.train.attention import PACKED
from vectorlm.train.grammar import Grammar
from vectorlm.train.packing import ContextGroup, Packing, Rows, pack
from vectorlm.train.settings import chunk_tokens

Result = TypeVar("Result")
KNOWN_LAYERS = {"full_attention", "sliding_attention"}
HARMLESS = {
    "sliding_window",
    "position_ids",
    "use_cache",
    "cache_position",
    "output_attentions",
    "position_embeddings",
}
"""What attention is given besides queries, keys and values, and a packed pass follows or need not."""
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.25
"""How far log-probabilities of the same tokens may lie apart; the second for a model that computes in 16 bits."""


@dataclass(frozen=True, eq=False)
class Scores:
    """What the distributions of M tokens are made of, a few at a time; without gradient."""

    states: torch.Tensor
    """float [M, H], what `head` takes; without one the logits, [M, V]."""
    head: Head | None
    temperature: float

    @torch.no_grad()
    def logprobs(self, places: slice) -> torch.Tensor:
        """Return float32 [m, V] for these of the M tokens."""
        scores = self.states[places] if self.head is None else self.head(self.states[places])
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return torch.log_softmax(scores / self.temperature, dim=-1)


class LanguageModel:
    """Computes log-probabilities of rows: laid end to end where the model's attention allows it, else padded."""

    def __init__(
        self,
        model: nn.Module,
        temperature: float = 1.0,
        *,
        support: Support = WHOLE,
        grammar: Grammar | None = None,
        packs: bool = True,
        device: str | torch.device = "cpu",
        context: ContextGroup | None = None,
    ) -> None:
        """Take a causal language model, plain or sharded with FSDP2; called on all ranks.

        `support` and `grammar` say which tokens the engine draws from: log-probabilities and entropies are of these
        alone. Without `packs` rows are padded in any case. The ranks of a `context` share each pass.

        Raises:
            ConfigError: Rows are padded, and ranks were to share them.
        """
        self.model, self.temperature, self.support, self.grammar = model, temperature, support, grammar
        self.context = context
        self.device = torch.device(device)
        causal = inner_model(model)
        self._can_skip_logits = "logits_to_keep" in inspect.signature(causal.forward).parameters
        # At the edge of a support rounding decides, and would look like a difference.
        plain = self.untruncated()

        def padded(rows: Rows) -> tuple[torch.Tensor, torch.dtype]:
            values, dtype = plain._padded(rows)
            return values.logprobs, dtype

        def packed(rows: Rows) -> tuple[torch.Tensor, Packing]:
            values, packing = plain._packed(rows)
            return values.logprobs, packing

        self.why_padded = prepare_packing(model, padded, packed, packs=packs, context=context)
        """Why rows are padded; None where they are not."""

    @property
    def packs(self) -> bool:
        """Whether rows are laid end to end."""
        return self.why_padded is None

    @property
    def shared_by(self) -> int:
        """How many ranks share each pass, and so its rows."""
        return 1 if self.context is None else self.context.size

    def __call__(
        self, rows: Rows, entropy: EntropyKind = "none", compare: Comparison | None = None
    ) -> TokenValues:
        """Return what is known of each token that is asked for.

        Args:
            rows: On the CPU.
            entropy: Whether the entropies are computed, else 0, and whether with a gradient.
            compare: What else is made of each token's distribution, in the order of `rows.targets`.

        Returns:
            float32 [B, T] each, on the model's device, with `compare` [B, T, K] too; 0 for tokens not asked for.
        """
        is_asked = rows.is_asked.to(self.device)
        bitmasks = None if self.grammar is None else self.grammar.bitmasks(rows).to(self.device)
        compute = self._packed if self.packs else self._padded
        values, _ = compute(rows, entropy, compare, bitmasks)
        found = []
        for each in values:
            if each is not None:
                empty = torch.zeros(*is_asked.shape, *each.shape[1:], device=self.device)
                place = is_asked.view(*is_asked.shape, *[1] * (each.dim() - 1)).expand_as(empty)
                found.append(empty.masked_scatter(place, each.float()))
        return TokenValues(*found)

    def logprobs(self, rows: Rows) -> torch.Tensor:
        """Return the log-probabilities alone, float32 [B, T]."""
        return self(rows).logprobs

    def untruncated(self, temperature: float | None = None) -> LanguageModel:
        """Return the same model without its support and grammar, and at a temperature of its own if one is given."""
        whole = copy(self)
        whole.support, whole.grammar = WHOLE, None
        whole.temperature = self.temperature if temperature is None else temperature
        return whole

    @torch.no_grad()
    def scores(self, rows: Rows) -> Scores:
        """Return what the distributions of the tokens that are asked for are made of, in the order of `rows.targets`.

        Of ranks that share a pass, each gets those of its own tokens, as `compare` does in a call with the same rows.
        Where rows are padded, these are logits in the model's dtype, and else hidden states with a copy of the output
        layer, which FSDP2 takes from the model after this pass.
        """
        if not self.packs:
            logits, skipped = self._logits(rows)
            return Scores(logits.flatten(0, 1)[self._places(rows, skipped)], None, self.temperature)
        model: Any = self.model
        causal = inner_model(model)

        def copies(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
            layer = causal.get_output_embeddings()
            return states, layer.weight.clone(), None if layer.bias is None else layer.bias.clone()

        states, weight, bias = model.packed_pass(pack(rows, self.context), self.device, copies)
        layer = partial(nn.functional.linear, weight=weight, bias=bias)
        return Scores(states, _head(causal, layer), self.temperature)

    def _packed(
        self,
        rows: Rows,
        entropy: EntropyKind = "none",
        compare: Comparison | None = None,
        bitmasks: torch.Tensor | None = None,
    ) -> tuple[TokenValues, Packing]:
        model: Any = self.model
        causal = inner_model(model)
        packing = pack(rows, self.context)

        def values(states: torch.Tensor) -> TokenValues:
            return token_values(
                states,
                packing.own(rows.targets).to(self.device),
                self.temperature,
                chunk_tokens(causal.config.get_text_config().vocab_size),
                head=_head(causal, causal.get_output_embeddings()),
                entropy=entropy,
                support=self.support,
                bitmasks=None if bitmasks is None else packing.own(bitmasks),
                compare=compare,
            )

        found: TokenValues = model.packed_pass(packing, self.device, values)
        return TokenValues(*(packing.gather(each) for each in found if each is not None)), packing

    def _logits(self, rows: Rows) -> tuple[torch.Tensor, int]:
        """Return the logits of padded rows, and how many positions before any that is asked for they leave out."""
        first = int(rows.is_asked.any(dim=0).int().argmax())
        skipped = max(first - 1, 0) if self._can_skip_logits else 0
        options = {"logits_to_keep": rows.input_ids.shape[1] - skipped} if skipped else {}
        output = self.model(
            input_ids=rows.input_ids.to(self.device),
            attention_mask=rows.attention_mask.to(self.device),
            use_cache=False,
            **options,
        )
        return output.logits, skipped

    def _padded(
        self,
        rows: Rows,
        entropy: EntropyKind = "none",
        compare: Comparison | None = None,
        bitmasks: torch.Tensor | None = None,
    ) -> tuple[TokenValues, torch.dtype]:
        logits, skipped = self._logits(rows)
        values = token_values(
            logits.flatten(0, 1),
            rows.targets.to(self.device),
            self.temperature,
            chunk_tokens(logits.shape[-1]),
            places=self._places(rows, skipped),
            entropy=entropy,
            support=self.support,
            bitmasks=bitmasks,
            compare=compare,
        )
        return values, logits.dtype

    def _places(self, rows: Rows, skipped: int) -> torch.Tensor:
        """Return where among the logits of padded rows those of the tokens that are asked for lie, int64 [M]."""
        is_before = rows.is_asked.roll(-1, dims=1)[:, skipped:].flatten()
        return torch.nonzero(is_before)[:, 0].to(self.device)


def require_packed(context: ContextGroup | None, why_padded: str | None) -> None:
    """Raise a ConfigError where ranks are to share passes, and rows are not laid end to end."""
    if context is not None and why_padded is not None:
        raise ConfigError(
            f"train_parameters.context_parallel={context.size} splits rows that are laid end to end, and these are "
            f"padded: {why_padded}. Set it to 1, or change what keeps them from being packed."
        )


@torch.no_grad()
def prepare_packing(
    model: nn.Module,
    padded: Callable[[Rows], tuple[torch.Tensor, torch.dtype]],
    packed: Callable[[Rows], tuple[torch.Tensor, Packing]],
    *,
    packs: bool,
    context: ContextGroup | None,
) -> str | None:
    """Let a model compute rows laid end to end if it can and `packs`; return why rows are padded, None if they are not.

    A few rows are computed both ways, and where the values differ the model stays as it was. Beside the values `padded`
    returns the type that they were computed in, and `packed` how it laid out the rows.

    Raises:
        ConfigError: Rows are padded, and the ranks of a `context` were to share them.
    """
    causal = inner_model(model)
    if "packed_pass" not in vars(model):
        # FSDP2 gathers weights for it as for the forward pass.
        model.packed_pass = partial(_packed_pass, causal)  # type: ignore[assignment]
        register_fsdp_forward_method(model, "packed_pass")
    reason = _why_not_packed(causal) if packs else "pack_rows is False"
    if reason is None:
        rows = probe(model)
        was_training = model.training
        before = causal.config._attn_implementation
        model.eval()
        expected, dtype = padded(rows)
        causal.set_attn_implementation(PACKED)
        found, packing = packed(rows)
        reshard(model)
        model.train(was_training)
        gap = (found - expected).abs().max()
        if dist.is_initialized():
            dist.all_reduce(gap, dist.ReduceOp.MAX)
        limit = HALF_TOLERANCE if dtype.itemsize == 2 else TOLERANCE
        reason = _unread(causal, packing)
        if reason is None and not gap <= limit:
            reason = f"what it computes would be {gap.item():.2g} off"
        if reason is not None:
            causal.set_attn_implementation(before)
    require_packed(context, reason)
    return reason


def probe(model: nn.Module) -> Rows:
    """Return a few short rows of two groups, to try a model with."""
    input_ids = torch.arange(40).view(4, 10) % inner_model(model).config.get_text_config().vocab_size
    input_ids[1:3, :5] = input_ids[0, :5]
    attention_mask = (torch.arange(10) < torch.tensor([7, 10, 6, 9])[:, None]).long()
    is_asked = attention_mask.bool() & (torch.arange(10) > 4)
    return Rows(input_ids, attention_mask, is_asked, (0, 0, 0, 1))


def inner_model(model: nn.Module) -> Any:
    """Return the model of transformers, without the wrapper of PEFT."""
    inner: Any = model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def _why_not_packed(causal: Any) -> str | None:
    """Say what keeps rows of a model from being packed, as far as it tells without a forward pass; None for nothing."""
    implementation, config = causal.config._attn_implementation, causal.config.get_text_config()
    # What torch's own kernel does not suit, as attention sinks, `packed_attention` does not know either.
    is_known = causal._supports_attention_backend and causal._supports_sdpa
    if not is_known or implementation not in ("sdpa", "eager", PACKED):
        return f"its attention is {implementation}" + ("" if is_known else ", of its own kind")
    others = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS
    if others:
        return f"it has layers of {', '.join(sorted(others))}"
    parameters = inspect.signature(causal.base_model.forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return "its forward pass does not hand arguments on to its attention"
    return None


def _unread(causal: Any, packing: Packing) -> str | None:
    """Say what the attention of a pass was given, or should have been given, that a packed pass does not follow."""
    config = causal.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds else bool(getattr(config, "sliding_window", None))
    windows = {each for each in packing.seen.get("sliding_window", ()) if isinstance(each, int)}
    if slides and not windows:
        return "its attention does not say how far it sees"
    unknown = sorted(
        name for name, given in packing.seen.items() if name not in HARMLESS and given != {type(None)}
    )
    return f"its attention follows {', '.join(unknown)}" if unknown else None


def _packed_pass(
    causal: Any, packing: Packing, device: torch.device, read: Callable[[torch.Tensor], Result]
) -> Result:
    """Return what `read` makes of the hidden states, [M, H], of the M tokens that are asked for."""
    states = causal.base_model(**packing.arguments(device)).last_hidden_state[0]
    return read(states.index_select(0, packing.places.to(device)))


def _head(causal: Any, layer: Head) -> Head:
    """Return what makes logits of hidden states with the output `layer`; `LanguageModel` compares it with its own."""
    scaling = getattr(causal.config, "logits_scaling", None)
    cap = getattr(causal.config, "final_logit_softcapping", None)

    def head(states: torch.Tensor) -> torch.Tensor:
        logits = layer(states)
        if scaling is not None:
            logits = logits / scaling
        return logits if cap is None else cap * torch.tanh(logits / cap)

    return head
