"""Record where an engine's own loader puts each checkpoint tensor."""

from __future__ import annotations

import bisect
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vectorlm.errors import WeightMismatch
from vectorlm.sampling.weights.plan import Quantised, TensorSpec, naming_advice

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
"""An engine model's ``load_weights``, which takes (checkpoint name, tensor) pairs."""
MAX_LETTERS = 200
"""Length of a loader's error text: vLLM lists all parameters after the cause."""
_FACTORY = re.compile(r"::(new_|empty|\w+_like$)")
"""Operations that read only shape, dtype and device of a tensor. Operations not listed here raise."""


@dataclass(frozen=True)
class View:
    """A strided piece of a tensor, counted in elements from the tensor's first one."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, piece: torch.Tensor, offset: int) -> View:
        """Describe `piece`, which starts `offset` elements into the tensor."""
        return cls(tuple(piece.shape), tuple(piece.stride()), offset)

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this piece of the contiguous `tensor`."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)

    def narrow(self, dim: int, start: int, length: int) -> View:
        """Narrow the piece as `torch.Tensor.narrow` does."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return View(shape, self.stride, self.offset + start * self.stride[dim])

    @property
    def is_whole(self) -> bool:
        """Whether the piece is one contiguous run of elements."""
        return self.stride == torch.empty(self.shape, device="meta").stride()

    @property
    def count(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def span(self) -> range:
        """The range from the first to the last element, including elements of other pieces between them."""
        steps = zip(self.shape, self.stride, strict=True)
        reach = sum((size - 1) * stride for size, stride in steps)
        return range(self.offset, self.offset + reach + 1 if self.count else self.offset)


@dataclass(frozen=True)
class Copy:
    """A copy that the loader makes: from a piece of a trainer's parameter to a piece of an engine's parameter."""

    source: str
    """Name of the trainer's parameter."""
    source_view: View
    parameter: str
    """Name of the engine's parameter."""
    parameter_view: View


@dataclass(frozen=True)
class LoadPlan:
    """The parts of the trainer's tensors that one worker of the engine takes."""

    copies: tuple[Copy, ...]
    """The copies that the worker's loader makes."""
    dtypes: Mapping[str, str]
    """The dtype of each of the worker's parameters, such as ``bfloat16``."""
    sizes: Mapping[str, int]
    """The number of elements of each of the worker's parameters."""
    computed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By source that the loader computes with: the parameters that it fills. An update copies the whole source into a
    separate tensor, with the name `staged_name`, and runs the loader on it."""
    quantised: Mapping[str, Quantised] = field(default_factory=dict)
    """By source of a copy: how its numbers are computed from a trainer's tensor, for a quantised engine."""

    @classmethod
    def whole(cls, manifest: Sequence[TensorSpec], dtype_of_tensor: Callable[[str], str]) -> LoadPlan:
        """Return the plan that copies every tensor to a parameter of its name, in `dtype_of_tensor(name)`."""
        views = {spec.name: View.of(torch.empty(spec.shape, device="meta"), 0) for spec in manifest}
        return cls(
            tuple(Copy(name, view, name, view) for name, view in views.items()),
            {name: dtype_of_tensor(name) for name in views},
            {name: view.count for name, view in views.items()},
        )


def staged_name(source: str) -> str:
    """Return the name, among an engine's tensors, of the copy of a source that the loader computes with."""
    return f"staged {source}"


class Recording(NamedTuple):
    """The pieces of the trainer's tensors that a loader copies, and the tensors that it computes with."""

    copies: list[Copy]
    """The pieces that it copies."""
    computed: dict[str, list[tuple[str, View]]]
    """By source that it computes with: the pieces of parameters that it fills."""


def record_loading(
    load_weights: Loader, parameters: Mapping[str, torch.Tensor], manifest: Sequence[TensorSpec]
) -> Recording:
    """Run the engine's loader on tensors without data and record what it would do; no weight changes.

    This works for every architecture, because the loader itself runs. Most loaders only slice and copy (fused
    projections, padded vocabularies, experts). Some compute with a tensor, such as :math:`-e^{A}` for Mamba-2. A worker
    of a parallel engine takes only its pieces.

    Raises:
        WeightMismatch: The loader rejects a name or a shape, or it computes with several tensors at once.
    """
    recorder = _Recorder(parameters)
    for spec in manifest:
        source = torch.empty(spec.shape, device="meta")
        recorder.watch(spec.name, source)
        try:
            with recorder:
                load_weights(checkpoint_tensors(spec, source))
                recorder.require_nothing_kept()
        except WeightMismatch:
            raise
        except Exception as error:
            if spec.is_buffer:
                continue
            raise WeightMismatch(
                f"the trainer sends {spec.name!r} with shape {spec.shape}, which the engine's loader rejects: "
                f"{type(error).__name__}: {textwrap.shorten(str(error), MAX_LETTERS, placeholder=' …')}"
                + naming_advice([other.name for other in manifest], parameters)
            ) from error
    return Recording(
        [copy for copy in recorder.copies if copy.source not in recorder.computed],
        {
            name: [
                *pieces,
                *((copy.parameter, copy.parameter_view) for copy in recorder.copies if copy.source == name),
            ]
            for name, pieces in recorder.computed.items()
            # This loader may only change a tensor that another worker takes.
            if pieces or any(copy.source == name for copy in recorder.copies)
        },
    )


def join_copies(
    copies: Sequence[Copy], manifest: Sequence[TensorSpec], parameters: Mapping[str, torch.Tensor]
) -> list[Copy]:
    """Replace the copies of one source by a single copy if together they keep the source's order.

    A loader fills a fused parameter part by part even from a source with the same fusion: q, k and v of a Phi-3, or all
    experts of a layer. A single copy can become a view of the arena and needs one checksum.
    """
    of_source: dict[str, list[Copy]] = defaultdict(list)
    for copy in copies:
        of_source[copy.source].append(copy)
    shapes = {spec.name: spec.shape for spec in manifest}
    joined: list[Copy] = []
    for name, parts in of_source.items():
        first = parts[0]
        shift = first.parameter_view.offset - first.source_view.offset
        whole = View.of(torch.empty(shapes[name], device="meta"), 0)
        if parameters[first.parameter].is_contiguous() and _are_laid_down(parts, shift, whole.count):
            joined.append(Copy(name, whole, first.parameter, View(whole.shape, whole.stride, shift)))
        else:
            joined.extend(parts)
    return joined


def _are_laid_down(parts: Sequence[Copy], shift: int, count: int) -> bool:
    """Whether `parts` are runs of one parameter, all shifted by `shift`, that cover a source of `count` elements."""
    end = 0
    for part in sorted(parts, key=lambda part: part.source_view.offset):
        is_run = part.source_view.is_whole and part.parameter_view.is_whole
        is_moved = part.parameter_view.offset - part.source_view.offset == shift
        if (
            part.parameter != parts[0].parameter
            or not (is_run and is_moved)
            or part.source_view.offset != end
        ):
            return False
        end += part.source_view.count
    return end == count


def checkpoint_tensors(spec: TensorSpec, whole: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the loader's input: the parameter itself, or views of its pieces."""
    pieces = [(piece.name, View(piece.shape, piece.stride, piece.offset).on(whole)) for piece in spec.pieces]
    return pieces or [(spec.name, whole)]


class _Recorder(TorchDispatchMode):
    """A recorder of what a loader does with the watched tensor; it prevents all writes to parameters."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        self.computed: dict[str, list[tuple[str, View]]] = {}
        # By address, not by storage: parameters that are views of an arena share one storage.
        self._owners = sorted((tensor.data_ptr(), name) for name, tensor in parameters.items())
        self._parameters = parameters
        self._filled: dict[str, list[tuple[str, View]]] = defaultdict(list)
        self._name = ""
        self._pieces: dict[int, tuple[torch.Tensor, View | None]] = {}
        """By storage: the source (None), and contiguous copies of its pieces. They are kept, because no other tensor
        may get their storage."""
        self._derived: dict[int, StorageWeakRef] = {}
        """The tensors that the loader computes from the source, by storage."""

    def watch(self, name: str, source: torch.Tensor) -> None:
        self._name, self._pieces = name, {source.untyped_storage()._cdata: (source, None)}
        self._derived = {}

    def require_nothing_kept(self) -> None:
        """Raise if the loader has kept a computed tensor, which an update could not replace."""
        self._pieces = {}
        if any(not storage.expired() for storage in self._derived.values()):
            self._refuse_to_keep()

    def _refuse_to_keep(self) -> None:
        raise WeightMismatch(
            f"the engine keeps what it computes from {self._name!r} outside of its parameters. An update would not "
            "replace it, so this model family cannot be updated."
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            self._record(*args[:2])
            return args[0]
        values = tree_leaves((args, kwargs))
        is_computing = not func.is_view and not _FACTORY.search(func._schema.name)
        is_derived = is_computing and any([self._reads(value) for value in values])
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            if (found := self._owner_of(args[0])) is not None:
                if is_derived:
                    self.computed[self._name].append(found)
                return args[0]
            if is_derived and args[0].untyped_storage()._cdata not in self._derived:
                self._refuse_to_keep()
            if args[0].untyped_storage()._cdata in self._pieces:
                self.computed.setdefault(self._name, [])
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default and (view := self._in_source(args[0])) is not None:
            self._pieces[result.untyped_storage()._cdata] = result, view
        for leaf in tree_leaves(result) if is_derived else ():
            if not isinstance(leaf, torch.Tensor):
                self._refuse_to_keep()
            self._derived[leaf.untyped_storage()._cdata] = StorageWeakRef(leaf.untyped_storage())
        return result

    def _in_source(self, value: torch.Tensor) -> View | None:
        """Return the piece of the source that `value` is, or holds a copy of; None for other tensors."""
        whole, view = self._pieces.get(value.untyped_storage()._cdata, (None, None))
        if whole is None or view is None:
            return None if whole is None else View.of(value, int(value.storage_offset()))
        is_whole = value.shape == whole.shape and value.stride() == whole.stride()
        return view if is_whole and value.storage_offset() == 0 else None

    def _record(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if (found := self._owner_of(target)) is None:
            raise WeightMismatch(f"the engine loads {self._name!r} into a tensor that is not a parameter.")
        owner, view = found
        if (piece := self._in_source(source)) is None:
            self.computed.setdefault(self._name, []).append((owner, view))
        else:
            self.copies.append(Copy(self._name, piece, owner, view))
        self._filled[owner].append((self._name, view))

    def _reads(self, value: Any) -> bool:
        """Whether the loader computes with `value`, which it has loaded from the source; note the source then.

        Raises:
            WeightMismatch: `value` was loaded from another source.
        """
        if not isinstance(value, torch.Tensor):
            return False
        if value.untyped_storage()._cdata in self._derived:
            return True
        if (found := self._owner_of(value)) is None:
            return False
        (owner, view), reads = found, False
        for source, filled in self._filled[owner]:
            if view.span.start >= filled.span.stop or filled.span.start >= view.span.stop:
                continue
            if source != self._name:
                raise WeightMismatch(
                    f"the engine computes with {owner!r}, which holds {source!r}, while it loads {self._name!r}. An "
                    "update sends one tensor at a time, so this model family cannot be updated."
                )
            self.computed.setdefault(source, [])
            reads = True
        return reads

    def _owner_of(self, value: Any) -> tuple[str, View] | None:
        """Return the parameter that contains `value`, and the piece; None for other values."""
        if not isinstance(value, torch.Tensor) or value.is_meta:
            return None
        place = bisect.bisect_right(self._owners, value.data_ptr(), key=lambda owner: owner[0]) - 1
        if place >= 0:
            start, name = self._owners[place]
            offset = (value.data_ptr() - start) // value.element_size()
            if offset < self._parameters[name].numel():
                return name, View.of(value, offset)
        return None
