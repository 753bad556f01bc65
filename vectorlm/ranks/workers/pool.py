"""A rank's pool of worker processes: started on demand, ended if late, replaced if lost."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from vectorlm.errors import WorkerLost, WorkersDied
from vectorlm.ranks.process_end import how_it_ended, require_own_process
from vectorlm.ranks.workers.supervisor import END, ERROR, HEADER, frame

MAX_DEATHS = 3
MAX_AUTO_SIZE = 8
DRAIN_S = 0.5
"""Time for the last answers of a dead worker to arrive, in seconds."""
CLOSE_S = 5.0
LOST, UNREADABLE = "lost", "unreadable"
Result = TypeVar("Result")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Worker:
    """One worker process; `WorkerPool` creates it."""

    def __init__(self, pool: WorkerPool, pid: int, streams: Streams) -> None:
        self.pid = pid
        self.loss: WorkerLost | None = None
        """The error of a lost worker; None while it works."""
        self.is_shared = False
        """Whether it runs many asynchronous jobs; a cancelled job does not end such a worker."""
        self._pool = pool
        self._reader, self._writer = streams
        self._numbers = itertools.count()
        self._jobs: dict[int, asyncio.Queue[tuple[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())
        self.ending: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it can take a job."""
        return self.loss is None and not self._jobs

    async def run(self, function: str, *arguments: Any, limit_s: float | None = None) -> AsyncIterator[Any]:
        """Call ``function(*arguments)`` in the worker, and yield the values of the generator that it returns.

        Args:
            function: Its name, like ``package.module:NAME``.
            *arguments: Its arguments; they and the values must pickle.
            limit_s: Longest time between two values, in seconds; the first value has no limit.

        Raises:
            WorkerLost: The process ended, or was ended because it was late; then its cause is a TimeoutError.
            RuntimeError: The function raised an error, or a value has a type that this process cannot import.
        """
        if self.loss is not None:
            raise self.loss
        message = frame((number := next(self._numbers), function, pickle.dumps(arguments)))
        queue = self._jobs[number] = asyncio.Queue[tuple[str, Any]]()
        self._writer.write(message)
        has_value, is_over, limit = False, False, None
        try:
            while True:
                try:
                    async with asyncio.timeout(limit):
                        kind, value = await queue.get()
                except TimeoutError as late:
                    self._pool.end(self, f"no answer within {limit:g} s")
                    assert self.loss is not None
                    raise self.loss from late
                is_over = kind in (END, ERROR, LOST)
                if kind == END:
                    return
                if is_over or kind == UNREADABLE:
                    raise value
                if has_value:
                    self._pool.deaths = 0
                has_value, limit = True, limit_s
                yield value
        finally:
            del self._jobs[number]
            if not is_over and self.is_shared and self.loss is None:
                self._writer.write(frame((number, "", b"")))
            elif not is_over:
                # Otherwise it would continue a job that nobody waits for.
                self._pool.end(self, "its job was cancelled")

    async def ask(self, function: str, *arguments: Any) -> Any:
        """Call `run` with a generator of one value, and return the value."""
        (value,) = [value async for value in self.run(function, *arguments)]
        return value

    async def ended(self, code: int) -> None:
        """Read the last answers of an ended process, then mark it as lost."""
        await asyncio.wait([self._reading], timeout=DRAIN_S)
        hint = ", as the kernel does when memory runs out" if code == -9 else ""
        self.lose(f"its process {how_it_ended(code)}{hint}")

    def lose(self, reason: str) -> None:
        """Mark the worker as lost, and fail its jobs."""
        if self.loss is None:
            self.loss = WorkerLost(reason)
            self._reading.cancel()
            self._writer.transport.abort()
            for queue in self._jobs.values():
                queue.put_nowait((LOST, self.loss))

    async def _read(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                number, kind, data = pickle.loads(await self._reader.readexactly(size))
                if number not in self._jobs:
                    continue
                try:
                    value = _Unpickler(io.BytesIO(data)).load()
                except Exception as error:  # The value's class may raise anything.
                    kind, value = UNREADABLE, RuntimeError(f"{type(error).__name__}: {error}")
                self._jobs[number].put_nowait((kind, value))


class _Unpickler(pickle.Unpickler):
    """An unpickler that names a type which cannot be imported here, such as a class in the user's file."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except Exception as error:
            raise TypeError(
                f"its answer has an object of the type {name!r}, which only its worker can import. Return texts, "
                "numbers, lists and dicts."
            ) from error


class WorkerPool:
    """Up to `size` processes that run the user's code: rewards, environments.

    A supervisor, a fresh interpreter without torch, forks them; see `vectorlm.ranks.workers.supervisor`. All coroutines
    of the pool and its workers run on one event loop, in a separate thread:

    >>> async def add(pool, a, b):
    ...     async with pool.worker() as worker:
    ...         async for total in worker.run("my_module:add", a, b, limit_s=5.0):
    ...             return total
    >>> pool.submit(add(pool, 1, 2)).result()  # doctest: +SKIP
    """

    def __init__(self, size: int, log_path: Path | None = None) -> None:
        """Start the supervisor; workers print to `log_path`, or to the output of this process."""
        self.size = size
        self.deaths = 0
        """Number of workers that crashed since the last answer of any worker."""
        self._last_death = ""
        self._pid, self._log_path = os.getpid(), log_path
        self._free = asyncio.Semaphore(size)
        self._idle: list[Worker] = []
        self._workers: dict[int, Worker] = {}
        self._starting: deque[tuple[asyncio.Future[Worker], Streams]] = deque()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="workers", daemon=True)
        self._thread.start()
        self._loop.call_soon_threadsafe(self._start_supervisor)

    @staticmethod
    def auto_size(num_ranks: int = 1) -> int:
        """Return one rank's share of the cores, from 2 to `MAX_AUTO_SIZE`."""
        return min(max(len(os.sched_getaffinity(0)) // num_ranks, 2), MAX_AUTO_SIZE)

    @property
    def output(self) -> str:
        """The place of the workers' output, and of the stacks of late calls."""
        return str(self._log_path or "the output of this process")

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine on the pool's event loop; may be called in any thread."""
        require_own_process(self._pid)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @contextlib.asynccontextmanager
    async def worker(self) -> AsyncIterator[Worker]:
        """Lend a worker; end it if the block ends before its job.

        Raises:
            WorkersDied: `MAX_DEATHS` workers crashed without an answer in between.
        """
        async with self._free:
            while self._idle and self._idle[-1].loss is not None:
                self._idle.pop()
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                yield worker
            finally:
                if worker.is_idle:
                    self._idle.append(worker)
                else:
                    self.end(worker, "its job was cancelled")

    async def start_shared(self) -> Worker:
        """Start a worker for many asynchronous jobs at a time, in addition to the `size` others; the pool ends it."""
        worker = await self._start()
        worker.is_shared = True
        return worker

    def end(self, worker: Worker, reason: str) -> None:
        """End a worker's process and all processes that it has started."""
        if worker.loss is None and self._control is not None:
            self._control.send(str(worker.pid).encode())
        worker.lose(reason)

    def close(self) -> None:
        """End the workers; safe to call twice."""
        if self._loop.is_closed():
            return
        self.submit(self._cancel_all()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                # The kernel ends the workers together with the supervisor.
                self._process.kill()
                self._process.wait()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _start(self) -> Worker:
        while True:
            if self.deaths >= MAX_DEATHS:
                raise WorkersDied(
                    f"{self.deaths} workers died without an answer in between; the last: {self._last_death}. "
                    f"Read their output in {self.output}."
                )
            if self._control is None:
                self._start_supervisor()
            assert self._control is not None
            ours, theirs = socket.socketpair()
            with theirs:
                streams = await asyncio.open_connection(sock=ours)
                self._starting.append((started := self._loop.create_future(), streams))
                socket.send_fds(self._control, [b"start"], [theirs.fileno()])
            with contextlib.suppress(WorkerLost):
                return await started

    def _start_supervisor(self) -> None:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        with theirs:
            descriptor = theirs.fileno()
            arguments = [str(descriptor), str(self._pid), str(self._log_path or "")]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "vectorlm.ranks.workers.supervisor", *arguments],
                # The ranks need the cores. A rank's temporary folder is deleted even if a worker is killed.
                env={
                    "OMP_NUM_THREADS": "1",
                    **os.environ,
                    "PYTHONPATH": path,
                    "TMPDIR": tempfile.gettempdir(),
                },
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                # The ranks handle Ctrl-C; the supervisor ends with its rank.
                start_new_session=True,
            )
        # Set after the start: if the start fails, the next caller that needs a worker tries again.
        self._control = control
        self._loop.add_reader(control, self._hear)

    def _hear(self) -> None:
        """Read a message of the supervisor; if it has ended, all workers are lost."""
        assert self._control is not None
        assert self._process is not None
        try:
            what, *numbers = self._control.recv(64).split()
        except BlockingIOError:
            return
        except (ValueError, ConnectionError):
            self._loop.remove_reader(self._control)
            self._control.close()
            self._control = None
            reason = f"its supervisor {how_it_ended(self._process.wait())}"
            self._count_death(reason)
            for worker in self._workers.values():
                worker.lose(reason)
            self._workers.clear()
            while self._starting:
                started, (_, writer) = self._starting.popleft()
                writer.transport.abort()
                if not started.done():
                    started.set_exception(WorkerLost(reason))
            return
        pid = int(numbers[0])
        if what == b"started":
            started, streams = self._starting.popleft()
            self._workers[pid] = worker = Worker(self, pid, streams)
            if started.done():
                self.end(worker, "nobody waits for it")
            else:
                started.set_result(worker)
            return
        worker = self._workers.pop(pid)
        if worker.loss is None:
            self._count_death(f"its process {how_it_ended(int(numbers[1]))}")
            worker.ending = self._loop.create_task(worker.ended(int(numbers[1])))

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks) if tasks else None

    def _count_death(self, reason: str) -> None:
        self.deaths += 1
        self._last_death = reason


async def together(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run coroutines and return their results; the first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
