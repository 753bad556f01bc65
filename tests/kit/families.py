"""Tiny random models of many families, with the peculiarity of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Family:
    """An architecture, with the weights that a hot swap could get wrong."""

    config: str
    """Name of the transformers configuration class."""
    layout: str
    """Peculiarity of the family."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that replace or extend the common ones."""
    always_tied: bool = False
    """Whether vLLM always uses the embedding table as the head."""
    never_tied: bool = False
    """Whether vLLM always loads a separate head."""
    dtype: str = "float32"
    """Dtype that vLLM computes in on CPU."""


_COMMON = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts_per_tok": 2}
_GROUPED_EXPERTS = {
    **_EXPERTS,
    "head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

_LATENT = {
    **_EXPERTS,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
}
_MAMBA_2 = {"mamba_n_groups": 1, "mamba_d_state": 32, "mamba_chunk_size": 16}
_HYBRID = {**_MAMBA_2, "mamba_d_head": 32, "mamba_expand": 2, "mamba_n_heads": 4}

_DELTA_NET = {
    "head_dim": 64,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
}
_DELTA_NET_EXPERTS = {
    **_EXPERTS,
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}

FAMILIES = {
    "Llama": Family("LlamaConfig", "vLLM fuses q, k, v and gate, up"),
    "Mistral": Family("MistralConfig", "sliding window", {"sliding_window": 8}),
    "Qwen2": Family("Qwen2Config", "biases on q, k, v"),
    "Qwen3": Family("Qwen3Config", "norms on q and k; `head_dim` set separately", {"head_dim": 64}),
    "Gemma 2": Family(
        "Gemma2Config",
        "norm weights + 1, scaled embeddings, capped logits, sliding window in every second layer; always tied",
        {"head_dim": 64, "sliding_window": 8, "query_pre_attn_scalar": 64},
        always_tied=True,
    ),
    "Gemma 3": Family(
        "Gemma3TextConfig",
        "as Gemma 2, with norms on q and k instead of caps",
        {
            "head_dim": 64,
            "sliding_window": 8,
            "query_pre_attn_scalar": 64,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "Phi-3": Family("Phi3Config", "the checkpoint fuses q, k, v and gate, up"),
    "Granite": Family(
        "GraniteConfig",
        "multipliers on embeddings, attention, residuals and logits",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "OPT": Family(
        "OPTConfig",
        "learned positions, layer norms and biases everywhere, other tensor names",
        {"num_key_value_heads": 2, "ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0},
    ),
    "Mixtral": Family(
        "MixtralConfig",
        "experts: one tensor for all in transformers, one tensor per expert in the checkpoint",
        {**_EXPERTS, "num_local_experts": 4, "sliding_window": None},
    ),
    "Qwen3-MoE": Family(
        "Qwen3MoeConfig",
        "experts; vLLM's kernel pads their 48 columns to 64; norms on q and k",
        {**_EXPERTS, "num_experts": 6, "moe_intermediate_size": 48, "head_dim": 32, "norm_topk_prob": True},
    ),
    "OLMo 2": Family("Olmo2Config", "norms after attention and MLP; vLLM runs the transformers code"),
    "GPT-NeoX": Family(
        "GPTNeoXConfig",
        "q, k, v interleaved by head; vLLM runs the transformers code",
        {"num_key_value_heads": 2},
    ),
    "OLMoE": Family(
        "OlmoeConfig",
        "experts; norms on q and k over all heads",
        {**_EXPERTS, "num_experts": 4, "num_key_value_heads": 2},
        never_tied=True,
    ),
    "Cohere 2": Family(
        "Cohere2Config",
        "scaled logits, attention and MLP in parallel; always tied",
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "logit_scale": 0.5},
        always_tied=True,
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        "attention sinks; gate and up of experts interleaved and transposed, with biases",
        {**_EXPERTS, "num_local_experts": 4, "head_dim": 32, "sliding_window": 16}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        never_tied=True,
    ),
    "DeepSeek-V2": Family(
        "DeepseekV2Config",
        "latent attention: vLLM also keeps parts of a projection in another order",
        {**_LATENT, "q_lora_rank": None},
        never_tied=True,
    ),
    "GLM-4-MoE-Lite": Family(
        "Glm4MoeLiteConfig",
        "as DeepSeek-V2, with latent queries and a router correction",
        {**_LATENT, "q_lora_rank": 32},
        never_tied=True,
    ),
    "Mamba-2": Family(
        "Mamba2Config",
        "no attention; vLLM computes `-exp(A_log)` when it loads `A_log`",
        {"num_heads": 4, "head_dim": 32, "n_groups": 1, "state_size": 32, "expand": 2, "chunk_size": 16}
        | {"intermediate_size": 128, "hidden_act": "silu"},
    ),
    "Falcon-H1": Family(
        "FalconH1Config",
        "Mamba-2 and attention in every layer",
        {**_MAMBA_2, "head_dim": 32, "mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32},
    ),
    "Granite 4 hybrid": Family(
        "GraniteMoeHybridConfig",
        "Mamba-2 layers between attention layers",
        {**_HYBRID, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96}
        | {"layer_types": ["mamba", "attention"], "position_embedding_type": "rope"},
    ),
    "Nemotron-H": Family(
        "NemotronHConfig",
        "Mamba-2 layers between attention layers; vLLM computes its experts on GPUs only",
        {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 32}
        | {"n_groups": 1, "ssm_state_size": 32, "chunk_size": 16, "head_dim": 32, **_EXPERTS}
        | {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 32}
        | {"moe_shared_expert_intermediate_size": 32},
    ),
    "Qwen3-Next": Family(
        "Qwen3NextConfig",
        "Gated DeltaNet in every second layer; experts",
        {**_DELTA_NET, **_DELTA_NET_EXPERTS},
        never_tied=True,
        dtype="bfloat16",
    ),
}

WITH_BUFFERS = {
    "Apertus": Family("ApertusConfig", "numbers of the activation are buffers"),
    "GLM-4-MoE": Family(
        "Glm4MoeConfig",
        "the correction of the router is a buffer",
        _GROUPED_EXPERTS,
    ),
    "dots.llm1": Family(
        "Dots1Config",
        "the same; vLLM runs the transformers code",
        {**_GROUPED_EXPERTS, "num_key_value_heads": 2},
    ),
}
"""Families with buffers that the model computes with and no optimizer trains."""


REFUSED = {
    "LFM2": (
        Family(
            "Lfm2Config",
            "short convolutions",
            {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32},
        ),
        "vLLM 0.32 reads `conv_dim`, which transformers 5.19 does not have",
    ),
    "Jamba": (
        Family(
            "JambaConfig",
            "Mamba-1 between layers with attention",
            {"num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
            | {"mamba_d_state": 16, "mamba_expand": 2, "mamba_dt_rank": 4},
        ),
        "vLLM 0.32 has no kernel for Mamba-1 on CPU",
    ),
}
"""Families that our vLLM cannot run on CPU, with the reason."""

RECURRENT = {
    **{
        name: FAMILIES[name]
        for name in ("Mamba-2", "Falcon-H1", "Granite 4 hybrid", "Nemotron-H", "Qwen3-Next")
    },
    "LFM2": REFUSED["LFM2"][0],
    "Qwen3.5": Family("Qwen3_5TextConfig", "Gated DeltaNet", _DELTA_NET),
    "Qwen3.5-MoE": Family(
        "Qwen3_5MoeTextConfig", "Gated DeltaNet, experts", {**_DELTA_NET, **_DELTA_NET_EXPERTS}
    ),
    "Granite 4 hybrid MoE": Family(
        "GraniteMoeHybridConfig",
        "Mamba-2, experts",
        {**_HYBRID, **_EXPERTS, "num_local_experts": 4, "shared_intermediate_size": 96}
        | {"layer_types": ["mamba", "attention"]},
    ),
}
"""Families whose layers pass a state from token to token; the trainer is tested with all of them."""

ATTENTIVE = {name: FAMILIES[name] for name in ("gpt-oss", "Cohere 2")}
"""Families with attention or output layers that the trainer must reproduce."""


def save_family(family: Family, path: Path, *, tied: bool = False) -> Path:
    """Save a model of `family` with random weights and no tokenizer; with `tied`, its head is the embedding table."""
    import torch
    import transformers

    config = getattr(transformers, family.config)(**{**_COMMON, **family.settings}, tie_word_embeddings=tied)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path
