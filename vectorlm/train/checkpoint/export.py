"""The export of a trained model in Hugging Face layout."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from vectorlm.data.encoding import end_tokens
from vectorlm.errors import ConfigError
from vectorlm.packages import is_installed
from vectorlm.ranks.engine_ranks import capture, results_or_first_error
from vectorlm.ranks.wait import report_wait
from vectorlm.sampling.weights.model_tensors import WRAPPERS
from vectorlm.sampling.weights.plan import shortened
from vectorlm.train.checkpoint import folder
from vectorlm.train.lora import STARTING, lasting_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SHARD = "5GB"
"""Largest safetensors file; a larger model gets several and an index."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""With these errors of a disk there is no room to write anything else."""


def save_model(
    model: nn.Module,
    folder: str | Path,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
) -> None:
    """Write a model as a folder that transformers, peft and vLLM load; all ranks call it, and rank 0 writes.

    The weights are the trainer's, bit for bit, whatever the layout of the ranks: one process, whole models, FSDP2 with
    full or hybrid shards, ``DistributedDataParallel``, ``torch.compile``. A shared tensor is written once. Of a PEFT
    model the adapters alone are written, for ``PeftModel.from_pretrained``. The folder appears, or replaces an older
    one, when it is complete.

    >>> vectorlm.save_model(model, "models/mine")  # doctest: +SKIP

    Args:
        model: A transformers or PEFT model, or one of the wrappers above around it.
        folder: Where to write.
        tokenizer: What is saved beside the weights: a tokenizer, or the folder or name to load it from; when omitted,
            where the model was loaded from.

    Raises:
        TypeError: The model cannot be saved in this layout; the text says what to pass.
        CheckpointError: The folder cannot be written; no half of it is left. All ranks raise.
    """
    export_model(_without_wrappers(model), tokenizer, folder)


def _without_wrappers(model: Any) -> Any:
    """Return the transformers or PEFT model inside wrappers of torch's."""
    while inner := model._modules.get("_orig_mod", model._modules.get("module")):
        model = inner
    if "_fsdp_wrapped_module" in model._modules:
        raise TypeError("the model is wrapped by FSDP1, which is not supported: use fully_shard (FSDP2).")
    if not hasattr(model, "save_pretrained"):
        raise TypeError(
            f"save_model takes a transformers or PEFT model, and {type(model).__name__} has no save_pretrained. If it "
            "holds such a model as an attribute, pass that: wrapper.lm, for example."
        )
    return model


def _tokenizer_of(model: Any, source: str | Path | None) -> PreTrainedTokenizerBase | None:
    from transformers import AutoTokenizer

    if source is not None:
        return AutoTokenizer.from_pretrained(source)
    source = model.config.name_or_path
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:
        warnings.warn(
            f"no tokenizer is saved: the model was loaded from {source!r}, which has none ({type(error).__name__}). "
            "Pass save_model(..., tokenizer=...).",
            stacklevel=6,
        )
        return None


def export_model(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | str | Path | None,
    path: str | Path,
    card: str | None = None,
) -> None:
    """Write weights (safetensors), configuration and tokenizer to the folder `path`; called on all ranks.

    Rank 0 holds one full copy in host memory, the others one tensor at a time. Of a model with adapters only the
    adapters are written. The folder appears, or replaces an older one, when it is complete. `tokenizer` is as for
    `save_model`; rank 0's `card` is the README.md.

    Raises:
        CheckpointError: The folder cannot be written; no half of it is left. All ranks raise.
    """
    path = Path(path).absolute()

    def write() -> None:
        given: Any = tokenizer
        rescued = path.with_name(f"{path.name}-weights.safetensors")
        with folder.naming(path, "export"):
            try:
                if isinstance(tokenizer, str | Path | None):
                    given = _tokenizer_of(model, tokenizer)
                # Of this folder alone: other programs may be writing beside it.
                write_model(model, weights, given, folder.begin(path), card)
                folder.finish(path)
                rescued.unlink(missing_ok=True)
            except BaseException as error:
                shutil.rmtree(folder.unfinished(path), ignore_errors=True)
                if isinstance(error, Exception) and getattr(error, "errno", None) not in FULL:
                    _rescue(weights, rescued, error)
                raise

    with report_wait(f"writing the model {path}", is_on=_is_main()):
        weights = gather_weights(model)
        written: list[Any] = [capture(write) if _is_main() else None]
        if dist.is_initialized():
            dist.broadcast_object_list(written)
        results_or_first_error(written)


