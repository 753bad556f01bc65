"""Write a trained model as a Hugging Face folder, and convert GGUF files to one."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from vectorlm.data.encoding import end_tokens
from vectorlm.data.images import image_tokens_of, takes_images
from vectorlm.errors import ConfigError
from vectorlm.packages import is_installed
from vectorlm.ranks.engine_ranks import capture, results_or_first_error
from vectorlm.ranks.wait import report_wait
from vectorlm.sampling.weights.model_tensors import without_wrappers
from vectorlm.sampling.weights.plan import shortened
from vectorlm.train.checkpoint import folder
from vectorlm.train.lora import STARTING, lasting_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SHARD = "5GB"
"""Maximum size of a safetensors file; a larger model gets several files and an index."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk, after which nothing else can be written."""


def save_model(
    model: nn.Module, folder: str | Path, tokenizer: PreTrainedTokenizerBase | str | Path | None = None
) -> None:
    """Write a model as a folder that transformers, peft and vLLM load; all ranks call this, and rank 0 writes.

    The weights equal the trainer's bit for bit. Supported layouts: one process, whole models, FSDP2 with full or hybrid
    shards, ``DistributedDataParallel``, and ``torch.compile``. A shared tensor is written once. For a PEFT
    model only the adapters are written, for ``PeftModel.from_pretrained``. The folder appears, or replaces an older
    one, once it is complete.

    >>> vectorlm.save_model(model, "models/mine")  # doctest: +SKIP

    Args:
        model: A transformers or PEFT model, or one of the wrappers above around it.
        folder: The folder to write.
        tokenizer: The tokenizer to save, or the folder or name to load it from; by default the folder or name that the
            model was loaded from.

    Raises:
        TypeError: The model has an unsupported layout; the message has the fix.
        CheckpointError: The folder cannot be written; no partial folder is left. All ranks raise.
    """
    inner: Any = model
    while found := inner._modules.get("_orig_mod", inner._modules.get("module")):
        inner = found
    if "_fsdp_wrapped_module" in inner._modules:
        raise TypeError("the model is wrapped by FSDP1, which is not supported. Use fully_shard (FSDP2).")
    if not hasattr(inner, "save_pretrained"):
        raise TypeError(
            f"save_model needs a transformers or PEFT model, but {type(inner).__name__} has no save_pretrained. If it "
            "holds such a model as an attribute, pass that: wrapper.lm, for example."
        )
    export_model(inner, tokenizer, folder)


