"""A start without the imports: sampler processes forked from a process that has loaded the backend's libraries.

On the rank's side `WarmStart` starts that process and has it fork; on the other `fork_on_request` forks, and tells how
each process ended, which only the process that forked it can learn.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from vectorlm.dist.topology import Topology
from vectorlm.engine.environment import sampler_environment
from vectorlm.errors import EngineError

POLL_S = 0.25
NUMBER = struct.Struct("i")


class WarmStart:
    """Loads vLLM, or another backend, once; engines that are given it start in the time that their model takes.

    It needs as much memory as the imports, some hundred MB, and ends with the process that made it. For notebooks and
    tests, which build one engine after the other:

    >>> warm = WarmStart()  # doctest: +SKIP
    >>> engine = SamplingEngine("path/to/model", warm_start=warm)  # doctest: +SKIP

    Engines take their variables from the environment as ever, but for those that libraries read while they are loaded
    (``GOMP_SPINCOUNT``, ``LD_PRELOAD`` …): these are as they were when this was made.
    """

    def __init__(self, inference: str = "vllm") -> None:
        """Begin to load the libraries of `inference`, a name as `SamplingEngine` takes it, in the background."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = sampler_environment(os.environ, tempfile.gettempdir(), Topology())
        self.inference = inference
        """What was loaded."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vectorlm.engine.process", "--fork", str(theirs.fileno()), inference],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], connection: int
    ) -> ForkedProcess:
        """Fork a sampler process that owns a copy of the descriptor `connection`; its first argument is that copy.

        Raises:
            EngineError: This was closed, or its process is gone.
        """
        if self._process.poll() is not None:
            raise EngineError("the process that engines are forked from is gone: make another WarmStart.")
        (output, prints), (status, tells) = os.pipe(), os.pipe()
        try:
            message = pickle.dumps((list(arguments), dict(environment)))
            # Longer than a packet of the socket may be.
            with tempfile.TemporaryFile() as file:
                file.write(message)
                file.flush()
                socket.send_fds(self._control, [b"fork"], [file.fileno(), connection, prints, tells])
        finally:
            os.close(prints)
            os.close(tells)
        return ForkedProcess(os.fdopen(output, "rb"), status)

    def close(self) -> None:
        """End the process, and with it the engines that were forked from it; safe to call twice."""
        self._control.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def __enter__(self) -> WarmStart:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class ForkedProcess:
    """What `subprocess.Popen` is for a child, for a child of the process that forked it."""

    def __init__(self, stdout: IO[bytes], status: int) -> None:
        """Take what it prints, and the pipe that tells its process id and how it ended."""
        self.stdout, self._status = stdout, status
        self.returncode: int | None = None
        self._pid: int | None = None

    @property
    def pid(self) -> int:
        """The process id; waits until the process is there."""
        if self._pid is None:
            self._pid = self._read() or -1
        return self._pid

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code; raise ``subprocess.TimeoutExpired``."""
        pid = self.pid
        if self.returncode is None:
            if timeout is not None and not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"sampler process {pid}", timeout)
            code = self._read()
            # Nobody could tell: the process that forked it was killed, and it ends with that.
            self.returncode = -signal.SIGKILL if code is None else code
        return self.returncode

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.returncode is None and self.pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _read(self) -> int | None:
        data = os.read(self._status, NUMBER.size)
        return NUMBER.unpack(data)[0] if data else None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            os.close(self._status)


def fork_on_request(control: socket.socket, run: Callable[[list[str]], None]) -> None:
    """Fork a process for each message, which calls `run` with its arguments; return when the other end is closed."""
    parent = os.getppid()
    children: dict[int, tuple[int, int]] = {}
    while os.getppid() == parent:
        ready: list[int] = select.select([control.fileno(), *children], [], [], POLL_S)[0]
        for descriptor in ready:
            if descriptor == control.fileno():
                message, descriptors, _, _ = socket.recv_fds(control, 16, 4)
                if not message:
                    return
                pid, pidfd, tells = _fork(control, descriptors, run)
                os.write(tells, NUMBER.pack(pid))
                children[pidfd] = pid, tells
            else:
                pid, tells = children.pop(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):
                    os.write(tells, NUMBER.pack(code))
                os.close(tells)
                os.close(descriptor)


def _fork(
    control: socket.socket, descriptors: Sequence[int], run: Callable[[list[str]], None]
) -> tuple[int, int, int]:
    """Fork; return the process id, a descriptor that is readable once the process has ended, and the one to tell by."""
    file, connection, prints, tells = descriptors
    if pid := os.fork():
        for descriptor in (file, connection, prints):
            os.close(descriptor)
        return pid, os.pidfd_open(pid), tells
    try:
        control.close()
        os.close(tells)
        os.setsid()
        os.dup2(prints, 1)
        os.dup2(prints, 2)
        with os.fdopen(file, "rb") as message:
            message.seek(0)
            arguments, environment = pickle.load(message)
        os.environ.clear()
        os.environ.update(environment)
        # It was worked out, perhaps, when another folder was set.
        tempfile.tempdir = None
        _set_threads(environment)
        run([str(connection), str(os.getppid()), *arguments])
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def _set_threads(environment: Mapping[str, Any]) -> None:
    """Use as many threads as OMP_NUM_THREADS says: torch read it when it was loaded."""
    torch = sys.modules.get("torch")
    if torch is not None and "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
