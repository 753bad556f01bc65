"""Make a transformers model compute the bits of vLLM's engine on CPU."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vectorlm.errors import ConfigError
from vectorlm.sampling.exact import exactly, linear, with_bits
from vectorlm.sampling.settings import why_not_exact
from vectorlm.sampling.weights.lora_factors import is_lora_layer, lora_factors
from vectorlm.sampling.weights.lora_source import merge_into
from vectorlm.train.attention import PACKED
from vectorlm.train.language_model import inner_model
from vectorlm.train.packing import Packing

Model = TypeVar("Model", bound=nn.Module)
Lengths = tuple[tuple[int, ...], ...]
"""Numbers of queries and of keys of each row; the queries are the row's last tokens."""
COMPUTING = ("linear.Linear'", "Experts'", "Router'", "activation")
"""Parts of the names of the classes whose forward passes multiply matrices or apply activations."""
BLOCK = 32
"""Tokens per block of the KV cache, as in the engine."""


def exact(model: Model) -> Model:
    """Make a transformers model compute the engine's log-probabilities bit for bit; change it in place and return it.

    The engine must be built with ``exact=True``. The forward pass uses the engine's attention kernel and products; the
    gradient comes from torch's own formulas. Call it before ``fully_shard``, after LoRA layers were added.

    Args:
        model: A causal language model in float32 on CPU, plain or with LoRA, of one of
            `vectorlm.sampling.settings.EXACT_FAMILIES`.

    Raises:
        ConfigError: The model cannot be exact; the message has the reason.
    """
    causal = inner_model(model)
    if not hasattr(causal, "set_attn_implementation"):
        raise ConfigError(f"exact needs a model of transformers, and {type(model).__name__} is none.")
    if (reason := why_not_exact(causal.config.to_dict())) is not None:
        raise ConfigError(f"{reason}. Choose another model, or leave exact out.")
    for x in model.parameters():
        if x.dtype != torch.float32 or x.is_cuda:
            raise ConfigError(
                f"exact needs a model in float32 on CPU, not {x.dtype} on {x.device}. Convert it."
            )
    _load_kernels()
    causal.set_attn_implementation(PACKED)
    for name, module in model.named_modules():
        kind = type(module)
        if "Experts'" in str(kind):
            causal.set_experts_implementation("eager")
        if is_lora_layer(module):
            if not isinstance(module.base_layer, nn.Linear):
                raise ConfigError(f"exact cannot merge adapters of {name!r}. Leave it out of target_modules.")
            module.forward = partial(_merged_linear, module, module.forward)
        elif hasattr(module, "scaling") and hasattr(module, "layer_idx"):
            module.exact_attention = attend  # type: ignore[assignment]
        elif any(word in str(kind) for word in COMPUTING):
            module.forward = partial(exactly, module.forward)  # type: ignore[method-assign]
    return model


