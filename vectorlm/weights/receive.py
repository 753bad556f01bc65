"""The engine's side of a hot swap: take the weights over from the arena, and prove that they arrived."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from vectorlm.errors import ChecksumMismatch, WeightMismatch
from vectorlm.weights.arena import Arena
from vectorlm.weights.checksum import checksum
from vectorlm.weights.layout import ArenaPlan, plan_arena
from vectorlm.weights.pack import check_packed, pack
from vectorlm.weights.plan import Layout, TensorSpec
from vectorlm.weights.record import Copy, record_loading


class Receiver:
    """Holds the running model of one engine and swaps its weights in place.

    `live`: layers compute with the arena's bytes themselves. `packed`: they compute with oneDNN's packed copy,
    made again at each update. On CUDA the weights are copied to the device and only `live` exists.
    """

    def __init__(self, model: Any, kind: str) -> None:
        self._model = model
        self._kind = kind
        self._plan: ArenaPlan | None = None
        self._all_copies: list[Copy] = []
        _require_plain_layers(model)
        if kind == "packed":
            pack(model)

    def connect(self, manifest: Sequence[TensorSpec], arena_path: str | None = None) -> Layout:
        """Match the trainer's tensors with the engine's, and make the arena that they will travel through.

        Parameters that can become views of the arena do so now, holding the values that they had.

        Args:
            manifest: What the trainer sends.
            arena_path: The arena of another engine of this node, which is then shared; None makes one.

        Raises:
            WeightMismatch: The two sides do not hold the same model.
        """
        parameters = dict(self._model.named_parameters())
        copies = record_loading(self._model.load_weights, parameters, manifest)
        _require_all_filled(self._model, copies)
        on_host = all(parameter.device.type == "cpu" for parameter in parameters.values())
        plan = plan_arena(manifest, copies, parameters, alias=on_host)
        arena = Arena.open(arena_path, plan.num_bytes) if arena_path else Arena.create(plan.num_bytes)
        for alias in plan.aliases:
            parameter = parameters[alias.parameter]
            size = parameter.numel() * parameter.element_size()
            block = arena.bytes[alias.offset_bytes : alias.offset_bytes + size].view(parameter.dtype)
            parameter.data = block.view(parameter.shape).copy_(parameter)
        self._plan, self._arena, self._all_copies = plan, arena, copies
        self._sources = {slot.name: arena.view(slot) for slot in plan.slots}
        return Layout(arena.path, plan.num_bytes, plan.slots)

    def load(self, version: int, expected: Sequence[int] | None = None) -> float:
        """Make the engine compute with what the arena holds now.

        Args:
            version: The training step of these weights.
            expected: The checksum of every slot as the trainer counts it; None skips the proof.

        Returns:
            Seconds it took.

        Raises:
            ChecksumMismatch: What the engine computes with is not what was sent; the text names the tensors.
        """
        start = time.perf_counter()
        assert self._plan is not None, "connect comes before load"
        parameters = dict(self._model.named_parameters())
        for copy in self._plan.copies:
            target = copy.parameter_view.on(parameters[copy.parameter].data)
            target.copy_(copy.source_view.on(self._sources[copy.source]), non_blocking=True)
        if self._kind == "packed":
            pack(self._model)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if expected is not None:
            self._verify(version, expected)
        return time.perf_counter() - start

    def _verify(self, version: int, expected: Sequence[int]) -> None:
        """Sum the parameters themselves, not the arena: a parameter that lost its alias must not pass."""
        assert self._plan is not None
        parameters = dict(self._model.named_parameters())
        found: dict[str, int] = defaultdict(int)
        for copy in self._all_copies:
            rows, first_row = _as_source_rows(
                copy, parameters[copy.parameter].data, self._sources[copy.source]
            )
            found[copy.source] += checksum(rows, first_row)
        wrong = [
            slot.name
            for slot, total in zip(self._plan.slots, expected, strict=True)
            if found[slot.name] % 2**64 != total
        ]
        if wrong:
            raise ChecksumMismatch(
                f"after the update {len(wrong)} of {len(expected)} tensors in the engine are not those that the "
                f"trainer sent: {wrong[:8]}{' and more' if len(wrong) > 8 else ''}."
            )
        if self._kind == "packed":
            check_packed(self._model, seed=version)


def _as_source_rows(copy: Copy, parameter: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the piece of the parameter that `copy` filled as rows of its source, and the first row's index.

    A loader may transpose (GPT-2's Conv1D): the piece's dimensions are put back into the source's order.
    """
    piece, strides = copy.parameter_view.on(parameter), copy.source_view.stride
    piece = piece.permute(sorted(range(piece.ndim), key=lambda dim: -strides[dim]))
    return piece, copy.source_view.offset // source.stride(0) if source.ndim else 0


PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "NoneType")
"""How vLLM keeps weights that lie in memory as the checkpoint has them."""


def _require_plain_layers(model: torch.nn.Module) -> None:
    """Refuse layers whose weights vLLM rearranges after loading: bytes written to them would mean something else."""
    odd = {
        f"{type(module).__name__} ({method})"
        for module in model.modules()
        if (method := type(getattr(module, "quant_method", None)).__name__) not in PLAIN_METHODS
    }
    if odd:
        raise WeightMismatch(
            f"this engine cannot take new weights: vLLM rearranges those of {', '.join(sorted(odd))} when it loads "
            "them. Use an unquantised dense model."
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