def write_model(
    model: Any, weights: Mapping[str, torch.Tensor], tokenizer: Any, work: Path, card: str | None
) -> None:
    """Write the files of an exported model into the folder `work`; `weights` are what `saved_tensors` names."""
    of_adapters: dict[str, Any] = {}
    adapters = getattr(model, "peft_config", {})
    # peft leaves it out of an adapter that was added to others.
    base = next(
        (each.base_model_name_or_path for each in adapters.values() if each.base_model_name_or_path), None
    )
    for name, options in adapters.items():
        own = options.base_model_name_or_path or base
        options.base_model_name_or_path = own and lasting_name(own)
        if name != STARTING:
            of_adapters.setdefault("selected_adapters", []).append(name)
    if adapters:
        _require_all_in_adapters(model, weights, of_adapters.get("selected_adapters", ()))
    generation_config: Any = getattr(model, "generation_config", None)
    is_whole = generation_config is not None and not hasattr(model, "peft_config")
    if is_whole:
        # transformers would refuse to write some that it reads.
        model.generation_config = type(generation_config)()
    noise: Any = getattr(model, "training_noise", ())
    for config, name, value in noise:
        setattr(config, name, value)
    try:
        model.save_pretrained(work, state_dict=dict(weights), max_shard_size=MAX_SHARD, **of_adapters)
    finally:
        for config, name, _ in noise:
            setattr(config, name, 0.0)
        if is_whole:
            model.generation_config = generation_config
    if is_whole:
        written, named = copy.copy(generation_config), generation_config.eos_token_id
        ends = {named} if isinstance(named, int) else set(named or ())
        # As it came, unless the engines of the run stopped at more.
        if tokenizer is not None and not end_tokens(tokenizer) <= ends:
            written.eos_token_id = sorted(ends | end_tokens(tokenizer))
        written.to_json_file(work / "generation_config.json", keys_to_pop=["compile_config"])
    if tokenizer is not None:
        tokenizer.save_pretrained(work)
        _restore_class(tokenizer, work / "tokenizer_config.json")
    # peft leaves a template of a card.
    (work / "README.md").unlink(missing_ok=True)
    if card is not None:
        (work / "README.md").write_text(card, encoding="utf-8")


def _restore_class(tokenizer: Any, path: Path) -> None:
    """Let a saved tokenizer_config.json name the class that the tokenizer came with, which older releases know."""
    source = Path(str(getattr(tokenizer, "name_or_path", "")), path.name)
    if not (source.is_file() and path.is_file()):
        return
    came, saved = (json.loads(each.read_text(encoding="utf-8")) for each in (source, path))
    kept = {name: value for name, value in saved.items() if name not in ("is_local", "local_files_only")}
    if "tokenizer_class" in came:
        kept["tokenizer_class"] = came["tokenizer_class"]
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _require_all_in_adapters(
    model: Any, weights: Mapping[str, torch.Tensor], adapters: Sequence[str]
) -> None:
    """Raise unless what was trained is part of an adapter: peft leaves out a base's own parameters in silence."""
    from peft import get_peft_model_state_dict

    written = {
        id(tensor)
        for name in adapters
        for tensor in get_peft_model_state_dict(model, dict(weights), name).values()
    }
    buffers = {name for name, _ in model.named_buffers()}
    lost = [name for name, each in weights.items() if id(each) not in written and name not in buffers]
    if lost:
        raise ValueError(
            f"{shortened(lost)} of the base model was trained, and a folder of adapters does not hold it. Name its "
            "layer in modules_to_save, freeze it, or save the merged model: model.merge_and_unload()"
        )


