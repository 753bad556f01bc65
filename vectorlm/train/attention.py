"""Attention of packed rows: one call of torch's flash kernel, or one call per bundle."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vectorlm.train.packing import Packing, to_device

PACKED = "packed"
"""Name of `packed_attention` among the attention functions of transformers."""
HAS_FLAG_FOR_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether `varlen_attn` needs a flag for grouped key heads; torch 2.11 accepts them without it."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each row of a packed pass; transformers calls this attention function.

    If `flash_takes` the queries, all stretches attend in one call, without padding, masks or repeated heads. The keys
    of a stretch are then a copy of its row's common beginning, and its own keys. Otherwise each bundle attends in a
    padded call.

    Args:
        module: The attention layer.
        query: float [1, H, N, D].
        key: float [1, K, N, D], where H is a multiple of K.
        value: float [1, K, N, E].
        attention_mask: Not read if there is a `packing`.
        scaling: Factor of the scores; None means 1 / sqrt(D).
        dropout: Share of the probabilities that is dropped.
        sliding_window: Number of tokens that a token attends to, itself included; None means all before it.
        softcap: Bound of the scores, as in Gemma 2; None for no bound.
        s_aux: Attention sinks, float [H]: the score of a further key of each head, whose value is 0, as in gpt-oss.
        packing: The layout of the rows; None for a padded batch, [B, H, T, D] and so on, with a mask. Ranks that share
            the pass exchange their tokens for a share of the heads.
        **kwargs: Further arguments of `sdpa_attention_forward`.

    Returns:
        float [1, N, H, E] in the order of the pass, and None.
    """
    exact, options = getattr(module, "exact_attention", None), (scaling, sliding_window, softcap, dropout)
    if packing is None and softcap is None and s_aux is None and exact is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if packing is not None and packing.context is not None and s_aux is not None:
        s_aux = s_aux.view(packing.context.size, -1)[packing.context.rank]
    attend = partial(_attend, scaling=scaling, dropout=dropout, softcap=softcap, sinks=s_aux)
    if packing is None:
        mask = None if attention_mask is None else _additive(attention_mask, query.dtype)

        def padded() -> torch.Tensor:
            # transformers passes no mask if every token attends to all before it.
            return attend(query, key, value, mask).transpose(1, 2).contiguous()

        if exact is None:
            return padded(), None
        return exact(padded, (query, key, value), attention_mask, None, options), None
    for name, given in {**kwargs, "sliding_window": sliding_window}.items():
        packing.seen.setdefault(name, set()).add(given if isinstance(given, int) else type(given))
    packing.attended.add(module)
    context = packing.context
    if context is not None:
        query, key, value = (context.to_heads(x, packing.num_tokens) for x in (query, key, value))
    found: Any
    if exact is not None:
        plain = partial(_in_bundles, attend, query, key, value, packing, sliding_window)
        found = exact(plain, (query, key, value), None, packing, options)
    elif softcap is None and s_aux is None and dropout == 0 and flash_takes(query, value):
        found = _in_one_call((query, key, value), packing, scaling, sliding_window)
    else:
        found = _in_bundles(attend, query, key, value, packing, sliding_window)
    return found if context is None else context.to_tokens(found), None


def _in_one_call(
    tokens: Sequence[torch.Tensor], packing: Packing, scaling: float | None, sliding_window: int | None
) -> Any:
    """Attend with torch's flash kernel for rows of any length."""
    queries, keys = packing.stretches
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in tokens)
    grouped: Any = {"enable_gqa": q.shape[1] > k.shape[1]} if HAS_FLAG_FOR_GROUPS else {}
    found: Any = varlen_attn(
        q,
        packing.keys(k),
        packing.keys(v),
        packing.once(_ends, queries, q.device),
        packing.once(_ends, keys, q.device),
        max(queries),
        max(keys),
        scale=scaling,
        # The window counts back from the last query and the last key of a row, which are the same token.
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **grouped,
    )
    return found.unsqueeze(0)


