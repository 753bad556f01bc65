"""Receive weights in the engine: workers take their pieces of the ranks' tensors, and checksums prove it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vectorlm.errors import ChecksumMismatch, HandleRefused, WeightMismatch
from vectorlm.ranks.engine_ranks import CallResult, results_or_first_error
from vectorlm.ranks.topology import return_freed_memory
from vectorlm.sampling.weights.arena import in_rounds, is_one_run, path_of, place_slots, reserve
from vectorlm.sampling.weights.copy_list import CopyList
from vectorlm.sampling.weights.exports import DeviceHandle, Export, FileHandle, Handle, Lent
from vectorlm.sampling.weights.inspection import Reading, bits_of, checksum, checksums, row_sums, widest_word
from vectorlm.sampling.weights.lora_receive import POLICY_ID
from vectorlm.sampling.weights.model_tensors import Snapshot, persistent_buffers
from vectorlm.sampling.weights.plan import (
    ADAPTER,
    BASE,
    Layout,
    Slot,
    TensorSpec,
    dtype_name,
    dtype_of,
    shortened,
)
from vectorlm.sampling.weights.quantise import loadable, scale_specs, scales_to_load
from vectorlm.sampling.weights.reader import Reader
from vectorlm.sampling.weights.record import (
    Copy,
    LoadPlan,
    View,
    checkpoint_tensors,
    join_copies,
    record_loading,
    staged_name,
)


class EngineReceiver:
    """The receiver of an engine with one or several workers; it lives in the process that drives the engine.

    This process owns the arena. Every worker maps it, or opens the ranks' exports, and takes its own pieces of every
    tensor. One update of the ranks serves all workers.
    """

    def __init__(self, call: Callable[..., list[CallResult]], kind: str) -> None:
        """Create the receivers of all workers by `call`, the engine's ``collective_rpc``.

        `kind` is `live`, `packed` or `auto`.
        """
        self._collective_rpc = call
        self.kind: str = self._call("vectorlm_prepare", kind)[0]
        """The kind that `auto` was resolved to."""
        self._pieces: dict[str, PieceMap] = {}
        self._arenas: dict[str, int] = {}
        self._layouts: dict[str, Layout] = {}

    def connect(
        self,
        manifest: Sequence[TensorSpec],
        arena_path: str | None,
        weight_set: str,
        arena_bytes: int | None = None,
    ) -> Layout:
        """Match the trainer's tensors with the engine's; create their arena, or share the one at `arena_path`.

        `arena_bytes` is the largest size of the arena. 0 creates none, and the caller calls `open_handles` next.

        Raises:
            WeightMismatch: Trainer and engine have different models; nothing has changed.
        """
        load_plans: list[LoadPlan] = self._call("vectorlm_describe", weight_set, tuple(manifest))
        taken = {copy.source for load_plan in load_plans for copy in load_plan.copies}
        manifest = tuple(spec for spec in manifest if not spec.is_buffer or spec.name in taken)
        quantised = {name: how for load_plan in load_plans for name, how in load_plan.quantised.items()}
        manifest += tuple(scale_specs(manifest, quantised))
        pieces = PieceMap(manifest, load_plans)
        num_bytes, slots = place_slots(manifest, load_plans[0])
        slots = tuple(
            dataclasses.replace(
                slot, word_bytes=pieces.word_bytes(spec, slot.dtype), quantised=quantised.get(spec.name)
            )
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
        """Let every worker open the rows that the ranks of this node export; they replace earlier exports."""
        self._call("vectorlm_attach", weight_set, self._layouts[weight_set], tuple(exports))

    def lend(self, checksums: Sequence[int]) -> Lent:
        """Return handles of the base's tensors in the engine's parameters, for ranks that only read them.

        `checksums` has one entry for each tensor of the trainer's base.

        Raises:
            ChecksumMismatch: The engine holds other weights.
            HandleRefused: Several workers hold pieces of the tensors.
        """
        pieces = self._pieces[BASE]
        (lent, sums), *others = self._call("vectorlm_lend", self._layouts[BASE])
        if others:
            raise HandleRefused(
                f"the engine's {len(others) + 1} workers have pieces of its weights, and a trainer needs whole tensors."
            )
        # The loader computes these from the same files; only its results exist.
        computed = lent.computed
        if wrong := [name for name in pieces.mismatched(checksums, [sums]) if name not in computed]:
            raise ChecksumMismatch(
                f"{len(wrong)} of {len(pieces.manifest)} tensors in the engine differ from the trainer's base: "
                f"{shortened(wrong)}."
            )
        return lent

    def copy_round(self, rounds: Mapping[str, int]) -> None:
        """Copy one round of each weight set out of the arenas, before the next round overwrites it."""
        for weight_set, number in rounds.items():
            self._call("vectorlm_copy", weight_set, number)

    def load(
        self,
        version: int,
        checksums: Sequence[int] | None,
        weight_sets: Sequence[str],
        adapter_id: int = POLICY_ID,
    ) -> float:
        """Copy the last round and switch the engine to the new weights; return the seconds it took.

        `checksums` has one entry per tensor of all sets; None skips the proof. `adapter_id` is vLLM's number of the
        adapter that is updated; without factors among `weight_sets`, the policy's becomes zero.

        Raises:
            ChecksumMismatch: The engine's parameters are not what was sent; the text names the tensors.
        """
        start = time.perf_counter()
        expected = None if checksums is None else iter(checksums)
        for name in weight_sets:
            of_adapter = (adapter_id,) if name == ADAPTER else ()
            sums = self._call("vectorlm_load", name, version, expected is not None, *of_adapter)
            if expected is None:
                continue
            pieces = self._pieces[name]
            if wrong := pieces.mismatched(list(itertools.islice(expected, len(pieces.manifest))), sums):
                raise ChecksumMismatch(
                    f"after the update {len(wrong)} of {len(pieces.manifest)} tensors in the engine differ from "
                    f"what the trainer sent: {shortened(wrong)}. Trainer or engine changed them during the update. "
                    "Update again; until then the engine samples nothing."
                )
        if adapter_id == POLICY_ID and ADAPTER in self._pieces.keys() - {*weight_sets}:
            self._call("vectorlm_clear", adapter_id)
        return time.perf_counter() - start

    def remove(self, adapter_id: int) -> None:
        """Free the slot of an adapter, if it has one."""
        self._call("vectorlm_remove", adapter_id)

    def before_sleep(self) -> None:
        """Let all workers list the tensors that a sleep of the weights may lose; see `UnlistedTensors`."""
        self._call("vectorlm_before_sleep")

    def after_wake(self) -> list[str]:
        """Compare the listed tensors once the weights are awake; return the names of those that were restored.

        Raises:
            ChangedBySleep: A tensor is lost; the text names it.
        """
        return sorted({name for names in self._call("vectorlm_after_wake") for name in names})

    def weight_sums(self) -> list[dict[str, int]]:
        """Return checksums of the tensors that an update fills, by worker; before the first update, of some more."""
        return self._call("vectorlm_weight_sums")

    def empty_kv_cache(self) -> None:
        """Overwrite the KV caches of all workers with zeros."""
        self._call("vectorlm_empty_kv_cache")

    def close(self) -> None:
        """Close the arenas here; the workers keep theirs."""
        while self._arenas:
            os.close(self._arenas.popitem()[1])

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; return the answers, or raise the first error."""
        return results_or_first_error(self._collective_rpc(method, args=args))


