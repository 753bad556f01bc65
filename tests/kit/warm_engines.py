"""Sampler processes forked from a process that has imported vLLM, which takes a new interpreter five seconds.

A sampler is forked only if its environment variables would equal this process's. Test files that use
`sampler_pid` start fresh samplers.
"""

import contextlib
import functools
import gc
import importlib
import multiprocessing.reduction
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from multiprocessing.connection import Client, Listener
from types import SimpleNamespace

from vectorlm.ranks.topology import Topology
from vectorlm.sampling import process_channel
from vectorlm.sampling.process_channel import sampler_environment

PRELOADED = (
    "vectorlm.sampling.sampler.process",
    "vectorlm.sampling.backends.vllm.backend",
    "vectorlm.sampling.backends.vllm.extension",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2_5_vl",
)
DIFFER = ("TMPDIR", "PYTEST_CURRENT_TEST", "COLUMNS", "LINES", "WANDB_", "VECTORLM_")
# vLLM sets these at import: after one test has imported it, they differ for all later tests.
DIFFER += ("AITER_", "LD_LIBRARY_PATH", "PYTORCH_NVML_", "TILELANG_", "TORCHINDUCTOR_", "TRITON_")
# lm_eval sets this at import, and only downloads read it. A process that forks ranks keeps it for all later files.
DIFFER += ("HF_XET_",)
"""Prefixes of variables that no code reads during the imports."""


class Sampler:
    """A stand-in for the parts of a subprocess that a `ProcessChannel` uses."""

    def __init__(self, address, arguments, environment, descriptor):
        reading, writing = os.pipe()
        self._connection = Client(address)
        self._connection.send((arguments, environment, os.getcwd()))
        for handle in (descriptor, writing):
            multiprocessing.reduction.send_handle(self._connection, handle, None)
        os.close(writing)
        self.stdout = open(reading, "rb")  # noqa: SIM115 (open for as long as the process prints)
        self.pid, self.returncode = self._connection.recv(), None
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self):
        with contextlib.suppress(EOFError, OSError):
            self.returncode = self._connection.recv()
        self._over.set()

    def wait(self, timeout=None):
        if not self._over.wait(timeout):
            raise subprocess.TimeoutExpired("a warm sampler", timeout)
        return self.returncode

    def kill(self):
        if not self._over.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


OFFERED: tuple[str, dict[str, str]] | None = None
"""Address that forks samplers, and their environment variables; None starts fresh samplers."""


def use(offered):
    """Let this process's engines fork samplers from the `offered` address; None starts fresh ones."""
    global OFFERED
    OFFERED = offered
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "STDOUT", "TimeoutExpired")}
    process_channel.subprocess = SimpleNamespace(Popen=_start, **names) if offered else subprocess


def _start(command, *, env, pass_fds, **options):
    address, expected = OFFERED
    differ = {name for name in env.keys() | expected.keys() if env.get(name) != expected.get(name)}
    if any(not name.startswith(DIFFER) for name in differ):
        return subprocess.Popen(command, env=env, pass_fds=pass_fds, **options)
    return Sampler(address, command[3:], env, pass_fds[0])


@functools.cache
def offer():
    """Start the process that forks samplers; return the argument of `use`."""
    address = f"vectorlm-tests-{os.getpid()}"
    environment = sampler_environment(os.environ, "", Topology())
    # The server ends when every process has closed the other end of its stdin.
    server = subprocess.Popen(
        [sys.executable, __file__, address],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    server.stdout.readline()
    return f"\0{address}", environment


def fork(client):
    """Fork a sampler for this client; return its pid and its folder."""
    arguments, environment, folder = client.recv()
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()
    connection, output = (multiprocessing.reduction.recv_handle(client) for _ in range(2))
    if pid := os.fork():
        os.close(connection)
        os.close(output)
        return pid, arguments[2]
    try:
        os.setsid()
        for descriptor, number in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(descriptor, number)
        os.chdir(folder)
        sys.path[0] = folder
        # vLLM's import has changed the variables.
        os.environ.update(environment)
        tempfile.tempdir = None
        # vLLM's workers import the main module first.
        process = sys.modules["__main__"] = importlib.import_module("vectorlm.sampling.sampler.process")
        process.run([str(connection), str(os.getppid()), arguments[2]])
    finally:
        traceback.print_exc()
        os._exit(1)


def serve(name):
    listener = Listener("\0" + name, "AF_UNIX")
    print("listening", flush=True)
    ready = selectors.DefaultSelector()
    ready.register(sys.stdin, selectors.EVENT_READ, "stdin")
    ready.register(listener._listener._socket, selectors.EVENT_READ, "client")
    while True:
        # Handle one event at a time: it may unregister others.
        key, _ = ready.select()[0]
        match key.data:
            case "stdin":
                return
            case "client":
                client = listener.accept()
                try:
                    pid, scratch = fork(client)
                except (EOFError, OSError):
                    continue  # The rank was killed in the meantime.
                with contextlib.suppress(OSError):
                    client.send(pid)
                sampler = os.pidfd_open(pid)
                data = (pid, scratch, client, sampler)
                ready.register(sampler, selectors.EVENT_READ, data)
                ready.register(client, selectors.EVENT_READ, data)
            case pid, scratch, client, sampler:
                # Either the sampler has ended, or its rank has gone.
                if key.fileobj is client:
                    os.kill(pid, signal.SIGKILL)
                ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError):
                    client.send(ended)
                for watched in (client, sampler):
                    ready.unregister(watched)
                client.close()
                os.close(sampler)
                shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    serve(sys.argv[1])
