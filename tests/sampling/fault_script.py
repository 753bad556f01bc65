"""A small run with an engine that something befalls; started by test_faults.py as a user starts a script.

fault_script.py MODEL WHAT WORLD_SIZE
"""

import os
import signal
import sys
import time
from pathlib import Path

import vectorlm
from vectorlm.errors import VectorLMError


def worker_pids(engine):
    """Return the process ids of a parallel engine's workers, in their order."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            command = (entry / "cmdline").read_bytes().decode()
        except OSError:
            continue
        if parent == engine._channel.pid and "Worker_TP" in command:
            found[command.rstrip("\0 ")] = int(entry.name)
    return [found[name] for name in sorted(found)]


def run(model_path, what):
    from transformers import AutoModelForCausalLM

    topology = vectorlm.Topology.from_environment()
    wrong = {"max_modle_len": 64} if what == "engine cannot start" else {}
    parallel = {"tensor_parallel_size": 2} if "parallel" in what else {}
    with vectorlm.SamplingEngine(
        model_path,
        **wrong,
        **parallel,
        dtype="float32",
        max_model_len=64,
        kv_cache_memory_bytes=16 << 20,
        timeout_s=12,
        sampling_params={"max_tokens": 4},
    ) as engine:
        if what == "engine cannot start":
            # By now the engine has failed, and this rank comes late.
            time.sleep(15)
        model = AutoModelForCausalLM.from_pretrained(model_path)
        engine.update(model, 0)
        engine.sample([[2, 3]])
        if topology.is_main:
            print(f"sampling works, launcher {os.environ['FAULT_LAUNCHER']}", flush=True)
        if topology.is_main and what == "worker of a parallel engine killed":
            os.kill(worker_pids(engine)[1], signal.SIGKILL)
        if topology.is_main and what == "engine killed":
            os.kill(engine._channel.pid, signal.SIGKILL)
        if topology.is_main and what == "engine killed while training":
            os.kill(engine._channel.pid, signal.SIGKILL)
            time.sleep(60)
        if topology.is_main and what == "engine frozen":
            os.kill(engine._channel.pid, signal.SIGSTOP)
        if topology.rank == 1 and what == "rank 1 killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if topology.rank == 1 and what == "rank 1 raises":
            raise ValueError("a bad batch")
        if what in ("wait", "wait beside a parallel engine"):
            time.sleep(60)
        engine.sample([[2, 3], [4]] if topology.rank == 1 and what == "other prompts" else [[2, 3]])
        engine.update(model, 1)


if __name__ == "__main__":
    os.environ["FAULT_LAUNCHER"] = str(os.getpid())
    try:
        if int(sys.argv[3]) == 0:
            run(str(Path(sys.argv[1])), sys.argv[2])
        vectorlm.launch(run, str(Path(sys.argv[1])), sys.argv[2], world_size=int(sys.argv[3]))
    except VectorLMError as error:
        sys.exit(f"{type(error).__name__}: {error}")
