"""Rows laid end to end for one forward pass: without padding, and what rows begin with in common computed once.

Source of the common beginning: Liu et al. 2025, arXiv:2506.05433 (prefix grouper).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vectorlm.train.context import ContextGroup

PACKED = "packed"
"""The name of the attention function below among those of transformers."""
MOST_PADDED, SPARE = 1.25, 64
"""Stretches attend together while, padded, they have at most `MOST_PADDED` times as many tokens, plus `SPARE`."""


@dataclass(frozen=True, eq=False)
class Rows:
    """What a forward pass reads, and which of its tokens are asked for; B rows, T tokens, on the CPU."""

    input_ids: torch.Tensor
    """int64 [B, T], padded on the right."""
    attention_mask: torch.Tensor
    """int64 [B, T], 1 up to the end of each row."""
    is_asked: torch.Tensor
    """bool [B, T], the tokens whose value is asked for; the first of a row has none."""
    groups: Sequence[int]
    """B numbers: neighbours of the same number may share what they begin with."""
    labels: torch.Tensor | None = None
    """int64 [B, T], what is asked for in place of `input_ids`."""
    turn_starts: torch.Tensor | None = None
    """int64 [B, T], where the completion that each token belongs to begins; -1 for tokens of none."""

    @property
    def targets(self) -> torch.Tensor:
        """The tokens that are asked for, int64 [M], row by row."""
        return (self.input_ids if self.labels is None else self.labels)[self.is_asked]


@dataclass(frozen=True)
class Bundle:
    """Stretches of rows that lie one after the other, and attend in one go, padded to the longest of them."""

    start: int
    lengths: tuple[int, ...]
    shared: tuple[int, int] = (0, 0)
    """From where to where in the pass lies what their rows begin with."""

    @property
    def end(self) -> int:
        """The index behind its last token."""
        return self.start + sum(self.lengths)


class Packing:
    """Rows laid end to end; N tokens are computed, and M are asked for.

    Ranks that share a pass have its tokens and places split among them.

    No dataclass: FSDP2 would build one again at every block, looking for tensors to cast.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        places: torch.Tensor,
        bundles: Sequence[Bundle],
        context: ContextGroup | None = None,
    ) -> None:
        """Take `input_ids` and places in rows, int64 [1, N], and all tokens in their order as `bundles`.

        `places`, int64 [M], says where the token before each one that is asked for lies, row by row.
        """
        self.context, self.num_tokens, self.num_asked = context, input_ids.shape[1], len(places)
        self._mine: Any = slice(None)
        if context is not None:
            input_ids, position_ids = context.own(input_ids), context.own(position_ids)
            self._mine = torch.nonzero(places % context.size == context.rank)[:, 0]
            places = places[self._mine] // context.size
        self.input_ids, self.position_ids, self.places = input_ids, position_ids, places
        self.bundles = tuple(bundles)
        self.seen: dict[str, set[Any]] = {}
        """What attention layers were given besides queries, keys and values, by name."""
        self._made: dict[Any, torch.Tensor] = {}

    def arguments(self, device: str | torch.device) -> dict[str, Any]:
        """Return what a model of transformers takes for this pass."""
        return {
            "input_ids": self.input_ids.to(device),
            "position_ids": self.position_ids.to(device),
            # A mask of four dimensions is handed through as it is; without one, transformers would make one [N, N].
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
            "use_cache": False,
            "packing": self,
        }

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return those of M numbers, [M, ...], that belong to the places of this rank."""
        return x[self._mine]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Put the values of all ranks' places together, as [M, ...]; undoes `own`."""
        if self.context is None:
            return values
        return self.context.gather(values, self._mine.to(values.device), self.num_asked)

    @cached_property
    def stretches(self) -> tuple[tuple[int, ...], ...]:
        """The lengths of all stretches in their order, and of the keys that each of them sees."""
        queries = [length for bundle in self.bundles for length in bundle.lengths]
        keys = [b.shared[1] - b.shared[0] + length for b in self.bundles for length in b.lengths]
        return tuple(queries), tuple(keys)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Put what a row begins with before each of its stretches, in a tensor [N, ...] of the pass."""
        if not any(bundle.shared[1] for bundle in self.bundles):
            return x
        lengths, _ = self.stretches
        # One `split` has one backward pass; a slice for each stretch would make a gradient of N tokens each.
        pieces = dict(zip(accumulate(lengths, initial=0), x.split(lengths), strict=False))
        parts, start = [], 0
        for bundle in self.bundles:
            first, last = bundle.shared
            for length in bundle.lengths:
                parts += [pieces[first]] * (last > first) + [pieces[start]]
                start += length
        return torch.cat(parts)

    def once(self, make: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        """Return what `make` makes of the arguments, made once for all layers of the pass."""
        key = (make, *arguments)
        if key not in self._made:
            self._made[key] = make(*arguments)
        return self._made[key]


def num_needed(is_asked: torch.Tensor) -> list[int]:
    """Return how many tokens of each row must be computed: all before the last one that is asked for."""
    return torch.where(is_asked, torch.arange(is_asked.shape[1]), 0).amax(dim=1).tolist()


def num_shared(input_ids: torch.Tensor, needed: Sequence[int]) -> int:
    """Return how many of the needed tokens of every row [B, T] are the same in all of them."""
    if len(needed) < 2:
        return 0
    beginning = input_ids[:, : min(needed)]
    return int((beginning == beginning[0]).all(dim=0).cumprod(0).sum())


def pack(rows: Rows, context: ContextGroup | None = None) -> Packing:
    """Lay out the tokens that must be computed, at least one: all beginnings, then what follows each of them.

    The ranks of a `context` call with the same rows.
    """
    needed = num_needed(rows.is_asked)
    if not any(needed):
        needed[0] = 1
    places = torch.zeros_like(rows.input_ids)
    order: list[tuple[int, int, int]] = []
    bundles: list[Bundle] = []

    def lay(stretches: list[tuple[list[int], int, int]], shared: tuple[int, int] = (0, 0)) -> None:
        """Lay down the tokens of rows from one place to another, the longest stretch first."""
        stretches.sort(key=lambda stretch: stretch[1] - stretch[2])
        for lengths in _alike([last - first for _, first, last in stretches]):
            bundles.append(Bundle(bundles[-1].end if bundles else 0, lengths, shared))
        start = bundles[-1].end - sum(last - first for _, first, last in stretches)
        for members, first, last in stretches:
            places[members, first:last] = torch.arange(start, start + last - first)
            order.append((members[0], first, last))
            start += last - first

    used = [row for row in range(len(needed)) if needed[row]]
    beginnings, endings = [], []
    for _, neighbours in groupby(used, key=lambda row: rows.groups[row]):
        members = list(neighbours)
        shared = num_shared(rows.input_ids[members], [needed[row] for row in members])
        if shared:
            beginnings.append((members, 0, shared))
            endings.append([([row], shared, needed[row]) for row in members if needed[row] > shared])
        else:
            beginnings += [([row], 0, needed[row]) for row in members]
    lay(beginnings)
    for stretches in filter(None, endings):
        # Any of its rows knows where the beginning lies.
        (row, *_), shared, _ = stretches[0]
        start = int(places[row, 0])
        lay(stretches, (start, start + shared))
    input_ids = torch.cat([rows.input_ids[row, first:last] for row, first, last in order])
    position_ids = torch.cat([torch.arange(first, last) for _, first, last in order])
    before = places.roll(1, dims=1)[rows.is_asked]
    return Packing(input_ids[None], position_ids[None], before, bundles, context)


def _alike(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Cut a falling sequence where padding to the first of each part would cost more than another part."""
    parts: list[list[int]] = []
    for length in lengths:
        if parts and (len(parts[-1]) + 1) * parts[-1][0] <= MOST_PADDED * (sum(parts[-1]) + length) + SPARE:
            parts[-1].append(length)
        else:
            parts.append([length])
    return [tuple(part) for part in parts]


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
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as rows of their own would; the attention function that transformers calls.

    Where `flash_takes` them, all stretches attend in one call, without padding, masks or repeated heads: each to what
    its row begins with, copied before its own keys, and to itself. Elsewhere those of like length do, padded.

    Args:
        module: The attention layer.
        query: float [1, H, N, D].
        key: float [1, K, N, D], where H is a multiple of K.
        value: float [1, K, N, E].
        attention_mask: Not read in a pass with a `packing`.
        scaling: Factor of the scores; None means 1 / sqrt(D).
        dropout: Share of the probabilities that is dropped.
        sliding_window: How many tokens each one sees, itself included; None means all before it.
        softcap: Bound of the scores, as of Gemma 2.
        packing: How the rows lie; None for a padded batch, [B, H, T, D] and so on, which is masked. Ranks that share
            the pass exchange its tokens, of which each has some, for heads, and attend with some of these.
        **kwargs: What else `sdpa_attention_forward` takes.

    Returns:
        float [1, N, H, E] in the order of the pass, and None.
    """
    if packing is None and softcap is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    attend = partial(_attend, scaling=scaling, dropout=dropout, softcap=softcap)
    if packing is None:
        mask = None if attention_mask is None else _additive(attention_mask, query.dtype)
        # transformers leaves the mask out where every token sees all before it.
        return attend(query, key, value, mask).transpose(1, 2).contiguous(), None
    for name, given in {**kwargs, "sliding_window": sliding_window}.items():
        packing.seen.setdefault(name, set()).add(given if isinstance(given, int) else type(given))
    context = packing.context
    if context is not None:
        query, key, value = (context.to_heads(x, packing.num_tokens) for x in (query, key, value))
    found: Any
    if softcap is None and dropout == 0 and flash_takes(query, value):
        queries, keys = packing.stretches
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        found = varlen_attn(
            q,
            packing.keys(k),
            packing.keys(v),
            packing.once(_ends, queries, query.device),
            packing.once(_ends, keys, query.device),
            max(queries),
            max(keys),
            scale=scaling,
            # Both count from the last query and the last key of a row, which are the same token.
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            enable_gqa=query.shape[1] > key.shape[1],
        )
        found = found.unsqueeze(0)
    else:
        found = _in_bundles(attend, query, key, value, packing, sliding_window)
    return found if context is None else context.to_tokens(found), None


def _in_bundles(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    sliding_window: int | None,
) -> torch.Tensor:
    """Attend as `packed_attention` does, a bundle at a time, with rows padded to the longest of each."""
    parts = []
    for bundle in packing.bundles:
        own = slice(bundle.start, bundle.end)
        first, last = bundle.shared
        length = bundle.lengths[0]
        q, k, v = (_as_rows(x[0, :, own], bundle.lengths, packing) for x in (query, key, value))
        if last > first:
            k, v = (
                torch.cat([x[:, :, first:last].expand(len(mine), -1, -1, -1), mine], dim=2)
                for x, mine in ((key, k), (value, v))
            )
        mask = None
        if last > first or (sliding_window is not None and sliding_window < length):
            mask = packing.once(_mask, last - first, length, sliding_window, query.dtype, query.device)
        parts.append(_end_to_end(attend(q, k, v, mask), bundle.lengths, packing)[None])
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def flash_takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether torch's flash kernel for rows of any length takes queries of this kind: on CUDA, in 16 bits."""
    size = query.shape[-1]
    is_taken = (
        query.is_cuda and query.dtype.itemsize == 2 and size == value.shape[-1] <= 256 and size % 8 == 0
    )
    # Before 2.13 torch's function had no windows and no key heads of several queries.
    is_known = torch.__version__ >= "2.13"
    return is_taken and is_known and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
) -> torch.Tensor:
    """Return float [B, H, T, E]; `mask` is added to the scores, and None lets each query see all before it."""
    repeats = query.shape[1] // key.shape[1]
    # On CUDA torch's kernels for padded rows take fewer keys than queries only in what `flash_takes` takes too.
    takes_fewer = softcap is None and mask is None and not query.is_cuda
    if repeats > 1 and not takes_fewer:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    if softcap is None:
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
    scores = softcap * torch.tanh(scores / softcap) + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights, dropout) @ value


