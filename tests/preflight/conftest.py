"""A config whose model, datasets and prompts exist."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def complete(write_config):
    Path("models/tiny").mkdir(parents=True)
    Path("models/tiny/config.json").write_text(
        json.dumps({"max_position_embeddings": 256, "num_attention_heads": 4})
    )
    for split in ("train", "eval"):
        Path("data", split).mkdir(parents=True)
        Path("data", split, "dataset_info.json").write_text("{}")
    Path("p.jsonl").write_text('{"prompt": "a", "answer": 1}\n\n{"prompt": "b"}\n')
    Path("mine.py").write_text("def score(text, answer=None):\n    return 1.0\n")
    return write_config()
