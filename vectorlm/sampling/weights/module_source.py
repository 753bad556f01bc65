"""The weights of a torch module as a `WeightSource`: every rank writes its own shards, and nothing is gathered."""

from __future__ import annotations

import functools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils._python_dispatch import TorchDispatchMode

from vectorlm.errors import WeightMismatch
from vectorlm.ranks.topology import Topology
from vectorlm.sampling.weights.arena import MappedArenas
from vectorlm.sampling.weights.boxes import boxes_of, own_shard, ranks_by_shard, uncut
from vectorlm.sampling.weights.inspection import Inspection, Reading, checksums, row_sums
from vectorlm.sampling.weights.model_tensors import persistent_buffers, quantized_layers, trainer_tensors
from vectorlm.sampling.weights.plan import Layout, Piece, Slot, TensorSpec, dtype_of
from vectorlm.sampling.weights.quantise import Quantiser
from vectorlm.sampling.weights.reader import Reader

_MANIFESTS: WeakKeyDictionary[torch.nn.Module, tuple[TensorSpec, ...]] = WeakKeyDictionary()
"""A cache by model, because a model's conversion takes longer than copying a small model's weights."""

Change = Callable[[torch.Tensor], torch.Tensor]
"""A function that computes the rows to send from the rows of a shard."""


