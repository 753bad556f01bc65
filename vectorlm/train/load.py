"""A causal language model with its tokenizer, read from a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vectorlm.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Read the tokenizer saved beside a model; where it has no padding token, its end token pads."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(_model_directory(path))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(path: str | Path, *, flash_attention: bool = False) -> PreTrainedModel:
    """Read a causal language model onto the CPU, with fp32 weights and in training mode."""
    from transformers import AutoModelForCausalLM

    directory = _model_directory(path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation=_attention(directory, flash_attention),
        output_loading_info=True,
    )
    model, info = loaded
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:5])
        raise ConfigError(
            f"model={str(path)!r} lacks {len(info['missing_keys'])} tensors ({missing}), which would start "
            "from random values. Use a complete checkpoint."
        )
    return model.train()


def load_empty_model(path: str | Path, *, flash_attention: bool = False) -> PreTrainedModel:
    """Build the same model as `load_model` with parameters that have a shape but no memory; buffers are real."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = _model_directory(path)
    config = AutoConfig.from_pretrained(directory)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=_attention(directory, flash_attention)
        )
    model.tie_weights()
    return model.train()


def _model_directory(path: str | Path) -> Path:
    if not (Path(path) / "config.json").is_file():
        what = "has no config.json" if Path(path).is_dir() else "is not a directory"
        raise ConfigError(
            f"model={str(path)!r} {what}: it must be a directory written by save_pretrained. "
            "Download the model first, or correct the path."
        )
    return Path(path)


def _attention(directory: Path, flash_attention: bool) -> str:
    from transformers.utils import is_flash_attn_2_available

    if flash_attention and not is_flash_attn_2_available():
        raise ConfigError(
            "train_parameters.use_flash_attention=True needs the flash-attn package and a CUDA device, and "
            "one of them is missing here. Install it, or set use_flash_attention: False."
        )
    if flash_attention:
        return "flash_attention_2"
    # transformers 5.19: torch's kernel silently leaves out the cap on Gemma 2's attention scores, and the trainer's
    # log-probabilities would differ from the engine's.
    capped = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("attn_logit_softcapping")
    return "eager" if capped else "sdpa"
