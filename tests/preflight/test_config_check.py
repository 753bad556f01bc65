import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from config_texts import MINIMAL
from huggingface_hub import constants
from safetensors.torch import save_file

from vectorlm.config import load_config
from vectorlm.errors import ConfigError
from vectorlm.lora.options import MERGED
from vectorlm.packages import fields_of
from vectorlm.preflight import packages
from vectorlm.preflight.settings import LORA_CONFIG, check_config, check_consistency

REWARDS = ["countdown", "length"]
SAMPLER = "train_parameters.sampler={sample_frequency: 2, prompts: p.jsonl}"


@pytest.fixture
def complete(write_config):
    """A config whose model, datasets and prompts all exist."""
    Path("models/tiny").mkdir(parents=True)
    Path("models/tiny/config.json").write_text(json.dumps({"max_position_embeddings": 256}))
    for split in ("train", "eval"):
        Path("data", split).mkdir(parents=True)
        Path("data", split, "dataset_info.json").write_text("{}")
    Path("p.jsonl").write_text('{"prompt": "a", "answer": 1}\n\n{"prompt": "b"}\n')
    return write_config()


def problems(path, *overrides, world_size=2):
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(path, overrides), world_size, REWARDS)
    return str(caught.value)


def test_a_complete_config_passes(complete):
    check_config(load_config(complete, [SAMPLER]), 1, REWARDS)
    check_config(
        load_config(complete, [SAMPLER, "train_parameters.sharding_strategy=HYBRID_SHARD"]), 2, REWARDS
    )
    check_config(load_config(complete, [SAMPLER, "train_parameters.max_seq_len=256"]), 2, REWARDS)
    reward = "train_parameters.sampler.reward=countdown"
    check_config(load_config(complete, [SAMPLER, reward]), 2, REWARDS)


def test_all_problems_are_listed_at_once(write_config):
    path = write_config()
    overrides = [SAMPLER, "train_parameters.sharding_strategy=HYBRID_SHARD"]
    assert problems(path, *overrides, world_size=1) == (
        "5 problems:\n"
        "  - train_parameters.sharding_strategy='HYBRID_SHARD' needs at least 2 ranks, and world_size=1. "
        "Use NO_SHARD, or start more ranks. (--set train_parameters.sharding_strategy=HYBRID_SHARD)\n"
        "  - model='models/tiny' is not a folder, and as a model of the Hugging Face Hub it is not in the cache "
        f"{constants.HF_HUB_CACHE}. Run `hf download models/tiny`, or name a folder. (my.yaml:1)\n"
        "  - dataset.train_ds='data/train' is not a folder. Preprocess the dataset first. (my.yaml:11)\n"
        "  - dataset.eval_ds='data/eval' is not a folder. Preprocess the dataset first. (my.yaml:12)\n"
        "  - train_parameters.sampler.prompts='p.jsonl' does not exist. Name a JSONL or Parquet file or a saved "
        f"dataset, or list the prompts themselves. (--set {SAMPLER})"
    )


def test_engines_on_several_nodes_need_the_whole_model_on_each(complete):
    hybrid = "train_parameters.sharding_strategy=HYBRID_SHARD"
    check_config(load_config(complete, [SAMPLER, hybrid]), 4, REWARDS, 2)
    check_config(load_config(complete), 4, REWARDS, 2)
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(complete, [SAMPLER]), 4, REWARDS, 2)
    assert str(caught.value) == (
        "train_parameters.sharding_strategy='FULL_SHARD' spreads the weights over 2 nodes, and the engine of each "
        "node needs all of them. Use HYBRID_SHARD: it shards within each node."
    )


@pytest.mark.parametrize(
    ("world_size", "num_nodes", "expected"),
    [
        (
            3,
            2,
            "world_size=3 must be a multiple of nnodes=2: it counts the ranks of all nodes. Use 4, for example.",
        ),
        (2, 0, "nnodes=0 must be an integer >= 1. Use 1 or more."),
    ],
)
def test_the_ranks_must_fit_the_nodes(complete, world_size, num_nodes, expected):
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(complete), world_size, REWARDS, num_nodes)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("place", "variable"),
    [
        ("train_parameters.sampler.engine.token", "VECTORLM_SERVER_TOKEN"),
        ("train_parameters.sampler.engine.hf_token", "HF_TOKEN"),
        ("wandb_config.api_key", "WANDB_API_KEY"),
    ],
)
def test_secrets_belong_into_the_environment_and_are_not_repeated(complete, place, variable):
    text = problems(complete, SAMPLER, f"{place}=hunter2hunter2hunter2")
    assert f"Set the environment variable {variable} instead" in text
    assert "hunter2" not in text


