"""The receivers in all workers of one engine, spoken to as one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from vectorlm.errors import ChecksumMismatch
from vectorlm.weights.arena import path_of, reserve
from vectorlm.weights.layout import Intake, place_slots
from vectorlm.weights.pieces import Pieces
from vectorlm.weights.plan import Layout, TensorSpec

Call = Callable[..., list[tuple[Any, Exception | None]]]
"""An engine's ``collective_rpc``: calls a method of `WeightExtension` in every worker, and lists their outcomes."""


class Receivers:
    """Swaps the weights of an engine of one worker or of several; lives where the engine is driven from.

    The arena belongs to this process. Every worker maps it and takes its own pieces of every tensor, so one update
    of the ranks serves all of them.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._layout: Layout | None = None

    def prepare(self, kind: str) -> str:
        """Make the receivers for the loaded model; return the kind that they chose, `live` or `packed`."""
        kinds: list[str] = self._ask("vectorlm_prepare", kind)
        return kinds[0]

    def connect(self, manifest: Sequence[TensorSpec], arena_path: str | None = None) -> Layout:
        """Match the trainer's tensors with the engine's, and make the arena that they will travel through.

        Args:
            manifest: What the trainer sends.
            arena_path: The arena of another engine of this node, which is then shared; None makes one.

        Raises:
            WeightMismatch: The two sides do not hold the same model; nothing has changed.
        """
        intakes: list[Intake] = self._ask("vectorlm_describe", tuple(manifest))
        pieces = Pieces(manifest, intakes)
        num_bytes, slots = place_slots(manifest, intakes[0])
        slots = tuple(
            dataclasses.replace(slot, word_bytes=pieces.word_bytes(spec, slot.dtype))
            for spec, slot in zip(manifest, slots, strict=True)
        )
        layout = Layout(arena_path or path_of(reserve(num_bytes)), num_bytes, slots)
        copied = sum(self._ask("vectorlm_attach", layout))
        self._pieces, self._layout = pieces, dataclasses.replace(layout, num_copied_bytes=copied)
        return self._layout

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
        assert self._layout is not None, "connect comes before load"
        sums: list[list[int]] = self._ask("vectorlm_load", version, expected is not None)
        if expected is not None:
            names = (slot.name for slot in self._layout.slots)
            wrong = self._pieces.wrong(dict(zip(names, expected, strict=True)), sums)
            if wrong:
                raise ChecksumMismatch(
                    f"after the update {len(wrong)} of {len(expected)} tensors in the engine are not those that the "
                    f"trainer sent: {wrong[:8]}{' and more' if len(wrong) > 8 else ''}."
                )
        return time.perf_counter() - start

    def _ask(self, method: str, *args: Any) -> list[Any]:
        return ask_all(self._call, method, *args)


def ask_all(call: Call, method: str, *args: Any) -> list[Any]:
    """Call `method` in every worker; return what each answered, or raise the first error."""
    outcomes = call(method, args=args)
    for _, error in outcomes:
        if error is not None:
            raise error
    return [answer for answer, _ in outcomes]