def _merged_linear(layer: Any, plain: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Multiply by the weight with its adapters merged, because the engine receives merged weights."""

    def values() -> Tensor:
        weight = layer.base_layer.weight
        for factors in lora_factors(layer):
            weight = merge_into(factors.b, factors.a, factors.scaling, factors.magnitude)(weight)
        return linear(x, weight, layer.base_layer.bias)

    return with_bits(values, partial(plain, x, *args, **kwargs))


def attend(
    plain: Callable[[], Tensor],
    tokens: Sequence[Tensor],
    mask: Tensor | None,
    packing: Packing | None,
    options: tuple[float | None, int | None, float | None, float],
) -> Tensor:
    """Attend with vLLM's kernel for CPU, and return float32 [B, T, H, D] with the gradient of `plain`.

    Args:
        plain: Computes the same with torch.
        tokens: Queries, float32 [B, H, T, D]; keys and values, [B, K, S, D].
        mask: bool [B, 1, T, S] of padded rows; None if no row is padded.
        packing: The layout of packed rows; B is then 1. None if rows are padded.
        options: `scaling`, `sliding_window`, `softcap` and `dropout` as in `packed_attention`; `dropout` must be 0.

    Raises:
        ConfigError: There is dropout, or rows are padded on the left.
    """
    *scores, dropout = options
    if dropout:
        raise ConfigError(
            f"attention_dropout={dropout} must be 0 with exact, because the engine has no dropout."
        )

    def values() -> Tensor:
        flat = [x.transpose(1, 2).flatten(0, 1) for x in tokens]
        if packing is None:
            lengths = _padded_lengths(mask, tokens[0], tokens[1], options[1])
        else:
            lengths, flat[1:] = packing.stretches, map(packing.keys, flat[1:])
        return _kernel(flat, lengths, *scores).unflatten(0, (len(tokens[0]), -1))

    return with_bits(values, plain)


def _kernel(tokens: Sequence[Tensor], lengths: Lengths, scaling: Any, window: Any, softcap: Any) -> Tensor:
    """Return float32 [n, H, D] from queries [n, H, D] and from keys and values [m, K, D] of packed rows."""
    query, key, value = (x.contiguous() for x in tokens)
    ops, (queries, keys), size = torch.ops._C, lengths, query.shape[-1]
    blocks = [-(-count // BLOCK) for count in keys]
    starts = [*accumulate(blocks, initial=0)]
    # Zeros, because attention multiplies masked values by 0, and 0 times NaN is NaN.
    caches = key.new_zeros(starts[-1], key.shape[1], 2 * BLOCK, size).chunk(2, dim=2)
    slots = torch.cat([torch.arange(n) + BLOCK * start for n, start in zip(keys, starts, strict=False)])
    # A row reads only the blocks that hold its keys; the other entries are arbitrary.
    table = (torch.tensor(starts[:-1])[:, None] + torch.arange(max(blocks))).clamp(max=starts[-1] - 1).int()
    isa, window = "vec" if size % 32 == 0 else "vec16", -1 if window is None else window
    ops.cpu_attn_reshape_and_cache(key, value, *caches, slots, isa, 1.0, 1.0, "auto")
    borders, counts = (torch.tensor(x, dtype=torch.int32) for x in ([0, *accumulate(queries)], keys))
    shape = len(keys), query.shape[1], key.shape[1], size
    # The order of vLLM's arguments, without a split of the keys.
    plan = ops.get_scheduler_metadata(
        *shape, counts, key.dtype, borders, True, window, isa, False, None, "auto"
    )
    output, scaling = torch.empty_like(query), size**-0.5 if scaling is None else scaling
    rest = scaling, True, None, window, table, softcap or 0.0, plan, None, None, 1.0, 1.0, "auto"
    ops.cpu_attention_with_kv_cache(query, *caches, output, borders, counts, *rest)
    return output


def _padded_lengths(mask: Tensor | None, query: Tensor, key: Tensor, window: int | None) -> Lengths:
    """Return the lengths of padded rows; raise unless all padding is on the right."""
    count, rows, columns = len(query), query.shape[2], key.shape[2]
    if mask is not None:
        seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        seen = seen if window is None else seen.triu(columns - rows - window + 1)
        is_real = mask[:, 0].diagonal(columns - rows, dim1=1, dim2=2)
        is_left = bool((is_real[:, 1:] & ~is_real[:, :-1]).any()) or not mask[:, 0, 0, 0].all()
        if is_left or not torch.equal(mask[:, 0][is_real], seen.expand(count, -1, -1)[is_real]):
            raise ConfigError(
                "exact needs rows that are padded on the right. Pad the other way, or pass no mask."
            )
    return (rows,) * count, (columns,) * count


def _load_kernels() -> None:
    """Load vLLM's kernels for this processor without its Python code, which takes seconds to import."""
    package, machine = find_spec("vllm"), platform.machine()
    # vllm.platforms.cpu chooses in the same way.
    name = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    name = name if torch.cpu._is_avx512_supported() else "_C_AVX2"
    folder = Path("" if package is None or package.origin is None else package.origin).parent
    files = [*folder.glob(f"{name}.*so")]
    if not files or machine not in ("x86_64", "AMD64"):
        raise ConfigError(
            f"exact needs vLLM for CPU on an x86 processor; this is {machine}. Leave exact out."
        )
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        torch.ops.load_library(files[0])
