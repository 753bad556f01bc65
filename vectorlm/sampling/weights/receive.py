"""The engine's side of a hot swap: its workers take their pieces of what the ranks send, and show what they hold."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from vectorlm.errors import ChecksumMismatch, WeightMismatch
from vectorlm.ranks.engine_ranks import CallResult, results_or_first_error
from vectorlm.sampling.weights.arena import path_of, reserve
from vectorlm.sampling.weights.copy_list import CopyList
from vectorlm.sampling.weights.exports import Export
from vectorlm.sampling.weights.inspection import checksums, row_sums, widest_word
from vectorlm.sampling.weights.layout import in_rounds, place_slots
from vectorlm.sampling.weights.model_tensors import persistent_buffers
from vectorlm.sampling.weights.plan import BASE, Layout, Slot, TensorSpec, dtype_name, dtype_of, shortened
from vectorlm.sampling.weights.record import Copy, LoadPlan, View, join_copies, record_loading

Call = Callable[..., list[CallResult]]
"""An engine's ``collective_rpc``: calls a method in every worker, and lists their results."""


class EngineReceiver:
    """Swaps the weights of an engine with one worker or several; lives where the engine is driven from.

    The arena belongs to this process. Every worker maps it, or opens what the ranks export, and takes its own pieces of
    every tensor, so one update of the ranks serves all of them.
    """

    def __init__(self, call: Call, kind: str) -> None:
        """Make the workers' receivers for the loaded model, of a `kind` that is `live`, `packed` or `auto`."""
        self._collective_rpc = call
        self.kind: str = self._call("vectorlm_prepare", kind)[0]
        """What `auto` was resolved to."""
        self._pieces: dict[str, HeldPieces] = {}
        self._arenas: dict[str, int] = {}
        self._layouts: dict[str, Layout] = {}

    def connect(
        self,
        manifest: Sequence[TensorSpec],
        arena_path: str | None,
        weight_set: str,
        arena_bytes: int | None = None,
    ) -> Layout:
        """Match the trainer's tensors with the engine's; make the arena that they cross in, or share `arena_path`.

        `arena_bytes` is its size at most; 0 makes none, and `open_handles` follows.

        Raises:
            WeightMismatch: The two sides do not hold the same model; nothing has changed.
        """
        load_plans: list[LoadPlan] = self._call("vectorlm_describe", weight_set, tuple(manifest))
        taken = {copy.source for load_plan in load_plans for copy in load_plan.copies}
        manifest = tuple(spec for spec in manifest if not spec.is_buffer or spec.name in taken)
        pieces = HeldPieces(manifest, load_plans)
        num_bytes, slots = place_slots(manifest, load_plans[0])
        slots = tuple(
            dataclasses.replace(slot, word_bytes=pieces.word_bytes(spec, slot.dtype))
            for spec, slot in zip(manifest, slots, strict=True)
        )
        if arena_bytes and num_bytes > arena_bytes:
            num_bytes, slots = in_rounds(slots, arena_bytes)
        earlier = self._arenas.pop(weight_set, None)
        if arena_path is None and arena_bytes != 0:
            self._arenas[weight_set] = reserve(num_bytes)
            arena_path = path_of(self._arenas[weight_set])
        layout = self._layouts[weight_set] = Layout(arena_path or "", num_bytes, slots)
        copied = self._call("vectorlm_attach", weight_set, layout) if layout.path else []
        self._pieces[weight_set] = pieces
        if earlier is not None:
            os.close(earlier)
        return dataclasses.replace(layout, num_copied_bytes=sum(copied))

    def open_handles(self, weight_set: str, exports: Sequence[Export]) -> None:
        """Let every worker open the rows that the ranks of this node export, in place of those from before."""
        self._call("vectorlm_attach", weight_set, self._layouts[weight_set], tuple(exports))

    def copy_round(self, rounds: Mapping[str, int]) -> None:
        """Copy what the arenas hold of `rounds`, by weight set, before the next round takes its place."""
        for weight_set, number in rounds.items():
            self._call("vectorlm_copy", weight_set, number)

    def load(self, version: int, checksums: Sequence[int] | None, weight_sets: Sequence[str]) -> float:
        """Copy the last round, and make the engine compute with the new weights; return the seconds it took.

        Without `checksums`, those of every tensor of the sets, there is no proof. Sets on top of the base that are not
        in `weight_sets` are cleared.

        Raises:
            ChecksumMismatch: What the engine computes with is not what was sent; the text names the tensors.
        """
        start = time.perf_counter()
        expected = None if checksums is None else iter(checksums)
        for name in weight_sets:
            sums = self._call("vectorlm_load", name, version, expected is not None)
            if expected is not None:
                self._pieces[name].check(expected, sums)
        for name in self._pieces.keys() - {BASE, *weight_sets}:
            self._call("vectorlm_clear", name)
        return time.perf_counter() - start

    def empty_kv_cache(self) -> None:
        """Overwrite the KV caches of all workers with zeros."""
        self._call("vectorlm_empty_kv_cache")

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; return their answers, or raise the first error."""
        return results_or_first_error(self._collective_rpc(method, args=args))


class HeldPieces:
    """Knows which worker holds which piece of which tensor, and which pieces are held more than once.

    Workers of a parallel engine hold disjoint pieces of most tensors, and the same piece of some: norms, and key and
    value heads where there are fewer of them than workers.
    """

    def __init__(self, manifest: Sequence[TensorSpec], load_plans: Sequence[LoadPlan]) -> None:
        """Sort the pieces that each worker takes; raise `WeightMismatch` where no worker uses (a part of) a tensor."""
        self._manifest = tuple(manifest)
        self._holders: Mapping[str, dict[View, list[tuple[int, int]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for worker, load_plan in enumerate(load_plans):
            for index, copy in enumerate(load_plan.copies):
                self._holders[copy.source][copy.source_view].append((worker, index))
        unused = [
            f"{spec.name} {spec.shape}"
            for spec in manifest
            if sum(view.count for view in self._holders[spec.name]) < torch.Size(spec.shape).numel()
        ]
        if unused:
            raise WeightMismatch(
                f"the trainer sends {len(manifest)} tensors, but the engine leaves {len(unused)} of them unused, "
                f"whole or in part: {', '.join(unused)}. The trainer's model and the engine's are not the same "
                "architecture."
            )

    def word_bytes(self, spec: TensorSpec, dtype: str) -> int:
        """Return the widest checksum word that neither a row nor a piece of the tensor cuts."""
        lengths = [torch.Size(spec.shape[1:]).numel()]
        for view in self._holders[spec.name]:
            lengths += _boundaries(view)
        return widest_word(*(length * dtype_of(dtype).itemsize for length in lengths))

    def check(self, expected: Iterator[int], sums: Sequence[Sequence[int]]) -> None:
        """Raise `ChecksumMismatch` where the workers do not hold what was sent.

        `expected` iterates over the checksums of whole tensors, and this manifest's are taken off it. `sums` are, for
        each worker, the checksums of the pieces that its copies filled.
        """
        if wrong := self.wrong(list(itertools.islice(expected, len(self._manifest))), sums):
            raise ChecksumMismatch(
                f"after the update {len(wrong)} of {len(self._manifest)} tensors in the engine are not those that the "
                f"trainer sent: {shortened(wrong)}. They changed while they were sent, or the engine's did since: "
                "update again; until then nothing is sampled."
            )

    def wrong(self, totals: Sequence[int | None], sums: Sequence[Sequence[int]]) -> list[str]:
        """Name the tensors whose pieces do not add up to `totals`, those of whole tensors; `sums` is as for `check`."""
        pairs = zip(self._manifest, totals, strict=True)
        return [spec.name for spec, total in pairs if self._total(spec.name, sums) != total]

    def _total(self, name: str, sums: Sequence[Sequence[int]]) -> int | None:
        """Add up the distinct pieces of a tensor; None where holders of one piece do not hold the same."""
        total = 0
        for holders in self._holders[name].values():
            first, *others = {sums[worker][index] for worker, index in holders}
            if others:
                return None
            total += first
        return total % 2**64


def _boundaries(view: View) -> list[int]:
    """Return lengths, in elements: their common divisors divide the start and the end of every run of `view`."""
    run, steps = 1, []
    for stride, size in sorted(zip(view.stride, view.shape, strict=True)):
        if stride == run:
            run *= size
        elif size != 1:
            steps.append(stride)
    return [view.offset, run, *steps]


class WorkerReceiver:
    """Holds the running model of one worker and swaps its weights in place."""

    _load_plan: LoadPlan
    """What `describe` found."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.copies: CopyList | None = None
        """What to copy at each update, since `attach`."""

    def describe(self, manifest: Sequence[TensorSpec]) -> LoadPlan:
        """Match the trainer's tensors with this worker's parameters; say what it takes of them."""
        self._load_plan, missing = match_tensors(self._model, manifest)
        if missing:
            raise WeightMismatch(
                f"the engine expects {len(dict(self._model.named_parameters()))} parameters, but the trainer's tensors "
                f"leave {len(missing)} of them unfilled, whole or in part: {missing}."
            )
        return self._load_plan

    def attach(self, layout: Layout, exports: Sequence[Export] = ()) -> int:
        """Open the arena, or what the ranks export, for the parameters; no value changes.

        Returns:
            Bytes that each update will copy; the engine computes with the rest where it lies.
        """
        earlier, parameters = self.copies, loaded_tensors(self._model)
        self.copies = CopyList(layout, exports, self._load_plan, parameters, may_alias=True, earlier=earlier)
        self._slots = {slot.name: slot for slot in layout.slots}
        if earlier is not None:
            earlier.close()
        return self.copies.num_bytes

    def load(self) -> None:
        """Copy the last round; the engine computes with what the parameters hold then."""
        assert self.copies is not None, "attach comes before load"
        self.copies.copy_round()

    def checksums(self) -> list[int]:
        """Sum the piece that each copy of the load plan filled.

        The parameters themselves, not the arena: a parameter that lost its alias must not pass.
        """
        return piece_sums(self._load_plan.copies, loaded_tensors(self._model), self._slots)


