"""Cases of TRL's own weight sync into a tiny vLLM engine of this process, each broken in another way.

Print as JSON, by case, the error or the findings. The argument is the folder of a model with biases and a tied head.
"""

import copy
import json
import os
import sys
from contextlib import contextmanager
from types import SimpleNamespace

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    TORCHDYNAMO_DISABLE="1",
)

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl.generation.vllm_generation import VLLMGeneration
from vllm import LLM, SamplingParams

from vectorlm.ranks.engine_ranks import results_or_first_error
from vectorlm.sampling import verify
from vectorlm.sampling.backends.server.extension import ServerExtension
from vectorlm.sampling.weights.wire import result_from_wire, to_wire

ADAPTERS = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)


def trained(folder):
    """Return the model with noise in its weights."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


class Cases:
    """An engine, and the result of each case."""

    def __init__(self, folder):
        VLLMGeneration._init_vllm = lambda self: None
        self.folder, self.found = folder, {}
        self.llm = LLM(
            folder, dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64,
            kv_cache_memory_bytes=16 << 20,
        )  # fmt: skip
        self.runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        self.engine = self.runner.get_model()

    @contextmanager
    def case(self, name):
        try:
            yield
            self.found.setdefault(name, "nothing")
        except Exception as error:
            self.found[name] = f"{type(error).__name__}: {error}"

    def generation(self, model, mode="colocate", unsent=""):
        generation = VLLMGeneration(model, Accelerator(cpu=True), None, mode=mode)
        generation.llm, generation.vllm_client = self.llm, Client(self.engine)
        iterate = generation._iter_named_params
        generation._iter_named_params = lambda: (
            pair for pair in iterate() if not unsent or unsent not in pair[0]
        )
        verify.verify_each_sync(SimpleNamespace(vllm_generation=generation))
        return generation

    def spoiled(self, spoil):
        """Sync, and spoil the engine before the check."""
        generation, reset = self.generation(trained(self.folder)), self.llm.reset_prefix_cache

        def reset_and_spoil():
            with torch.no_grad():
                spoil(dict(self.engine.named_parameters()))

        self.llm.reset_prefix_cache = reset_and_spoil
        try:
            generation.sync_weights()
        finally:
            self.llm.reset_prefix_cache = reset

    def parameter_sums(self, manifest):
        """Return the sums as a server does, over JSON."""
        worker = ServerExtension()
        worker.model_runner = self.runner
        answer = json.loads(json.dumps(worker.vectorlm_sums(to_wire(tuple(manifest)))))
        return results_or_first_error([result_from_wire("vectorlm_parameter_sums", answer)])

    def logprobs(self, rows):
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        answers = self.llm.generate([{"prompt_token_ids": row} for row in rows], params, use_tqdm=False)
        return [
            [
                0.0,
                *(
                    step[token].logprob
                    for token, step in zip(row[1:], answer.prompt_logprobs[1:], strict=True)
                ),
            ]
            for row, answer in zip(rows, answers, strict=True)
        ]


class Client:
    """A stand-in for TRL's client that loads into an engine of this process."""

    base_url = "http://127.0.0.1:1"

    def __init__(self, engine):
        self.engine = engine

    def update_named_params(self, metadata, named_params):
        self.engine.load_weights(list(named_params))

    def reset_prefix_cache(self): ...


def run(folder):
    cases = Cases(folder)
    with cases.case("sync"):
        cases.generation(trained(folder)).sync_weights()
    with cases.case("sync of adapters"):
        generation = cases.generation(get_peft_model(trained(folder), ADAPTERS))
        generation.sync_weights()
        generation.sync_weights()
    with cases.case("bias not sent"):
        cases.generation(trained(folder), unsent="1.self_attn.q_proj.bias").sync_weights()
    with cases.case("bias not taken"):
        cases.spoiled(lambda weights: weights["model.layers.1.self_attn.qkv_proj.bias"][:4].zero_())
    with cases.case("rounded"):
        cases.spoiled(
            lambda weights: (weight := weights["model.layers.0.mlp.down_proj.weight"]).copy_(
                weight.bfloat16()
            )
        )
    with cases.case("server that does not answer"):
        cases.generation(trained(folder), "server").sync_weights()
    server = SimpleNamespace(
        parameter_sums=cases.parameter_sums, logprobs=cases.logprobs, max_model_len=lambda: 64
    )
    verify.ScoringServer = lambda *args, **more: server
    with cases.case("server"):
        cases.generation(trained(folder), "server").sync_weights()
    with cases.case("checkpoint"):
        cases.found["checkpoint"] = verify.verify_server("u", lambda: trained(folder))
    with cases.case("another checkpoint"):
        verify.verify_server("u", lambda: AutoModelForCausalLM.from_pretrained(folder))
    with cases.case("other shapes"):
        wider = trained(folder)
        wider.resize_token_embeddings(50)
        verify.verify_server("u", lambda: wider)
    server.parameter_sums = lambda manifest: None
    with cases.case("log-probabilities"):
        cases.found["log-probabilities"] = verify.verify_server("u", lambda: trained(folder))
    with cases.case("other log-probabilities"):
        verify.verify_server("u", lambda: AutoModelForCausalLM.from_pretrained(folder))
    with cases.case("server without the extension"):
        cases.generation(trained(folder), "server").sync_weights()
    # These cases come last, because they replace the engine's head by another layer.
    cases.engine.lm_head = copy.deepcopy(cases.engine.model.embed_tokens)
    with cases.case("head untied and equal"):
        cases.generation(trained(folder)).sync_weights()
    with cases.case("stale head"):
        cases.spoiled(lambda weights: weights["lm_head.weight"][7].zero_())
    return cases.found


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))
