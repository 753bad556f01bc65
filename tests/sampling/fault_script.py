"""A small run whose engine or rank fails; test_faults.py starts it as a user starts a script.

fault_script.py MODEL WHAT WORLD_SIZE
"""

import os
import signal
import sys
import time
from pathlib import Path

from child_processes import sampler_pid

import vectorlm
from vectorlm.errors import VectorLMError

VLLM = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 16 << 20, "timeout_s": 12}
SCRIPTED = {
    "inference": "vectorlm.sampling.backends.scripted:Scripted",
    "answers": "{0}".format,
    "timeout_s": 12,
}
ENGINES = {
    # In these cases the fault does not depend on vLLM.
    "engine cannot start": SCRIPTED | {"max_model_len": 64},
    "engine killed while training": SCRIPTED,
    "engine frozen": SCRIPTED | {"timeout_s": 6},
    "rank 1 killed": SCRIPTED,
    "wait": VLLM,
}


def run(model_path, what):
    from transformers import AutoModelForCausalLM

    topology = vectorlm.Topology.from_environment()
    with vectorlm.SamplingEngine(model_path, **ENGINES[what], sampling_params={"max_tokens": 4}) as engine:
        if what == "engine cannot start":
            # The engine has failed by now, and this rank comes late.
            time.sleep(8)
        model = AutoModelForCausalLM.from_pretrained(model_path)
        engine.update(model, 0)
        engine.sample([[2, 3]])
        if topology.is_main:
            print(f"sampling works, launcher {os.environ['FAULT_LAUNCHER']}", flush=True)
        if topology.is_main and what == "engine killed while training":
            os.kill(sampler_pid(), signal.SIGKILL)
            time.sleep(60)
        if topology.is_main and what == "engine frozen":
            os.kill(sampler_pid(), signal.SIGSTOP)
        if topology.rank == 1 and what == "rank 1 killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "wait":
            time.sleep(60)
        engine.sample([[2, 3]])
        engine.update(model, 1)


if __name__ == "__main__":
    os.environ["FAULT_LAUNCHER"] = str(os.getpid())
    try:
        if int(sys.argv[3]) == 0:
            run(str(Path(sys.argv[1])), sys.argv[2])
        vectorlm.launch(run, str(Path(sys.argv[1])), sys.argv[2], world_size=int(sys.argv[3]))
    except VectorLMError as error:
        sys.exit(f"{type(error).__name__}: {error}")
