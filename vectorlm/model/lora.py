"""Low-rank adapters on a model whose own weights stay frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vectorlm.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def add_lora(model: PreTrainedModel, lora_config: Mapping[str, Any]) -> nn.Module:
    """Wrap `model` so that only its low-rank adapters are trained: W x + (alpha / r) B A x.

    Source: Hu et al. 2021, arXiv 2106.09685, eq. 3.

    Args:
        model: The base model, before it is sharded.
        lora_config: Arguments of ``peft.LoraConfig``; ``task_type`` defaults to ``CAUSAL_LM``.

    Returns:
        The wrapped model; ``save_pretrained`` on it writes the adapters alone.

    Raises:
        ConfigError: An argument is unknown or does not fit the model.
    """
    from peft import LoraConfig, get_peft_model

    try:
        return get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **lora_config}))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"train_parameters.lora_peft_config={dict(lora_config)} cannot be used: {error} "
            "It takes the arguments of peft.LoraConfig."
        ) from error
