"""Log-probabilities of rows of tokens, computed by a sharded causal language model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.func import functional_call

from vectorlm.algorithms.logprobs import (
    Comparison,
    EntropyKind,
    Head,
    Places,
    TokenValues,
    dtype_before,
    token_values,
)
from vectorlm.algorithms.support import WHOLE, Support
from vectorlm.data.images import ImageTokens
from vectorlm.errors import ConfigError
from vectorlm.sampling.weights.model_tensors import reshard
from vectorlm.train.attention import PACKED
from vectorlm.train.grammar import Grammar
from vectorlm.train.images import Images, language_model_of
from vectorlm.train.packing import ContextGroup, Packing, Rows, pack, to_device
from vectorlm.train.routes import Routers, find_routers
from vectorlm.train.row_by_row import RowByRow, suspects
from vectorlm.train.settings import chunk_tokens

Result = TypeVar("Result")
KNOWN_LAYERS = {"full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "moe", "mlp"}
HARMLESS = {
    *("sliding_window", "position_ids", "use_cache"),
    *("cache_position", "output_attentions", "position_embeddings"),
}
"""Arguments of attention layers that a packed pass supports or may ignore."""
LEAK = 1e-6
"""Largest change of a row's log-probabilities if other rows change."""
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.25
"""Largest difference between packed and padded log-probabilities; the second is for models that compute in 16 bits."""


@dataclass(frozen=True, eq=False)
class Scores:
    """The distributions of M tokens, computed a few at a time and without gradient."""

    states: torch.Tensor
    """float [M, H], the inputs of `head`; without a head the logits, [M, V]."""
    head: Head | None
    temperature: float

    @torch.no_grad()
    def logprobs(self, places: Places) -> torch.Tensor:
        """Return float32 [m, V] for the tokens at `places`."""
        scores = self.states[places] if self.head is None else self.head(self.states[places])
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return torch.log_softmax(scores / self.temperature, dim=-1)


