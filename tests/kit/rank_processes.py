"""Run a test's function on several gloo ranks; each is a process with one thread."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import cloudpickle

from kit import pictures, warm_engines
from vectorlm.ranks.topology import Topology

_CONTEXT = multiprocessing.get_context("forkserver")
# A clean process, from which the ranks are forked, imports these modules once.
_CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.checkpoint",
        "transformers",
        "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
        "datasets",
        "vectorlm.runs.reinforcement",
        "matplotlib.figure",
        "pytest",
    ]
)


def on_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, check: bool = True, num_nodes: int = 1
) -> list[Any]:
    """Return the result of ``fn(topology, *args)`` on each rank; None for a dead rank if `check` is false.

    `num_nodes` spreads the ranks of the topology over that many machines.
    """
    with tempfile.TemporaryDirectory() as scratch:
        readers, processes = [], []
        for rank in range(world_size):
            reader, writer = _CONTEXT.Pipe(duplex=False)
            num_local = world_size // num_nodes
            topology = Topology(rank, rank % num_local, world_size, num_local, "cpu")
            target = (fn, args, topology, f"{scratch}/store", writer, warm_engines.OFFERED, pictures.DRAWN)
            process = _CONTEXT.Process(target=_main, args=target, daemon=True)
            process.start()
            writer.close()
            readers.append(reader)
            processes.append(process)
        try:
            results = _collect(readers, check)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return results


def forked(fn: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    """Run a function like `vectorlm.launch`, without a launcher, on ranks that have imported torch and transformers."""
    return on_ranks(world_size, _call, fn, args)


def launch(fn: Callable[..., Any], *args: Any, world_size: int = 1) -> list[Any]:
    """Replace `vectorlm.launch` by ranks that have imported torch and transformers."""
    return forked(_unpickled, cloudpickle.dumps((fn, args)), world_size=world_size)


def _unpickled(call: bytes) -> Any:
    fn, args = pickle.loads(call)
    return fn(*args)


def _call(topology: Topology, fn: Callable[..., Any], args: tuple) -> Any:
    place = {"RANK": topology.rank, "LOCAL_RANK": topology.local_rank}
    place |= {"WORLD_SIZE": topology.world_size, "LOCAL_WORLD_SIZE": topology.local_world_size}
    os.environ.update({name: str(value) for name, value in place.items()})
    return fn(*args)


def _collect(readers: list[Any], check: bool) -> list[Any]:
    results: list[Any] = [None] * len(readers)
    pending = list(readers)
    while pending:
        for reader in wait(pending):
            pending.remove(reader)
            try:
                error, results[readers.index(reader)] = pickle.loads(reader.recv_bytes())
            except EOFError:
                error = "the rank died"
            if error and check:
                raise AssertionError(f"rank {readers.index(reader)}: {error}")
            if error:
                return results
    return results


def _main(
    fn: Callable[..., Any], args: tuple, topology: Topology, store: str, writer: Any, warm: Any, drawn: bool
) -> None:
    import torch
    import torch.distributed as dist

    warm_engines.use(warm)
    pictures.draw(drawn)
    torch.set_num_threads(1)
    place = {"rank": topology.rank, "world_size": topology.world_size}
    dist.init_process_group("gloo", init_method=f"file://{store}", **place)
    # Plain pickle copies tensors; the pipe's pickler would share their memory with a process that is about to exit.
    try:
        result = fn(topology, *args)
        writer.send_bytes(pickle.dumps((None, result)))
        dist.barrier()
    except BaseException:
        writer.send_bytes(pickle.dumps((traceback.format_exc(), None)))


def save_tiny_llama(
    path: Path,
    *,
    tied: bool = False,
    dropout: float = 0.0,
    vocab_size: int = 48,
    hidden_size: int = 32,
    max_length: int = 64,
    num_heads: int = 2,
    num_key_value_heads: int = 1,
) -> Path:
    """Save a Llama of three blocks with random weights, and a tokenizer of single letters."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    vocab = {
        character: index for index, character in enumerate(["</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"])
    }
    letters = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="</s>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(path)
    return path


def save_adapters(model: Path, path: Path, **options: Any) -> Path:
    """Save LoRA adapters with random weights for the model in the folder `model`, in PEFT's format."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **options}
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    adapted.save_pretrained(path)
    return path
