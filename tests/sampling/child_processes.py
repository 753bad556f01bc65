"""Child processes of a process, from /proc."""

import os
from pathlib import Path


def children(parent, word):
    """Return the pids of the children of `parent` whose command line contains `word`, sorted by command line."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text()
            command = (entry / "cmdline").read_bytes().decode().rstrip("\0 ")
        except OSError:
            continue
        if int(stat.rsplit(")", 1)[1].split()[1]) == parent and word in command:
            found[command] = int(entry.name)
    return [found[command] for command in sorted(found)]


def sampler_pid():
    """Return the pid of this process's only sampler process."""
    (pid,) = children(os.getpid(), "vectorlm.sampling.sampler.process")
    return pid


def worker_pids(sampler):
    """Return the pids of a parallel engine's workers, in order."""
    return children(sampler, "Worker_TP")
