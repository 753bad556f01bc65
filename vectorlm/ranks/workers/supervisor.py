"""The supervisor process of a rank's workers, and the loop of a worker.

`WorkerPool` starts it as ``python -m vectorlm.ranks.workers.supervisor <socket> <parent> <log>``. It forks workers,
ends them with all their children, and logs their output. It imports no user code, so it has one thread, and forks in
milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import inspect
import io
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from vectorlm.errors import VectorLMError
from vectorlm.plugin import load_plugin, raised_at

HEADER = struct.Struct(">Q")
STACK_SIGNAL = signal.SIGUSR1
VALUE, END, ERROR = "value", "end", "error"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S = 0.25
END_WITHIN_S = 3.0
STACK_S = 0.1
"""Time for a hanging worker to write its stack, in seconds."""
MAX_LOG_BYTES = 16 * 2**20
"""Largest size of the log and ``<log>.1`` together; at half of it, the log replaces ``<log>.1``."""
MAX_LINE_BYTES = 2**16
"""Length in bytes above which output without a line end is logged as a line."""
OOM_SCORE = "800"
"""The workers' ``oom_score_adj``: if memory runs out, the kernel ends a worker and not the rank."""


class OutputLog:
    """A log file of limited size that keeps the last output of the workers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: io.FileIO | None = None

    def write(self, data: bytes) -> None:
        """Append to the file; the first write creates it."""
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
        if self._file.tell() + len(data) > MAX_LOG_BYTES // 2:
            self._file.close()
            # Another rank may have moved it.
            with contextlib.suppress(FileNotFoundError):
                self._path.replace(f"{self._path}.1")
            self._file = self._path.open("ab", buffering=0)
        with contextlib.suppress(OSError):  # A full disk is reported by more important writers.
            self._file.write(data)


class Supervisor:
    """The loop that forks, ends and reaps workers for the pool, until the pool's process is gone."""

    def __init__(self, control: socket.socket, log: OutputLog | None) -> None:
        self._control, self._log = control, log
        self._selector = selectors.DefaultSelector()
        self._workers: set[int] = set()
        self._printed: dict[int, tuple[int, bytearray]] = {}
        """The pid and the incomplete last line of each worker, by its output pipe."""

    def run(self, parent_pid: int) -> None:
        """Serve until `parent_pid` closes the socket or is gone; end all workers then."""
        # Processes that a worker leaves behind become children of this process, and end with it.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        woken, wake = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        for file in (self._control, woken):
            self._selector.register(file, selectors.EVENT_READ)
        try:
            while os.getppid() == parent_pid:
                ready = [key.fileobj for key, _ in self._selector.select(POLL_S)]
                for output in self._printed.keys() & ready:
                    self._keep_output(output)
                if woken in ready:
                    os.read(woken, 512)
                    self._reap()
                if self._control in ready and not self._obey():
                    break
        except ConnectionError:
            pass  # The pool is gone.
        finally:
            self._end_all()
            for output in list(self._printed):
                self._keep_output(output, is_last=True)

    def _obey(self) -> bool:
        message, descriptors, *_ = socket.recv_fds(self._control, 64, 1)
        if descriptors:
            output, printed = os.pipe()
            pid = os.fork()
            if pid == 0:
                self._become_worker(descriptors[0], printed)
            os.close(descriptors[0])
            os.close(printed)
            os.set_blocking(output, False)
            self._selector.register(output, selectors.EVENT_READ)
            self._printed[output] = pid, bytearray()
            self._workers.add(pid)
            self._control.send(f"started {pid}".encode())
        elif message:
            self._end(int(message))
        return bool(message)

    def _become_worker(self, descriptor: int, printed: int) -> None:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            with contextlib.suppress(OSError):
                Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
            self._control.close()
            if self._log is not None:
                os.dup2(printed, 1)
                os.dup2(printed, 2)
            serve(socket.socket(fileno=descriptor))
        finally:
            os._exit(0)

    def _end(self, pid: int) -> None:
        if pid not in self._workers:
            return
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            # faulthandler writes the stack, even from inside C code.
            os.kill(pid, STACK_SIGNAL)
            time.sleep(STACK_S)
            family = psutil.Process(pid).children(recursive=True)
            os.killpg(pid, signal.SIGKILL)
            for process in family:
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def _reap(self) -> None:
        """Reap ended workers, and end the rest of their process groups."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in self._workers:
                # Before it is reaped, because afterwards another process may get its pid.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            if ended.si_pid in self._workers:
                self._workers.remove(ended.si_pid)
                self._control.send(f"ended {ended.si_pid} {os.waitstatus_to_exitcode(status)}".encode())

    def _end_all(self) -> None:
        deadline = time.monotonic() + END_WITHIN_S
        while (family := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
            for process in family:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.01)

    def _keep_output(self, output: int, is_last: bool = False) -> None:
        """Log the lines of a worker with its pid; close the pipe at its end, or if `is_last`."""
        pid, line = self._printed[output]
        with contextlib.suppress(BlockingIOError):
            while data := os.read(output, 2**16):
                line += data
                *lines, line[:] = line.split(b"\n")
                if len(line) > MAX_LINE_BYTES:
                    lines.append(line[:])
                    line.clear()
                self._log_lines(pid, lines)
            is_last = True
        if is_last:
            self._log_lines(pid, [line] if line else [])
            self._selector.unregister(output)
            os.close(output)
            del self._printed[output]

    def _log_lines(self, pid: int, lines: list[bytearray]) -> None:
        if self._log is not None and lines:
            self._log.write(b"".join(b"[%d] %s\n" % (pid, line) for line in lines))


def frame(value: Any) -> bytes:
    """Return a message as bytes, preceded by its length."""
    data = pickle.dumps(value)
    return HEADER.pack(len(data)) + data


def _bypass_proxies() -> None:
    """Reach servers of this machine, such as the run's gateway, without a proxy."""
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))


