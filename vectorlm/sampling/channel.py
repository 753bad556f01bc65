"""Rank 0's line to the sampler process: start it, talk to it, notice when it is gone."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import vectorlm
from vectorlm.errors import EngineDied, EngineTimeout
from vectorlm.ranks.fault import write_fault
from vectorlm.ranks.topology import Topology
from vectorlm.sampling import messages as say

POLL_S = 0.5
KEPT_LINES = 40
GRACE_S = 2.0
"""How long a dead sampler may go unnoticed by the caller before the rank itself is ended."""

TRAINER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TRAINER_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "GROUP_", "ROLE_")


class Channel:
    """A running sampler process and the connection to it.

    The process is a fresh interpreter, not a fork and not a multiprocessing child: the trainer's ``__main__`` is not
    imported again, and nothing that vLLM does to its process reaches the trainer.
    """

    def __init__(
        self,
        start: say.Start,
        topology: Topology,
        *,
        log_path: Path | None = None,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the process and send it `start`; its answer, `Ready`, has the number 0.

        Args:
            start: What engine to build.
            topology: Rank 0's place in the run.
            log_path: A file for the process's output.
            while_waiting: Called every half second while an answer is awaited.

        Raises:
            OSError: `log_path` cannot be written.
        """
        self._topology = topology
        self._while_waiting = while_waiting
        self._count = itertools.count()
        self._closing = threading.Event()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        log = open(log_path, "a") if log_path else None  # noqa: SIM115 (the reader thread closes it)
        self._scratch = tempfile.mkdtemp(prefix="vectorlm-sampler-")
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "vectorlm.sampling.process", str(theirs.fileno()), str(os.getpid())]
        command.append(self._scratch)
        self._process = subprocess.Popen(
            command,
            env=sampler_environment(os.environ, self._scratch, on_cpu=not topology.is_cuda),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for the launcher, which ends the ranks; the sampler follows its rank.
            start_new_session=True,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._reader = threading.Thread(
            target=self._keep_output, args=(log,), name="sampler-output", daemon=True
        )
        self._reader.start()
        if topology.error_file is not None:
            threading.Thread(target=self._end_rank_with_sampler, name="sampler-watch", daemon=True).start()
        self.send(start)

    @property
    def pid(self) -> int:
        """The sampler's process id."""
        return self._process.pid

    def send(self, command: Any) -> int:
        """Send a command and return its number.

        Raises:
            EngineDied: The sampler is gone.
        """
        number = next(self._count)
        try:
            self._connection.send((number, command))
        except OSError as error:
            raise self._death() from error
        return number

    def answer(self, number: int, timeout_s: float, waiting_for: str) -> Any:
        """Wait for the answer to command `number`; those to earlier, interrupted ones are dropped.

        Raises:
            EngineDied: The sampler is gone.
            EngineTimeout: It said nothing at all for `timeout_s`.
            Exception: What the sampler raised.
        """
        while True:
            seen, message = self._receive(timeout_s, waiting_for)
            if seen == number:
                if isinstance(message, say.Failed):
                    raise message.error
                return message

    def call(self, command: Any, timeout_s: float) -> Any:
        """Send a command and return its answer; a `Generate` that nobody waits for any more is taken back."""
        number = self.send(command)
        try:
            return self.answer(number, timeout_s, f"answering {type(command).__name__}")
        except (KeyboardInterrupt, EngineTimeout):
            if isinstance(command, say.Generate):
                self.send(say.Abort(number))
            raise

    def close(self) -> None:
        """End the sampler process and remove what it left; safe to call twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(OSError):
            self._connection.send((None, say.Stop()))
        try:
            self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=1.0)
        self._connection.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _receive(self, timeout_s: float, waiting_for: str) -> Any:
        deadline = time.monotonic() + timeout_s
        try:
            while not self._connection.poll(min(POLL_S, max(deadline - time.monotonic(), 0.0))):
                self._while_waiting()
                if self._process.poll() is not None and not self._connection.poll():
                    raise self._death()
                if time.monotonic() > deadline:
                    raise EngineTimeout(
                        f"the sampler process (pid {self.pid}) said nothing for {timeout_s:g} s while "
                        f"{waiting_for}.\n{self._last_output()}"
                    )
            return self._connection.recv()
        except (EOFError, ConnectionError) as error:
            if isinstance(error, EngineDied):
                raise
            raise self._death() from error

    def _death(self) -> EngineDied:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=GRACE_S)
        self._reader.join(timeout=1.0)
        code = self._process.returncode
        how = "closed its connection" if code is None else _ending(code)
        return EngineDied(f"the sampler process (pid {self.pid}) {how}.\n{self._last_output()}")

    def _last_output(self) -> str:
        return (
            "Its last output:\n" + "".join(f"  {line}" for line in self._lines)
            if self._lines
            else "It printed nothing."
        )

    def _keep_output(self, log: TextIO | None) -> None:
        """Read what the sampler prints to its end, or its pipe would fill up and stop it."""
        assert self._process.stdout is not None
        with log or contextlib.nullcontext():
            for line in self._process.stdout:
                text = line.decode(errors="replace")
                self._lines.append(text)
                with contextlib.suppress(OSError):
                    if log is not None:
                        log.write(text)
                        log.flush()

    def _end_rank_with_sampler(self) -> None:
        """End a supervised rank whose sampler died while it was busy elsewhere: nobody else would notice."""
        self._process.wait()
        if self._closing.wait(GRACE_S):
            return
        assert self._topology.error_file is not None
        write_fault(self._topology.error_file, self._topology.rank, self._death())
        os._exit(1)


def sampler_environment(trainer: Mapping[str, str], scratch: str, on_cpu: bool) -> dict[str, str]:
    """Return the sampler's variables: the trainer's without its place in the run, plus what starts vLLM fast.

    Whatever the user has set wins, except where vLLM would then not run in one process, and except the number of
    threads under a launcher: torchrun gives each rank one, but while the sampler works the ranks wait.
    """
    kept = {
        name: value
        for name, value in trainer.items()
        if name not in TRAINER_VARIABLES and not name.startswith(TRAINER_PREFIXES)
    }
    if "TORCHELASTIC_RUN_ID" in trainer:
        kept.pop("OMP_NUM_THREADS", None)
    defaults = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    if on_cpu:
        threads = str(len(os.sched_getaffinity(0)))
        defaults |= {
            "OMP_NUM_THREADS": threads,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",
        }
    library = str(Path(vectorlm.__file__).parent.parent)
    path = os.pathsep.join([library, kept["PYTHONPATH"]] if kept.get("PYTHONPATH") else [library])
    return {**defaults, **kept, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": path, "TMPDIR": scratch}


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