@pytest.mark.parametrize("text", ["{broken", "[]", '{"features": 3}'])
def test_a_broken_description_of_a_dataset_is_refused(complete, text):
    Path("data/train/dataset_info.json").write_text(text)
    assert "has a broken dataset_info.json. Make the dataset again." in problems(complete)


@pytest.mark.parametrize("world_size", [0, -1])
def test_there_must_be_a_rank(complete, world_size):
    assert problems(complete, world_size=world_size) == (
        f"world_size={world_size} must be an integer >= 1. Use 1 or more."
    )


@pytest.mark.parametrize("parallel", ["0", "'1'"])
def test_the_number_of_the_engines_workers_is_a_number(complete, parallel):
    override = f"train_parameters.sampler.engine.tensor_parallel_size={parallel}"
    assert problems(complete, SAMPLER, override) == (
        f"train_parameters.sampler.engine.tensor_parallel_size={parallel} must be an integer >= 1. "
        f"Use 1, or a number of devices. (--set {override})"
    )


def test_on_cuda_every_worker_of_the_engine_needs_the_device_of_a_rank(complete, monkeypatch):
    override = "train_parameters.sampler.engine.tensor_parallel_size=4"
    check_config(load_config(complete, [SAMPLER, override]), 2, REWARDS)
    monkeypatch.setattr("vectorlm.preflight.settings.has_gpu", lambda: True)
    check_config(load_config(complete, [SAMPLER, override]), 4, REWARDS)
    assert problems(complete, SAMPLER, override) == (
        "train_parameters.sampler.engine.tensor_parallel_size=4 must be at most the number of ranks on "
        f"a node, 2. Use fewer, or start more ranks. (--set {override})"
    )


def test_a_reward_must_exist(complete):
    override = "train_parameters.sampler.reward=countdwn"
    assert problems(complete, SAMPLER, override) == (
        "train_parameters.sampler.reward='countdwn' is not a reward that exists. Did you mean 'countdown'? "
        f"(--set {override})"
    )
    assert "Use one of countdown, length." in problems(
        complete, SAMPLER, "train_parameters.sampler.reward=xyz"
    )


@pytest.mark.parametrize(
    ("lora", "mode", "problem"),
    [
        (
            "{r: 4, use_dora: true}",
            "adapter",
            "use_dora=true is beyond vLLM's LoRA layers. Leave it out, or use "
            f"{MERGED}, which publishes "
            "merged weights.",
        ),
        (
            "{bias: all}",
            "adapter",
            "bias='all' is beyond vLLM's LoRA layers. Leave it out, or use "
            f"{MERGED}, which publishes merged "
            "weights.",
        ),
        (
            "{r: 8, rank_pattern: {q_proj: 600}}",
            "adapter",
            f"r=600 is beyond vLLM's largest adapter rank of 512. Use a smaller rank, or {MERGED}.",
        ),
        (
            "{lora_bias: true}",
            "merged",
            "lora_bias=true changes the model in a way that neither vLLM's LoRA layers nor merged weights express. "
            "Leave it out, or train without a sampler.",
        ),
    ],
)
def test_lora_options_that_the_engine_cannot_follow_are_refused(complete, lora, mode, problem):
    override = f"train_parameters.lora_peft_config={lora}"
    message = problems(complete, SAMPLER, f"train_parameters.sampler.lora_mode={mode}", override)
    assert message == f"train_parameters.lora_peft_config.{problem} (--set {override})"


def test_lora_options_that_the_engine_can_follow_pass_and_without_a_sampler_all_do(complete):
    lora = "train_parameters.lora_peft_config={r: 4, bias: none, use_dora: false, modules_to_save: null}"
    check_config(load_config(complete, [SAMPLER, lora]), 2, REWARDS)
    dora = "train_parameters.lora_peft_config={use_dora: true, modules_to_save: [lm_head]}"
    check_config(load_config(complete, [dora]), 2, REWARDS)
    merged = "train_parameters.sampler.lora_mode=merged"
    check_config(load_config(complete, [SAMPLER, merged, dora]), 2, REWARDS)