def serve(connection: socket.socket) -> None:
    """Answer requests until the pool is gone; an answer has the number of its request.

    Generators run one after the other, asynchronous generators concurrently. A request without a function name cancels
    the request with its number.
    """
    # An idle worker has no late call and writes no stack. Not SIG_IGN, which children would inherit.
    signal.signal(STACK_SIGNAL, lambda *_: None)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _bypass_proxies()
    pid, loop = os.getpid(), asyncio.new_event_loop()
    loop.add_reader(connection, loop.stop)
    tasks: dict[int, asyncio.Task[None]] = {}

    def send(number: int, kind: str, value: Any = None) -> None:
        if os.getpid() != pid:
            os._exit(0)  # This is a fork that the user's code made.
        try:
            # The pool may lack the value's type, and must still read the number.
            connection.sendall(frame((number, kind, pickle.dumps(value))))
        except ConnectionError:
            os._exit(0)  # The pool is gone.

    @contextmanager
    def reported(number: int) -> Iterator[None]:
        try:
            yield
        except VectorLMError as error:
            send(number, ERROR, error)
        except BaseException as error:
            send(number, ERROR, RuntimeError(raised_at(error)))

    @contextmanager
    def watched() -> Iterator[None]:
        faulthandler.register(STACK_SIGNAL, all_threads=False)
        try:
            yield
        finally:
            if not tasks:
                faulthandler.unregister(STACK_SIGNAL)

    async def carry_out(number: int, values: AsyncIterator[Any]) -> None:
        with reported(number):
            with watched():
                try:
                    async for value in values:
                        send(number, VALUE, value)
                finally:
                    del tasks[number]
            send(number, END)

    def read(size: int) -> bytes:
        data = b""
        # A signal may cut a read short.
        while len(data) < size and (more := connection.recv(size - len(data), socket.MSG_WAITALL)):
            data += more
        return data

    while True:
        # The loop stops at each request, because synchronous functions may run their own loop. It also runs without
        # tasks, to answer the pings of connections that a function has opened.
        loop.run_forever()
        if not (header := read(HEADER.size)):
            return
        number, name, arguments = pickle.loads(read(*HEADER.unpack(header)))
        if not name:
            if number in tasks:
                tasks[number].cancel()
            continue
        with reported(number):
            with watched():
                function, given = load_plugin(name), pickle.loads(arguments)
                if inspect.isasyncgenfunction(function):
                    tasks[number] = loop.create_task(carry_out(number, function(*given)))
                    continue
                for value in function(*given):
                    send(number, VALUE, value)
            send(number, END)


if __name__ == "__main__":
    log = OutputLog(Path(sys.argv[3])) if sys.argv[3] else None
    Supervisor(socket.socket(fileno=int(sys.argv[1])), log).run(int(sys.argv[2]))
