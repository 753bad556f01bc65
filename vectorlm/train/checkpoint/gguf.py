"""GGUF files as model folders in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vectorlm.errors import ConfigError
from vectorlm.packages import is_installed
from vectorlm.train.checkpoint import folder

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
