"""The texts of refusals, whole: value, rule, fix, and where it was written. Elsewhere tests compare keys alone."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from vectorlm.config import load_config
from vectorlm.errors import ConfigError
from vectorlm.lora.options import MERGED
from vectorlm.preflight.checked import preflight

SAMPLER = "train_parameters.sampler={sample_frequency: 2, prompts: p.jsonl}"
UNKNOWN = "train_parameters.lora_peft_config={lora_alhpa: null}"
BIAS = "train_parameters.lora_peft_config={bias: all}"
LENGTH = "train_parameters.max_seq_len=257"


def refusal(path, *overrides, **more):
    with pytest.raises(ConfigError) as caught:
        preflight(load_config(path, overrides), **{"world_size": 1, **more})
    return str(caught.value)


def test_all_problems_are_listed_at_once(write_config):
    assert refusal(write_config(), SAMPLER) == (
        "4 problems:\n"
        "  - model='models/tiny' is not a folder, and as a model of the Hugging Face Hub it is not in the cache "
        f"{constants.HF_HUB_CACHE}. Run `hf download models/tiny`, or name a folder. (my.yaml:1)\n"
        "  - dataset.train_ds='data/train' is not a folder. Preprocess the dataset first. (my.yaml:11)\n"
        "  - dataset.eval_ds='data/eval' is not a folder. Preprocess the dataset first. (my.yaml:12)\n"
        "  - train_parameters.sampler.prompts='p.jsonl' does not exist. Make it first, or list the prompts. "
        f"(--set {SAMPLER})"
    )


@pytest.mark.parametrize(
    ("overrides", "more", "text"),
    [
        (
            [LENGTH],
            {},
            "train_parameters.max_seq_len=257 is beyond the model's limit of 256 tokens. Use 256 or less. "
            f"(--set {LENGTH})",
        ),
        (
            [],
            {"world_size": 3, "num_nodes": 2},
            "world_size=3 must be a multiple of nnodes=2: it counts the ranks of all nodes. Use 4, for example.",
        ),
        (
            [SAMPLER],
            {"world_size": 4, "num_nodes": 2},
            "train_parameters.sharding_strategy='FULL_SHARD' spreads the weights over 2 nodes, and the engine of each "
            "node needs all of them. Use HYBRID_SHARD: it shards within each node.",
        ),
        (
            [UNKNOWN],
            {},
            "train_parameters.lora_peft_config.lora_alhpa=null is not an argument of peft.LoraConfig. "
            f"Did you mean 'lora_alpha'? (--set {UNKNOWN})",
        ),
        (
            [SAMPLER, BIAS],
            {},
            "train_parameters.lora_peft_config.bias='all' is beyond vLLM's LoRA layers. Leave it out, or use "
            f"{MERGED}, which publishes merged weights. (--set {BIAS})",
        ),
        (
            ["wandb_config.api_key=hunter2"],
            {},
            "wandb_config.api_key='…' is a secret, and a run saves its config where others may read it. Set the "
            "environment variable WANDB_API_KEY instead.",
        ),
        (
            ["trackers={tensorbord: {}}"],
            {},
            "trackers.tensorbord={} is not a tracker that exists. Did you mean 'tensorboard'? "
            "(--set trackers={tensorbord: {}})",
        ),
    ],
)  # fmt: skip
def test_a_refusal_names_value_rule_fix_and_place(complete, overrides, more, text):
    assert refusal(complete, *overrides, **more) == text


def test_a_dataset_without_a_column_says_which(complete):
    Path("data/train/dataset_info.json").write_text('{"features": {"text": {}, "input_ids": {}}}')
    assert refusal(complete) == (
        "dataset.train_ds='data/train' has no column 'labels'. Preprocess it: training reads token ids and labels. "
        "(my.yaml:11)"
    )