def _rescue(weights: Mapping[str, torch.Tensor], path: Path, error: Exception) -> None:
    """Write the weights alone to the file `path`, and add to `error` where they are."""
    try:
        save_file({name: each.contiguous() for name, each in weights.items()}, path)
        error.add_note(f"The weights alone are in {path}.")
    except Exception:
        with contextlib.suppress(OSError):
            path.unlink()


def _is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def gather_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that ``save_pretrained`` writes, in full on rank 0's host and none elsewhere.

    A shared parameter comes once, under its first name; frozen weights under adapters are left out.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in saved_tensors(model).items():
        whole = tensor.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        if _is_main():
            weights[name] = whole.cpu()
    return weights


def saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what is exported of `model`, as its rank holds it."""
    # Also makes FSDP2 take back the bf16 copies of a forward without backward.
    saved = model.state_dict().keys()
    has_adapters = hasattr(model, "peft_config")
    # PEFT wants a trained tensor that two modules share under both names.
    named = model.named_parameters(remove_duplicate=not has_adapters)
    trained = [(name, each) for name, each in named if each.requires_grad or not has_adapters]
    buffers = [(name, each) for name, each in model.named_buffers() if name in saved]
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in trained + buffers:
        for part in WRAPPERS:
            name = name.replace(part, "")
        tensors[name] = tensor
    return tensors


SOURCE = "gguf_source.txt"
"""The file in a converted folder that says which GGUF file it was made of."""


def is_made_of(folder: Path, file: Path) -> bool:
    """Return whether `convert_gguf` made `folder` of `file` as it is now, by its size and its time."""
    note = folder / SOURCE
    return note.is_file() and note.read_text(encoding="utf-8") == _source(file)


def _source(file: Path) -> str:
    return f"{file.stat().st_size} bytes, {file.stat().st_mtime_ns} ns"


def convert_gguf(file: Path, path: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to the folder `path`, weights in float32.

    Quantised weights become the numbers that they stand for. The folder has its name once it is complete.

    Raises:
        ConfigError: The file cannot be read, transformers lacks its architecture, tensors of the model are missing, or
            its position embeddings are scaled, which transformers does not read.
        CheckpointError: The folder cannot be written.
    """
    if not is_installed("gguf"):
        raise ConfigError(f"{file} is a GGUF file, and the package gguf is missing: pip install gguf")
    import torch
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    load: Any = AutoModelForCausalLM.from_pretrained
    # Each of the readers raises its own errors for a file that is cut, or of an unknown architecture.
    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name).get_text_config()
        rope: Any = getattr(config, "rope_parameters", None) or {}
        # Some models have them by the kind of layer.
        kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
        if kinds - {None} == {"default"} and (scaling := _scaling(GGUFReader(file))) is not None:
            raise ConfigError(
                f"{file} scales its rotary position embeddings ({scaling}), which transformers does not read from GGUF "
                "files: the model would compute something else. Use its folder in Hugging Face layout."
            )
        read, loading = load(file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True)
        if missing := sorted(loading["missing_keys"]):
            raise ValueError(f"{len(missing)} tensors of the model are missing, the first is {missing[0]!r}")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{file} cannot be read as a GGUF file ({type(error).__name__}: {error}). Download it again if it is cut; "
            "transformers' documentation lists the architectures that it reads."
        ) from error
    config = read.config
    # The model counts as quantised, which cannot be saved, though its weights are whole numbers of float32 now.
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    with folder.naming(path, "export"):
        work = folder.begin(path)
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
        (work / SOURCE).write_text(_source(file), encoding="utf-8")
        folder.finish(path)


def _scaling(reader: Any) -> str | None:
    """Return what scales the rotary position embeddings in a GGUF file: a tensor or a setting."""
    if found := {"rope_freqs.weight", "rope_factors_long.weight"} & {each.name for each in reader.tensors}:
        return min(found)
    for name, field in reader.fields.items():
        if name.endswith(".rope.scaling.type") and field.contents() != "none":
            return f"{name}={field.contents()}"
    return None
