"""Tiny fine-tuning runs, for the tests of whole runs; the fixture `inputs` in conftest.py makes their data."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from vectorlm.runs.config.load import load_config
from vectorlm.runs.fine_tuning import finetune

ROOT = Path(__file__).parents[2]
SAMPLER = (
    'train_parameters.sampler={sample_frequency: 4, prompts: ["abc", "xyzk"], vllm_dtype: float32, '
    "sampling_params: {temperature: 0, max_tokens: 6, ignore_eos: true}, "
    "engine: {max_model_len: 32, kv_cache_memory_bytes: 16777216}}"
)
CONFIG = """
model: {inputs}/model
train_parameters:
  output_dir: {output}
  max_seq_len: 16
  epochs: 2
  seed: 3
  optimizer: {{lr: 0.01}}
  warmup_ratio: 0.2
  gradient_accumulation_steps: 2
  logging_steps: 3
  checkpointing_enabled: False
  save_frequency: 0.5
dataset: {{train_bs: 2, eval_bs: 4, train_ds: {inputs}/train, eval_ds: {inputs}/eval}}
"""
WITH_CHECKPOINTS = """
model: {inputs}/model
train_parameters:
  output_dir: {output}
  max_seq_len: 16
  seed: 3
  optimizer: {{lr: 0.02}}
  checkpointing_enabled: True
  save_frequency: 2
  logging_steps: 1
dataset: {{train_bs: 4, eval_bs: 4, train_ds: {inputs}/train, eval_ds: {inputs}/eval}}
"""


def make_config(inputs, output, text=CONFIG, **changes):
    """Write the config next to `output`, with changes of train_parameters, and load it."""
    path = output.with_suffix(".yaml")
    path.write_text(text.format(inputs=inputs, output=output))
    return load_config(
        path, [f"train_parameters.{name}={json.dumps(value)}" for name, value in changes.items()]
    )


def train(topology, config):
    finetune(config, topology)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights_of(folder):
    """Return the weights in a model's folder, or of a run's final model."""
    final = folder / "final-model"
    return load_file((final if final.is_dir() else folder) / "model.safetensors")


def are_equal(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def assert_last_answers_are_those_of(model, tokenizer, samples):
    """Check that the engine's greedy answers equal the model's."""
    model.generation_config.eos_token_id = None
    for sample in samples:
        inputs = tokenizer(sample["prompt"], return_tensors="pt")
        rest = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        expected = tokenizer.decode(rest[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        assert sample["options"][0].split() == expected.split()