def test_the_engines_own_room_for_adapters_must_be_enough(complete):
    lora = "train_parameters.lora_peft_config={r: 9}"
    override = "train_parameters.sampler.engine.max_lora_rank=8"
    assert problems(complete, SAMPLER, lora, override) == (
        "train_parameters.sampler.engine.max_lora_rank=8 must be at least the largest rank of the adapters, 9. "
        f"Leave it out: it follows from lora_peft_config. (--set {override})"
    )


def test_the_model_folder_must_hold_a_description(complete):
    Path("models/tiny/config.json").unlink()
    assert problems(complete) == (
        "model='models/tiny' holds no config.json. Name the folder that `save_pretrained` wrote. (my.yaml:1)"
    )


@pytest.mark.parametrize("text", ["{", "[]"])
def test_the_models_description_must_be_readable(complete, text):
    Path("models/tiny/config.json").write_text(text)
    assert problems(complete).startswith("model='models/tiny' holds a broken config.json (")


def test_weights_that_a_download_left_incomplete_are_refused(complete):
    folder = Path("models/tiny")
    index = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    save_file({"a": torch.ones(100)}, folder / "model-1.safetensors")
    fix = "Download or save the model again. (my.yaml:1)"
    missing = f"model='models/tiny' has damaged weights (model-2.safetensors is missing). {fix}"
    assert problems(complete) == missing
    size = (folder / "model-1.safetensors").stat().st_size
    os.truncate(folder / "model-1.safetensors", size - 1)
    what = f"model-1.safetensors is cut off: {size - 1} bytes of {size}"
    assert (
        problems(complete)
        == f"2 problems:\n  - model='models/tiny' has damaged weights ({what}). {fix}\n  - {missing}"
    )
    os.truncate(folder / "model-1.safetensors", 0)
    assert "(model-1.safetensors is not a safetensors file)" in problems(complete)


FLASH = "train_parameters.use_flash_attention=true"


def test_flash_attention_needs_its_package_on_cuda_alone(complete, monkeypatch):
    monkeypatch.setattr("vectorlm.preflight.files.has_gpu", lambda: False)
    check_config(load_config(complete, [FLASH]), 1, REWARDS)
    monkeypatch.setattr("vectorlm.preflight.files.has_gpu", lambda: True)
    monkeypatch.setattr("vectorlm.preflight.files.is_installed", lambda name: False)
    assert problems(complete, FLASH) == (
        "train_parameters.use_flash_attention=true needs the package flash-attn on CUDA, and it is not installed. "
        f"Run `pip install flash-attn`, or set it to false. (--set {FLASH})"
    )
    monkeypatch.setattr("vectorlm.preflight.files.is_installed", lambda name: True)
    check_config(load_config(complete, [FLASH]), 1, REWARDS)


def test_flash_attention_needs_16_bits(complete):
    in_fp32 = [FLASH, "train_parameters.use_mp=false"]
    check_consistency(load_config(complete, [*in_fp32, "train_parameters.dtype=bfloat16"]))
    with pytest.raises(ConfigError) as caught:
        check_consistency(load_config(complete, in_fp32))
    assert str(caught.value) == (
        "train_parameters.use_flash_attention=true computes in 16 bits alone, and use_mp is false with dtype float32. "
        f"Set use_mp to true, or use_flash_attention to false. (--set {FLASH})"
    )


def test_sequences_must_fit_the_model(complete):
    assert problems(complete, "train_parameters.max_seq_len=257") == (
        "train_parameters.max_seq_len=257 is beyond the model's limit of 256 tokens. Use 256 or less. "
        "(--set train_parameters.max_seq_len=257)"
    )


def test_a_model_without_a_limit_takes_any_length(complete):
    Path("models/tiny/config.json").write_text("{}")
    check_config(load_config(complete, ["train_parameters.max_seq_len=99999"]), 1, REWARDS)


