"""Work out which models fit on which GPUs, and write docs/sizes.md. Run: python benchmarks/sizes.py"""

from __future__ import annotations

import json
import math
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from report import ROOT

from vectorlm.runs.config.load import load_config
from vectorlm.runs.preflight.memory import find_shortage, plan_of_config
from vectorlm.runs.preflight.memory_plan import GIB

PAGE = ROOT / "docs" / "sizes.md"
BASE = "configs/cuda/1x80gb_sft.yaml"
MODELS = {
    "Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-3B": ("qwen2", 2048, 11008, 36, 16, 2, 151936, True),
    "Qwen2.5-7B": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False),
    "Llama-3-8B": ("llama", 4096, 14336, 32, 32, 8, 128256, False),
    "Qwen2.5-32B": ("qwen2", 5120, 27648, 64, 40, 8, 152064, False),
    "Llama-3-70B": ("llama", 8192, 28672, 80, 64, 8, 128256, False),
}
"""From each ``config.json``: type, hidden size, feed-forward size, blocks, heads, key-value heads, vocabulary, tied."""
NUM_DEVICES = (1, 2, 8)
DEVICE_GB = (24, 48, 80, 141)
"""Nominal memory of a card, in 1e9 bytes; no card has less."""
KINDS = {
    "full": (),
    "LoRA": (
        "train_parameters.dtype=bfloat16",
        "train_parameters.lora_peft_config={r: 32, target_modules: all-linear}",
    ),
    "QLoRA": (
        "train_parameters.dtype=bfloat16",
        "train_parameters.quantization=nf4",
        "train_parameters.lora_peft_config={r: 32, target_modules: all-linear}",
    ),
}
WAYS = {
    "awake": ("engine.sleep=none", "engine.offload_optimizer=false"),
    "sleep": ("engine.sleep=all", "engine.offload_optimizer=false"),
    "sleep, offload": (
        "engine.sleep=all",
        "engine.offload_optimizer=true",
    ),
    "sleep, 70%": (
        "engine.sleep=all",
        "engine.offload_optimizer=true",
        "engine.gpu_memory_utilization=0.7",
    ),
    "CPU offload": (
        "engine.sleep=all",
        "engine.offload_optimizer=false",
        "engine.gpu_memory_utilization=0.85",
        "train_parameters.cpu_offload=true",
    ),
}
"""Settings that reduce memory, the fastest first."""
NOTHING = "-"
LENGTHS = (2048, 8192, 32768, 131072)
LONG = (
    (1, 24, "LoRA", 1),
    (1, 80, "full", 1),
    (1, 80, "LoRA", 1),
    (8, 80, "full", 1),
    (8, 80, "full", 8),
    (8, 80, "LoRA", 8),
)
"""Number of devices, memory of each, kind, and the most ranks that share a pass."""
TEXT = """\
# Model sizes and GPUs

Look up which models fit on which GPUs. The tables show what `vectorlm check` predicts from the models'
shapes. **Nobody has checked these predictions on a GPU.** To check your own config and model folder:

```bash
{command}
```

## Fine-tuning beside an engine

Each cell names the fastest way that fits; `-` means that none does.

| way | meaning |
| --- | --- |
| *awake* | the engine keeps its memory |
| *sleep* | the engine frees its memory while the trainer works (`engine.sleep: all`) |
| *sleep, offload* | *sleep*, and optimizer state moves to the host (`engine.offload_optimizer: true`) |
| *sleep, 70%* | *sleep, offload*, and `engine.gpu_memory_utilization: 0.7`; the KV cache may be small |
| *CPU offload* | *sleep* with `train_parameters.cpu_offload: true` and `gpu_memory_utilization: 0.85`; slow |

*full* trains all weights in float32 and computes in bfloat16. *LoRA* trains adapters of rank 32 on a frozen bfloat16
base, and *QLoRA* on a 4-bit base (`quantization: nf4`). *QLoRA* cannot use *CPU offload*.

{table}

All cells assume one sequence of 2,048 tokens per micro-batch, activation checkpointing, FULL_SHARD, AdamW, and a vLLM
engine in 16 bits with {share:.0%} of each device's memory, unless the way says otherwise. A GB is 1e9 bytes.

[1x24gb_qlora.yaml](../configs/cuda/1x24gb_qlora.yaml) fits a 7B model on 24 GB with shorter sequences.

## Longest sequences

Each cell is the longest length that fits, out of {lengths} tokens. Each micro-batch has one
sequence, no engine runs, and activations are offloaded (`use_activation_checkpointing: offload`). *Shared* columns also
use `context_parallel` ([guide](howto/out_of_memory.md#long-sequences)) with the largest power of two, at most 8, that
divides the number of heads.

{long}

[8x80gb_long.yaml](../configs/cuda/8x80gb_long.yaml) trains a 7B model beside an engine.
"""


