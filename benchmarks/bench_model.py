"""The model that the benchmarks measure: a random Llama of about 36 million parameters, 142 MB in fp32."""

from __future__ import annotations

from pathlib import Path


def save_bench_model(folder: Path) -> Path:
    """Save the model, with tied embeddings and without a tokenizer, to `folder`, and return `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
