"""What the trainer sends: the names, shapes and places of its tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vectorlm.errors import WeightMismatch

if TYPE_CHECKING:
    import torch

BASE = "base"
"""The weight set with the model's own tensors; all others lie on top of it."""


HEAD = "lm_head.weight"
"""The output layer, in most families."""

MAX_NAMES = 8
"""As many names an error lists of each kind."""


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor, as a strided piece of a trainer parameter that holds several."""

    name: str
    """Its name in the Hugging Face checkpoint."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements of the whole, contiguous parameter."""
    offset: int
    """Its first element in that parameter."""


@dataclass(frozen=True)
class TensorSpec:
    """One trainer parameter or buffer, whole."""

    name: str
    """Its name in the trainer's model."""
    shape: tuple[int, ...]
    """Its full, unsharded shape."""
    pieces: tuple[Piece, ...] = ()
    """The checkpoint tensors that it holds; none where it is one tensor of the same name."""
    is_buffer: bool = False
    """Whether it is sent only to engines that load such a tensor: others compute it themselves."""


@dataclass(frozen=True)
class Slot:
    """Where one trainer parameter lives in the arena."""

    name: str
    """Its name in the trainer's model."""
    shape: tuple[int, ...]
    """Its full shape; the slot is contiguous, row by row."""
    dtype: str
    """The engine's dtype, as torch spells it without the module: the trainer casts while writing."""
    offset_bytes: int
    """First byte of the slot in the arena."""
    word_bytes: int = 0
    """Size of the words that its checksum adds, so narrow that no worker's piece cuts one; 0 for the widest."""
    round: int = 0
    """Which filling of the arena it crosses in, from 0; one that is smaller than the model is filled several times."""

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
    """The arena's table of contents, made by the engine and the same on every rank."""

    path: str
    """The file that every process maps; empty where the engines pull out of the ranks' own memory."""
    num_bytes: int
    """Size of the arena."""
    slots: tuple[Slot, ...]
    """One slot per trainer parameter, in the trainer's order."""
    num_copied_bytes: int = 0
    """Bytes that the engine copies out of the arena at each update; the rest it computes with where they lie."""

    def rounds(self) -> list[Layout]:
        """Return what each filling of the arena holds, in order; mostly one."""
        numbers = dict.fromkeys(slot.round for slot in self.slots)
        if len(numbers) < 2:
            return [self]
        slots = (tuple(slot for slot in self.slots if slot.round == number) for number in numbers)
        return [replace(self, slots=each) for each in slots]


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype called `name`, such as ``bfloat16``."""
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype` without its module."""
    return str(dtype).removeprefix("torch.")


def require_same(sent: Sequence[TensorSpec], held: Sequence[TensorSpec | Slot]) -> None:
    """Raise `WeightMismatch` unless the trainer sends what the engine holds; the text lists names and shapes."""
    names = {each.name for each in held}
    theirs = {each.name: tuple(each.shape) for each in sent if not each.is_buffer or each.name in names}
    ours = {each.name: tuple(each.shape) for each in held}
    if list(theirs.items()) == list(ours.items()):
        return
    if theirs == ours:
        differences = "the same ones in another order: the order must stay as it was."
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
        f"the trainer sends {len(theirs)} tensors, the engine holds {len(ours)}; {differences}"
    )


def naming_advice(theirs: Collection[str], ours: Collection[str]) -> str:
    """Say what may be wrong: the names are those of a wrapper or of a part of the model, or one side ties its head."""
    if {*theirs} ^ {*ours} == {HEAD}:
        is_theirs = HEAD in theirs
        tied, untied = ("engine", "trainer") if is_theirs else ("trainer", "engine")
        return (
            f" The {tied}'s output layer is its embedding (tie_word_embeddings), the {untied}'s is a tensor of its "
            "own: tie both or neither."
        )
    if prefix := _prefix_over(theirs, ours):
        return f" The model is wrapped: its weights lie under {prefix!r}. Pass that module: wrapper.{prefix[:-1]}."
    if prefix := _prefix_over(ours, theirs):
        return f" This is a part of the engine's model: pass the module that holds it as {prefix[:-1]!r}."
    first_parts = ({name.partition(".")[0] for name in names} for names in (theirs, ours))
    if own := sorted(set.difference(*first_parts)):
        return (
            f" The engine has no {shortened(own)}: if that is a layer of yours, such as a value head, keep it beside "
            "the model in a wrapper, and pass wrapper.lm."
        )
    return ""


def _prefix_over(longer: Collection[str], shorter: Collection[str]) -> str:
    """Return what most names of `longer` have before a name of `shorter`; empty if the two share a name."""
    if not set(shorter).isdisjoint(longer):
        return ""
    prefixes: Counter[str] = Counter()
    for name in longer:
        dots = (place + 1 for place, letter in enumerate(name) if letter == ".")
        prefixes.update([name[:dot] for dot in dots if name[dot:] in shorter][:1])
    return prefixes.most_common(1)[0][0] if prefixes else ""


def shortened(names: Sequence[str]) -> str:
    """Return a list as text, with its first names only if it is long."""
    more = len(names) - MAX_NAMES
    return f"{list(names[:MAX_NAMES])}{f' and {more} more' if more > 0 else ''}"