def _mask(
    shared: int, length: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return float [length, shared + length]: 0 where a token behind a common beginning sees another, else very low."""
    seen = torch.ones(length, shared + length, dtype=torch.bool, device=device).tril(shared)
    return _additive(seen if window is None else seen.triu(shared - window + 1), dtype)


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what is added to scores: one tensor of their dtype, which all layers can keep."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def _ends(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return where stretches begin and end, int32 [len(lengths) + 1], as the kernel takes it."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _as_rows(x: torch.Tensor, lengths: tuple[int, ...], packing: Packing) -> torch.Tensor:
    """Cut [H, sum of lengths, D] into rows [len(lengths), H, longest, D]; what fills them up is arbitrary."""
    longest = max(lengths)
    if min(lengths) < longest:
        x = x.index_select(1, packing.once(_to_rows, lengths, x.device))
    elif len(packing.bundles) > 1:
        x = x.clone()  # Of a view, attention would keep for the backward pass all that it is a part of.
    return x.unflatten(1, (len(lengths), longest)).transpose(0, 1)


def _end_to_end(x: torch.Tensor, lengths: tuple[int, ...], packing: Packing) -> torch.Tensor:
    """Undo `_as_rows`: from [len(lengths), H, longest, D] to [H, sum of lengths, D]."""
    flat = x.transpose(0, 1).flatten(1, 2)
    if min(lengths) == max(lengths):
        return flat
    return flat.index_select(1, packing.once(_from_rows, lengths, x.device))


def _to_rows(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    ends = torch.tensor(lengths).cumsum(0)
    starts = ends - torch.tensor(lengths)
    return torch.minimum(starts[:, None] + torch.arange(max(lengths)), ends[-1] - 1).flatten().to(device)


def _from_rows(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    longest = max(lengths)
    return torch.cat([row * longest + torch.arange(n) for row, n in enumerate(lengths)]).to(device)


# Each pass has another layout: compiled, every one of them would be compiled again.
AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
AttentionMaskInterface.register(PACKED, sdpa_mask)
