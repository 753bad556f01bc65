"""Run the rollouts of one engine in a thread, while its rank trains."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from vectorlm.data.encoding import encode
from vectorlm.errors import EngineError, VectorLMError
from vectorlm.rl.rollouts.sampler import GroupSampler, SampledGroup, Task
from vectorlm.sampling.handle import Hear, LocalRequests
from vectorlm.types import Completion, Prompt

Outcome = SampledGroup | Exception
CLOSE_S = 5.0
"""Seconds to wait until the thread ends."""
IDLE_S = 0.005
"""Seconds between two checks for new requests, if the engine samples in the rank itself."""


class Actor:
    """An asyncio loop in a thread of an engine rank; every rollout is a coroutine in this loop.

    All ranks number the tasks in the order of submission. An actor draws the next number when it is below its
    concurrency limit; rollouts that wait for their environment do not count towards the limit.
    """

    def __init__(
        self,
        requests: LocalRequests,
        sampler: GroupSampler,
        *,
        draw: Callable[[], int],
        tokenizer: Callable[[], Any],
        limit: ConcurrencyLimit,
    ) -> None:
        """Start the thread; `draw` returns the next task's number; `limit` bounds the sequences in the engine."""
        self._requests, self._sampler, self._draw, self._tokenizer = requests, sampler, draw, tokenizer
        self._limit = limit
        self._tasks: dict[int, Task] = {}
        """Tasks that this actor has not drawn, by number; another actor may have drawn them."""
        self._num_submitted = 0
        self._drawn: int | None = None
        """A number that was drawn before its task was submitted."""
        self._share = 0
        self._running: dict[int, asyncio.Task[None]] = {}
        self._reserved: dict[int, int] = {}
        """Sequences of the running groups that have not asked the engine yet, by the groups' numbers."""
        self._num_asking = self._num_rollouts = 0
        self._most: tuple[int, ...] = (0, 0, 0)
        self._flush_is_due = False
        self._news = threading.Condition()
        self._outcomes: dict[int, Outcome] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="actor", daemon=True)
        self._thread.start()

    def submit(self, tasks: Mapping[int, Task], still_open: Collection[int], share: int) -> None:
        """Add tasks to the queue; this actor runs at most `share` of the tasks that are `still_open`."""
        self._loop.call_soon_threadsafe(self._extend, tasks, set(still_open), share)

    def cancel(self, numbers: Sequence[int]) -> None:
        """Cancel tasks of any rank; when this returns, their requests are cancelled."""
        asyncio.run_coroutine_threadsafe(self._cancel(list(numbers)), self._loop).result()
        self._requests.forget()

    def wait(self, at_least: int, timeout_s: float) -> None:
        """Wait until `at_least` tasks have finished on this rank; an inline engine samples in this call.

        Raises:
            EngineError: The engine is dead or silent.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            is_sampling = self._requests.advance()
            with self._news:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or len(self._outcomes) >= at_least:
                    return
                if not is_sampling:
                    self._news.wait(min(left_s, IDLE_S) if self._requests.is_inline else left_s)

    def take(self) -> tuple[dict[int, Outcome], tuple[int, ...]]:
        """Return new outcomes; and the maxima of the rollouts in flight, the sequences in the engine, and the limit."""
        with self._news:
            outcomes, self._outcomes = self._outcomes, {}
            most, self._most = self._most, (self._num_rollouts, self._num_asking, self._limit.size)
        return outcomes, most

    def close(self) -> None:
        """Cancel all tasks and end the thread."""
        if self._loop.is_closed():
            return
        # The thread may be waiting for the store of a dead rank. Then it ends with the process.
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._cancel(list(self._running)), self._loop).result(CLOSE_S)
            self._requests.forget()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _count(self, num_asking: int) -> None:
        self._num_asking += num_asking
        now = self._num_rollouts, self._num_asking, self._limit.size
        self._most = tuple(map(max, self._most, now))

    def _flush(self) -> None:
        self._flush_is_due = False
        self._requests.flush()

    def _extend(self, tasks: Mapping[int, Task], still_open: Collection[int], share: int) -> None:
        self._num_submitted += len(tasks)
        waiting = {number: task for number, task in self._tasks.items() if number in still_open}
        self._tasks = {**waiting, **tasks}
        self._share = share
        self._start_more()

    def _start_more(self) -> None:
        """Start tasks while a whole group fits below the limit, or the engine is idle."""
        size = self._sampler.settings.group_size
        self._limit.has_waiting = False
        while len(self._running) < self._share:
            if self._num_asking and self._num_asking + size > self._limit.size:
                self._limit.has_waiting = bool(self._tasks)
                return
            if self._drawn is None:
                self._drawn = self._draw()
            if self._drawn >= self._num_submitted:
                return
            number, self._drawn = self._drawn, None
            if (task := self._tasks.pop(number, None)) is None:
                # The task was cancelled.
                continue
            self._num_rollouts += size
            self._count(size)
            self._reserved[number] = size
            self._running[number] = self._loop.create_task(self._carry_out(number, task))
            # A task that is cancelled before its first step runs no `finally`.
            self._running[number].add_done_callback(functools.partial(self._end, number))

    def _end(self, number: int, _: object = None) -> None:
        """Free the place of a group, if it still has one."""
        if self._running.pop(number, None) is not None:
            self._num_asking -= self._reserved.pop(number, 0)
            self._num_rollouts -= self._sampler.settings.group_size
            self._start_more()

    async def _carry_out(self, number: int, task: Task) -> None:
        async def ask(
            prompt: Prompt, params: dict[str, Any], hear: Hear | None = None
        ) -> Sequence[Completion]:
            self._count(params["n"] - self._reserved.pop(number, 0))
            try:
                completions = await self._ask(prompt, params, hear)
                num_tokens = sum(len(completion.token_ids) for completion in completions)
                self._limit.answered(num_tokens, time.monotonic())
                return completions
            finally:
                self._num_asking -= params["n"]
                # Start more tasks later: with its last answer this group ends, and frees its place.
                self._loop.call_soon(self._start_more)

        try:
            outcome: Outcome = await self._sampler.sample(task, ask)
        except VectorLMError as error:
            outcome = error
        except Exception as error:
            outcome = EngineError(f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}")
        finally:
            self._end(number)
        with self._news:
            self._outcomes[number] = outcome
            self._news.notify_all()

    async def _ask(self, prompt: Prompt, params: dict[str, Any], hear: Hear | None) -> Sequence[Completion]:
        future = self._requests.ask(encode(prompt, self._tokenizer), params, hear)
        if not self._flush_is_due:
            # The flush also sends other requests of this round of the event loop.
            self._flush_is_due = True
            self._loop.call_soon(self._flush)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._requests.take_back(future)
            raise

    async def _cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._tasks.pop(number, None)
        running = [self._running[number] for number in numbers if number in self._running]
        for rollout in running:
            rollout.cancel()
        await asyncio.gather(*running, return_exceptions=True)


GROWTH, GAIN = 1.5, 1.1
"""Factor by which the limit is raised, and smallest gain of throughput with which the new limit is kept."""
MIN_ANSWERS, MIN_WINDOW_S = 64, 1.0
MAX_REST = 16


class ConcurrencyLimit:
    """Concurrency limit for rollouts: raised while throughput keeps growing, measured in windows."""

    def __init__(self, size: int, most: int | None = None) -> None:
        """Start at `size` sequences and grow to at most `most`; None keeps `size`."""
        self.size, self._most = size, most
        self.has_waiting = False
        """Whether a group waits because of the limit; only then is throughput measured."""
        self._kept, self._kept_rate = size, 0.0
        self._rest = self._num_resting = 1
        """Number of windows between two attempts, and number of windows until the next attempt."""
        self._begin(0.0)

    def answered(self, num_tokens: int, now_s: float) -> None:
        """Count an answer of the engine; raise or lower the limit at the end of a window."""
        if self._most is None or not self.has_waiting:
            self._begin(now_s)
            return
        self._num_answers += 1
        self._num_tokens += num_tokens
        took_s = now_s - self._began_s
        # Answers arrive whole. A window must be long enough for about two answers per sequence.
        if took_s < MIN_WINDOW_S or self._num_answers < max(2 * self.size, MIN_ANSWERS):
            return
        self._look(self._num_tokens / took_s)
        self._begin(now_s)

    def _look(self, rate: float) -> None:
        """Choose the next limit from a window's throughput."""
        if self.size == self._kept:
            self._kept_rate = rate
            self._num_resting -= 1
        elif rate > GAIN * self._kept_rate:
            self._kept, self._kept_rate = self.size, rate
            self._rest, self._num_resting = 1, 0
        else:
            self.size = self._kept
            self._rest = self._num_resting = min(2 * self._rest, MAX_REST)
        if self._num_resting <= 0 and self._most is not None:
            self.size = min(int(GROWTH * self._kept) + 1, self._most)

    def _begin(self, now_s: float) -> None:
        self._began_s, self._num_answers, self._num_tokens = now_s, 0, 0
