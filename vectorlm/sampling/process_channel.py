"""The channel to an engine in a separate sampler process, which it starts, supervises and ends."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import pickle
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import psutil

from vectorlm.errors import EngineDied, EngineError, EngineTimeout
from vectorlm.ranks.engine_ranks import CallResult
from vectorlm.ranks.process_end import (
    how_it_ended,
    require_own_process,
    without_tracker_warnings,
    write_fault,
)
from vectorlm.ranks.topology import Topology, bounded_spin, on_loopback
from vectorlm.ranks.wait import report_wait
from vectorlm.sampling import messages

POLL_S = 0.5
ASLEEP_S = 5.0
"""Seconds without a tick of a thread that ticks every `POLL_S`, after which the process must have been stopped."""
KEPT_LINES = 40
GRACE_S = 2.0
"""Time for the caller to notice a dead sampler before the rank is ended, in seconds."""
PACKAGE = str(Path(__file__).parent.parent)
CORES_VARIABLE = "VECTORLM_SAMPLER_CORES"
"""The variable with the cores that only the sampler process uses; not set if it shares the ranks' cores."""
TRAINER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TRAINER_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "GROUP_", "ROLE_", "SLURM_STEP_")


class ProcessChannel:
    """A `vectorlm.sampling.messages.Channel` to a sampler process.

    The process is a fresh interpreter, neither a fork nor a multiprocessing child: the trainer's ``__main__`` is not
    imported again, and vLLM cannot change the trainer's process. Two threads move the messages: a Ctrl-C reaches only
    the main thread and therefore never cuts a message in the socket.
    """

    def __init__(
        self,
        start: messages.Start,
        topology: Topology,
        *,
        ranks_per_engine: int | None = None,
        devices: Sequence[int] | None = None,
        log_path: Path | None = None,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the process and send it `start`.

        The engine shares the devices and cores of `ranks_per_engine` ranks (all of the node's when omitted), or has
        `devices` to itself. `while_waiting` is called every half second while an answer is awaited.
        """
        self._topology, self._pid = topology, os.getpid()
        self._num_workers = start.engine_args.get("tensor_parallel_size", 1)
        self._start_is = f"waiting for {start.engine_args.get('url', 'the engine')}"
        self._while_waiting = while_waiting
        self._count = itertools.count()
        self._closing = threading.Event()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._outbox: queue.SimpleQueue[list[tuple[int, messages.Pickled]] | None] = queue.SimpleQueue()
        self._news = threading.Condition()
        self._answers: dict[int, CallResult] = {}
        self._awaited: dict[int, float] = {}
        """The times at which commands without an answer were sent."""
        self._tell: dict[int, messages.TakeAnswer] = {}
        self._heard_at = self._ticked_at = time.monotonic()
        self._is_cut = False
        log = open(log_path, "a") if log_path else None  # noqa: SIM115 (the reader thread closes it)
        self._scratch = tempfile.mkdtemp(prefix="vectorlm-sampler-")
        dtype = str(start.engine_args.get("dtype", "auto"))
        environment = sampler_environment(
            os.environ, self._scratch, topology, ranks_per_engine, self._num_workers, devices, dtype
        )
        ours, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), str(os.getpid()), self._scratch]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vectorlm.sampling.sampler.process", *arguments],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # The launcher handles Ctrl-C and ends the ranks; the sampler ends with its rank.
            start_new_session=True,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._reader = self._thread("sampler-output", self._keep_output, log)
        self._receiver = self._thread("sampler-receive", self._receive_all)
        self._sender = self._thread("sampler-send", self._send_all)
        if topology.error_file is not None:
            self._thread("sampler-watch", self._end_rank_with_sampler)
        self.send(start)

    @property
    def pid(self) -> int:
        """The sampler's process id."""
        return self._process.pid

    def send(self, command: Any) -> int:
        """Send a command."""
        require_own_process(self._pid)
        if self._is_cut:
            raise self._death()
        number = next(self._count)
        # Pickled here, because the caller must get the error, and apart from the number, because the sampler answers
        # even a command that it cannot unpickle.
        pickled = messages.pickled(command)
        self._awaited[number] = time.monotonic()
        self._outbox.put([(number, pickled)])
        return number

    def ask(self, commands: Sequence[messages.Generate], tell: messages.TakeAnswer) -> list[int]:
        """Send commands as one message; the receiving thread passes their answers to `tell`."""
        require_own_process(self._pid)
        numbers = [next(self._count) for _ in commands]
        message = list(zip(numbers, map(messages.pickled, commands), strict=True))
        with self._news:
            if not self._is_cut:
                self._awaited |= dict.fromkeys(numbers, time.monotonic())
                self._tell |= dict.fromkeys(numbers, tell)
                self._outbox.put(message)
                return numbers
        raise self._death()

    def advance(self, until: Callable[[], bool] = lambda: True, timeout_s: float = 0.0) -> None:
        """Wait; the process samples by itself."""
        require_own_process(self._pid)
        with self._news:
            self._news.wait_for(until, timeout_s)

    def has_answer(self, number: int, silence_s: float) -> bool:
        """Return whether the answer is there; raise if the sampler is dead or silent."""
        require_own_process(self._pid)
        with self._news:
            if number not in self._answers:
                self._require_life(number, silence_s, "sampling")
            return number in self._answers

    def answer(self, number: int, silence_s: float, waiting_for: str, deadline_s: float | None = None) -> Any:
        """Wait for an answer; rank 0 prints a line if the engine takes long to start."""
        require_own_process(self._pid)
        is_start = number == 0 and self._topology.is_main
        with report_wait(self._start_is, is_on=is_start, detail=self._size), self._news:
            while number not in self._answers:
                now = time.monotonic()
                if not self._is_cut and deadline_s is not None and now >= deadline_s:
                    raise EngineTimeout(f"the sampler process (pid {self.pid}) is still {waiting_for}.")
                self._require_life(number, silence_s, waiting_for)
                left = POLL_S if deadline_s is None else min(POLL_S, deadline_s - now)
                if not self._news.wait(left):
                    self._while_waiting()
            value, error = self._answers.pop(number)
        if error is None:
            return value
        if number == 0 and self._num_workers > 1:
            # vLLM's error has no cause if a worker could not start; the worker printed it.
            raise EngineError(f"{error}\n{self._last_output()}")
        raise error

    def call(self, command: Any, silence_s: float) -> Any:
        """Send a command and wait for its answer."""
        number = self.send(command)
        try:
            return self.answer(number, silence_s, f"answering {type(command).__name__}")
        except (KeyboardInterrupt, EngineTimeout):
            self._awaited.pop(number, None)
            raise

    def cancel(self, number: int) -> None:
        """Abort a `Generate`, and drop its answer."""
        if self._pid != os.getpid():
            return  # In a fork, the lock may belong to a thread that the fork does not have.
        with self._news:
            self._awaited.pop(number, None)
            self._answers.pop(number, None)
            self._tell.pop(number, None)
        if not self._is_cut:
            self._send_unanswered(messages.Abort(number))

    def close(self) -> None:
        """End the sampler process and remove its files."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._send_unanswered(messages.Stop())
        self._outbox.put(None)
        try:
            self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # An engine may be garbage-collected in one of these threads.
        for thread in {self._reader, self._receiver, self._sender} - {threading.current_thread()}:
            thread.join(timeout=1.0)
        self._connection.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _thread(self, name: str, work: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=work, args=args, name=name, daemon=True)
        thread.start()
        return thread

    def _send_unanswered(self, command: messages.Abort | messages.Stop) -> None:
        # A handle may be garbage-collected in the middle of `send`: that is safe, because `put` is reentrant.
        self._outbox.put([(-1, messages.pickled(command))])

    def _send_all(self) -> None:
        # Noted here, where no Ctrl-C can come between the note of a picture and the picture itself.
        pictures = messages.KeptPictures()
        # The receiving thread notices a cut connection.
        with contextlib.suppress(OSError):
            while (commands := self._outbox.get()) is not None:
                encoded = [(number, pictures.encode(pickled)) for number, pickled in commands]
                self._connection.send_bytes(pickle.dumps(encoded))

    def _receive_all(self) -> None:
        """Store the answers that somebody waits for."""
        try:
            while True:
                has_news = self._connection.poll(POLL_S)
                with self._news:
                    # After Ctrl-Z and `fg`: this process was stopped, not the sampler.
                    if self._slept():
                        self._heard_at = time.monotonic()
                    self._ticked_at = time.monotonic()
                if not has_news:
                    continue
                number, message = messages.read_answer(self._connection.recv_bytes())
                with self._news:
                    self._heard_at = time.monotonic()
                    if isinstance(message, messages.Part):
                        tell = self._tell.get(number)
                    else:
                        tell = self._tell.pop(number, None)
                        if self._awaited.pop(number, None) is not None and tell is None:
                            self._answers[number] = message
                    self._news.notify_all()
                if tell is not None:
                    tell(number, message)
        except (EOFError, OSError):
            pass
        finally:
            with self._news:
                self._is_cut = True
                self._news.notify_all()
            for number, tell in self._tell.items():
                tell(number, (None, self._death()))

    def _size(self) -> str:
        """Return the memory of the process as text; it grows while weights are read."""
        try:
            return f"process {self.pid} holds {psutil.Process(self.pid).memory_info().rss / 2**30:.1f} GiB"
        except psutil.Error:
            return ""

    def _slept(self) -> bool:
        return time.monotonic() - self._ticked_at > ASLEEP_S

    def _require_life(self, number: int, silence_s: float, waiting_for: str) -> None:
        """Raise if the sampler is dead, or was silent for `silence_s` since the command was sent."""
        if self._is_cut:
            raise self._death()
        sent_at = self._awaited.get(number, math.inf)
        if not self._slept() and time.monotonic() - max(sent_at, self._heard_at) > silence_s:
            raise EngineTimeout(
                f"the sampler process (pid {self.pid}) sent nothing for {silence_s:g} s while {waiting_for}.\n"
                f"{self._last_output()}"
            )

    def _death(self) -> EngineDied:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=GRACE_S)
        self._reader.join(timeout=1.0)
        code = self._process.returncode
        how = "closed its connection" if code is None else how_it_ended(code)
        return EngineDied(f"the sampler process (pid {self.pid}) {how}.\n{self._last_output()}")

    def _last_output(self) -> str:
        if not self._lines:
            return "It printed nothing."
        return "Its last output:\n" + "".join(f"  {line}" for line in self._lines)

    def _keep_output(self, log: TextIO | None) -> None:
        """Read the sampler's output; a full pipe would stop it."""
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
        """End a supervised rank if its sampler dies while the rank is busy and does not notice."""
        self._process.wait()
        if self._closing.wait(GRACE_S):
            return
        assert self._topology.error_file is not None
        write_fault(self._topology.error_file, self._topology.rank, self._death())
        os._exit(1)


def let_go_of_last_error() -> None:
    """Clear this library's frames in the last error of an interactive Python; the user's frames stay for a debugger.

    Otherwise a frame keeps the engine of an interrupted call, and its sampler process, alive during the next cell.
    """
    trace = getattr(sys, "last_traceback", None)
    if trace is None:
        return
    # Earlier errors are garbage, but in reference cycles with their frames.
    gc.collect()
    for frame, _ in traceback.walk_tb(trace):
        if frame.f_code.co_filename.startswith(PACKAGE):
            with contextlib.suppress(RuntimeError):  # It is running.
                frame.clear()
                # Python 3.11 and 3.12 keep a copy of locals that were read, as IPython does; reading again updates it.
                _ = frame.f_locals


def sampler_environment(
    trainer: Mapping[str, str],
    scratch: str,
    topology: Topology,
    ranks_per_engine: int | None = None,
    num_workers: int = 1,
    devices: Sequence[int] | None = None,
    dtype: str = "auto",
) -> dict[str, str]:
    """Return the sampler's environment: the trainer's without its rank, plus defaults that start vLLM fast.

    The user's values win, except for vLLM's single-process mode and for OMP_NUM_THREADS=1 under torchrun: torchrun sets
    it for several ranks, but they wait while the sampler works. Engines of one node, and the workers of a parallel
    engine, share its cores. On CUDA the first visible devices are `devices`, or the devices of the engine's ranks, and
    the engine computes on them. The other ranks' devices are visible too, because the engine pulls weights from them.
    """
    kept = {
        name: value
        for name, value in trainer.items()
        if name not in TRAINER_VARIABLES and not name.startswith(TRAINER_PREFIXES)
    }
    if (
        "TORCHELASTIC_RUN_ID" in trainer
        and topology.local_world_size > 1
        and kept.get("OMP_NUM_THREADS") == "1"
    ):
        del kept["OMP_NUM_THREADS"]
    defaults = vllm_variables(trainer, on_cpu=not topology.is_cuda)
    of_engine = ranks_per_engine or topology.local_world_size
    if topology.is_cuda:
        own = range(topology.local_rank, topology.local_rank + of_engine) if devices is None else devices
        places = list(dict.fromkeys([*own, *range(topology.local_world_size)]))
        visible = kept.get("CUDA_VISIBLE_DEVICES")
        names = range(max(places) + 1) if visible is None else visible.split(",")
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(str(names[place]) for place in places)
        # FlashInfer compiles for minutes at the first start, needs nvcc, and does not speed up dense 16-bit models.
        defaults["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        if dtype in ("float32", "float"):
            # Triton's attention, the only one for float32, would use TF32.
            defaults["TRITON_F32_DEFAULT"] = "ieee"
    else:
        num_cores = len(os.sched_getaffinity(0)) * of_engine // topology.local_world_size
        if devices is not None:
            num_cores = len(devices)
            kept[CORES_VARIABLE] = ",".join(map(str, devices))
        defaults["OMP_NUM_THREADS"] = str(max(1, num_cores // num_workers))
    library = str(Path(__file__).parents[2])
    path = os.pathsep.join([library, kept["PYTHONPATH"]] if kept.get("PYTHONPATH") else [library])
    forced = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Spawned workers import the sampler's main module first (see `start_worker`).
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Killed workers do not remove their queues.
        **without_tracker_warnings(kept),
        "PYTHONPATH": path,
        "TMPDIR": scratch,
    }
    return {**defaults, **kept, **forced}


def vllm_variables(environment: Mapping[str, str], on_cpu: bool) -> dict[str, str]:
    """Return vLLM's default variables in a sampler and a server; the user's values win."""
    # With a base in 4 bits vLLM would round activations to 8 bits on processors with AMX.
    of_cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_INT4_W4A8": "0"}
    return {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        **on_loopback(),
        **bounded_spin(environment),
        **(of_cpu if on_cpu else {}),
    }
