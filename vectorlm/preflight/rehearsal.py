"""The end of a run, carried out before its start, with the names and shapes of its weights alone."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar

from vectorlm.checkpoint.export import saved_tensors, write_model
from vectorlm.config.schema import Config
from vectorlm.config.setting import refuse
from vectorlm.errors import ConfigError, VectorLMError
from vectorlm.lora.folder import merged
from vectorlm.lora.load import add_lora
from vectorlm.lora.sources import merged_source
from vectorlm.ranks.topology import Topology
from vectorlm.report.card import card_of
from vectorlm.train.load import load_model, load_scorer, load_tokenizer
from vectorlm.weights.module_source import manifest_of
from vectorlm.weights.plan import require_same

REHEARSAL = ".rehearsal-"
"""How the name of the folder begins that a rehearsal removes again."""


def rehearse(config: Config) -> None:
    """Export and merge what a run will train, in a folder that is removed again.

    Raises:
        ConfigError: What the run trains could not be exported, merged or sampled from; the text says why.
    """
    train = config.train_parameters
    output = Path(train.output_dir).absolute()
    existing = next(each for each in (output, *output.parents) if each.exists())
    disable_progress_bar()
    with _naming(config), warnings.catch_warnings(action="ignore"), ExitStack() as stack:
        tokenizer = load_tokenizer(config.model)

        def load() -> Any:
            if config.reward_model is not None:
                base = load_scorer(config.model, tokenizer, dtype=train.model.dtype, is_empty=True)
            else:
                base = load_model(config.model, dtype=train.model.dtype, is_empty=True)
                with suppress(OSError):  # A model without one gets transformers' own.
                    base.generation_config = GenerationConfig.from_pretrained(config.model)
            return base if train.lora_peft_config is None else add_lora(base, train.lora_peft_config)

        model = load()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=REHEARSAL, dir=existing)))
        stack.enter_context(patch("transformers.modeling_utils.safe_save_file", _save_names))
        card = card_of(output, 0, is_adapter=train.lora_peft_config is not None)
        weights = saved_tensors(model)
        if train.lora_peft_config is not None:
            stack.enter_context(patch("peft.peft_model.safe_save_file", _save_names))
            whole = merged(load())
            write_model(whole, saved_tensors(whole), tokenizer, folder / "merged", card)
            if config.reward_model is None:
                # As `vectorlm sample` sends them.
                held = manifest_of(load_model(config.model, is_empty=True))
                require_same(merged_source(model, Topology()).manifest(), held)
        write_model(model, weights, tokenizer, folder / "final-model", card)
        needed, free = sum(each.nbytes for each in weights.values()), shutil.disk_usage(existing).free
        if needed > free:
            rule = f"is on a disk with {free:,} bytes left, and the exported model takes {needed:,}"
            fix = "Make room, or name another folder."
            raise ConfigError(refuse(config, "train_parameters.output_dir", rule, fix))


@contextmanager
def _naming(config: Config) -> Iterator[None]:
    """Say what an error means, which the end of a run would raise."""
    try:
        yield
    except (ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except OSError as error:
        rule = f"cannot take the exported model ({error})"
        fix = "Make it writable, or name another folder."
        raise ConfigError(refuse(config, "train_parameters.output_dir", rule, fix)) from error
    except Exception as error:
        if "allocate memory" in str(error):  # torch on CPU, whose error no file or adapter would mend.
            raise
        what = "" if isinstance(error, VectorLMError) else f"{type(error).__name__}: "
        raise ConfigError(
            f"what this run trains could not be exported, merged or sampled from at its end ({what}{error}). Change "
            f"train_parameters.lora_peft_config, or the files in model={config.model!r}."
        ) from error


def _save_names(tensors: Mapping[str, torch.Tensor], path: Any, metadata: dict[str, str]) -> None:
    save_file({name: torch.empty(0) for name in tensors}, path, metadata)
