"""What a step is given: a device, a folder, a place for its figures, and models made on the spot."""

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
"""Four fp32 numbers for each of 7.6e9 parameters are 113 GiB."""
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
    """The surroundings of one step; travels to its ranks."""

    is_cuda: bool
    memory_gib: float
    """Of one device."""
    folder: Path

    def note(self, figure: str, value: float | bool | str) -> None:
        """Write a figure down at once, so that it outlives a crash of the step."""
        with (self.folder / "figures.jsonl").open("a") as file:
            file.write(json.dumps([figure, value]) + "\n")

    def tiny_model(self) -> str:
        """Save a tiny Llama with a tokenizer of letters."""
        return str(save_tiny_llama(self.folder / "tiny", hidden_size=64, max_length=2048))

    def big_model(self, shape: tuple[int, ...] = QWEN_7B) -> str:
        """Save a config alone: of Qwen2.5-7B (with 12 of its layers on 80 GiB) or 3B, of a tiny one on CPU."""
        from transformers import Qwen2Config

        sizes: dict[str, Any] = dict(zip(SIZES, shape if self.is_cuda else REHEARSAL, strict=True))
        if self.is_cuda and shape == QWEN_7B and self.memory_gib < ROOM_FOR_7B_GIB:
            sizes["num_hidden_layers"] = 12
        sizes |= {"max_position_embeddings": 2048, "architectures": ["Qwen2ForCausalLM"]}
        Qwen2Config(**sizes).save_pretrained(self.folder / "big")
        return str(self.folder / "big")

    def big_engine(self, folder: str, **more: Any) -> SamplingEngine:
        """Start an engine with random weights of its own, without compiling or capturing anything."""
        arguments = {"dtype": "bfloat16", "load_format": "dummy", "enforce_eager": True, "max_model_len": 512}
        cache = {} if self.is_cuda else {"kv_cache_memory_bytes": 16 << 20}
        return SamplingEngine(folder, **{**arguments, **cache, **more})


def big_trainer(folder: str) -> Any:
    """Build the model of a rank with random fp32 weights, on its device, and shard it."""
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
    """Return what all processes use of this rank's device; on CPU what this process and its children use."""
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