def make_folder(folder: Path, name: str) -> None:
    """Write the parts of a model that `vectorlm check` reads: config.json, and the header of its weights file."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, hidden, feed_forward, blocks, heads, kv_heads, vocabulary, is_tied = MODELS[name]
    config = AutoConfig.for_model(
        kind,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=is_tied,
        max_position_embeddings=max(LENGTHS),
    )
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    config.save_pretrained(folder)
    head = {name: {"shape": list(parameter.shape)} for name, parameter in model.named_parameters()}
    text = json.dumps(head).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def overrides(kind: str, way: str) -> tuple[str, ...]:
    """Return the settings of a cell, besides the model."""
    return ("dataset.train_bs=1", *KINDS[kind], *WAYS[way])


def device_gib(gigabytes: int) -> float:
    """Return the memory of a card in GiB, rounded down to a tenth."""
    return int(gigabytes * 1e9 / GIB * 10) / 10


@cache
def config_of(folder: Path, settings: tuple[str, ...]) -> Any:
    """Read the config of a cell; it is the same for any number of devices."""
    return load_config(ROOT / BASE, [f"model={folder}", *settings])


def fits(config: Any, num_devices: int, gigabytes: int) -> bool:
    """Return whether a run fits on this number of devices."""
    return find_shortage(plan_of_config(config, num_devices, int(device_gib(gigabytes) * GIB))) is None


def way_of(folder: Path, kind: str, num_devices: int, gigabytes: int) -> str:
    """Return the fastest way in which a model fits; `NOTHING` if none does."""
    for way in [candidate for candidate in WAYS if (kind, candidate) != ("QLoRA", "CPU offload")]:
        if fits(config_of(folder, overrides(kind, way)), num_devices, gigabytes):
            return way
    return NOTHING


def long_settings(name: str, kind: str, most: int, length: int) -> tuple[str, ...]:
    """Return the settings of a cell in the table of longest sequences."""
    return (
        "dataset.train_bs=1",
        *KINDS[kind],
        "train_parameters.sampler=null",
        "train_parameters.use_activation_checkpointing=offload",
        f"train_parameters.context_parallel={math.gcd(MODELS[name][4], most)}",
        f"train_parameters.max_seq_len={length}",
    )


def longest(folder: Path, name: str, num_devices: int, gigabytes: int, kind: str, most: int) -> int | None:
    """Return the longest sequence that fits; None if none does."""
    for length in reversed(LENGTHS):
        config = config_of(folder, long_settings(name, kind, most, length))
        if fits(config, num_devices, gigabytes):
            return length
    return None


def long_table(folders: Path) -> str:
    """Return the table of longest sequences."""
    heads = [
        f"{num} x {gigabytes} GB, {kind}" + (", shared" if most > 1 else "")
        for num, gigabytes, kind, most in LONG
    ]
    table = ["| Model | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    rows = {}
    for name in MODELS:
        found = [longest(folders / name, name, *where) for where in LONG]
        rows[name] = " | ".join(NOTHING if length is None else f"{length:,}" for length in found)
    table += [f"| {', '.join(names)} | {row} |" for names, row in grouped(rows)]
    return "\n".join(table)


def grouped(rows: Mapping[Any, Any]) -> list[tuple[list[Any], Any]]:
    """Group neighbouring keys with equal rows."""
    groups: list[tuple[list[Any], Any]] = []
    for key, row in rows.items():
        if groups and groups[-1][1] == row:
            groups[-1][0].append(key)
        else:
            groups.append(([key], row))
    return groups


def command(name: str, num_devices: int, gigabytes: int, settings: Sequence[str]) -> str:
    """Return the command that checks a cell."""
    words = ["vectorlm", "check", BASE, "--world_size", num_devices]
    words += ["--device_memory_gib", device_gib(gigabytes), "--set", f"model=models/{name}"]
    words += [word for setting in settings for word in ("--set", setting)]
    return shlex.join(map(str, words))


def cells(folders: Path) -> Iterator[tuple[str, int, dict[tuple[int, str], str]]]:
    """Yield model, number of devices and, by memory and kind, the way of every row."""
    for name in MODELS:
        (folders / name).mkdir()
        make_folder(folders / name, name)
        for num_devices in NUM_DEVICES:
            yield (
                name,
                num_devices,
                {
                    (gigabytes, kind): way_of(folders / name, kind, num_devices, gigabytes)
                    for gigabytes in DEVICE_GB
                    for kind in KINDS
                },
            )


def page(folders: Path) -> str:
    """Return the text of the page; stand-ins for the models are written to `folders`."""
    heads = [f"{gigabytes} GB, {kind}" for gigabytes in DEVICE_GB for kind in KINDS]
    table = ["| Model | GPUs | " + " | ".join(heads) + " |", "|---" * (2 + len(heads)) + "|"]
    rows: dict[str, dict[int, str]] = {}
    for name, num_devices, found in cells(folders):
        rows.setdefault(name, {})[num_devices] = " | ".join(found.values())
    for names, by_number in grouped(rows):
        for numbers, row in grouped(by_number):
            table.append(f"| {', '.join(names)} | {', '.join(map(str, numbers))} | {row} |")
    share = load_config(ROOT / BASE).engine.gpu_memory_utilization
    return TEXT.format(
        share=share,
        table="\n".join(table),
        command=command("Qwen2.5-7B", 2, 80, overrides("full", "sleep")),
        long=long_table(folders),
        lengths="; ".join(f"{length:,}" for length in LENGTHS),
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(page(Path(folder)))
