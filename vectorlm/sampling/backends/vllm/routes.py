"""Capture the experts that vLLM's routers choose on CPU, where its model runner does not return them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from vectorlm.types import route_dtype

BLOCK = 16
"""Number of tokens in a remembered block; it divides every block size of vLLM's prefix cache."""


@dataclass
class Known:
    """The routes of one request: the experts of every token that the engine has read."""

    generation: int
    """Number of weight updates before the request; requests share cached blocks only within a generation."""
    rows: np.ndarray
    """The routes, [capacity, L, K]; the first `length` tokens are filled."""
    length: int = 0
    kept: int = 0
    """Number of tokens that a preempted request computes again; their first routes and log-probabilities count."""
    is_whole: bool = True
    """Whether the routes of all cached tokens were found."""
    keys: list[int] = field(default_factory=list)
    """The key of each remembered block; a key depends on all tokens up to the block's end."""

    def write(self, start: int, rows: np.ndarray) -> None:
        """Write the rows of tokens from `start` on, except those before `kept`."""
        self.is_whole &= start <= self.length
        first, end = max(start, self.kept), start + len(rows)
        if end > len(self.rows):
            spare = np.empty((2 * end, *self.rows.shape[1:]), self.rows.dtype)
            self.rows = np.concatenate([self.rows[: self.length], spare])
        self.rows[first:end] = rows[first - start :]
        # Less than before if draft tokens were rejected.
        self.length = max(end, self.kept)


class RouteCapture:
    """The routes of all requests in flight, and of the prefix cache's blocks since the last update.

    Chunks of a prompt are joined. Tokens found in the prefix cache have the routes with which they were computed.
    """

    def __init__(self, runner: Any) -> None:
        """Capture from the routers of a V1 model runner's model; `num_layers` is 0 if it has no experts."""
        self._runner, self._execute = runner, runner.execute_model
        # By router, because LoRA's layers pass on the attributes of the layer that they wrap.
        found = {
            id(_router(x)): x for x in runner.get_model().modules() if hasattr(_router(x), "set_capture_fn")
        }
        layers = sorted(found.values(), key=lambda layer: layer.layer_id)
        self.num_layers = len(layers)
        self._parts: list[np.ndarray | None] = [None] * len(layers)
        self._requests: dict[str, Known] = {}
        self._blocks: dict[int, np.ndarray] = {}
        self._generation = 0
        if layers:
            self._dtype = route_dtype(max(_router(layer).global_num_experts for layer in layers))
            self._top_k = max(_router(layer).top_k for layer in layers)
            for index, layer in enumerate(layers):
                _router(layer).set_capture_fn(partial(self._note, index))
            runner.execute_model = self._step

    def take(self, names: Sequence[str], is_wanted: bool) -> list[np.ndarray | None]:
        """Return the routes of requests that have ended, [T, L, K], and forget them; None if some are missing."""
        found = [self._requests.pop(name, None) for name in names]
        return [
            known.rows[: known.length].copy() if is_wanted and known is not None and known.is_whole else None
            for known in found
        ]

    def begin_generation(self) -> None:
        """Forget the blocks of the prefix cache, because the weights were replaced."""
        self._generation += 1
        self._blocks.clear()

    def _note(self, index: int, chosen: Any) -> None:
        self._parts[index] = chosen.numpy().astype(self._dtype)

    def _step(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model for the scheduled tokens, and note their routes."""
        self._parts = [None] * self.num_layers
        found = self._execute(scheduled, *args, **kwargs)
        if scheduled.total_num_scheduled_tokens:
            self._write(scheduled)
        return found

    def _write(self, scheduled: Any) -> None:
        batch, parts = self._runner.input_batch, [part for part in self._parts if part is not None]
        if len(parts) != self.num_layers:
            return  # These tokens have no routes, so their completions have none.
        rows = np.stack(parts, axis=1)
        new = {request.req_id: request for request in scheduled.scheduled_new_reqs}
        resumed = scheduled.scheduled_cached_reqs.resumed_req_ids
        # In the order of scheduling: a request may find blocks that an earlier one computes in the same step.
        for name, count in scheduled.num_scheduled_tokens.items():
            index = batch.req_id_to_index[name]
            first, done = (
                int(self._runner.query_start_loc.np[index]),
                int(batch.num_computed_tokens_cpu[index]),
            )
            if name in new:
                empty = np.empty((done + count + BLOCK, self.num_layers, self._top_k), self._dtype)
                self._requests[name] = Known(self._generation, empty)
                self._read_cached(name, done)
            if (known := self._requests.get(name)) is None:
                continue
            if name in resumed:
                known.kept = min(known.length, self._runner.requests[name].num_tokens - 1)
            known.write(done, rows[first : first + count])
            self._remember(name, known)

    def _read_cached(self, name: str, num_cached: int) -> None:
        """Begin a request with the routes of the tokens that vLLM found in its prefix cache."""
        known = self._requests[name]
        for index in range(num_cached // BLOCK):
            known.keys.append(self._key(name, known, index))
            if (block := self._blocks.get(known.keys[-1])) is None:
                return
            known.write(index * BLOCK, block)

    def _remember(self, name: str, known: Known) -> None:
        """Keep the blocks of the request that are complete."""
        state = self._runner.requests[name]
        # Drafts that may be rejected are not kept.
        for index in range(len(known.keys), min(known.length, state.num_tokens) // BLOCK):
            known.keys.append(self._key(name, known, index))
            block = known.rows[index * BLOCK : (index + 1) * BLOCK]
            if known.is_whole and known.generation == self._generation:
                self._blocks.setdefault(known.keys[-1], block.copy())

    def _key(self, name: str, known: Known, index: int) -> int:
        state, end = self._runner.requests[name], (index + 1) * BLOCK
        tokens = tuple(state.get_token_id(place) for place in range(index * BLOCK, end))
        images = tuple(x.identifier for x in state.mm_features if x.mm_position.offset < end)
        return hash((known.keys[-1] if known.keys else known.generation, tokens, images))


def _router(layer: Any) -> Any:
    return getattr(layer, "router", None)
