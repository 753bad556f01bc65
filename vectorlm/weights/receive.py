"""One worker's side of a hot swap: take its weights over from the arena, and sum up what it holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from vectorlm.errors import WeightMismatch
from vectorlm.weights.arena import Arena
from vectorlm.weights.checksum import checksum
from vectorlm.weights.experts import are_plain
from vectorlm.weights.join import join_copies
from vectorlm.weights.layout import Intake, find_aliases
from vectorlm.weights.pack import check_packed, pack
from vectorlm.weights.plan import Layout, TensorSpec, dtype_name
from vectorlm.weights.record import Copy, record_loading


class Receiver:
    """Holds the running model of one worker and swaps its weights in place.

    `live`: layers compute with the arena's bytes themselves. `packed`: they compute with oneDNN's packed copy,
    made again at each update. On CUDA the weights are copied to the device and only `live` exists.
    """

    def __init__(self, model: Any, kind: str) -> None:
        self._model = model
        self._kind = kind
        self._intake: Intake | None = None
        _require_plain_layers(model)
        if kind == "packed":
            pack(model)

    def describe(self, manifest: Sequence[TensorSpec]) -> Intake:
        """Match the trainer's tensors with this worker's parameters; say what it takes of them.

        Raises:
            WeightMismatch: A parameter would stay unfilled, or the loader cannot take a tensor.
        """
        parameters = dict(self._model.named_parameters())
        recorded = record_loading(self._model.load_weights, parameters, manifest)
        copies = join_copies(recorded, manifest, parameters)
        _require_all_filled(self._model, copies)
        self._intake = Intake(
            tuple(copies),
            {name: dtype_name(parameter.dtype) for name, parameter in parameters.items()},
            {name: parameter.numel() for name, parameter in parameters.items()},
        )
        return self._intake

    def attach(self, layout: Layout) -> int:
        """Map the arena. Parameters that can become views of it do so now, holding the values that they had.

        Returns:
            Bytes that each update will copy out of the arena; the rest is computed with where it lies.
        """
        assert self._intake is not None, "describe comes before attach"
        arena = Arena.open(layout.path, layout.num_bytes)
        parameters = dict(self._model.named_parameters())
        aliased = set()
        for alias in find_aliases(self._intake, layout.slots, layout.num_bytes):
            parameter = parameters[alias.parameter]
            if parameter.device.type == "cpu" and parameter.is_contiguous():
                size = parameter.numel() * parameter.element_size()
                block = arena.bytes[alias.offset_bytes : alias.offset_bytes + size].view(parameter.dtype)
                parameter.data = block.view(parameter.shape).copy_(parameter)
                aliased.add(alias.parameter)
        self._remaining = [copy for copy in self._intake.copies if copy.parameter not in aliased]
        self._sources = {slot.name: arena.view(slot) for slot in layout.slots}
        self._word_bytes = {slot.name: slot.word_bytes for slot in layout.slots}
        return sum(
            copy.source_view.count * parameters[copy.parameter].element_size() for copy in self._remaining
        )

    def load(self, version: int, with_checksums: bool = False) -> list[int]:
        """Make the engine compute with what the arena holds now.

        Args:
            version: The training step of these weights.
            with_checksums: Whether to prove it.

        Returns:
            The checksum of the piece that each copy of the intake filled, if asked for; else nothing.

        Raises:
            ChecksumMismatch: A packed layer does not hold what its plain weight holds.
        """
        parameters = dict(self._model.named_parameters())
        for copy in self._remaining:
            target = copy.parameter_view.on(parameters[copy.parameter].data)
            target.copy_(copy.source_view.on(self._sources[copy.source]), non_blocking=True)
        if self._kind == "packed":
            pack(self._model)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if not with_checksums:
            return []
        sums = self._checksums()
        if self._kind == "packed":
            check_packed(self._model, seed=version)
        return sums

    def _checksums(self) -> list[int]:
        """Sum the parameters themselves, not the arena: a parameter that lost its alias must not pass."""
        assert self._intake is not None
        parameters = dict(self._model.named_parameters())
        sums = []
        for copy in self._intake.copies:
            piece = parameters[copy.parameter].data
            rows, first_row = _as_source_rows(copy, piece, self._sources[copy.source])
            sums.append(checksum(rows, first_row, self._word_bytes[copy.source]))
        return sums


def _as_source_rows(copy: Copy, parameter: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the piece of the parameter that `copy` filled as rows of its source, and the first row's index.

    A loader may transpose (GPT-2's Conv1D): the piece's dimensions are put back into the source's order.
    """
    piece, strides = copy.parameter_view.on(parameter), copy.source_view.stride
    order = sorted(range(piece.ndim), key=lambda dim: -strides[dim])
    piece = piece.permute(order)
    if source.ndim == 0:
        return piece, 0
    first_row = copy.source_view.offset // source.stride(0)
    # One expert of several is a table within a single row of its source.
    lies_within_a_row = piece.ndim == 0 or strides[order[0]] < source.stride(0)
    return piece.unsqueeze(0) if lies_within_a_row else piece, first_row


PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "NoneType")
"""How vLLM keeps weights that lie in memory as the checkpoint has them."""


def _require_plain_layers(model: torch.nn.Module) -> None:
    """Refuse layers whose weights vLLM rearranges after loading: bytes written to them would mean something else."""
    odd = {
        f"{type(module).__name__} ({method})"
        for module in model.modules()
        if (method := type(getattr(module, "quant_method", None)).__name__) not in PLAIN_METHODS
        and not (method == "UnquantizedFusedMoEMethod" and are_plain(module))
    }
    if odd:
        raise WeightMismatch(
            f"this engine cannot take new weights: vLLM rearranges those of {', '.join(sorted(odd))} when it loads "
            "them. Use an unquantised model; for experts on CUDA, moe_backend='triton'."
        )


def _require_all_filled(model: torch.nn.Module, copies: Sequence[Copy]) -> None:
    filled: dict[str, int] = defaultdict(int)
    for copy in copies:
        filled[copy.parameter] += copy.parameter_view.count
    missing = [
        name
        for name, parameter in model.named_parameters()
        if filled[name] < parameter.numel() - _padding(model, name, parameter)
    ]
    if missing:
        raise WeightMismatch(
            f"the engine expects {len(dict(model.named_parameters()))} parameters, but the trainer's tensors leave "
            f"{len(missing)} of them unfilled, whole or in part: {missing}."
        )


def _padding(model: torch.nn.Module, name: str, parameter: torch.Tensor) -> int:
    """Count the elements of a vocabulary table that vLLM adds to round its size up; no checkpoint fills them."""
    owner: Any = model.get_submodule(name.rpartition(".")[0])
    if not hasattr(owner, "shard_indices"):
        return 0
    rows: int = owner.shard_indices.org_vocab_end_index - owner.shard_indices.org_vocab_start_index
    return (parameter.shape[0] - rows) * parameter[0].numel()
