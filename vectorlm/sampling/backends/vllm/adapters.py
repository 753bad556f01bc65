"""The adapters in vLLM's LoRA slots: names, versions, and the requests that use them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from vectorlm.errors import EngineError
from vectorlm.sampling.weights.lora_receive import POLICY_ID, adapter_request
from vectorlm.sampling.weights.plan import ADAPTER, BASE
from vectorlm.types import POLICY


class Adapters:
    """The adapters of one engine. Without factors an adapter is the base and has no slot; the policy keeps its slot."""

    def __init__(self, num_slots: int, free: Callable[[int], None]) -> None:
        """Start with the policy; `free` frees the slot of vLLM's adapter number. Without LoRA there are no slots."""
        self._num_slots, self._free = num_slots, free
        self.versions: dict[str, int] = {POLICY: -1}
        """The version of each adapter's last load."""
        self.requests: dict[str, Any] = {}
        """vLLM's ``LoRARequest`` of each adapter with a slot."""
        if num_slots:
            self.versions[BASE] = -1
            # From the start (as zeros), because the first adapter must also reach requests in flight.
            self.requests[POLICY] = adapter_request(POLICY, POLICY_ID)
        self._ids = itertools.count(POLICY_ID + 1)
        self._num_loads: Counter[str] = Counter()
        self.adapter_of: dict[str, str] = {}
        """The adapter of each request that is not for the policy."""
        self.keep_blocks = False
        """Whether requests used other adapters than the policy; updates of one adapter then keep the prefix cache."""

    def begin(self, request: str, adapter: str) -> str:
        """Note a new request; return the salt that hides the cached blocks of other weights from it.

        vLLM distinguishes adapters by their names.
        """
        if adapter != POLICY:
            self.adapter_of[request], self.keep_blocks = adapter, True
        return f"weights {self._num_loads[BASE]}.{self._num_loads[adapter]}"

    def version_of(self, request: str) -> int:
        """Return the version of the weights that a request is sampled with now."""
        return self.versions[self.adapter_of.get(request, POLICY)]

    def require_slot(self, name: str) -> None:
        """Raise `EngineError` unless the adapter has a slot, or one is free."""
        if name not in self.requests and len(self.requests) >= self._num_slots:
            raise EngineError(
                f"max_loras={self._num_slots}: the engine needs a free slot for the adapter {name!r}, and its slots "
                f"hold {', '.join(self.requests)}. Free one with remove_adapter(name), or use a larger max_loras."
            )

    def id_for(self, adapter: str, weight_sets: Sequence[str]) -> int:
        """Return vLLM's number of the adapter that is loaded next; 0 if it needs no slot."""
        if adapter != POLICY and ADAPTER not in weight_sets:
            self._free_slot(adapter)
        elif adapter not in self.requests and ADAPTER in weight_sets:
            self.requests[adapter] = adapter_request(adapter, next(self._ids))
        request = self.requests.get(adapter)
        return 0 if request is None else int(request.lora_int_id)

    def loaded(self, adapter: str, version: int, weight_sets: Sequence[str]) -> None:
        """Note a load that has succeeded."""
        brought = {adapter, *({BASE} & {*weight_sets})}
        self._num_loads.update(brought)
        for name in brought & {adapter, *self.versions}:
            self.versions[name] = version

    def remove(self, name: str) -> None:
        """Forget an adapter that no request uses, and free its slot."""
        self.versions.pop(name, None)
        self._free_slot(name)

    def keep_policy(self) -> None:
        """Forget all other adapters: their weights are lost."""
        for name in self.versions.keys() - {POLICY, BASE}:
            self.remove(name)

    def _free_slot(self, name: str) -> None:
        if (request := self.requests.pop(name, None)) is not None:
            self._free(request.lora_int_id)
