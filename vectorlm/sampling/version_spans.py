"""Which weights sampled which token of the requests that live through an update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class VersionSpans:
    """Remembers how far every running request was when its weights went."""

    def __init__(self) -> None:
        self._closed: dict[str, dict[int, list[tuple[int, int]]]] = {}
        """By request and completion: (tokens written, version that wrote the last of them), in order."""

    def close(self, engine: Any, version: int) -> None:
        """Note that what was written until now is of `version`; called between two engine steps."""
        for state in engine.output_processor.request_states.values():
            owner = state.external_req_id if state.parent_req is None else state.parent_req.external_req_id
            num_tokens = state.detokenizer.num_output_tokens()
            if num_tokens:
                spans = self._closed.setdefault(owner, {}).setdefault(state.request_index, [])
                spans.append((num_tokens, version))

    def of(self, output: Any, version: int) -> list[list[int]]:
        """Return the version of each token of each completion, and forget them; the last ones are of `version`."""
        closed = self._closed.pop(output.request_id, {})
        return [
            _spread(closed.get(completion.index, ()), len(completion.token_ids), version)
            for completion in output.outputs
        ]

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop requests that will not be asked for."""
        for name in request_ids:
            self._closed.pop(name, None)


def _spread(spans: Sequence[tuple[int, int]], num_tokens: int, version: int) -> list[int]:
    versions: list[int] = []
    for end, old in spans:
        versions += [old] * (end - len(versions))
    return versions + [version] * (num_tokens - len(versions))