@dataclass(frozen=True)
class HeldBox:
    """A block of one tensor that this rank holds, and the part of it that it sends."""

    held: torch.Tensor
    place: tuple[int, ...]
    """Index of the first element of `held` in the whole tensor, by dimension."""
    rows: torch.Tensor
    """The rows that this rank sends: all of `held`, or a part if other ranks of its node have the same block."""
    first_row: int
    """Index of the first row of `rows` in the whole tensor."""
    counts: bool
    """Whether this rank is the first of its node with this block; only its checksum of `held` counts."""
    change: Change | None = None
    """A function that computes the rows to send; None sends them unchanged."""

    @property
    def sent_place(self) -> tuple[int, ...]:
        """Index of the first element of `rows` in the whole tensor, by dimension."""
        return (self.first_row, *self.place[1:])

    def of(self, whole: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return the place in a whole tensor of `rows`, or of what `change` computes from them, by their shape."""
        whole = whole.reshape(1) if whole.ndim == 0 else whole
        # A scale has fewer dimensions than the rows that it was computed from.
        for dim, (start, length) in enumerate(zip(self.sent_place, shape)):  # noqa: B905
            if length != whole.shape[dim]:
                whole = whole.narrow(dim, start, length)
        return whole


class ModuleSource:
    """A `vectorlm.sampling.contract.WeightSource` over a module, plain or sharded by FSDP2.

    It describes the module at the time of the first call. A later update may use it again as long as a `Snapshot` of
    the module is current, after `forget_sums`. `manifest` raises for any wrong sharding, before anything is sent.
    """

    quantises = True
    """Whether it computes the rows and scales of a quantised engine."""

    def __init__(
        self,
        model: torch.nn.Module,
        topology: Topology,
        arenas: MappedArenas | None = None,
        *,
        tensors: Mapping[str, torch.Tensor] | None = None,
        changes: Mapping[str, Change] | None = None,
        beside: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Set what is sent.

        Args:
            model: The trained module.
            topology: This rank's place in the run.
            arenas: The mapped arenas, which are kept from one update to the next.
            tensors: The tensors to send by name, plain or DTensors; the module's own tensors if omitted.
            changes: By the name of a tensor: a function that computes its rows while they are sent.
            beside: Tensors that `changes` read, by name; they are inspected as buffers are.
        """
        self._model: torch.nn.Module | None = model
        self._topology = topology
        self._arenas = MappedArenas() if arenas is None else arenas
        self._tensors, self._changes, self._beside = tensors, changes or {}, beside or {}
        self._sums: dict[str, int] = {}
        """This rank's part of a tensor's checksum, known from `inspect` for rows that are stored, not computed."""
        self._inspections: dict[tuple[int, bool, bool], _PreparedInspection] = {}
        """By the identity of the layout, and the arguments of `inspect`."""
        self._writings: dict[int, _PreparedWriting] = {}
        """By the identity of the layout."""

    def manifest(self) -> Sequence[TensorSpec]:
        """List the tensors, whole.

        Raises:
            WeightMismatch: A tensor is sharded in a way that cannot be sent.
        """
        return self._description.manifest

    @property
    def writes(self) -> Mapping[str, Sequence[HeldBox]]:
        """This rank's blocks of each tensor, by name."""
        return self._description.writes

    def forget_sums(self) -> None:
        """Forget the checksums of `inspect`: the weights may have other numbers now."""
        self._sums.clear()

    @functools.cached_property
    @torch.no_grad()  # `to_local` would record each tensor.
    def _description(self) -> _Description:
        assert self._model is not None
        tensors: Mapping[str, torch.Tensor]
        changes = dict(self._changes)
        if self._tensors is None:
            quantized = quantized_layers(self._model)
            for name, layer in quantized.items():
                changes[name] = then(layer.dequantize, changes.get(name))
            tensors = trainer_tensors(self._model, quantized)
            manifest = manifest_of(self._model, tensors, quantized)
        else:
            tensors = self._tensors
            manifest = tuple(TensorSpec(name, tuple(tensor.shape)) for name, tensor in tensors.items())
        manifest = tuple(_with_cuts(spec, tensors[spec.name]) for spec in manifest)
        writes = {
            name: held_boxes(tensor, self._topology, changes.get(name)) for name, tensor in tensors.items()
        }
        buffers = persistent_buffers(self._model)
        others = {**self._beside, **buffers}
        beside = {name: held_boxes(tensor, self._topology) for name, tensor in others.items()}
        groups: dict[Any, list[str]] = defaultdict(list)
        for name, tensor in {**others, **tensors}.items():
            placed = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
            groups[placed].append(name)
        # A source that is kept must not keep the model alive.
        self._model = None
        return _Description(
            manifest,
            writes,
            inspected={**beside, **writes},
            buffers=frozenset(buffers),
            groups={names[0]: names for names in groups.values()},
        )

    def inspect(self, layout: Layout, with_checksums: bool, check_finite: bool) -> Inspection:
        """Sum all rows of this rank, and search the rows that it sends for numbers that are not finite."""
        key = id(layout), with_checksums, check_finite
        if key not in self._inspections:
            self._inspections[key] = _PreparedInspection(self._description, layout, *key[1:])
        prepared = self._inspections[key]
        found = prepared.reader.read()
        not_finite = [
            name for name, is_finite in zip(prepared.names, found.is_finite, strict=True) if not is_finite
        ]
        # A mask may hold infinities.
        wrong = tuple(name for name in dict.fromkeys(not_finite) if name not in self._description.buffers)
        if not with_checksums:
            return Inspection({}, wrong)
        self._sums = _added((name, found.sums[index] * counts) for name, index, counts in prepared.stored)
        self._sums |= _added((name, found.sent_sums[index]) for name, index in prepared.cast)
        totals = _added(zip(prepared.names, found.sums[: prepared.num_held]))  # noqa: B905 (parts come last)
        sums = {name: (prepared.places[name], total) for name, total in totals.items()}
        return Inspection(sums, wrong, self._description.groups)

    def publish(self, layout: Layout, with_checksums: bool) -> Sequence[int]:
        """Write this rank's rows into the arena, cast to the dtypes of the slots."""
        places = self._arenas.slots_of(layout)
        prepared = self._writings.get(id(layout))
        if prepared is None or prepared.places is not places:
            writes = quantised_writes(self.writes, layout)
            prepared = self._writings[id(layout)] = _PreparedWriting(writes, layout, places)
        if prepared.targets:
            torch._foreach_copy_(prepared.targets, prepared.rows, non_blocking=True)
        sums: dict[str, list[tuple[torch.Tensor, int]]] = defaultdict(list)
        for slot, write, change, whole in prepared.computed:
            rows = change(write.rows).to(whole.dtype)
            write.of(whole, rows.shape).copy_(rows, non_blocking=True)
            if with_checksums:
                sums[slot.name].append((row_sums(rows, slot.word_bytes), write.first_row))
        own = {torch.device(self._topology.device)} if self._topology.is_cuda else set[torch.device]()
        for device in prepared.devices | own:
            torch.cuda.synchronize(device)
        return self.checksums_of(layout, sums) if with_checksums else []

    def checksums_of(
        self, layout: Layout, computed: Mapping[str, Sequence[tuple[torch.Tensor, int]]]
    ) -> list[int]:
        """Return the checksums of what this rank sends, given the `row_sums` of rows that it computes.

        The checksums of other rows are known from `inspect`, or computed here.
        """
        sums = dict(computed)
        for slot in layout.slots:
            if slot.name not in self._sums and slot.name not in sums:
                sums[slot.name] = [
                    (row_sums(write.rows.to(dtype_of(slot.dtype)), slot.word_bytes), write.first_row)
                    for write in self.writes[slot.name]
                ]
        names = [name for name, parts in sums.items() for _ in parts]
        parts = checksums([part for parts in sums.values() for part in parts])
        found = self._sums | _added(zip(names, parts, strict=True))
        return [found[slot.name] for slot in layout.slots]


@dataclass(frozen=True)
class _Description:
    """A module as `ModuleSource` sends it."""

    manifest: Sequence[TensorSpec]
    writes: Mapping[str, Sequence[HeldBox]]
    inspected: Mapping[str, Sequence[HeldBox]]
    """The blocks of all tensors whose values the ranks compare, sent or not."""
    buffers: frozenset[str]
    """The tensors that are buffers."""
    groups: Mapping[str, Sequence[str]]
    """As in `Inspection`."""


class _PreparedInspection:
    """The reader of `ModuleSource.inspect` for one layout."""

    def __init__(
        self, description: _Description, layout: Layout, with_checksums: bool, check_finite: bool
    ) -> None:
        self._layout = layout  # Its identity is the key, so it must stay alive.
        slots = {slot.name: slot for slot in layout.slots}
        quantised = quantised_writes(description.writes, layout)
        readings: list[Reading] = []
        parts: list[Reading] = []
        held_names = [name for name, boxes in description.inspected.items() for _ in boxes]
        part_names: list[str] = []
        self.stored: list[tuple[str, int, bool]] = []
        """Rows that are sent as they are stored: name, index in the reader, whether this rank's checksum counts."""
        self.cast: list[tuple[str, int]] = []
        """Rows that are sent in another dtype: name and index in the reader."""
        for name, shard in ((name, box) for name, boxes in description.inspected.items() for box in boxes):
            held, slot, first_held = shard.held, slots.get(name), shard.place[0]
            if slot is not None and slot.quantised is not None:
                # Quantised rows are finite if they are in the dtype of the forward pass.
                (shard,), slot = (
                    quantised[name],
                    replace(slot, dtype=slot.quantised.rounded_to, word_bytes=0),
                )
            if slot is None or (shard.change is not None and not held.is_floating_point()):
                readings.append(Reading(held, first_held))
                continue
            dtype = dtype_of(slot.dtype)
            if dtype == held.dtype:
                if shard.change is None:
                    self.stored.append((name, len(readings), shard.counts))
                readings.append(Reading(held, first_held, slot.word_bytes if shard.change is None else 0))
                continue
            is_all = len(shard.rows) == len(held)
            if shard.change is None:
                self.cast.append((name, len(readings) if is_all else len(held_names) + len(parts)))
            if is_all:
                readings.append(Reading(held, first_held, 0, dtype, slot.word_bytes))
            else:
                readings.append(Reading(held, first_held))
                part_names.append(name)
                parts.append(Reading(shard.rows, shard.first_row, 0, dtype, slot.word_bytes))
        self.names = [*held_names, *part_names]
        self.num_held = len(held_names)
        self.places = {name: boxes[0].place for name, boxes in description.inspected.items()}
        self.reader = Reader([*readings, *parts], sums=with_checksums, check_finite=check_finite)


class _PreparedWriting:
    """The copies of `ModuleSource.publish` into one arena."""

    def __init__(
        self, writes: Mapping[str, Sequence[HeldBox]], layout: Layout, places: Mapping[str, torch.Tensor]
    ) -> None:
        self._layout = layout  # Its identity is the key, so it must stay alive.
        self.places = places
        """The arena's tensors by name."""
        self.targets: list[torch.Tensor] = []
        self.rows: list[torch.Tensor] = []
        """The rows to copy to each of `targets`."""
        self.computed: list[tuple[Slot, HeldBox, Change, torch.Tensor]] = []
        """The other rows, how to compute them, and the whole tensors that they belong to."""
        sent = (write.rows for slot in layout.slots for write in writes[slot.name])
        self.devices = {rows.device for rows in sent if rows.is_cuda}
        """The CUDA devices of the rows: a model may move to one after the topology was chosen."""
        for slot in layout.slots:
            for write in writes[slot.name]:
                whole = places[slot.name]
                if write.change is None:
                    self.targets.append(write.of(whole, write.rows.shape))
                    self.rows.append(write.rows)
                else:
                    self.computed.append((slot, write, write.change, whole))


def quantised_writes(
    writes: Mapping[str, Sequence[HeldBox]], layout: Layout
) -> Mapping[str, Sequence[HeldBox]]:
    """Return what a rank sends by slot: its `writes`, and for quantised slots the rows with their `Quantiser`.

    Raises:
        WeightMismatch: This rank does not hold whole rows.
    """
    found, scales = dict(writes), dict[str, torch.Tensor]()
    for slot in layout.slots:
        if (how := slot.quantised) is not None:
            boxes = writes[how.source]
            # Scales come after their rows, perhaps in a later round, whose layout does not have the rows.
            is_cut = any(not how.is_scale and box.rows.shape[1] != slot.shape[1] for box in boxes)
            if len(boxes) > 1 or is_cut:
                raise WeightMismatch(
                    f"{how.source!r} cannot be quantised, because ranks hold parts of its rows. Train without "
                    "tensor_parallel and expert_parallel, or sample without quantization."
                )
            found[slot.name] = [replace(box, change=Quantiser(how, box.change, scales)) for box in boxes]
    return found


def then(first: Change, second: Change | None) -> Change:
    """Return the change that applies `first` and then `second`."""
    return first if second is None else lambda rows: second(first(rows))


def _added(totals: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Add up checksums by name."""
    found: dict[str, int] = {}
    for name, total in totals:
        found[name] = (found[name] + total) % 2**64 if name in found else total
    return found


def _with_cuts(spec: TensorSpec, tensor: torch.Tensor) -> TensorSpec:
    if not isinstance(tensor, DTensor):
        return spec
    length = uncut(tensor.shape, tensor.device_mesh, tensor.placements)
    return spec if length == math.prod(spec.shape[1:]) else replace(spec, uncut=length)


def held_boxes(tensor: torch.Tensor, topology: Topology, change: Change | None = None) -> tuple[HeldBox, ...]:
    """Return this rank's blocks of `tensor`, and the rows of them that it sends.

    The rank with a shard sends it. If several ranks of a node have the same shard (no sharding, or replicas), they send
    equal parts, and no byte is written twice. The ranks of each node must have the whole tensor together, because they
    fill that node's engine.
    """
    if isinstance(tensor, DTensor):
        shard = tensor.to_local().detach()
        boxes = boxes_of(tensor.shape, tensor.device_mesh, tensor.placements)
        index, count = _holders(tensor.device_mesh, tensor.placements, topology)
        blocks = [(box.of(shard), box.place) for box in boxes]
    else:
        index, count = topology.local_rank, topology.local_world_size
        blocks = [(tensor.detach(), (0,) * tensor.ndim)]
    found = []
    for held, place in blocks:
        if held.ndim == 0:
            held, place = held.reshape(1), (0,)
        size = -(-len(held) // count)
        start = min(index * size, len(held))
        rows = held[start : start + size]
        found.append(HeldBox(held, place, rows, place[0] + start, index == 0, change))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _holders(mesh: DeviceMesh, placements: tuple[Placement, ...], topology: Topology) -> tuple[int, int]:
    """Return this rank's index among the ranks of its node that hold the same shard, and their number."""
    near = {
        shard: [rank for rank in ranks if rank // topology.local_world_size == topology.node]
        for shard, ranks in ranks_by_shard(mesh, placements, topology.world_size).items()
    }
    if lacking := sum(not ranks for ranks in near.values()):
        raise WeightMismatch(
            f"node {topology.node} holds {len(near) - lacking} of the {len(near)} shards of a parameter, but its "
            f"engine needs all: with engines on {topology.num_nodes} nodes use sharding_strategy=HYBRID_SHARD (shards "
            "within each node, replicas over nodes) or NO_SHARD."
        )
    holders = near[own_shard(mesh, placements)]
    return holders.index(topology.rank), len(holders)


def warn_of_rounded_positions(model: Any) -> None:
    """Warn if ``.to(torch.bfloat16)`` rounded the frequencies of a rotary embedding, which no checkpoint contains."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    tensors = (getattr(module, "inv_freq", None) for module in modules)
    rounded = {
        tensor.dtype
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.bfloat16, torch.float16)
    }
    if rounded:
        warnings.warn(
            f"the model's rotary frequencies (inv_freq) are {rounded.pop()}, an engine's are float32. Trainer and "
            "engine compute different functions of the same weights, and the difference grows with the length of the "
            "text. Load the model with from_pretrained(..., dtype=...) instead of model.to(...).",
            stacklevel=2,
        )


def manifest_of(
    model: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor] | None = None,
    quantized: Mapping[str, Any] | None = None,
) -> tuple[TensorSpec, ...]:
    """List the `trainer_tensors` of `model` with their full shapes and checkpoint names.

    Pass its `tensors` and `quantized` layers if they are known.

    Raises:
        WeightMismatch: The checkpoint joins several parameters to one tensor, or computes with them.
    """
    quantized = quantized_layers(model) if quantized is None else quantized
    tensors = trainer_tensors(model, quantized) if tensors is None else tensors
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shapes |= {name: (layer.out_features, layer.in_features) for name, layer in quantized.items()}
    known = _MANIFESTS.get(model)
    if known is None or [(spec.name, spec.shape) for spec in known] != list(shapes.items()):
        pieces = checkpoint_pieces(model, shapes)

        def is_buffer(name: str) -> bool:
            return name not in quantized and not isinstance(tensors[name], torch.nn.Parameter)

        known = tuple(
            TensorSpec(name, shape, pieces.get(name, ()), is_buffer(name)) for name, shape in shapes.items()
        )
        _MANIFESTS[model] = known
    return known


def checkpoint_pieces(
    model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[Piece, ...]]:
    """Return the pieces of each parameter that is not one tensor of the same name in the checkpoint.

    A transformers model may use other names than its checkpoint, or one parameter for many tensors: the experts of a
    layer are one parameter with three dimensions, and one tensor per expert in the file. We run the model's own
    conversion, which ``save_pretrained`` uses, on tensors without data to find the pieces.
    """
    inner: Any = next((module for module in model.modules() if hasattr(module, "base_model_prefix")), None)
    if inner is None:
        return {}
    from transformers.core_model_loading import revert_weight_conversion

    wholes = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owners = {whole.untyped_storage()._cdata: name for name, whole in wholes.items()}
    with _ViewsInsteadOfCopies():
        converted: Any = revert_weight_conversion(inner, dict(wholes))
    found: dict[str, list[Piece]] = {name: [] for name in shapes}
    for name, tensor in converted.items():
        owner = owners.get(tensor.untyped_storage()._cdata)
        if owner is None:
            raise WeightMismatch(
                f"the checkpoint's {name!r} is computed from the trainer's parameters, so an update cannot send it. "
                "Train a model with the parameters of its checkpoint."
            )
        found[owner].append(
            Piece(name, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))
        )
    return {
        name: tuple(pieces) for name, pieces in found.items() if [piece.name for piece in pieces] != [name]
    }


class _ViewsInsteadOfCopies(TorchDispatchMode):
    """A mode in which ``contiguous()`` does nothing, because pieces must stay views of their parameter."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))
