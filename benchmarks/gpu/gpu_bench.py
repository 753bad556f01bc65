"""The surroundings of a qualification step: its device, folder, figures and models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.rank_processes import save_tiny_llama

from vectorlm import SamplingEngine, Topology

GIB = 1 << 30
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
ROOM_FOR_7B_GIB = 130.0
"""Device memory for training the whole 7B model: four fp32 numbers for each of 7.6e9 parameters are 113 GiB."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
QWEN_3B, QWEN_7B = (151936, 2048, 11008, 36, 16, 2), (152064, 3584, 18944, 28, 28, 4)
REHEARSAL = (512, 128, 256, 2, 4, 2)


@dataclass(frozen=True)
class Bench:
    """The surroundings of one step, which every rank receives."""

    is_cuda: bool
    memory_gib: float
    """Memory of one device, in GiB."""
    folder: Path

    def note(self, figure: str, value: float | bool | str) -> None:
        """Append a figure to the file immediately; it then survives a crash of the step."""
        with (self.folder / "figures.jsonl").open("a") as file:
            file.write(json.dumps([figure, value]) + "\n")

    def tiny_model(self) -> str:
        """Save a tiny Llama with a tokenizer of letters, and return its folder."""
        return str(save_tiny_llama(self.folder / "tiny", hidden_size=64, max_length=2048))

    def big_model(self, shape: tuple[int, ...] = QWEN_7B) -> str:
        """Save only the config of Qwen2.5-7B (12 of its layers on 80 GiB) or 3B, or of a tiny model on CPU."""
        from transformers import Qwen2Config

        sizes: dict[str, Any] = dict(zip(SIZES, shape if self.is_cuda else REHEARSAL, strict=True))
        if self.is_cuda and shape == QWEN_7B and self.memory_gib < ROOM_FOR_7B_GIB:
            sizes["num_hidden_layers"] = 12
        sizes |= {"max_position_embeddings": 2048, "architectures": ["Qwen2ForCausalLM"]}
        Qwen2Config(**sizes).save_pretrained(self.folder / "big")
        return str(self.folder / "big")

    def big_engine(self, folder: str, **more: Any) -> SamplingEngine:
        """Start an engine with its own random weights, without compilation and CUDA graphs unless `more` changes it."""
        arguments = {"dtype": "bfloat16", "load_format": "dummy", "enforce_eager": True, "max_model_len": 512}
        cache = {} if self.is_cuda else {"kv_cache_memory_bytes": 16 << 20}
        return SamplingEngine(folder, **{**arguments, **cache, **more})


def big_trainer(folder: str) -> Any:
    """Build a model with random fp32 weights on the device of this rank, and shard it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from vectorlm.train.settings import ModelSettings
    from vectorlm.train.shard import shard_model

    topology = Topology.from_environment()
    with torch.device(topology.device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    settings = ModelSettings(use_mp=True, use_activation_checkpointing=True)
    return shard_model(model, topology, settings)


def used_bytes() -> int:
    """Return the used bytes of this rank's device; on CPU, the memory of this process and its children."""
    import psutil
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free
    this = psutil.Process()
    return sum(process.memory_info().rss for process in [this, *this.children(recursive=True)])


def logprobs(engine: SamplingEngine, prompts: list[list[int]]) -> list[float]:
    """Return the log-probabilities of greedy completions."""
    answers = engine.sample(prompts, GREEDY)
    return [logprob for (answer,) in answers for logprob in answer.sampler_logprobs]