class PieceMap:
    """A map from the pieces of each tensor to the workers that have them.

    Workers of a parallel engine have disjoint pieces of most tensors. They share some pieces: norms, and key and value
    heads if there are fewer heads than workers.
    """

    def __init__(self, manifest: Sequence[TensorSpec], load_plans: Sequence[LoadPlan]) -> None:
        """Sort the pieces of all workers; raise `WeightMismatch` if no worker uses a tensor, or a part of one."""
        self.manifest = tuple(manifest)
        self._owners: Mapping[str, dict[View, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        """By tensor and piece: the worker, and the number of the copy in its load plan."""
        for worker, load_plan in enumerate(load_plans):
            for index, copy in enumerate(load_plan.copies):
                self._owners[copy.source][copy.source_view].append((worker, index))
        self._pieces = self._index(load_plans)
        unused = [
            f"{spec.name} {spec.shape}"
            for spec in manifest
            if sum(view.count for view in self._owners[spec.name]) < torch.Size(spec.shape).numel()
        ]
        if unused:
            raise WeightMismatch(
                f"the trainer sends {len(manifest)} tensors, but the engine does not use {len(unused)} of them, or "
                f"only in part: {', '.join(unused)}. Trainer and engine must have the same architecture."
            )

    def word_bytes(self, spec: TensorSpec, dtype: str) -> int:
        """Return the widest checksum word that crosses no border of a row or piece of the tensor."""
        lengths = [torch.Size(spec.shape[1:]).numel(), *([spec.uncut] if spec.uncut else [])]
        for view in self._owners[spec.name]:
            # Common divisors of these lengths divide the start and the end of every run of the view.
            run, steps = 1, []
            for stride, size in sorted(zip(view.stride, view.shape, strict=True)):
                if stride == run:
                    run *= size
                elif size != 1:
                    steps.append(stride)
            lengths += [view.offset, run, *steps]
        return widest_word(*(length * dtype_of(dtype).itemsize for length in lengths))

    def mismatched(self, totals: Sequence[int | None], sums: Sequence[Sequence[int]]) -> list[str]:
        """Name the tensors that differ from what was sent.

        Args:
            totals: The checksum of each whole tensor.
            sums: By worker, the checksums of the pieces that its copies filled.
        """
        tensors, first_owners, owners, owned = self._pieces
        found = np.array([total for of_worker in sums for total in of_worker], np.uint64)
        expected = np.array([0 if total is None else total for total in totals], np.uint64)
        sent = np.zeros(len(self.manifest), np.uint64)
        np.add.at(sent, tensors, found[first_owners])
        is_wrong = sent != expected
        is_wrong |= np.array([total is None for total in totals], bool)
        is_wrong[tensors[owned[found[owners] != found[first_owners[owned]]]]] = True
        return [self.manifest[index].name for index in is_wrong.nonzero()[0]]

    def _index(self, load_plans: Sequence[LoadPlan]) -> tuple[np.ndarray, ...]:
        """Return the pieces as arrays for `mismatched`, with the copies of all workers numbered consecutively.

        Returns:
            The tensor of each piece and the copy of its first owner; and every copy, with its piece.
        """
        firsts = [0, *itertools.accumulate(len(load_plan.copies) for load_plan in load_plans)]
        tensors: list[int] = []
        first_owners, owners, owned = [], [], []
        for number, spec in enumerate(self.manifest):
            for copies in self._owners[spec.name].values():
                places = [firsts[worker] + index for worker, index in copies]
                owners += places
                owned += [len(tensors)] * len(places)
                tensors.append(number)
                first_owners.append(places[0])
        return tuple(np.array(numbers, np.int64) for numbers in (tensors, first_owners, owners, owned))


class WorkerReceiver:
    """The receiver in one worker: it replaces the weights of the running model in place."""

    _load_plan: LoadPlan
    """The result of `describe`."""
    _staged: Mapping[str, torch.Tensor]
    """Whole sources that the loader computes with, by `staged_name`."""

    def __init__(self, model: Any, derived: Set[str] = frozenset()) -> None:
        """Take the engine's `model`; the parameters in `derived` are made from others after each update."""
        self._model, self._derived = model, derived
        self.copies: CopyList | None = None
        """The copies of each update; None before `attach`."""
        self._sums: tuple[Snapshot, Reader] | None = None

    def describe(self, manifest: Sequence[TensorSpec]) -> LoadPlan:
        """Match the trainer's tensors with this worker's parameters; return the pieces that the worker takes."""
        self._load_plan, missing = match_tensors(self._model, manifest, self._derived)
        self._specs = {spec.name: spec for spec in manifest if spec.name in self._load_plan.computed}
        parameters, dtypes = loaded_tensors(self._model), self._load_plan.dtypes
        self._staged = {
            staged_name(name): torch.zeros(
                spec.shape,
                dtype=dtype_of(dtypes[staged_name(name)]),
                device=parameters[self._load_plan.computed[name][0]].device,
            )
            for name, spec in self._specs.items()
        }
        if missing:
            raise WeightMismatch(
                f"the trainer's tensors do not fill, or only partly fill, {len(missing)} of the engine's "
                f"{len(dict(self._model.named_parameters()))} parameters: {missing}."
            )
        return self._load_plan

    def attach(self, layout: Layout, exports: Sequence[Export] = ()) -> int:
        """Open the arena, or the exports of the ranks; no value changes.

        Returns:
            Bytes that each update copies. The engine uses all other parameters where they are, in the arena.
        """
        earlier, tensors = self.copies, self._tensors()
        self._sums = None  # Its views of an arena would be taken for other users of that memory.
        self.copies = CopyList(layout, exports, self._load_plan, tensors, may_alias=True, earlier=earlier)
        self._slots = {slot.name: slot for slot in layout.slots}
        if earlier is not None:
            earlier.close()
        return self.copies.num_bytes

    def lend(self, layout: Layout) -> tuple[Lent, list[int]]:
        """Return handles of the sources that are one contiguous run of a parameter, and the sum of every copy.

        On CPU this moves parameters that are not in an arena into shared memory.
        """
        self._slots = {slot.name: slot for slot in layout.slots}
        parameters, exports = loaded_tensors(self._model), dict[str, Export]()
        for copy in self._load_plan.copies:
            slot, is_plain = self._slots[copy.source], copy.source not in self._load_plan.computed
            if is_plain and is_one_run(copy, math.prod(slot.shape)):
                held = copy.parameter_view.on(parameters[copy.parameter].data).view(slot.shape)
                if (handle := self._handle_of(held)) is not None:
                    exports[copy.source] = Export(copy.source, (0,) * len(slot.shape), handle)
        # The parameters left the memory that they were loaded into.
        return_freed_memory()
        lent = Lent(os.getpid(), tuple(exports.values()), frozenset(self._load_plan.computed))
        return lent, self.checksums()

    def _handle_of(self, held: torch.Tensor) -> Handle | None:
        if held.is_cuda:
            return DeviceHandle.of(held)
        # With an arena, moving a parameter out of it would take the memory twice.
        return FileHandle.of(held) if self.copies is None else self.copies.handle_of(held)

    def load(self) -> None:
        """Copy the last round into the parameters, and run the loader on the sources that it computes with."""
        assert self.copies is not None, "attach comes before load"
        self.copies.copy_round()
        for name in self._specs:
            self._run_loader(name)

    @torch.no_grad()
    def _run_loader(self, name: str) -> None:
        # A copy, because some loaders change what they are given.
        source = self._staged[staged_name(name)].clone()
        self._model.load_weights(checkpoint_tensors(self._specs[name], source))

    def require_computed(self) -> None:
        """Load the sources that the loader computes with again; raise `ChecksumMismatch` if a bit changes."""
        if not self._load_plan.computed:
            return
        parameters, changed = loaded_tensors(self._model), []
        for name, filled in self._load_plan.computed.items():
            before = {owner: parameters[owner].detach().clone() for owner in filled}
            self._run_loader(name)
            changed += [
                name
                for owner, held in before.items()
                if not torch.equal(bits_of(held), bits_of(parameters[owner]))
            ]
        if changed:
            raise ChecksumMismatch(
                f"after the update the engine does not hold what its loader computes from {len(changed)} tensors: "
                f"{shortened(changed)}. Update again; until then the engine samples nothing."
            )

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**loaded_tensors(self._model), **self._staged}

    def checksums(self) -> list[int]:
        """Sum the piece that each copy of the load plan filled.

        Reads the parameters and not the arena: a parameter that is no longer a view of the arena must not pass.
        """
        if self._sums is None or not self._sums[0].is_current():
            pieces = piece_readings(self._load_plan.copies, self._tensors(), self._slots)
            self._sums = Snapshot(self._model), Reader(pieces)
        return self._sums[1].read().sums

    def weight_sums(self) -> dict[str, int]:
        """Return the checksums of the tensors that an update fills, without a vocabulary's padding.

        Before `describe` they are of all tensors that the loader may fill.
        """
        tensors = loaded_tensors(self._model)
        plan: LoadPlan | None = getattr(self, "_load_plan", None)
        names: Iterable[str] = tensors
        if plan is not None:
            computed = itertools.chain.from_iterable(plan.computed.values())
            filled = (copy.parameter for copy in plan.copies if copy.source not in plan.computed)
            names = dict.fromkeys([*filled, *computed])
        rows = []
        for name in names:
            tensor, num_rows = tensors[name].data, _filled_rows(self._model, name)
            rows.append((row_sums(tensor if num_rows is None else tensor[:num_rows]), 0))
        return dict(zip(names, checksums(rows), strict=True))


@dataclass(frozen=True)
class WorkerSums:
    """The checksums of one worker's parameters, for the tensors of a manifest."""

    load_plan: LoadPlan
    """The places of the tensors in the parameters."""
    sums: tuple[int, ...]
    """A checksum per copy of the plan, modulo 2**64."""
    unfilled: tuple[str, ...]
    """Parameters that no tensor fills, except a head that is tied and equal to the embedding table."""


def parameter_sums(model: Any, manifest: Sequence[TensorSpec], derived: Set[str] = frozenset()) -> WorkerSums:
    """Sum a worker's parameters, whoever loaded them, except the `derived` ones; nothing changes.

    Raises:
        WeightMismatch: It is another model: its loader rejects a name or a shape.
    """
    parameters = loaded_tensors(model)
    load_plan, unfilled = match_tensors(model, manifest, derived)
    if load_plan.computed:
        # A comparison would have to load the tensors themselves again, and they are not here.
        raise WeightMismatch(
            f"the engine transforms {shortened([*load_plan.computed])} while it loads them, and keeps only the "
            "results, so checksums cannot verify these weights."
        )
    shapes, slots = {spec.name: spec.shape for spec in manifest}, {}
    for copy in load_plan.copies:
        dtype = load_plan.dtypes[copy.parameter]
        slots[copy.source] = Slot(copy.source, shapes[copy.source], dtype, 0, dtype_of(dtype).itemsize)
    tables = {copy.parameter for copy in load_plan.copies if copy.parameter.endswith("embed_tokens.weight")}
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        unfilled = [
            name
            for name in unfilled
            if not name.endswith("lm_head.weight")
            or not any(torch.equal(parameters[table], parameters[name]) for table in tables)
        ]
    sums = Reader(piece_readings(load_plan.copies, parameters, slots)).read().sums
    return WorkerSums(load_plan, tuple(sums), tuple(unfilled))


def require_same_weights(
    manifest: Sequence[TensorSpec], expected: Callable[[str, str], int | None], workers: Sequence[WorkerSums]
) -> dict[str, str]:
    """Compare a model's tensors with the parameters of an engine; return the engine's dtype of each tensor.

    Args:
        manifest: The tensors that the workers summed.
        expected: Returns the checksum of a whole tensor in a dtype, in words of one number.
        workers: The answer of each worker.

    Raises:
        WeightMismatch: No worker uses a tensor, or a part of one.
        ChecksumMismatch: The engine has other weights; the text names the tensors.
    """
    dtypes = {
        copy.source: worker.load_plan.dtypes[copy.parameter]
        for worker in workers
        for copy in worker.load_plan.copies
    }
    manifest = [spec for spec in manifest if not spec.is_buffer or spec.name in dtypes]
    pieces = PieceMap(manifest, [worker.load_plan for worker in workers])
    totals = [expected(spec.name, dtypes[spec.name]) for spec in manifest]
    problems = []
    if wrong := pieces.mismatched(totals, [worker.sums for worker in workers]):
        problems.append(f"{len(wrong)} of {len(manifest)} tensors differ: {shortened(wrong)}")
    if unfilled := sorted({name for worker in workers for name in worker.unfilled}):
        problems.append(f"no tensor fills these parameters: {shortened(unfilled)}")
    if problems:
        raise ChecksumMismatch(f"the engine does not have these weights: {'; '.join(problems)}.")
    return dtypes


def tensor_sum(tensor: torch.Tensor, dtype: str) -> int:
    """Return the checksum of a whole tensor in an engine's `dtype`, in words of one number."""
    converted = tensor.detach().to(dtype_of(dtype))
    return checksum(converted, word_bytes=converted.element_size())


def match_tensors(
    model: Any, manifest: Sequence[TensorSpec], derived: Set[str] = frozenset()
) -> tuple[LoadPlan, list[str]]:
    """Return the pieces that a worker's `model` takes, and the parameters that the tensors do not fill completely.

    Parameters in `derived` need no tensor. Some are views of others.
    """
    parameters = {name: tensor for name, tensor in loaded_tensors(model).items() if name not in derived}
    with loadable(model):
        recording = record_loading(model.load_weights, parameters, manifest)
    copies = join_copies(recording.copies, manifest, parameters)
    scales, quantised = scales_to_load(model, recording, manifest)
    copies += scales
    filled: dict[str, int] = defaultdict(int)
    for copy in copies:
        filled[copy.parameter] += copy.parameter_view.count
    dtypes = {name: dtype_name(parameter.dtype) for name, parameter in parameters.items()}
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    shapes, computed = {spec.name: spec.shape for spec in manifest}, {}
    for name, pieces in recording.computed.items():
        owners = computed[name] = tuple(dict.fromkeys(parameter for parameter, _ in pieces))
        for parameter, view in dict.fromkeys(pieces):
            filled[parameter] += view.count
        whole, staged = View.of(torch.empty(shapes[name], device="meta"), 0), staged_name(name)
        copies.append(Copy(name, whole, staged, whole))
        dtypes[staged] = max((dtypes[owner] for owner in owners), key=lambda dtype: dtype_of(dtype).itemsize)
        sizes[staged] = whole.count
    load_plan = LoadPlan(tuple(copies), dtypes, sizes, computed, quantised)
    unfilled = []
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        if (num_rows := _filled_rows(model, name)) is not None:
            count = num_rows * parameter[0].numel()
        if filled[name] < count and name not in derived:
            unfilled.append(name)
    return load_plan, unfilled


def _filled_rows(model: Any, name: str) -> int | None:
    """Return how many rows of a vocabulary table a checkpoint fills; engines pad it. None for other tensors."""
    indices = getattr(model.get_submodule(name.rpartition(".")[0]), "shard_indices", None)
    return None if indices is None else indices.org_vocab_end_index - indices.org_vocab_start_index


def piece_readings(
    copies: Sequence[Copy], parameters: Mapping[str, torch.Tensor], slots: Mapping[str, Slot]
) -> list[Reading]:
    """Return the piece of a parameter that each of `copies` fills, to be read; `slots` are the sources."""
    readings = []
    for copy in copies:
        slot = slots[copy.source]
        rows, first_row = _as_source_rows(copy, parameters[copy.parameter].data, slot)
        readings.append(Reading(rows, first_row, slot.word_bytes))
    return readings


def loaded_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that a model's loader may fill."""
    return {**persistent_buffers(model), **dict(model.named_parameters())}


def _as_source_rows(copy: Copy, parameter: torch.Tensor, source: Slot) -> tuple[torch.Tensor, int]:
    """Return the piece of the parameter that `copy` filled as rows of its source, and the index of the first row.

    A loader may transpose (GPT-2's Conv1D); the piece's dimensions are put back into the source's order.
    """
    piece, strides = copy.parameter_view.on(parameter), copy.source_view.stride
    order = sorted(range(piece.ndim), key=lambda dim: -strides[dim])
    piece = piece.permute(order)
    if not source.shape:
        return piece, 0
    first_row = copy.source_view.offset // source.row_size
    # One expert of several is a table within a single row of its source.
    is_within_a_row = piece.ndim == 0 or strides[order[0]] < source.row_size
    return piece.unsqueeze(0) if is_within_a_row else piece, first_row
