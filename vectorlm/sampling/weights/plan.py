"""Records of the weights that cross from trainer to engine: names, shapes and places."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vectorlm.errors import WeightMismatch

if TYPE_CHECKING:
    import torch

BASE = "base"
"""The weight set with the model's own tensors, and the name of the model without an adapter."""
ADAPTER = "adapter"
"""The weight set with the factors of one adapter, which the update names."""


HEAD = "lm_head.weight"
"""The output layer of most families."""

MAX_NAMES = 8
"""Maximum number of names in a list of an error message."""


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor that is a strided piece of a trainer parameter."""

    name: str
    """Name in the Hugging Face checkpoint."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Stride in elements of the whole contiguous parameter."""
    offset: int
    """Index of the first element in that parameter."""


@dataclass(frozen=True)
class TensorSpec:
    """A whole parameter or buffer of the trainer."""

    name: str
    """Name in the trainer's model."""
    shape: tuple[int, ...]
    """Full, unsharded shape."""
    pieces: tuple[Piece, ...] = ()
    """The checkpoint tensors in it; empty if it is one tensor of the same name."""
    is_buffer: bool = False
    """Whether only engines that load this buffer receive it; other engines compute it."""
    uncut: int = 0
    """Ranks cut rows of dimension 0 at multiples of this many elements only; 0 if they do not cut rows."""


@dataclass(frozen=True)
class Quantised:
    """How ranks compute the numbers of a slot that an engine holds in 8 bits (`vectorlm.sampling.weights.quantise`)."""

    source: str
    """Name of the trainer's tensor."""
    dtype: str
    """The dtype of the rows in the engine: ``float8_e4m3fn`` or ``int8``."""
    rounded_to: str
    """The dtype of the forward pass, which the rows are rounded to first."""
    is_scale: bool = False
    """Whether the slot holds the scales of the rows, and not the rows."""


@dataclass(frozen=True)
class Slot:
    """The place of one trainer parameter in the arena."""

    name: str
    """Name in the trainer's model."""
    shape: tuple[int, ...]
    """Full shape; the slot is contiguous."""
    dtype: str
    """The engine's dtype, such as ``bfloat16``; the trainer casts while it writes."""
    offset_bytes: int
    """First byte of the slot in the arena."""
    word_bytes: int = 0
    """Size of the words of its checksum, small enough that no worker's piece cuts a word; 0 for the widest."""
    round: int = 0
    """The round in which it is sent, from 0; an arena smaller than the model takes several rounds."""
    quantised: Quantised | None = None
    """How its numbers are computed; None if they are the tensor's own."""

    @property
    def num_bytes(self) -> int:
        """Size of the slot."""
        return dtype_of(self.dtype).itemsize * math.prod(self.shape)

    @property
    def row_size(self) -> int:
        """Number of elements in one step of dimension 0."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class Layout:
    """The arena's table of contents. The engine creates it; it is the same on every rank."""

    path: str
    """The file that every process maps; empty if the engines read the ranks' own memory."""
    num_bytes: int
    """Size of the arena."""
    slots: tuple[Slot, ...]
    """One slot per trainer parameter, in the trainer's order; then the scales of a quantised engine."""
    num_copied_bytes: int = 0
    """Bytes that the engine copies out of the arena at each update; it computes with the others in the arena."""

    @functools.cached_property
    def tensors(self) -> Sequence[Slot]:
        """The slots of the trainer's own tensors, without scales."""
        return [slot for slot in self.slots if slot.quantised is None or not slot.quantised.is_scale]

    @functools.cached_property
    def num_sent_bytes(self) -> int:
        """Bytes that each update sends."""
        return sum(slot.num_bytes for slot in self.slots)

    @functools.cached_property
    def rounds(self) -> Sequence[Layout]:
        """The layout of each round, in order; usually there is one."""
        numbers = dict.fromkeys(slot.round for slot in self.slots)
        if len(numbers) < 2:
            return [self]
        slots = (tuple(slot for slot in self.slots if slot.round == number) for number in numbers)
        return [replace(self, slots=slots_of_round) for slots_of_round in slots]


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype called `name`, such as ``bfloat16``."""
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype` without its module."""
    return str(dtype).removeprefix("torch.")


def require_same(sent: Sequence[TensorSpec], expected: Sequence[TensorSpec | Slot]) -> None:
    """Raise `WeightMismatch` unless the trainer sends the engine's tensors; the text lists names and shapes."""
    ours = {spec.name: tuple(spec.shape) for spec in expected}
    theirs = {spec.name: tuple(spec.shape) for spec in sent if not spec.is_buffer or spec.name in ours}
    if list(theirs.items()) == list(ours.items()):
        return
    if theirs == ours:
        differences = "the same ones in another order; the order must not change."
    else:
        missing = [name for name in ours if name not in theirs]
        unexpected = [name for name in theirs if name not in ours]
        reshaped = [
            f"{name} {theirs[name]} for {shape}"
            for name, shape in ours.items()
            if theirs.get(name, shape) != shape
        ]
        differences = (
            f"missing: {shortened(missing)}; unexpected: {shortened(unexpected)}; other shapes: "
            f"{shortened(reshaped)}.{naming_advice(theirs, ours)}"
        )
    raise WeightMismatch(
        f"the trainer sends {len(theirs)} tensors, the engine has {len(ours)}; {differences}"
    )


def naming_advice(theirs: Collection[str], ours: Collection[str]) -> str:
    """Return a hint: the names belong to a wrapper or a part of the model, or only one side ties its head."""
    if {*theirs} ^ {*ours} == {HEAD}:
        is_theirs = HEAD in theirs
        tied, untied = ("engine", "trainer") if is_theirs else ("trainer", "engine")
        return (
            f" The {tied}'s output layer is its embedding (tie_word_embeddings), and the {untied}'s is another tensor. "
            "Tie both or neither."
        )
    if prefix := _prefix_over(theirs, ours):
        return f" The model is wrapped: its weights are under {prefix!r}. Pass that module: wrapper.{prefix[:-1]}."
    if prefix := _prefix_over(ours, theirs):
        return f" This is a part of the engine's model. Pass the module that has it as {prefix[:-1]!r}."
    first_parts = ({name.partition(".")[0] for name in names} for names in (theirs, ours))
    if own := sorted(set.difference(*first_parts)):
        return (
            f" The engine has no {shortened(own)}. If that is your own layer, such as a value head, keep it beside the "
            "model in a wrapper, and pass wrapper.lm."
        )
    return ""


def _prefix_over(longer: Collection[str], shorter: Collection[str]) -> str:
    """Return the most common prefix of names in `longer` before a name in `shorter`; empty if they share a name."""
    if not set(shorter).isdisjoint(longer):
        return ""
    prefixes: Counter[str] = Counter()
    for name in longer:
        dots = (place + 1 for place, letter in enumerate(name) if letter == ".")
        prefixes.update([name[:dot] for dot in dots if name[dot:] in shorter][:1])
    return prefixes.most_common(1)[0][0] if prefixes else ""


def shortened(names: Sequence[str]) -> str:
    """Return a list as text; a long list is cut after its first names."""
    more = len(names) - MAX_NAMES
    return f"{list(names[:MAX_NAMES])}{f' and {more} more' if more > 0 else ''}"
