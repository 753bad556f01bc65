"""Tiny mixture-of-experts models whose routers decide clearly enough to differ in bfloat16."""

from pathlib import Path

from kit.families import FAMILIES, WITH_BUFFERS, Family, save_family

_SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
_SIZES |= {"max_position_embeddings": 512, "initializer_range": 0.08, "vocab_size": 48}
# fmt: off
MIXTURES = {
    "Qwen3-MoE": {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "num_key_value_heads": 2},
    "OLMoE": {"num_experts": 16, "num_experts_per_tok": 2, "num_key_value_heads": 4, "intermediate_size": 64},
    "GLM-4-MoE": {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64,
                  "num_key_value_heads": 2},
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 2},
}
# fmt: on
"""Settings by family; in tests of these families, replay must remove two thirds of the largest gap."""


def save_mixture(name: str, path: Path) -> Path:
    """Save the model of a family with sharpened routers and without a tokenizer."""
    import transformers

    family = {**FAMILIES, **WITH_BUFFERS}[name]
    settings = {**family.settings, **_SIZES, **MIXTURES[name]}
    save_family(Family(family.config, family.layout, settings), path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("gate.weight") and parameter.ndim == 2:
            parameter.data.mul_(3)
    model.save_pretrained(path)
    return path
