"""Tokenizers that pad on the left train the same model."""

import json
from pathlib import Path

from datasets import Dataset
from letters import letter_tokenizer, made_of
from rank_processes import save_tiny_llama
from tiny_runs import rows
from transformers import AutoTokenizer

from vectorlm.config.load import load_config
from vectorlm.sft_run import finetune

CONFIG = """
model: {side}
train_parameters: {{output_dir: runs/{side}, max_seq_len: 16, epochs: 2, optimizer: {{lr: 1.0e-2}}, logging_steps: 1}}
dataset: {{train_bs: 4, eval_bs: 4, train_ds: {side}-rows, eval_ds: {side}-rows}}
"""


def losses(side):
    """Fine-tune with a tokenizer that pads on `side`, on rows that it padded itself."""
    save_tiny_llama(Path(side))
    tokenizer = AutoTokenizer.from_pretrained(side, padding_side=side)
    tokenizer.save_pretrained(side)
    assert AutoTokenizer.from_pretrained(side).padding_side == side
    tokenizer.pad_token = tokenizer.eos_token
    given = rows(10)
    padded = tokenizer.pad({"input_ids": [row["input_ids"] for row in given]})
    for row, mask in zip(given, padded["attention_mask"], strict=True):
        room = [-100] * (len(mask) - len(row["labels"]))
        row["labels"] = room + row["labels"] if side == "left" else row["labels"] + room
    columns = {name: padded[name] for name in ("input_ids", "attention_mask")}
    assert (columns["attention_mask"][0][0] == 0) == (side == "left")
    Dataset.from_dict(columns | {"labels": [row["labels"] for row in given]}).save_to_disk(f"{side}-rows")
    Path(f"{side}.yaml").write_text(CONFIG.format(side=side))
    finetune(load_config(f"{side}.yaml"))
    metrics = map(json.loads, Path(f"runs/{side}/metrics.jsonl").read_text().splitlines())
    return [row["train/loss"] for row in metrics if "train/loss" in row]


def test_training_is_the_same_on_rows_that_were_padded_on_the_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    left = losses("left")
    assert left == losses("right")
    assert len(left) == 6


def test_preprocessing_pads_on_neither_side(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = []
    for side in ("left", "right"):
        tokenizer = letter_tokenizer()
        tokenizer.padding_side, tokenizer.pad_token = side, "</s>"
        made.append(made_of(["abc", "d"], tokenizer=tokenizer)[0][:])
    assert made[0] == made[1]
    assert list(map(len, made[0]["input_ids"])) == [5, 3]
