"""What a refusal says, word for word: the value, the rule, the fix and the place. Other tests look at the key alone."""

import pytest
from kit.config_texts import FULL, MINIMAL, RL, refusal

SET = "train_parameters."
"""Where most settings of these tests stand."""


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("epochs=0", "epochs=0 must be an integer >= 1. Use 1, for example."),
        ("epochs='3'", "epochs='3' must be an integer >= 1. Write 3 without quotes."),
        ("seed=-1", "seed=-1 must be an integer from 0 to 4294967295. Use 11, for example."),
        (
            "output_dir=2024",
            "output_dir=2024 must be a path without variables such as $HOME. Put quotes around it.",
        ),
        (
            "sharding_strategy=full_shard",
            "sharding_strategy='full_shard' must be one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD. Did you "
            "mean 'FULL_SHARD'?",
        ),
        (
            "max_grad_norm=.nan",
            "max_grad_norm=nan must be a number > 0 (.inf turns clipping off). Use 1.0, for example.",
        ),
        (
            "optimizer.betas=[1, 0]",
            "optimizer.betas=[1, 0] must be a list of two numbers, each >= 0 and < 1. Use [0.9, 0.95], for example.",
        ),
        ("sampler=true", "sampler=true must be a section (`key: value` lines), or null."),
        (
            "sampler.timeout_s=.inf",
            "sampler.timeout_s=inf must be a finite number > 0. Use 1.0, for example.",
        ),
        (
            "sampler.sample_frequency=0",
            "sampler.sample_frequency=0 must be an integer >= 1, or null. Use 1, for example.",
        ),
        ("lora_peft_config=8", "lora_peft_config=8 must be a mapping, or null."),
    ],
)
def test_a_wrong_value_names_value_rule_fix_and_place(write_config, override, text):
    assert refusal(write_config(FULL), SET + override) == f"{SET}{text} (--set {SET}{override})"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            ("epochs: 2", "epochs: 2\n  warmup_ration: 0.1"),
            "unknown setting 'train_parameters.warmup_ration' (my.yaml:6). "
            "Did you mean 'train_parameters.warmup_ratio'?",
        ),
        (
            ("model: models/tiny\n", "model: models/tiny\nmax_grad_norm: 1\n"),
            "unknown setting 'max_grad_norm' (my.yaml:2). Did you mean 'train_parameters.max_grad_norm'?",
        ),
        (
            ("lr: 1e-4", "lr: 1e-4\n    zzz: 1"),
            "unknown setting 'train_parameters.optimizer.zzz' (my.yaml:8). The settings of "
            "'train_parameters.optimizer' are: name, lr, weight_decay, betas, eps, amsgrad, maximize, foreach, "
            "capturable, differentiable, fused, arguments.",
        ),
        (
            ("epochs: 2", "epochs: 2\n  epochs: 3"),
            "duplicate setting 'epochs' (my.yaml:6): it was set before at my.yaml:5. Remove one of the two.",
        ),
        (
            ("model: models/tiny\n", "model: [a\n"),
            "not valid YAML: expected ',' or ']', but got ':' (my.yaml:2).",
        ),
        (
            ("model: models/tiny\n", ""),
            "missing setting 'model' (Folder of the model with its tokenizer, in Hugging Face layout; or its name on "
            "the Hub (`google/gemma-2b`); or a folder of LoRA adapters, which name their model) "
            "(my.yaml:1). Add it, or give --set model=VALUE.",
        ),
    ],
)
def test_a_wrong_file_names_the_line_and_what_to_do(write_config, change, text):
    assert refusal(write_config(MINIMAL, change)) == text


def test_all_problems_of_a_file_are_listed(write_config):
    changes = [("max_seq_len", "max_seqlen"), ("epochs: 2", "epochs: 0"), ("  train_bs: 4\n", "")]
    assert refusal(write_config(MINIMAL, *changes)) == (
        "4 problems:\n"
        "  - unknown setting 'train_parameters.max_seqlen' (my.yaml:4). "
        "Did you mean 'train_parameters.max_seq_len'?\n"
        "  - train_parameters.epochs=0 must be an integer >= 1. Use 1, for example. (my.yaml:5)\n"
        "  - missing setting 'train_parameters.max_seq_len' (Longest sequence in tokens; at most the model's "
        "own limit, which -1 stands for) (my.yaml:2). Add it, or give --set train_parameters.max_seq_len=VALUE.\n"
        "  - missing setting 'dataset.train_bs' (Sequences per rank in one training micro-batch) "
        "(my.yaml:8). Add it, or give --set dataset.train_bs=VALUE."
    )


def test_a_wrong_item_of_a_list_is_blamed_on_its_own_line(write_config):
    path = write_config(FULL, ("'Two plus two is'", "22"))
    assert refusal(path) == (
        "train_parameters.sampler.prompts[1]=22 must be text. Put quotes around it. (my.yaml:41)"
    )


def test_a_setting_of_another_algorithm_names_the_algorithms_that_have_it(write_config):
    path = write_config(RL, ("group_size: 3", "group_size: 3\n  beta: 0.04"))
    assert refusal(path) == (
        "rl.beta=0.04 cannot be set: grpo has no such setting (copg, online_dpo have it). Did you mean "
        "rl.kl_coef? (my.yaml:12)"
    )


def test_a_long_value_is_cut_off(write_config):
    text = refusal(write_config(), f"train_parameters.use_mp={'x' * 500}")
    assert text.startswith(f"train_parameters.use_mp='{'x' * 56}... must be true or false, or null.")
