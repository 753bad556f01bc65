"""A batch under way, as every rank sees it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vectorlm.errors import EngineError, EngineTimeout
from vectorlm.sampling import messages as say
from vectorlm.sampling.hosts import outcome_of
from vectorlm.sampling.packed import PackedCompletions
from vectorlm.sampling.request_outputs import PackedOutputs
from vectorlm.sampling.share import CHUNKS_UNDER_WAY, EngineShare
from vectorlm.types import Completion, Prompt

if TYPE_CHECKING:
    import numpy as np

    from vectorlm.ranks.meeting import Meeting
    from vectorlm.sampling.channel import Channel
    from vectorlm.sampling.hosts import Hosts


class Submission:
    """The handle that `SamplingEngine.submit` returns; its calls are collective."""

    def __init__(
        self,
        name: str,
        prompts: Sequence[Prompt],
        sampling_params: Any,
        *,
        as_request_outputs: bool,
        hosts: Hosts,
        meeting: Meeting,
        channel: Channel | None,
        capacity: int,
        silence_s: float,
    ) -> None:
        """Put the batch into the queue; hosts begin with it at once.

        Args:
            name: Tells it from the engine's other batches.
            prompts: The same on every rank.
            sampling_params: One for all or one each.
            as_request_outputs: Whether vLLM's own objects will be asked for.
            hosts: The ranks that own a sampler.
            meeting: Where ranks exchange results.
            channel: The line to this rank's engine, on hosts.
            capacity: Sequences that one engine samples from at a time.
            silence_s: The longest silence that is tolerated from an engine.
        """
        self._hosts = hosts
        self._meeting = meeting
        self._silence_s = silence_s
        self._num_prompts = len(prompts)
        num_hosts = len(hosts.ranks)
        # Every engine starts with its fair share at most; beyond its capacity the faster one takes more.
        room = len(prompts) if num_hosts == 1 else min(capacity, -(-len(prompts) // num_hosts))
        self._size = room if num_hosts == 1 else max(1, room // CHUNKS_UNDER_WAY)
        self._share: EngineShare | None = None
        self._failure: Exception | None = None
        self._outcome: tuple[dict[int, Sequence[np.ndarray]], Exception | None] | None = None
        if not prompts:
            self._outcome = ({}, None)
        elif channel is not None:
            chunks = _chunks(prompts, sampling_params, as_request_outputs, self._size)
            draw = lambda: meeting.ticket(name)  # noqa: E731
            _, self._failure = outcome_of(lambda: self._begin(channel, draw, chunks, room))

    @property
    def is_settled(self) -> bool:
        """Whether its result, or its end, is known to every rank already."""
        return self._outcome is not None

    def done(self) -> bool:
        """Return whether `result` would not wait; errors of the engine are `result`'s to raise."""
        return self._outcome is not None or all(self._hosts.together("poll", self.is_finished_here))

    def is_finished_here(self) -> bool:
        """Return whether this rank's engine, if it has one, is through with its share; not a collective."""
        if self._outcome is not None or self._share is None:
            return True
        finished, error = outcome_of(self._share.is_finished)
        return error is not None or finished

    def result(self, timeout_s: float | None = None) -> list[list[Completion]]:
        """Wait for the completions of each prompt, in the order of the prompts; a second call returns the same.

        Args:
            timeout_s: The longest to wait, in seconds; as long as the engine shows life when omitted.

        Raises:
            EngineTimeout: They were not finished within `timeout_s`; they go on, and `result` may be called again.
            EngineError: The engine raised (the text holds its traceback), died, or the requests were cancelled.
        """
        return self.part(0, self._num_prompts, timeout_s)

    def part(self, first: int, last: int, timeout_s: float | None = None) -> list[list[Completion]]:
        """Return the completions of prompts `first` to `last` (exclusive); otherwise like `result`."""
        found = []
        for place, arrays in sorted(self.arrays(timeout_s).items()):
            start = place * self._size
            stop = min(start + self._size, self._num_prompts)
            if start < last and stop > first:
                packed = PackedCompletions.from_arrays(arrays)
                found += packed.unpack(max(first, start) - start, min(last, stop) - start)
        return found

    def request_outputs(self) -> list[Any]:
        """Return vLLM's own objects, for a batch that was begun with `as_request_outputs`."""
        chunks = (PackedOutputs.from_arrays(arrays).unpack() for _, arrays in sorted(self.arrays().items()))
        outputs = [output for chunk in chunks for output in chunk]
        for index, output in enumerate(outputs):
            output.request_id = str(index)
        return outputs

    def arrays(self, timeout_s: float | None = None) -> dict[int, Sequence[np.ndarray]]:
        """Return the packed answers by chunk, on every rank; raises as `result` does."""
        if self._outcome is None:
            self._outcome = self._exchange(None if timeout_s is None else time.monotonic() + timeout_s)
        answers, error = self._outcome
        if error is not None:
            raise error
        return answers

    def cancel(self) -> None:
        """Take the requests back; `result` then raises `EngineError`. Does nothing once a result is there."""
        if self._outcome is None:
            self.take_back()
            self._outcome = ({}, EngineError("these requests were cancelled."))

    @contextlib.contextmanager
    def taken_back_on_error(self) -> Iterator[None]:
        """Abort the batch if its caller stops waiting: nobody could ask for the result any more."""
        try:
            yield
        except BaseException:
            self.take_back()
            raise

    def take_back(self) -> None:
        """Abort this rank's share; not a collective."""
        if self._share is not None:
            self._share.take_back()

    def _begin(
        self, channel: Channel, draw: Callable[[], int], chunks: Sequence[say.Generate], room: int
    ) -> None:
        self._share = EngineShare(channel, draw, chunks, room)

    def _exchange(self, deadline_s: float | None) -> tuple[dict[int, Sequence[np.ndarray]], Exception | None]:
        """Give every host's answers to every rank; a time-out raises, for it leaves the batch under way."""
        mine, failure = outcome_of(lambda: self._collect(deadline_s))
        answers: dict[int, Sequence[np.ndarray]] = {}
        errors = []
        for host in self._hosts.ranks:
            counts = {place: len(arrays) for place, arrays in (mine or {}).items()}
            flat = [array for arrays in (mine or {}).values() for array in arrays]
            (sizes, error), shared = self._meeting.share("sample", (counts, failure), flat, root=host)
            rest = iter(shared)
            answers |= {place: [next(rest) for _ in range(count)] for place, count in sizes.items()}
            errors += [error] if error is not None else []
        # An error that ends the batch comes before a time-out that does not.
        errors.sort(key=lambda error: type(error) is EngineTimeout)
        if errors and type(errors[0]) is EngineTimeout:
            raise errors[0]
        return answers, errors[0] if errors else None

    def _collect(self, deadline_s: float | None) -> dict[int, Sequence[np.ndarray]]:
        if self._share is None:
            if self._failure is not None:
                raise self._failure
            return {}
        return self._share.collect(self._silence_s, deadline_s)


def _chunks(
    prompts: Sequence[Prompt], sampling_params: Any, as_request_outputs: bool, size: int
) -> list[say.Generate]:
    each = isinstance(sampling_params, Sequence) and len(sampling_params) == len(prompts)
    return [
        say.Generate(
            prompts[start : start + size],
            sampling_params[start : start + size] if each else sampling_params,
            as_request_outputs,
        )
        for start in range(0, len(prompts), size)
    ]