def _load_tokenizer(model: Any, source: str | Path | None) -> PreTrainedTokenizerBase | None:
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
    """Write weights (safetensors), configuration and tokenizer to the folder `path`; all ranks call this.

    Rank 0 needs host memory for one full copy, the others for one tensor. For a model with adapters only the adapters
    are written. The folder appears, or replaces an older one, once it is complete. For `tokenizer` see `save_model`.
    Rank 0's `card` becomes README.md.

    Raises:
        CheckpointError: The folder cannot be written; no partial folder is left. All ranks raise.
    """
    path = Path(path).absolute()

    def write() -> None:
        given: Any = tokenizer
        # A hidden name: the user may have files beside the folder.
        rescued = path.with_name(f".{path.name}.weights.safetensors")
        with folder.naming(path, "export"):
            try:
                if isinstance(tokenizer, str | Path | None):
                    given = _load_tokenizer(model, tokenizer)
                # Clean up for this folder only: other programs may write to its parent.
                write_model(model, weights, given, folder.begin(path), card)
                folder.finish(path)
                rescued.unlink(missing_ok=True)
            except BaseException as error:
                shutil.rmtree(folder.unfinished(path), ignore_errors=True)
                if isinstance(error, Exception) and getattr(error, "errno", None) not in FULL:
                    try:
                        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, rescued)
                        error.add_note(f"The weights alone are in {rescued}.")
                    except Exception:
                        with contextlib.suppress(OSError):
                            rescued.unlink()
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
    """Write the files of an exported model into the folder `work`; `weights` are the tensors of `saved_tensors`."""
    adapters = getattr(model, "peft_config", {})
    # peft does not set the base model of an adapter that was added to others.
    bases = [options.base_model_name_or_path for options in adapters.values()]
    base = next(filter(None, bases), None)
    for options in adapters.values():
        if own := options.base_model_name_or_path or base:
            options.base_model_name_or_path, commit = lasting_name(own)
            options.revision = commit or options.revision
    selected = [name for name in adapters if name != STARTING]
    if adapters:
        _require_all_in_adapters(model, weights, selected)
    generation_config: Any = getattr(model, "generation_config", None)
    is_whole = generation_config is not None and not hasattr(model, "peft_config")
    if is_whole:
        # transformers refuses to write some generation configs that it reads.
        model.generation_config = type(generation_config)()
    noise: Any = getattr(model, "training_noise", ())
    for config, name, value in noise:
        setattr(config, name, value)
    try:
        options = {"selected_adapters": selected} if selected else {}
        model.save_pretrained(work, state_dict=dict(weights), max_shard_size=MAX_SHARD, **options)
    finally:
        for config, name, _ in noise:
            setattr(config, name, 0.0)
        if is_whole:
            model.generation_config = generation_config
    if is_whole:
        written, named = copy.copy(generation_config), generation_config.eos_token_id
        ends = {named} if isinstance(named, int) else set(named or ())
        # Unchanged, unless the engines of the run stop at further tokens.
        if tokenizer is not None and not end_tokens(tokenizer) <= ends:
            written.eos_token_id = sorted(ends | end_tokens(tokenizer))
        written.to_json_file(work / "generation_config.json", keys_to_pop=["compile_config"])
    if is_whole and getattr(model.config, "auto_map", None):
        for file in Path(model.config.name_or_path).glob("*.py"):
            shutil.copy(file, work)
    if tokenizer is not None:
        if takes_images(tokenizer):
            image_tokens_of(tokenizer).save(work)
        tokenizer.save_pretrained(work)
        _restore_class(tokenizer, work / "tokenizer_config.json")
    # peft writes a model card that is a template.
    (work / "README.md").unlink(missing_ok=True)
    if card is not None:
        (work / "README.md").write_text(card, encoding="utf-8")


def _restore_class(tokenizer: Any, path: Path) -> None:
    """Keep the tokenizer's original class in a saved tokenizer_config.json, for older releases of transformers."""
    source = Path(str(getattr(tokenizer, "name_or_path", "")), path.name)
    if not (source.is_file() and path.is_file()):
        return
    came, saved = (json.loads(file.read_text(encoding="utf-8")) for file in (source, path))
    kept = {name: value for name, value in saved.items() if name not in ("is_local", "local_files_only")}
    if "tokenizer_class" in came:
        kept["tokenizer_class"] = came["tokenizer_class"]
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _require_all_in_adapters(
    model: Any, weights: Mapping[str, torch.Tensor], adapters: Sequence[str]
) -> None:
    """Raise unless all trained tensors belong to an adapter: peft silently omits parameters of the base model."""
    from peft import get_peft_model_state_dict

    written = {
        id(tensor)
        for name in adapters
        for tensor in get_peft_model_state_dict(model, dict(weights), name).values()
    }
    buffers = {name for name, _ in model.named_buffers()}
    lost = [name for name, tensor in weights.items() if id(tensor) not in written and name not in buffers]
    if lost:
        raise ValueError(
            f"{shortened(lost)} of the base model was trained, but adapters do not include it. Name its layer in "
            "modules_to_save, freeze it, or save the merged model: model.merge_and_unload()"
        )


def _is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def gather_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole tensors for ``save_pretrained``, on rank 0's host; other ranks get none.

    A shared parameter has its first name only. Frozen weights under adapters are not returned.
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
    """Return the tensors to export, as this rank holds them."""
    # state_dict() also makes FSDP2 free the bf16 copies of a forward without backward.
    saved = model.state_dict().keys()
    has_adapters = hasattr(model, "peft_config")
    # PEFT needs both names of a trained tensor that two modules share.
    named = model.named_parameters(remove_duplicate=not has_adapters)
    trained = [(name, weight) for name, weight in named if weight.requires_grad or not has_adapters]
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    return {without_wrappers(name): tensor for name, tensor in trained + buffers}