def test_a_folder_without_a_dataset_is_refused(complete):
    Path("data/eval/dataset_info.json").unlink()
    assert problems(complete) == (
        "dataset.eval_ds='data/eval' holds no dataset_info.json. "
        "Name a folder written by `datasets.Dataset.save_to_disk`. (my.yaml:12)"
    )


def test_a_dataset_that_was_copied_in_part_is_refused(complete):
    shards = [{"filename": f"data-{number}.arrow"} for number in range(2)]
    Path("data/eval/state.json").write_text(json.dumps({"_data_files": shards}))
    Path("data/eval/data-0.arrow").touch()
    assert problems(complete) == (
        "dataset.eval_ds='data/eval' lacks its data-1.arrow. Make or copy the dataset again. (my.yaml:12)"
    )


def test_a_dataset_needs_the_columns_that_training_reads(complete):
    Path("data/train/dataset_info.json").write_text('{"features": {"text": {}, "input_ids": {}}}')
    assert problems(complete) == (
        "dataset.train_ds='data/train' has no column 'labels'. Preprocess it: training reads token ids and labels. "
        "(my.yaml:11)"
    )


def test_a_folder_of_several_datasets_is_refused(complete):
    Path("data/dataset_dict.json").write_text('{"splits": ["train", "eval"]}')
    assert problems(complete, "dataset.train_ds=data") == (
        "dataset.train_ds='data' holds several datasets. Name one of: data/eval, data/train. "
        "(--set dataset.train_ds=data)"
    )


def test_a_dataset_saved_by_datasets_is_accepted(complete):
    from datasets import Dataset

    Dataset.from_dict({"input_ids": [[1]], "labels": [[1]]}).save_to_disk("data/real")
    check_config(load_config(complete, ["dataset.train_ds=data/real"]), 1, REWARDS)


@pytest.mark.parametrize("line", ["no json", '["prompt"]', '{"text": "a"}', '{"prompt": ""}'])
def test_every_line_of_the_prompt_file_must_hold_a_prompt(complete, line):
    Path("p.jsonl").write_text('{"prompt": "a"}\n' + line + "\n")
    assert problems(complete, SAMPLER) == (
        "train_parameters.sampler.prompts='p.jsonl' must hold JSON objects with a `prompt`, "
        f'and line 2 is none. Write {{"prompt": "..."}} there. (--set {SAMPLER})'
    )


def test_the_prompt_file_must_hold_a_prompt(complete):
    Path("p.jsonl").write_text("\n")
    assert problems(complete, SAMPLER) == (
        "train_parameters.sampler.prompts='p.jsonl' holds no prompt. "
        f'Write {{"prompt": "..."}}, one per line. (--set {SAMPLER})'
    )


def test_prompts_in_the_config_need_no_file(complete):
    check_config(
        load_config(complete, ["train_parameters.sampler={sample_frequency: 2, prompts: [a]}"]), 1, REWARDS
    )


def test_outputs_must_not_stand_where_something_else_does(complete):
    Path("runs").mkdir()
    Path("runs/tiny").write_text("")
    sampler = "train_parameters.sampler={sample_frequency: 2, prompts: [a], output_jsonl_path: data}"
    assert problems(complete, sampler) == (
        "2 problems:\n"
        "  - train_parameters.output_dir='runs/tiny' exists and is not a folder. "
        "Name another folder. (my.yaml:3)\n"
        "  - train_parameters.sampler.output_jsonl_path='data' is a folder. Name a file in it. "
        f"(--set {sampler})"
    )


def test_contradicting_settings_of_a_config_made_by_hand_are_found(complete):
    config = load_config(complete, [SAMPLER])
    config.train_parameters.sampler.engine.engine_args["dtype"] = "half"
    with pytest.raises(ConfigError) as caught:
        check_config(config, 1, REWARDS)
    assert str(caught.value) == (
        "train_parameters.sampler.engine.dtype='half' is set in another place. "
        "Set 'train_parameters.sampler.vllm_dtype' instead."
    )


