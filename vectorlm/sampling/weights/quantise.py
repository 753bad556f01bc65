"""Weights in 8 bits with a scale per row: how ranks compute them, and where a quantised engine holds them.

A scale depends on its own row alone. Therefore every rank quantises its own shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from vectorlm.errors import WeightMismatch
from vectorlm.sampling.weights.plan import Quantised, TensorSpec, dtype_name, dtype_of
from vectorlm.sampling.weights.record import Copy, Recording, View

CHUNK = 1 << 24
"""Elements that are divided at a time, because the quotients are float32."""


class RowFormat(NamedTuple):
    """The numbers of one dtype: :math:`w_{ij} \\approx s_i q_{ij}` with :math:`s_i = \\max_j |w_{ij}| / q_{max}`."""

    largest: float
    """The largest number q."""
    least_scale: float
    """The scale of a row of zeros, and of rows that are almost zero."""


FORMATS: Mapping[torch.dtype, RowFormat] = {
    # The least scale is vLLM's.
    torch.float8_e4m3fn: RowFormat(448.0, 1 / (448.0 * 512)),
    torch.int8: RowFormat(127.0, torch.finfo(torch.float32).tiny),
}
"""Formats by the dtype of an engine's weights: of `fp8_per_channel` and of `int8`."""


def scales_of(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale of each row, float32 [N, 1].

    Args:
        rows: Weights [N, K] as the forward pass uses them.
        dtype: A key of `FORMATS`.
    """
    largest = rows.abs().amax(dim=-1, keepdim=True).float()
    # Division by a Python number could become a product with its inverse, which rounds otherwise.
    divisor = torch.tensor(FORMATS[dtype].largest, dtype=torch.float32, device=rows.device)
    return (largest / divisor).clamp_min(FORMATS[dtype].least_scale)


def quantise(rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `rows` divided by their `scales` and rounded to `dtype`, [N, K]."""
    found, bound = torch.empty_like(rows, dtype=dtype), FORMATS[dtype].largest
    step = max(1, CHUNK // max(rows.shape[-1], 1))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        quotients = (rows[part] / scales[part]).clamp_(-bound, bound)
        found[part] = (quotients if dtype.is_floating_point else quotients.round_()).to(dtype)
    return found


class Quantiser:
    """A `Change` that computes the rows of a quantised slot, or their scales."""

    def __init__(self, how: Quantised, before: Any, found: dict[str, torch.Tensor]) -> None:
        """Quantise what the change `before` returns, or the rows themselves if it is None.

        `found` passes the scales on from the rows of a tensor to its scales.
        """
        self._how, self._before, self._found = how, before, found

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return 8-bit rows, or scales [N, 1]."""
        how, dtype = self._how, dtype_of(self._how.dtype)
        if how.is_scale and (scales := self._found.pop(how.source, None)) is not None:
            return scales
        rows = (rows if self._before is None else self._before(rows)).to(dtype_of(how.rounded_to))
        scales = scales_of(rows, dtype)
        if how.is_scale:
            return scales
        self._found[how.source] = scales
        return quantise(rows, scales, dtype)


def quantised_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and layers of an engine whose weight has a dtype of `FORMATS`."""
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.dtype in FORMATS:
            yield name, module


def is_plain(layer: Any) -> bool:
    """Whether a quantised layer holds rows in their order, as the transpose of a table, with a scale per row."""
    scale = layer._parameters.get("weight_scale")
    if layer.weight.ndim != 2 or scale is None or scale.dtype != torch.float32:
        return False
    rows = layer.weight.data.t()
    return rows.is_contiguous() and scale.is_contiguous() and scale.shape == (len(rows), 1)


@contextmanager
def loadable(model: torch.nn.Module) -> Iterator[None]:
    """Let the model's own loader see quantised weights as plain ones; for a recording, which writes nothing."""
    kept = [(layer, layer.weight) for _, layer in quantised_layers(model)]
    try:
        for layer, weight in kept:
            rows = torch.nn.Parameter(weight.data.t(), requires_grad=False)
            for name, value in (("output_dim", 0), ("input_dim", 1), ("weight_loader", weight.weight_loader)):
                setattr(rows, name, value)
            layer._parameters["weight"] = rows
        yield
    finally:
        for layer, weight in kept:
            layer._parameters["weight"] = weight


def scales_to_load(
    model: torch.nn.Module, recording: Recording, manifest: Sequence[TensorSpec]
) -> tuple[list[Copy], dict[str, Quantised]]:
    """Return the copies of the scales, and what is quantised by the name of its slot.

    Raises:
        WeightMismatch: Rows of the engine are not rows of the trainer, and ranks cannot compute their scales.
    """
    layers = {f"{name}.weight": layer for name, layer in quantised_layers(model)}
    shapes = {spec.name: spec.shape for spec in manifest}
    copies: list[Copy] = []
    found: dict[str, Quantised] = {}
    targets: dict[str, set[bool]] = {}
    for copy in recording.copies:
        layer = layers.get(copy.parameter)
        targets.setdefault(copy.source, set()).add(layer is not None)
        if layer is None:
            continue
        view, shape = copy.source_view, shapes[copy.source]
        if len(shape) != 2 or len(view.shape) != 2 or view.stride != (shape[1], 1):
            _refuse(copy.source, "its rows are not the trainer's")
        part = (view.shape[0], 1), (1, 1)
        first, target = view.offset // shape[1], copy.parameter_view.offset // layer.weight.shape[0]
        name, scale = f"{copy.source} scale", f"{copy.parameter}_scale"
        copies.append(Copy(name, View(*part, first), scale, View(*part, target)))
        how = Quantised(copy.source, dtype_name(layer.weight.dtype), dtype_name(layer.params_dtype))
        found |= {copy.source: how, name: dataclasses.replace(how, is_scale=True)}
    if mixed := [name for name in found if len(targets.get(name, ())) > 1]:
        _refuse(mixed[0], "a part of it is not quantised")
    for name, pieces in recording.computed.items():
        if any(parameter in layers for parameter, _ in pieces):
            _refuse(name, "the engine's loader computes with it")
    return copies, found


def _refuse(name: str, reason: str) -> None:
    raise WeightMismatch(
        f"the quantised engine cannot take {name!r}: {reason}. Leave out quantization, or train another model."
    )


def scale_specs(manifest: Sequence[TensorSpec], quantised: Mapping[str, Quantised]) -> list[TensorSpec]:
    """Return the specs of the scales that are sent besides the tensors of `manifest`."""
    shapes = {spec.name: spec.shape for spec in manifest}
    return [TensorSpec(name, (shapes[how.source][0], 1)) for name, how in quantised.items() if how.is_scale]
