"""Recurrent layers in a packed pass: every row starts from an empty state."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from vectorlm.train.packing import Packing, alike, to_device


class RowByRow:
    """The forward pass of a layer that passes a state from token to token, such as linear attention or a convolution.

    In a packed pass the layer computes whole rows. It computes the common beginning of a group once per row, because
    transformers' layers take an initial state only from a cache for generation. All other layers compute the beginning
    once.
    """

    def __init__(self, layer: nn.Module, parent: nn.Module, *, in_one_call: bool) -> None:
        """Replace the forward pass of `layer`; its `parent` receives the layout of a packed pass.

        If `in_one_call`, the layer's kernels compute all rows end to end, and read where rows start. Otherwise rows of
        similar length are padded to equal length, because torch's formulas for these layers need it.
        """
        self.layer, self.in_one_call = layer, in_one_call
        self._forward = layer.forward
        self._packing: Packing | None = None
        # Some blocks do not pass their keyword arguments on. The hook also runs when activations are recomputed.
        self._hook = parent.register_forward_pre_hook(self._take, with_kwargs=True)
        # Every pass has its own layout, and torch.compile would recompile for each.
        layer.forward = torch.compiler.disable(self._compute)  # type: ignore[method-assign]
        layer.row_by_row = self  # type: ignore[assignment]

    def remove(self) -> None:
        """Restore the layer's own forward pass."""
        self._hook.remove()
        self.layer.forward = self._forward  # type: ignore[method-assign]
        del self.layer.row_by_row

    def _take(self, parent: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._packing = kwargs.get("packing")

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        packing = self._packing
        if packing is None:
            return self._forward(*args, **kwargs)
        kwargs.pop("packing", None)
        queries, keys = packing.stretches
        of_pass, of_rows = (1, packing.num_tokens), (sum(keys),)
        device = next(x.device for x in (*args, *kwargs.values()) if _has(of_pass, x))
        calls, places = packing.once(_calls, queries, keys, self.in_one_call, device)
        starts = self._starts(keys, packing, device) if self.in_one_call else {}
        whole = tree_map(lambda x: packing.keys(x[0]) if _has(of_pass, x) else x, (args, kwargs))
        found = []
        for call in calls:
            rows, named = tree_map(lambda x, call=call: x[call] if _has(of_rows, x) else x, whole)
            found.append(self._forward(*rows, **named | starts))

        def join(*parts: Any) -> Any:
            if not _has(calls[0].shape, parts[0]):
                return parts[0]
            return torch.cat([part.flatten(0, 1) for part in parts]).index_select(0, places)[None]

        return tree_map(join, *found)

    def _starts(self, keys: Sequence[int], packing: Packing, device: torch.device) -> dict[str, Any]:
        """Return the borders of rows under the names from transformers that the layer takes."""
        named = {
            "cu_seq_lens_q": packing.once(_borders, keys, device),
            "seq_idx": packing.once(_row_numbers, keys, device),
        }
        parameters = inspect.signature(self._forward).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        return {name: value for name, value in named.items() if takes_all or name in parameters}


def suspects(model: nn.Module, packing: Packing) -> list[tuple[nn.Module, nn.Module]]:
    """Return layers that may be recurrent, with their parents, after a packed pass of `model`.

    All layers of transformers that mix tokens read the attention mask. This returns the innermost of them that did not
    call `packed_attention`.
    """
    modules = dict(model.named_modules())
    reads = [
        name
        for name, module in modules.items()
        if "attention_mask" in inspect.signature(type(module).forward).parameters
    ]
    inner = [name for name in reads if name and not any(other.startswith(f"{name}.") for other in reads)]
    return [
        (modules[name], modules[name.rpartition(".")[0]])
        for name in inner
        if modules[name] not in packing.attended
    ]


def follow(model: nn.Module, other: nn.Module) -> None:
    """Let `model` compute the same layers row by row as `other`, a model of the same family."""
    for name, module in other.named_modules():
        if hasattr(module, "row_by_row"):
            parent = model.get_submodule(name.rpartition(".")[0])
            RowByRow(model.get_submodule(name), parent, in_one_call=module.row_by_row.in_one_call)


def _has(shape: tuple[int, ...], x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.shape[: len(shape)] == shape


def _calls(
    queries: tuple[int, ...], keys: tuple[int, ...], in_one_call: bool, device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the tokens of each call, int64 [rows, tokens], and the places of all stretches in the joined results.

    Rows are end to end. Each has `keys` tokens, and its stretch is the last `queries` of them.
    """
    starts = [0, *accumulate(keys)]
    order = sorted(range(len(keys)), key=lambda row: -keys[row])
    calls, returned = [], dict(enumerate(starts))
    if in_one_call:
        calls.append(to_device(torch.arange(starts[-1])[None], device))
    else:
        rows, start = iter(order), 0
        for lengths in alike([keys[row] for row in order]):
            members = [next(rows) for _ in lengths]
            ends = torch.tensor([[starts[row] + keys[row] - 1] for row in members])
            firsts = torch.tensor([[starts[row]] for row in members])
            calls.append(to_device(torch.minimum(firsts + torch.arange(lengths[0]), ends), device))
            returned |= {row: start + number * lengths[0] for number, row in enumerate(members)}
            start += len(lengths) * lengths[0]
    places = [
        torch.arange(returned[row] + key - query, returned[row] + key)
        for row, (query, key) in enumerate(zip(queries, keys, strict=True))
    ]
    return calls, to_device(torch.cat(places), device)


def _borders(keys: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor([0, *accumulate(keys)]), device)


def _row_numbers(keys: tuple[int, ...], device: torch.device) -> torch.Tensor:
    numbers = torch.arange(len(keys), dtype=torch.int32)
    return to_device(numbers.repeat_interleave(torch.tensor(keys))[None], device)
