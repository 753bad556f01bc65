"""A vLLM server in a separate process, started by `vectorlm serve` or by vLLM's command."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from kit.open_ports import free_port
from kit.watched_run import shared_memory_of_nobody

TOKEN = "a token for tests alone"
START_S = 240
LEAVES = "VECTORLM_TEST_LEAVES"
"""Name of the variable with the path of a file, for `left_embeddings.ServerLeavesAnEmbedding`."""


@contextlib.contextmanager
def running_server(folder, log_path, *vllm_args):
    """Start a server; yield its process and its address."""
    command = ["-m", "vectorlm", "serve", "--model", str(folder)]
    variables = {"VECTORLM_SERVER_TOKEN": TOKEN}
    with _running(command, ["--", *vllm_args], variables, log_path) as running:
        yield running


@contextlib.contextmanager
def plain_server(folder, log_path, *vllm_args):
    """Start vLLM's server with vectorlm's weight-transfer backend; yield its process and its address."""
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    further = ["--weight-transfer-config", '{"backend": "vectorlm"}', *vllm_args]
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
    with _running(command, further, variables, log_path) as running:
        yield running


@contextlib.contextmanager
def _running(command, further, variables, log_path):
    port = free_port()
    command = [sys.executable, *command, "--port", str(port)]
    environment = {"OMP_NUM_THREADS": "2", **os.environ, **variables}
    others = shared_memory_of_nobody()
    with open(log_path, "w") as log:
        process = subprocess.Popen(
            [*command, *further], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for_health(url, process, log_path)
        yield process, url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # vLLM's workers name their queues, and a killed worker cannot remove the names.
        for name in shared_memory_of_nobody() - others:
            Path("/dev/shm", name).unlink(missing_ok=True)


def wait_for_health(url, process, log_path):
    deadline = time.monotonic() + START_S
    while status_of(url, "/health", method="GET") != 200:
        assert process.poll() is None, log_path.read_text()
        assert time.monotonic() < deadline, log_path.read_text()
        time.sleep(0.3)


def status_of(url, path, token=None, method="POST"):
    """Return the status of an HTTP request; None if nobody answers."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url + path, headers=headers, method=method)
        ) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None
