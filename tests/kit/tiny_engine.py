"""Arguments of an engine for the tiny Llama of `save_tiny_llama`."""

TINY_ENGINE = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 16 << 20}