class LanguageModel:
    """Computes log-probabilities of rows, packed if the model's attention allows it, else padded."""

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
        image_tokens: ImageTokens | None = None,
        watches_routers: bool = True,
    ) -> None:
        """Take a causal language model, plain or sharded with FSDP2; all ranks call this.

        Log-probabilities and entropies are over the tokens that the engine may sample, by `support` and `grammar`.
        Without `packs` rows are always padded. The ranks of a `context` share each pass. `image_tokens` let
        a vision-language model read pictures. With `watches_routers`, `routers` records and replays the choices of a
        model with experts.

        Raises:
            ConfigError: Rows are padded, although the ranks of a `context` must share them.
        """
        self.model, self.temperature, self.support, self.grammar = model, temperature, support, grammar
        self.context, self.image_tokens = context, image_tokens
        self._images = None if image_tokens is None else Images(image_tokens, inner_model(model))
        self.device = torch.device(device)
        causal = inner_model(model)
        self._can_skip_logits = "logits_to_keep" in inspect.signature(causal.forward).parameters
        self.routers: Routers | None = None
        """Records or replays the choices of experts; None without experts."""
        # Compare without the support: at its edge, rounding alone would make a difference.
        plain = self.untruncated()

        def logprobs_of(compute: Callable[[Rows], tuple[TokenValues, Result]]) -> Callable[[Rows], Any]:
            def run(rows: Rows) -> tuple[torch.Tensor, Result]:
                values, extra = compute(rows)
                return values.logprobs, extra

            return run

        if watches_routers:
            self.routers = find_routers(model, causal, lambda: plain._padded(probe(model)))
        padded, packed = logprobs_of(plain._padded), logprobs_of(plain._packed)
        self.why_padded = prepare_packing(model, padded, packed, packs=packs, context=context)
        """Why rows are padded; None if they are packed."""

    @property
    def packs(self) -> bool:
        """Whether rows are packed: laid end to end, without padding."""
        return self.why_padded is None

    def __call__(
        self, rows: Rows, entropy: EntropyKind = "none", compare: Comparison | None = None
    ) -> TokenValues:
        """Return the values of all requested tokens.

        Args:
            rows: Rows on the CPU.
            entropy: Whether entropies are computed (else 0), and whether with a gradient.
            compare: Further values of each token's distribution, in the order of `rows.targets`.

        Returns:
            float32 [B, T] tensors on the model's device, and [B, T, K] with `compare`; 0 for other tokens.
        """
        is_asked = to_device(rows.is_asked, self.device)
        bitmasks = None if self.grammar is None else to_device(self.grammar.bitmasks(rows), self.device)
        compute = self._packed if self.packs else self._padded
        values, _ = compute(rows, bitmasks, entropy=entropy, compare=compare)
        found = []
        for value in values:
            if value is not None:
                empty = torch.zeros(*is_asked.shape, *value.shape[1:], device=self.device)
                place = is_asked.view(*is_asked.shape, *[1] * (value.dim() - 1)).expand_as(empty)
                found.append(empty.masked_scatter(place, value.float()))
        return TokenValues(*found)

    def logprobs(self, rows: Rows) -> torch.Tensor:
        """Return only the log-probabilities, float32 [B, T]."""
        return self(rows).logprobs

    def untruncated(self, temperature: float | None = None) -> LanguageModel:
        """Return the same model without support and grammar, at another temperature if one is given."""
        whole = copy(self)
        whole.support, whole.grammar = WHOLE, None
        whole.temperature = self.temperature if temperature is None else temperature
        return whole

    @torch.no_grad()
    def scores(self, rows: Rows) -> Scores:
        """Return the distributions of the requested tokens, in the order of `rows.targets`.

        Ranks that share a pass get the distributions of all its tokens, because another model or other rows may split
        the tokens differently. If rows are padded, the scores are logits. Otherwise they are hidden states with copies
        of the output layer's weights, because FSDP2 frees these weights after this pass.
        """
        if not self.packs:
            logits, skipped = self._logits(rows)
            return Scores(logits.flatten(0, 1)[self._places(rows, skipped)], None, self.temperature)
        model: Any = self.model
        causal = inner_model(model)

        def copies(states: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            weights = causal.get_output_embeddings().named_parameters()
            return states, {name: weight.detach().clone() for name, weight in weights}

        packing = self._pack(rows)
        states, weights = model.packed_pass(packing, self.device, copies)
        # The layer itself computes, because it may have adapters, or be split over ranks.
        layer = partial(functional_call, causal.get_output_embeddings(), weights)
        return Scores(packing.gather(states), _head(causal, layer), self.temperature)

    def _packed(
        self,
        rows: Rows,
        bitmasks: torch.Tensor | None = None,
        *,
        compare: Comparison | None = None,
        **options: Any,
    ) -> tuple[TokenValues, Packing]:
        model: Any = self.model
        causal = inner_model(model)
        packing = self._pack(rows)
        if compare is not None:
            own = to_device(packing.own(torch.arange(packing.num_asked)), self.device)
            options["compare"] = partial(_compare_own, compare, own)

        def values(states: torch.Tensor) -> TokenValues:
            return token_values(
                states,
                to_device(packing.own(rows.targets), self.device),
                self.temperature,
                chunk_tokens(causal.config.get_text_config().vocab_size),
                head=_head(causal, causal.get_output_embeddings()),
                support=self.support,
                bitmasks=None if bitmasks is None else packing.own(bitmasks),
                **options,
            )

        with self._watched(self._with_picture(rows), packing):
            found: TokenValues = model.packed_pass(packing, self.device, values)
        return TokenValues(*(packing.gather(value) for value in found if value is not None)), packing

    def _pack(self, rows: Rows) -> Packing:
        if self._images is None:
            return pack(rows, self.context, self._whole(rows))
        shown = self._with_picture(rows)
        whole = [*self._whole(rows), *range(len(rows.input_ids), len(shown.input_ids))]
        packing = pack(shown, self.context, whole)
        packing.more = self._images.arguments(shown, self.device, packing)
        return packing

    def _whole(self, rows: Rows) -> list[int]:
        """Return the rows to compute to their ends: rows with requested tokens, if the experts' balance is measured."""
        if self.routers is None or not self.routers.has_balance:
            return []
        found: list[int] = torch.nonzero(rows.is_asked.any(dim=1))[:, 0].tolist()
        return found

    def _watched(self, rows: Rows, packing: Packing | None = None) -> AbstractContextManager[None]:
        """Record or replay the experts of one pass, if the model has any."""
        return nullcontext() if self.routers is None else self.routers.running(rows, packing, self.device)

    def _with_picture(self, rows: Rows) -> Rows:
        """Append a row with a picture if there is none and other ranks may compute one in this pass."""
        has_others = dist.is_initialized() and dist.get_world_size() > 1
        if self._images is None or not has_others or any(rows.images or ()):
            return rows
        return self._images.with_blank(rows)

    def _logits(self, rows: Rows) -> tuple[torch.Tensor, int]:
        """Return the logits of padded rows, and the number of leading positions that they skip."""
        first = int(rows.is_asked.any(dim=0).int().argmax())
        skipped = max(first - 1, 0) if self._can_skip_logits else 0
        shown, (num, length) = self._with_picture(rows), rows.input_ids.shape
        options = {"logits_to_keep": shown.input_ids.shape[1] - skipped} if skipped else {}
        with self._watched(shown):
            output = self.model(
                input_ids=to_device(shown.input_ids, self.device),
                attention_mask=to_device(shown.attention_mask, self.device),
                use_cache=False,
                **({} if self._images is None else self._images.arguments(shown, self.device)),
                **options,
            )
        return output.logits[:num, : length - skipped], skipped

    def _padded(
        self, rows: Rows, bitmasks: torch.Tensor | None = None, **options: Any
    ) -> tuple[TokenValues, torch.dtype]:
        logits, skipped = self._logits(rows)
        values = token_values(
            logits.flatten(0, 1),
            to_device(rows.targets, self.device),
            self.temperature,
            chunk_tokens(logits.shape[-1]),
            places=self._places(rows, skipped),
            support=self.support,
            bitmasks=bitmasks,
            **options,
        )
        return values, dtype_before(inner_model(self.model).get_output_embeddings(), logits)

    def _places(self, rows: Rows, skipped: int) -> torch.Tensor:
        """Return int64 [M]: the places of the requested tokens in the logits of padded rows."""
        is_before = rows.is_asked.roll(-1, dims=1)[:, skipped:].flatten()
        return to_device(torch.nonzero(is_before)[:, 0], self.device)


def _compare_own(
    compare: Comparison, own: torch.Tensor, places: Places, logprobs: torch.Tensor
) -> torch.Tensor:
    """Compare this rank's tokens, which have the indices `own` among all requested tokens."""
    return compare(own[places], logprobs)


def require_packed(context: ContextGroup | None, why_padded: str | None) -> None:
    """Raise a ConfigError if ranks share passes although rows are padded."""
    if context is not None and why_padded is not None:
        raise ConfigError(
            f"train_parameters.context_parallel={context.size} needs packed rows, but rows are padded: {why_padded}. "
            "Set it to 1, or remove the cause of the padding."
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
    """Let a model compute packed rows if it can and `packs` is true; return why rows are padded, or None.

    A few rows are computed both ways; if the values differ, the model stays as it was. `padded` also returns the dtype
    of the computation, and `packed` its layout.

    Raises:
        ConfigError: Rows are padded, although the ranks of a `context` must share them.
    """
    causal = inner_model(model)
    if "packed_pass" not in vars(model):
        # FSDP2 gathers the weights for it, as for the forward pass.
        model.packed_pass = partial(_packed_pass, causal)  # type: ignore[assignment]
        register_fsdp_forward_method(model, "packed_pass")
    reason = _why_not_packed(causal) if packs else "pack_rows is False"
    if reason is None:
        was_training = model.training
        model.eval()
        reason = _try(causal, padded, packed, probe(model), has_context=context is not None)
        reshard(model)
        model.train(was_training)
    require_packed(context, reason)
    return reason


def _try(
    causal: Any,
    padded: Callable[[Rows], tuple[torch.Tensor, torch.dtype]],
    packed: Callable[[Rows], tuple[torch.Tensor, Packing]],
    rows: Rows,
    *,
    has_context: bool,
) -> str | None:
    """Compare packed with padded rows: first with the model as it is, then with its recurrent layers row by row."""
    # In every layout, rows 0 and 2 are before and behind rows 1 and 3.
    changed = replace(rows, input_ids=rows.input_ids.clone())
    changed.input_ids[1::2, 5:] += 1
    expected, dtype = padded(rows)
    # Reward models return one value per row.
    row = torch.arange(4) if len(expected) == 4 else rows.is_asked.nonzero()[:, 0]
    is_kept = (row % 2 == 0).to(expected.device)

    def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
        largest = (found - expected).abs().max()
        if dist.is_initialized():
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.item()

    @cache
    def noise() -> float:
        """Return how much padded rows change: with experts, the rounding of a row depends on the other rows."""
        return gap(padded(changed)[0][is_kept], padded(rows)[0][is_kept])

    def why_not() -> str | None:
        found, packing = packed(rows)
        candidates[:] = suspects(causal.base_model, packing)
        # Attention keeps rows apart by its masks; only other layers could mix them.
        if candidates or applied or causal._is_stateful:
            leak = gap(packed(changed)[0][is_kept], found[is_kept])
            if not leak <= 8 * noise() + LEAK:
                return f"its packed rows would change each other by {leak:.2g}"
        off = gap(found, expected)
        if not off <= (HALF_TOLERANCE if dtype.itemsize == 2 else TOLERANCE):
            return f"its packed values would be off by {off:.2g}"
        return _unread(causal, packing)

    # The attention of a vision tower is not packed.
    reader = language_model_of(causal)
    before = reader.config._attn_implementation
    applied = [module.row_by_row for module in causal.modules() if hasattr(module, "row_by_row")]
    candidates: list[tuple[nn.Module, nn.Module]] = []
    reader.set_attn_implementation(PACKED)
    reason = why_not()
    if reason is not None and candidates and not applied:
        if has_context and "change each other" in reason:
            reason = "its recurrent layers need whole rows on every rank"
        layers = tuple(candidates)
        for in_one_call in () if has_context else (True, False):
            applied = [RowByRow(layer, parent, in_one_call=in_one_call) for layer, parent in layers]
            reason = why_not()
            if reason is None:
                break
            for item in applied:
                item.remove()
    if reason is not None:
        reader.set_attn_implementation(before)
    return reason


def probe(model: nn.Module) -> Rows:
    """Return a few short rows of two groups, for a trial of a model."""
    # Odd strides: no two tokens of a row are equal, and no two rows.
    input_ids = torch.arange(4)[:, None] * 7 + torch.arange(12) * 3
    input_ids[1:3, :5] = input_ids[0, :5]
    lengths = torch.tensor([9, 12, 8, 11])[:, None]
    attention_mask = (torch.arange(12) < lengths).long()
    is_asked = attention_mask.bool() & (torch.arange(12) > 0)
    config = inner_model(model).config
    num_ids = config.get_text_config().vocab_size - 1
    if getattr(config, "vision_config", None) is not None:
        # Leave special tokens out: a small vocabulary would repeat them, and the model would look for pictures.
        special = {value for name, value in vars(config).items() if name.endswith("_token_id")}
        ordinary = [token for token in range(num_ids) if special.isdisjoint((token, token + 1))]
        return Rows(torch.tensor(ordinary)[input_ids % len(ordinary)], attention_mask, is_asked, (0, 0, 0, 1))
    return Rows(input_ids % num_ids, attention_mask, is_asked, (0, 0, 0, 1))


def inner_model(model: nn.Module) -> Any:
    """Return the transformers model inside a PEFT wrapper."""
    inner: Any = model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def _why_not_packed(causal: Any) -> str | None:
    """Return why rows cannot be packed, as far as the model's config and code show; None if nothing prevents it."""
    implementation = language_model_of(causal).config._attn_implementation
    config = causal.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    # Models for these kernels change attention only by its arguments, which `_unread` checks.
    has_kernels = causal._supports_sdpa or causal._supports_flash_attn
    # transformers marks hybrids only as stateful, although their attention layers call attention functions.
    is_known = (causal._supports_attention_backend and has_kernels) or (causal._is_stateful and kinds)
    if not is_known or implementation not in ("sdpa", "eager", PACKED):
        return f"its attention is {implementation}" + ("" if is_known else ", which is not torch's")
    if others := kinds - KNOWN_LAYERS:
        return f"it has layers of {', '.join(sorted(others))}"
    parameters = inspect.signature(causal.base_model.forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return "its forward pass does not pass arguments on to its attention"
    return None


def _unread(causal: Any, packing: Packing) -> str | None:
    """Return why the arguments of the attention layers do not fit a packed pass, as a clause; None if they fit."""
    config = causal.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds else bool(getattr(config, "sliding_window", None))
    windows = {window for window in packing.seen.get("sliding_window", ()) if isinstance(window, int)}
    if slides and not windows:
        return "its attention does not pass on its sliding window"
    unknown = sorted(
        name for name, given in packing.seen.items() if name not in HARMLESS and given != {type(None)}
    )
    return f"its attention reads {', '.join(unknown)}" if unknown else None


def _packed_pass(
    causal: Any, packing: Packing, device: torch.device, read: Callable[[torch.Tensor], Result]
) -> Result:
    """Apply `read` to the hidden states [M, H] before the M requested tokens."""
    arguments = packing.arguments(device)
    if "position_ids" not in inspect.signature(causal.base_model.forward).parameters:
        del arguments[
            "attention_mask"
        ]  # A model without positions has no attention. Mamba would multiply its states by the mask.
    states = causal.base_model(**arguments).last_hidden_state[0]
    # Some models sum the outputs of their layers in 32 bits.
    states = states.to(causal.get_input_embeddings().weight.dtype)
    return read(states.index_select(0, to_device(packing.places, device)))


def _head(causal: Any, layer: Head) -> Head:
    """Return the function from hidden states to logits with the output `layer`; `_try` checks it."""
    config = causal.config.get_text_config()
    scaling = getattr(config, "logits_scaling", None)
    factors = [getattr(config, name, None) for name in ("logit_scale", "lm_head_multiplier")]
    cap = getattr(config, "final_logit_softcapping", None)

    def head(states: torch.Tensor) -> torch.Tensor:
        logits = layer(states)
        if scaling is not None:
            logits = logits / scaling
        for factor in factors:
            logits = logits if factor is None else logits * factor
        return logits if cap is None else cap * torch.tanh(logits / cap)

    return head
