"""Unmodified vLLM in its own process: the baseline of the swap and sampling benchmarks.

The benchmarks start ``bare_vllm.py MODEL TASK`` with the sampler's environment. It answers each line on stdin with a
line of JSON on stdout. TASK is `load_weights` (plain weights), `reload_weights` (packed, vLLM's default) or
`generate`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 256 << 20}


class BareVLLM:
    """A client that starts this file as a process and sends it requests."""

    def __init__(self, model: Path, task: str) -> None:
        from vectorlm.ranks.topology import Topology
        from vectorlm.sampling.process_channel import sampler_environment

        environment = sampler_environment(os.environ, tempfile.gettempdir(), Topology())
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(model), task],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.start_s = self._answer()

    def ask(self, **prompt_record: Any) -> Any:
        """Send one request and return the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(prompt_record) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise RuntimeError("bare vLLM died; run it by hand to see why")


def _serve(model: str, task: str) -> None:
    start = time.perf_counter()
    if task == "load_weights":
        from vectorlm.sampling.backends.vllm.pack import keep_plain_weights

        keep_plain_weights()
    from vllm import LLM, SamplingParams

    llm = LLM(model, skip_tokenizer_init=True, disable_log_stats=True, **ENGINE)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    if task != "generate":
        from transformers import AutoModelForCausalLM

        weights = [
            (name, parameter.detach())
            for name, parameter in AutoModelForCausalLM.from_pretrained(model).named_parameters()
        ]
    _tell(time.perf_counter() - start)
    for line in sys.stdin:
        prompt_record = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in prompt_record.get("prompts", [])]
        began = time.perf_counter()
        if task == "load_weights":
            for pair in weights:
                runner.get_model().load_weights([pair])
        elif task == "reload_weights":
            runner.reload_weights(weights_iterator=iter(weights))
        else:
            llm.generate(prompts, SamplingParams(**prompt_record["sampling_params"]), use_tqdm=False)
        _tell(time.perf_counter() - began)


def _tell(value: Any) -> None:
    print("ANSWER " + json.dumps(value), flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
