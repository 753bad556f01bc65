"""Two torchrun processes on loopback, each acting as a machine."""

import os
import socket
import subprocess
import sys
import threading
import time
import uuid

from kit.watched_run import processes, shared_memory_of_nobody

GONE_WITHIN_S = 20.0
"""Longest time from the end of both torchruns to the end of every process, on a busy machine."""


class TwoNodes:
    """A command that runs under torchrun on two nodes, each in a separate session; it must leave nothing behind."""

    def __init__(self, command, scratch, *, num_ranks=(1, 1), environment=None):
        with socket.create_server(("127.0.0.1", 0)) as server:
            endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        self.scratch = scratch
        self.shared_before = set(os.listdir("/dev/shm"))
        self.mark = f"VECTORLM_TEST_MARK={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        variables = {
            **os.environ,
            name: value,
            "TMPDIR": str(scratch),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        # torchrun never removes its folder for error files; a separate folder keeps them out of the check.
        logs = scratch.with_name(scratch.name + "-logs")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--rdzv_id", "run"]
        torchrun += ["--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--log_dir", str(logs)]
        self.processes = []
        for node, ranks in enumerate(num_ranks):
            # On two machines, torchrun finds the host of the store by the name of the endpoint.
            own = [
                "--nproc_per_node",
                str(ranks),
                "--rdzv_conf",
                f"is_host={int(node == 0)},join_timeout=300",
            ]
            process = subprocess.Popen(
                [*torchrun, *own, *map(str, command)],
                env=variables | {"NODE": str(node)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            self.processes.append(process)
        self.texts = ["" for _ in self.processes]
        self._readers = [threading.Thread(target=self._read, args=(node,)) for node in range(len(num_ranks))]
        for reader in self._readers:
            reader.start()

    def _read(self, node):
        for line in self.processes[node].stdout:
            self.texts[node] += line

    def wait_for(self, word, timeout_s=120):
        """Wait until every node has printed `word`."""
        deadline = time.monotonic() + timeout_s
        while not all(word in text for text in self.texts):
            assert time.monotonic() < deadline, "\n\n".join(self.texts)
            time.sleep(0.1)

    def outcomes(self, timeout_s=240):
        """Wait until everything has ended and nothing is left; return exit code and output of each node."""
        deadline = time.monotonic() + timeout_s
        try:
            codes = [process.wait(max(deadline - time.monotonic(), 0.1)) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        for reader in self._readers:
            reader.join(GONE_WITHIN_S)
        deadline = time.monotonic() + GONE_WITHIN_S
        while any(self.leftovers().values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = self.leftovers()
        assert not any(left.values()), left
        return list(zip(codes, self.texts, strict=True))

    def leftovers(self):
        return {
            "processes": [command for _, command in processes(self.mark)],
            "shared memory": sorted(shared_memory_of_nobody() - self.shared_before),
            "temporary files": sorted(path.name for path in self.scratch.rglob("*")),
        }
