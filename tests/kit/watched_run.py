"""Runs that die in various ways, and checks of their leftovers."""

import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

GONE_WITHIN_S = 10.0


def shared_memory_of_nobody():
    """List the names in /dev/shm that no living process uses; names in use belong to other programs."""
    # Compare inodes: a semaphore is renamed after it is mapped.
    in_use = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            in_use |= set(re.findall(r" (\d+) +/dev/shm/", maps.read_text()))
        except OSError:
            continue
    return {entry.name for entry in os.scandir("/dev/shm") if str(entry.inode()) not in in_use}


def processes(mark):
    """Yield pid and command line of the processes with `mark` in their environment."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue


class WatchedRun:
    """A command in a separate session, to which a test can send a signal as a terminal does."""

    def __init__(self, command, scratch):
        self.mark = f"VECTORLM_TEST_MARK={uuid.uuid4().hex}"
        self.scratch = scratch
        self.shared_before = set(os.listdir("/dev/shm"))
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        name, value = self.mark.split("=")
        self.process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, name: value, "TMPDIR": str(scratch)},
            stdout=subprocess.PIPE,
            # A pipe would fill up and block a run that prints much.
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    def error(self):
        """Return the standard error output until now."""
        self._errors.seek(0)
        return self._errors.read()

    def outcome(self, timeout_s=150):
        """Wait until everything has ended and nothing is left; return the exit code and the error text."""
        self.process.communicate(timeout=timeout_s)
        self.require_nothing_left()
        return self.process.returncode, self.error()

    def require_nothing_left(self):
        deadline = time.monotonic() + GONE_WITHIN_S
        while any(self.leftovers().values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.leftovers() == {"processes": [], "shared memory": [], "temporary files": []}

    def leftovers(self):
        return {
            "processes": [command for _, command in self.processes()],
            "shared memory": sorted(shared_memory_of_nobody() - self.shared_before),
            "temporary files": sorted(path.name for path in self.scratch.rglob("*")),
        }

    def processes(self):
        return processes(self.mark)
