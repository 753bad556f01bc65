"""Config files that the tests change line by line, and the error that refuses a config."""

import pytest

from vectorlm.errors import ConfigError
from vectorlm.runs.config.load import load_config

MINIMAL = """\
model: models/tiny
train_parameters:
  output_dir: runs/tiny
  max_seq_len: 128
  epochs: 2
  optimizer:
    lr: 1e-4
dataset:
  eval_bs: 4
  train_bs: 4
  train_ds: data/train
  eval_ds: data/eval
"""

FULL = """\
model: models/tiny
enable_wandb_logging: True
wandb_config:
  project: vectorlm
  name: all-keys
  tags: [first, "1e-5"]
train_parameters:
  output_dir: runs/full
  max_seq_len: 2048
  epochs: 1
  seed: 7
  # sharding
  sharding_strategy: HYBRID_SHARD
  use_mp: True
  use_activation_checkpointing: True
  use_flash_attention: True
  low_cpu_mem_usage: True
  lora_peft_config:
    task_type: CAUSAL_LM
    r: 8
    lora_dropout: 0.1
  max_grad_norm: 1
  gradient_accumulation_steps: 8
  optimizer:
    lr: 2.0e-5
    weight_decay: 0.1
    betas: [0.9, 0.95]
    eps: 1e-5
  lr_scheduler_type: plataeu-with-warmup
  warmup_ratio: 0.05
  checkpointing_enabled: True
  logging_steps: 500
  save_frequency: 0.1
  sampler:
    sample_frequency: 8
    output_jsonl_path: data/samples.jsonl
    gpu_memory_utilization: 0.5
    vllm_dtype: half
    prompts:
      - "The capital of France is"
      - 'Two plus two is'
    sampling_params:
      n: 4
      temperature: 1e-1
      logit_bias: {50256: -100}
    engine:
      max_model_len: 512
    reward: countdown
    receiver: packed
    transport: bucketed
    verify_updates: False
    timeout_s: 60
dataset:
  ignore_index: -100
  eval_bs: 8
  train_bs: 16
  train_ds: data/train
  eval_ds: data/eval
dataset_preprocess:
  ignore_index: -100
  dataset_format: hf
  dataset_type: pretrain
  data_field: text
  packing_type: partial
  overlap: 16
  add_bos_eos_tokens: False
  from_disk: False
  seperator: "### Answer"
  load_path: some/dataset
  split: train
  save_path: data/processed
  truncate: True
  pre_pend: "PromptRecord: "
"""

RL = """\
model: model
train_parameters:
  output_dir: run
  max_seq_len: 64
  optimizer: {lr: 1.0e-3}
rl:
  algorithm: grpo
  max_steps: 2
  prompts: [abc]
  prompts_per_step: 1
  group_size: 3
  rewards: {countdown: 1.0}
"""


def refusal(path, *overrides):
    """Return the text of the error that refuses a config."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)