def _in_bundles(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    sliding_window: int | None,
) -> torch.Tensor:
    """Attend one bundle at a time, with rows padded to the longest of the bundle."""
    parts = []
    # One `split` has one backward pass; a slice per bundle would make a gradient of all tokens per slice.
    sizes = [bundle.end - bundle.start for bundle in packing.bundles]
    pieces = zip(*(x[0].split(sizes, dim=1) for x in (query, key, value)), strict=True)
    shared = {bundle.shared[0] for bundle in packing.bundles if bundle.shared[1]}
    beginnings: dict[int, tuple[torch.Tensor, ...]] = {}
    for bundle, piece in zip(packing.bundles, pieces, strict=True):
        first, last = bundle.shared
        length = bundle.lengths[0]
        q, k, v = (_as_rows(x, bundle.lengths, packing) for x in piece)
        if not shared.isdisjoint(starts := [*accumulate(bundle.lengths, initial=bundle.start)][:-1]):
            both = zip(*(x.split(bundle.lengths, dim=1) for x in piece[1:]), strict=True)
            beginnings |= zip(starts, both, strict=True)
        if last > first:
            k, v = (
                torch.cat([x.expand(len(mine), -1, -1, -1), mine], dim=2)
                for x, mine in zip(beginnings[first], (k, v), strict=True)
            )
        mask = None
        if last > first or (sliding_window is not None and sliding_window < length):
            mask = packing.once(_mask, last - first, length, sliding_window, query.dtype, query.device)
        parts.append(_end_to_end(attend(q, k, v, mask), bundle.lengths, packing)[None])
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def flash_takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether torch's flash kernel for rows of any length supports these tensors: on CUDA, in 16 bits."""
    size = query.shape[-1]
    is_taken = (
        query.is_cuda and query.dtype.itemsize == 2 and size == value.shape[-1] <= 256 and size % 8 == 0
    )
    return is_taken and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return float [B, H, T, E]; `mask` is added to the scores, and None means causal attention."""
    repeats = query.shape[1] // key.shape[1]
    is_plain = softcap is None and sinks is None
    # On CUDA, torch's kernels for padded rows support grouped keys only where `flash_takes` holds too.
    takes_fewer = is_plain and mask is None and not query.is_cuda
    if repeats > 1 and not takes_fewer:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    if is_plain:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=repeats > 1 and takes_fewer,
        )
    if mask is None:
        mask = _mask(0, query.shape[2], None, query.dtype, query.device)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (scores if softcap is None else softcap * torch.tanh(scores / softcap)) + mask
    if sinks is not None:
        sinks = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights[..., : key.shape[2]], dropout) @ value


def _mask(
    shared: int, length: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return float [length, shared + length]: 0 where a token after a common beginning attends, else very low."""
    seen = torch.ones(length, shared + length, dtype=torch.bool, device=device).tril(shared)
    return _additive(seen if window is None else seen.triu(shared - window + 1), dtype)


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask in the dtype of the scores; all layers can reuse it."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def _ends(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the borders of stretches, int32 [len(lengths) + 1], as the kernel expects them."""
    return to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


def _as_rows(x: torch.Tensor, lengths: tuple[int, ...], packing: Packing) -> torch.Tensor:
    """Cut [H, sum of lengths, D] into rows [len(lengths), H, longest, D]; the padding is arbitrary."""
    longest = max(lengths)
    if min(lengths) < longest:
        x = x.index_select(1, packing.once(_to_rows, lengths, x.device))
    elif x.untyped_storage().nbytes() > x.nbytes:
        x = x.clone()  # Attention would keep the whole base of a view for the backward pass.
    return x.unflatten(1, (len(lengths), longest)).transpose(0, 1)


def _end_to_end(x: torch.Tensor, lengths: tuple[int, ...], packing: Packing) -> torch.Tensor:
    """Invert `_as_rows`: from [len(lengths), H, longest, D] to [H, sum of lengths, D]."""
    flat = x.transpose(0, 1).flatten(1, 2)
    if min(lengths) == max(lengths):
        return flat
    return flat.index_select(1, packing.once(_from_rows, lengths, x.device))


def _to_rows(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    ends = torch.tensor(lengths).cumsum(0)
    starts = ends - torch.tensor(lengths)
    return to_device(
        torch.minimum(starts[:, None] + torch.arange(max(lengths)), ends[-1] - 1).flatten(), device
    )


def _from_rows(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    longest = max(lengths)
    return to_device(torch.cat([row * longest + torch.arange(n) for row, n in enumerate(lengths)]), device)


# Every pass has its own layout, and torch.compile would recompile for each.
AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
AttentionMaskInterface.register(PACKED, sdpa_mask)
