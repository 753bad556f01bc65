"""vLLM's ``RequestOutput`` objects as flat arrays: what is long travels as numbers, the rest as a skeleton."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vectorlm.contracts import RequestOutput
from vectorlm.engine.packed import ABSENT, Ragged, ints
from vectorlm.errors import EngineError

NO_RANK = -1


@dataclass(frozen=True)
class PackedOutputs:
    """Finished requests of vLLM; reached by name from `vectorlm.engine.packed`."""

    skeletons: np.ndarray
    """uint8: the pickled objects without token ids, log-probabilities and texts."""
    prompts: Ragged
    """int32 token ids, one row per object."""
    tokens: Ragged
    """int32 token ids, one row per completion."""
    texts: Ragged
    """UTF-8, one row per completion."""
    position_counts: np.ndarray
    """int32: of each list of log-probabilities its positions, `ABSENT` where there is no list; prompts' first."""
    candidates: Ragged
    """int32: the token ids that have a log-probability, one row per position."""
    logprobs: np.ndarray
    """float32, one per candidate."""
    ranks: np.ndarray
    """int32, one per candidate, `NO_RANK` where vLLM gives none."""
    decoded: Ragged
    """UTF-8, one row per candidate."""

    @classmethod
    def pack(cls, outputs: Sequence[RequestOutput]) -> PackedOutputs:
        """Pack vLLM's own objects; they are emptied on the way.

        Raises:
            EngineError: Another backend than vLLM finished them.
        """
        if any(output.raw is None for output in outputs):
            raise EngineError(
                "this inference engine has no vllm.RequestOutput objects: call sample instead of generate."
            )
        return pack_request_outputs([output.raw for output in outputs])

    def arrays(self) -> list[np.ndarray]:
        """Return all that this holds as plain arrays; `from_arrays` turns them back."""
        ragged = (self.prompts, self.tokens, self.texts, self.candidates, self.decoded)
        flat = [array for each in ragged for array in (each.lengths, each.values)]
        return [self.skeletons, self.position_counts, self.logprobs, self.ranks, *flat]

    @classmethod
    def from_arrays(cls, arrays: Sequence[np.ndarray]) -> PackedOutputs:
        """Rebuild from what `arrays` returned."""
        skeletons, position_counts, logprobs, ranks, *flat = arrays
        prompts, tokens, texts, candidates, decoded = (
            Ragged(*flat[place : place + 2]) for place in range(0, len(flat), 2)
        )
        return cls(skeletons, prompts, tokens, texts, position_counts, candidates, logprobs, ranks, decoded)

    def unpack(self, first: int = 0, last: int | None = None) -> list[Any]:
        """Return vLLM's objects `first` to `last` (exclusive)."""
        outputs = pickle.loads(self.skeletons.tobytes())
        completions = [completion for output in outputs for completion in output.outputs]
        for output, prompt in zip(outputs, self.prompts.rows(), strict=True):
            output.prompt_token_ids = None if prompt is None else prompt.tolist()
        columns = zip(completions, self.tokens.rows(), self.texts.texts(), strict=True)
        for completion, tokens, text in columns:
            completion.token_ids, completion.text = tokens.tolist() if tokens is not None else [], text
        positions = self._positions()
        holders = [(output, "prompt_logprobs") for output in outputs]
        holders += [(completion, "logprobs") for completion in completions]
        for (holder, name), count in zip(holders, self.position_counts.tolist(), strict=True):
            # The skeleton holds an empty list, or vLLM's own flat kind, which takes the same calls.
            for _ in range(max(count, 0)):
                getattr(holder, name).append(next(positions))
        return outputs[first:last]  # type: ignore[no-any-return]

    def _positions(self) -> Iterator[dict[int, Any] | None]:
        from vllm.logprobs import Logprob

        values = zip(self.logprobs.tolist(), self.ranks.tolist(), self.decoded.texts(), strict=True)
        for row in self.candidates.rows():
            if row is None:
                yield None
                continue
            entries = {}
            for token in row.tolist():
                logprob, rank, text = next(values)
                entries[token] = Logprob(logprob, None if rank == NO_RANK else rank, text)
            yield entries


def pack_request_outputs(outputs: Sequence[Any]) -> PackedOutputs:
    """Pack finished ``RequestOutput`` objects; they are emptied on the way."""
    completions = [completion for output in outputs for completion in output.outputs]
    prompts = Ragged.of((output.prompt_token_ids for output in outputs), np.int32)
    tokens = Ragged.of((completion.token_ids for completion in completions), np.int32)
    texts = Ragged.of_texts(completion.text for completion in completions)
    lists = [output.prompt_logprobs for output in outputs]
    lists += [completion.logprobs for completion in completions]
    positions = [position for each in lists if each is not None for position in each]
    entries = [entry for position in positions for entry in (position or {}).values()]
    for output in outputs:
        output.prompt_token_ids = None
        output.prompt_logprobs = _emptied(output.prompt_logprobs)
    for completion in completions:
        completion.token_ids, completion.text = [], ""
        completion.logprobs = _emptied(completion.logprobs)
    return PackedOutputs(
        skeletons=np.frombuffer(pickle.dumps(list(outputs)), np.uint8),
        prompts=prompts,
        tokens=tokens,
        texts=texts,
        position_counts=ints(ABSENT if each is None else len(each) for each in lists),
        candidates=Ragged.of(
            (None if position is None else tuple(position) for position in positions), np.int32
        ),
        logprobs=np.fromiter((entry.logprob for entry in entries), np.float32),
        ranks=ints(NO_RANK if entry.rank is None else entry.rank for entry in entries),
        decoded=Ragged.of_texts(entry.decoded_token for entry in entries),
    )


def _emptied(logprobs: Any) -> Any:
    return None if logprobs is None else type(logprobs)()
