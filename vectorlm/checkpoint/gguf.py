"""GGUF files as model folders in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vectorlm.checkpoint import folder
from vectorlm.errors import ConfigError
from vectorlm.packages import is_installed


def convert_gguf(file: Path, path: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to the folder `path`, weights in float32.

    Quantised weights become the numbers that they stand for. The folder has its name once it is complete.

    Raises:
        ConfigError: The file cannot be read, transformers lacks its architecture, or tensors of the model are missing.
        CheckpointError: The folder cannot be written.
    """
    if not is_installed("gguf"):
        raise ConfigError(f"{file} is a GGUF file, and the package gguf is missing: pip install gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    load: Any = AutoModelForCausalLM.from_pretrained
    # Each of the readers raises its own errors for a file that is cut, or of an unknown architecture.
    try:
        read, loading = load(file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True)
        if missing := sorted(loading["missing_keys"]):
            raise ValueError(f"{len(missing)} tensors of the model are missing, the first is {missing[0]!r}")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
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
        folder.finish(path)