SOURCE = "gguf_source.txt"
"""Name of the file in a converted folder that identifies its GGUF file."""


def is_made_of(folder: Path, file: Path) -> bool:
    """Return whether `convert_gguf` made `folder` from `file` in its present state (size and time)."""
    note = folder / SOURCE
    return note.is_file() and note.read_text(encoding="utf-8") == _source(file)


def _source(file: Path) -> str:
    return f"{file.stat().st_size} bytes, {file.stat().st_mtime_ns} ns"


def convert_gguf(file: Path, path: Path) -> None:
    """Convert a GGUF file to a folder with model and tokenizer at `path`; weights are dequantised to float32.

    Raises:
        ConfigError: The file cannot be read, transformers lacks its architecture, or tensors of the model are missing.
            Or its position embeddings are scaled, which transformers does not read.
        CheckpointError: The folder cannot be written.
    """
    if not is_installed("gguf"):
        raise ConfigError(f"{file} is a GGUF file, which needs the package gguf. Run `pip install gguf`.")
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    load: Any = AutoModelForCausalLM.from_pretrained
    # The readers raise all kinds of errors for a truncated file or an unknown architecture.
    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name).get_text_config()
        rope: Any = getattr(config, "rope_parameters", None) or {}
        # Some models have parameters per kind of layer.
        kinds = {found.get("rope_type") for found in (rope, *rope.values()) if isinstance(found, dict)}
        if kinds - {None} == {"default"} and (scaling := _scaling(GGUFReader(file))) is not None:
            raise ConfigError(
                f"{file} scales its rotary position embeddings ({scaling}), which transformers ignores in GGUF files: "
                "the model would compute other values. Use its folder in Hugging Face layout."
            )
        read, loading = load(file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True)
        if missing := sorted(loading["missing_keys"]):
            raise ValueError(f"{len(missing)} tensors of the model are missing, such as {missing[0]!r}")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{file} cannot be read as a GGUF file ({type(error).__name__}: {error}). Download it again, or use an "
            "architecture that transformers reads from GGUF files."
        ) from error

    def save_rest(work: Path) -> None:
        tokenizer.save_pretrained(work)
        (work / SOURCE).write_text(_source(file), encoding="utf-8")

    _save_dequantised(read, path, save_rest, tokenizer.eos_token_id)


def convert_mxfp4(source: Path, path: Path) -> None:
    """Write the model in the folder `source` to `path` with its experts in bfloat16, and the other files as they are.

    Raises:
        ConfigError: The model cannot be read.
        CheckpointError: The folder cannot be written.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        read = load(source, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True))
    except Exception as error:  # transformers raises all kinds of errors.
        raise ConfigError(
            f"{source} cannot be read ({type(error).__name__}: {error}). Delete it, and download it again."
        ) from error
    left = shutil.ignore_patterns(
        "*.safetensors", "*.bin", "*.index.json", "config.json", "original", "metal"
    )
    _save_dequantised(read, path, lambda work: shutil.copytree(source, work, ignore=left, dirs_exist_ok=True))


def _save_dequantised(
    read: Any, path: Path, save_rest: Callable[[Path], object], eos_token_id: int | None = None
) -> None:
    """Write a model that was dequantised while it was read, then the other files by `save_rest`."""
    from transformers import AutoModelForCausalLM

    config, weights = read.config, read.state_dict()
    # A model read from GGUF still counts as quantised, and transformers cannot save quantised models.
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=read.dtype)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    if eos_token_id is not None:
        model.generation_config.eos_token_id = eos_token_id
    with folder.naming(path, "export"):
        work = folder.begin(path)
        model.save_pretrained(work)
        save_rest(work)
        folder.finish(path)


def _scaling(reader: Any) -> str | None:
    """Return the tensor or setting that scales the rotary position embeddings in a GGUF file; None if there is none."""
    if found := {"rope_freqs.weight", "rope_factors_long.weight"} & {
        tensor.name for tensor in reader.tensors
    }:
        return min(found)
    for name, field in reader.fields.items():
        if name.endswith(".rope.scaling.type") and field.contents() != "none":
            return f"{name}={field.contents()}"
    return None