def match_tensors(model: Any, manifest: Sequence[TensorSpec]) -> tuple[LoadPlan, list[str]]:
    """Find out what a worker's `model` takes of the tensors, and which of its parameters they do not fill."""
    parameters = loaded_tensors(model)
    copies = join_copies(record_loading(model.load_weights, parameters, manifest), manifest, parameters)
    load_plan = LoadPlan(
        tuple(copies),
        {name: dtype_name(parameter.dtype) for name, parameter in parameters.items()},
        {name: parameter.numel() for name, parameter in parameters.items()},
    )
    return load_plan, _unfilled(model, copies)


def piece_sums(
    copies: Sequence[Copy], parameters: Mapping[str, torch.Tensor], slots: Mapping[str, Slot]
) -> list[int]:
    """Sum the piece of a parameter that each of `copies` fills; `slots` are of the tensors that they come from."""
    sums = []
    for copy in copies:
        slot = slots[copy.source]
        rows, first_row = _as_source_rows(copy, parameters[copy.parameter].data, slot)
        sums.append((row_sums(rows, slot.word_bytes), first_row))
    return checksums(sums)


def loaded_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what a model's loader may fill."""
    return {**persistent_buffers(model), **dict(model.named_parameters())}


def _as_source_rows(copy: Copy, parameter: torch.Tensor, source: Slot) -> tuple[torch.Tensor, int]:
    """Return the piece of the parameter that `copy` filled as rows of its source, and the first row's index.

    A loader may transpose (GPT-2's Conv1D): the piece's dimensions are put back into the source's order.
    """
    piece, strides = copy.parameter_view.on(parameter), copy.source_view.stride
    order = sorted(range(piece.ndim), key=lambda dim: -strides[dim])
    piece = piece.permute(order)
    if not source.shape:
        return piece, 0
    first_row = copy.source_view.offset // source.row_size
    # One expert of several is a table within a single row of its source.
    lies_within_a_row = piece.ndim == 0 or strides[order[0]] < source.row_size
    return piece.unsqueeze(0) if lies_within_a_row else piece, first_row


def _unfilled(model: torch.nn.Module, copies: Sequence[Copy]) -> list[str]:
    """Name the parameters that `copies` leave unfilled, whole or in part."""
    filled: dict[str, int] = defaultdict(int)
    for copy in copies:
        filled[copy.parameter] += copy.parameter_view.count
    parameters = dict(model.named_parameters())
    missing = []
    for name, parameter in parameters.items():
        count = parameter.numel()
        owner: Any = model.get_submodule(name.rpartition(".")[0])
        if hasattr(owner, "shard_indices"):
            # No checkpoint fills the rows that an engine adds to a vocabulary table to round its size up.
            rows = owner.shard_indices.org_vocab_end_index - owner.shard_indices.org_vocab_start_index
            count = rows * parameter[0].numel()
        if filled[name] < count:
            missing.append(name)
    return missing