def test_checking_writes_nothing(complete):
    before = sorted(Path().rglob("*"))
    check_config(load_config(complete, [SAMPLER]), 1, REWARDS)
    assert sorted(Path().rglob("*")) == before
    assert Path(complete).read_text() == MINIMAL


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train_parameters.sampler.inference=vlm"],
            "train_parameters.sampler.inference='vlm' is not known. Did you mean 'vllm'? ",
        ),
        (
            ["train_parameters.sampler.inference=server"],
            "train_parameters.sampler.inference='server' needs the server's url among the engine's arguments. ",
        ),
        (
            [
                "train_parameters.sampler.inference=transformers",
                "train_parameters.lora_peft_config={r: 4, target_modules: [q_proj]}",
            ],
            "train_parameters.sampler.lora_mode='adapter' is for vLLM in the process, and inference is 'transformers'",
        ),
    ],
)
def test_another_inference_engine_needs_a_name_and_what_it_is_built_of(complete, overrides, message):
    assert message in problems(complete, SAMPLER, *overrides)


def test_other_inference_engines_pass(complete):
    Path("p.jsonl").write_text('{"prompt": "a"}\n')
    url = "train_parameters.sampler.engine={url: 'http://127.0.0.1:1'}"
    for overrides in (["server", url], ["mine.py:Mine"], ["transformers"]):
        name, *more = overrides
        config = load_config(complete, [SAMPLER, f"train_parameters.sampler.inference={name}", *more])
        check_config(config, 1, REWARDS)


@pytest.mark.parametrize("more", [[], [SAMPLER]])
def test_an_argument_that_peft_does_not_know_is_refused_whatever_its_value(complete, more):
    lora = "train_parameters.lora_peft_config={r: 4, lora_alhpa: null}"
    assert problems(complete, lora, *more) == (
        "train_parameters.lora_peft_config.lora_alhpa=null is not an argument of peft.LoraConfig. "
        f"Did you mean 'lora_alpha'? (--set {lora})"
    )


def test_every_argument_of_peft_is_known():
    from peft import LoraConfig

    known = set().union(*(fields_of(path, name, "peft") for path, name in LORA_CONFIG))
    public = {field.name for field in dataclasses.fields(LoraConfig) if field.init and field.name[0] != "_"}
    assert public <= known


def test_wandb_without_a_key_is_refused_before_a_model_is_loaded(complete, monkeypatch, tmp_path):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    online = "enable_wandb_logging=true"
    expected = "needs a key for api.wandb.ai. Run `wandb login`, or set wandb_config.mode: offline."
    assert expected in problems(complete, online)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8080")
    assert "needs a key for wandb.example.org" in problems(complete, online)
    monkeypatch.delenv("WANDB_BASE_URL")

    def passes(*overrides):
        check_config(load_config(complete, overrides), 2, REWARDS)

    passes(online, "wandb_config={mode: offline}")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    passes(online)
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    passes(online)


def test_wandb_that_is_not_installed_is_refused_before_a_model_is_loaded(complete, monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda name: name != "wandb")
    assert "needs the package wandb. Run `pip install wandb`" in problems(
        complete, "enable_wandb_logging=true"
    )


@pytest.mark.parametrize(
    ("trackers", "text"),
    [
        (
            "{tensorbord: {}}",
            "trackers.tensorbord={} is not a tracker that exists. Did you mean 'tensorboard'?",
        ),
        (
            "{wandb: {}}",
            "trackers.wandb={} has settings of its own. Set enable_wandb_logging and wandb_config.",
        ),
        ("{tensorboard: logs}", "trackers.tensorboard='logs' must be a mapping of the tracker's arguments."),
        ("{trackio: {}}", "trackers.trackio={} needs the package trackio. Run `pip install trackio`."),
    ],
)
def test_a_tracker_that_would_not_work_is_refused_before_the_start(complete, monkeypatch, trackers, text):
    monkeypatch.setattr(packages, "is_installed", lambda name: name != "trackio")
    assert text in problems(complete, f"trackers={trackers}")


def test_a_tracker_needs_no_arguments_and_takes_no_secrets(complete):
    check_config(load_config(complete, ["trackers={tensorboard: }"]), 2, REWARDS)
    with pytest.raises(ConfigError, match=r"trackers.tensorboard.hf_token='…' is a secret"):
        check_consistency(load_config(complete, ["trackers={tensorboard: {hf_token: abc}}"]))


def test_the_peak_speed_may_stand_where_it_stood(complete):
    config = load_config(complete, ["rl.device_peak_tflops=2.5"])
    assert config.train_parameters.loop.device_peak_tflops == 2.5
