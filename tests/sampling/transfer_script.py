"""A separate trainer for test_transfer.py: `transfer_script.py CASE FOLDER URL`."""

import contextlib
import io
import json
import os
import re
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from vectorlm.errors import EngineError, NonFiniteWeights
from vectorlm.sampling.transport import Push
from vectorlm.transfer import WeightTransfer

ROW = [
    2,
    3,
    4,
    5,
    9,
    11,
    17,
    2,
    3,
    4,
    5,
    9,
    11,
    17,
    2,
    3,
    4,
    5,
    9,
    11,
    17,
    2,
    3,
    4,
    5,
    9,
    11,
    17,
    6,
    7,
    8,
    9,
    10,
    3,
    3,
]


def model_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def change(model):
    for parameter in model.parameters():
        parameter.mul_(1.1)


def dies(folder, url):
    publish = Push.publish

    def publish_and_die(*args):
        publish(*args)
        maps = Path("/proc/self/maps").read_text()
        print(json.dumps(re.findall(r"/dev/shm/\S+$", maps, re.MULTILINE)), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    model = model_of(folder)
    with WeightTransfer(model, url) as transfer:
        transfer.update(1)
        change(model)
        Push.publish = publish_and_die
        transfer.update(2)


def sharded(folder, url):
    """Send a model that FSDP2 has sharded."""
    from torch.distributed.fsdp import fully_shard

    model = model_of(folder)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with WeightTransfer(model, url) as transfer:
        for step in (20, 21):
            change(model)
            print(transfer.update(step), flush=True)
        if dist.get_rank() == 1:
            with torch.no_grad():
                model.lm_head.weight.to_local()[0, 0] = float("inf")
        try:
            transfer.update(22)
        except NonFiniteWeights:
            found = [None, None]
            dist.all_gather_object(found, "NonFiniteWeights")
            if dist.get_rank() == 0 and found == ["NonFiniteWeights"] * 2:
                print("NonFiniteWeights on both", flush=True)


def torchrun(folder, url):
    dist.init_process_group("gloo")
    sharded(folder, url)
    dist.destroy_process_group()


def sharded_here(_topology, folder, url):
    """Call `sharded` on a rank that the test has started; return the printed text."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        sharded(folder, url)
    return printed.getvalue()


def llm(folder, size):
    """Send to a `vllm.LLM` whose engine runs in `size` processes of vLLM, the default."""
    from vllm import LLM, SamplingParams

    os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    if size == "2":
        # vLLM's default needs a NUMA node for each worker.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    engine = LLM(
        folder,
        dtype="float32",
        max_model_len=128,
        tensor_parallel_size=int(size),
        enforce_eager=True,
        kv_cache_memory_bytes=50_000_000,
        weight_transfer_config={"backend": "vectorlm"},
    )
    model = model_of(folder)
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=0)
    prompts = [{"prompt_token_ids": ROW}]

    @torch.no_grad()
    def distance():
        (token,) = engine.generate(prompts, params, use_tqdm=False)[0].outputs[0].logprobs[0].values()
        return abs(model(torch.tensor([ROW])).logits[0, -1].log_softmax(-1).max().item() - token.logprob)

    found = {"before": distance()}
    with WeightTransfer(model, engine) as transfer:
        change(model)
        found["verified"] = transfer.update(1).verified
        found["distance"] = distance()
        publish = Push.publish

        def publish_and_spoil(push, weight_set, layout, with_checksums):
            sums = publish(push, weight_set, layout, with_checksums)
            push._arenas.slots_of(layout)["lm_head.weight"].view(torch.uint8)[5, 7] ^= 1
            return sums

        Push.publish = publish_and_spoil
        try:
            transfer.update(2)
        except EngineError:
            raise
        except ValueError as error:
            found["error"] = type(error).__name__
        Push.publish = publish
        try:
            distance()
        except EngineError as error:
            found["after a wrong byte"] = f"{type(error).__name__}: {error}"
        change(model)
        transfer.update(3)
        found["distance after the next update"] = distance()
    found["version"] = engine.get_weight_version()
    print(json.dumps(found))


if __name__ == "__main__":
    case, *arguments = sys.argv[1:]
    globals()[case](*arguments)
