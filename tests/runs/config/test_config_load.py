import pickle
from pathlib import Path

import pytest
from kit.config_texts import FULL, MINIMAL, refusal

from vectorlm.runs.config.load import load_config
from vectorlm.runs.config.schema import (
    Config,
    DatasetSettings,
    OptimizerSettings,
    PreprocessSettings,
    TrainSettings,
)
from vectorlm.sampling.settings import EngineSettings
from vectorlm.train.settings import EvaluationSettings, LoopSettings, ModelSettings, ScheduleSettings


def with_train_line(line):
    """Return a change that adds a line at the end of `train_parameters`, line 8 of the minimal file."""
    return ("dataset:\n", f"  {line}\ndataset:\n")


@pytest.mark.parametrize("name", ["train.py", "train.ipynb"])
def test_a_script_is_no_config(tmp_path, name):
    (tmp_path / name).write_text("import torch\n\nprint(f'{torch}')\n")
    assert "with python" in refusal(str(tmp_path / name))


def test_every_key_of_a_full_file_arrives(write_config):
    assert load_config(write_config(FULL)) == Config(
        model="models/tiny",
        enable_wandb_logging=True,
        wandb_config={"project": "vectorlm", "name": "all-keys", "tags": ["first", "1e-5"]},
        train_parameters=TrainSettings(
            output_dir="runs/full",
            max_seq_len=2048,
            seed=7,
            loop=LoopSettings(
                epochs=1,
                max_grad_norm=1.0,
                gradient_accumulation_steps=8,
                logging_steps=500,
                save_frequency=0.1,
            ),
            model=ModelSettings(
                sharding_strategy="HYBRID_SHARD",
                use_mp=True,
                use_activation_checkpointing=True,
                use_flash_attention=True,
                low_cpu_mem_usage=True,
            ),
            lora_peft_config={"task_type": "CAUSAL_LM", "r": 8, "lora_dropout": 0.1},
            optimizer=OptimizerSettings(lr=2e-5, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-5),
            schedule=ScheduleSettings(lr_scheduler_type="plateau-with-warmup", warmup_ratio=0.05),
            checkpointing_enabled=True,
        ),
        engine=EngineSettings(
            gpu_memory_utilization=0.5,
            dtype="float16",
            engine_args={"max_model_len": 512},
            receiver="packed",
            transport="bucketed",
            verify_updates=False,
            timeout_s=60.0,
        ),
        evaluation=EvaluationSettings(
            every=8,
            output_jsonl_path="data/samples.jsonl",
            prompts=("The capital of France is", "Two plus two is"),
            sampling_params={"n": 4, "temperature": 0.1, "logit_bias": {50256: -100}},
            rewards={"countdown": 1.0},
        ),
        dataset=DatasetSettings(
            ignore_index=-100, eval_bs=8, train_bs=16, train_ds="data/train", eval_ds="data/eval"
        ),
        dataset_preprocess=PreprocessSettings(
            ignore_index=-100,
            dataset_format="hf",
            dataset_type="pretrain",
            data_field="text",
            packing_type="partial",
            overlap=16,
            add_bos_eos_tokens=False,
            from_disk=False,
            seperator="### Answer",
            load_path="some/dataset",
            split="train",
            save_path="data/processed",
            truncate=True,
            pre_pend="PromptRecord: ",
        ),
    )


def test_a_minimal_file_takes_the_defaults(write_config):
    config = load_config(write_config())
    train = config.train_parameters
    assert config.enable_wandb_logging is False
    assert config.wandb_config == {}
    assert config.dataset_preprocess is None
    assert config.dataset.ignore_index == -100
    assert (train.model.sharding_strategy, train.schedule.lr_scheduler_type) == ("FULL_SHARD", "cosine")
    assert (train.model.low_cpu_mem_usage, train.model.use_flash_attention) == (None, False)
    assert train.checkpointing_enabled is False
    assert train.lora_peft_config is None
    assert not config.has_engine
    assert config.samples_path == Path("runs/tiny/samples.jsonl")


def test_the_optimizer_left_out_is_torchs_own(write_config):
    import torch

    optimizer = load_config(write_config()).train_parameters.optimizer
    defaults = torch.optim.AdamW([torch.zeros(1)]).defaults
    assert (optimizer.weight_decay, optimizer.betas, optimizer.eps) == tuple(
        defaults[name] for name in ("weight_decay", "betas", "eps")
    )


@pytest.mark.parametrize(
    ("written", "value"), [("1e-4", 1e-4), ("1E4", 1e4), ("2.5e3", 2500.0), (".5e-1", 0.05), ("1", 1.0)]
)
def test_a_number_needs_neither_dot_nor_signed_exponent(write_config, written, value):
    lr = load_config(write_config(MINIMAL, ("1e-4", written))).train_parameters.optimizer.lr
    assert lr == value
    assert type(lr) is float


@pytest.mark.parametrize("key", ["sampler", "lora_peft_config"])
def test_an_optional_section_that_is_commented_out_is_absent(write_config, key):
    config = load_config(write_config(MINIMAL, with_train_line(f"{key}:")))
    assert config.train_parameters.lora_peft_config is None
    assert not config.has_engine


def test_lora_may_stand_at_the_top(write_config):
    config = load_config(write_config("lora_peft_config: {r: 8}\n" + MINIMAL))
    assert config.train_parameters.lora_peft_config == {"r": 8}


def test_an_empty_lora_section_at_the_top_says_nothing(write_config):
    path = write_config("lora_peft_config:\n" + MINIMAL, with_train_line("lora_peft_config: {r: 4}"))
    assert load_config(path).train_parameters.lora_peft_config == {"r": 4}


def test_separator_is_the_same_setting_as_seperator(write_config):
    config = load_config(write_config(FULL, ("seperator", "separator")))
    assert config.dataset_preprocess.seperator == "### Answer"


@pytest.mark.parametrize(
    ("written", "value"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")]
)
def test_dtypes_of_vllm_are_understood(write_config, written, value):
    path = write_config(FULL, ("vllm_dtype: half", f"vllm_dtype: {written}"))
    assert load_config(path).engine.dtype == value


def test_schedules_are_those_of_transformers(write_config):
    from transformers import SchedulerType

    for name in [kind.value for kind in SchedulerType]:
        config = load_config(write_config(), [f"train_parameters.lr_scheduler_type={name}"])
        assert config.train_parameters.schedule.lr_scheduler_type == name
    assert "lr_scheduler_type" in refusal(write_config(), "train_parameters.lr_scheduler_type=round")


def test_a_merge_key_is_overridden_by_the_keys_beside_it(write_config):
    anchor = ("sampling_params:\n", "sampling_params: &p\n")
    path = write_config(FULL, anchor, ("    engine:\n", "    engine:\n      <<: *p\n      n: 1\n"))
    engine = load_config(path).engine.engine_args
    assert engine == {"n": 1, "temperature": 0.1, "logit_bias": {50256: -100}, "max_model_len": 512}


REFUSED = {
    "train_parameters.epochs": ["true", "1.0", "'- 3'", "null", "x" * 500],
    "train_parameters.gradient_accumulation_steps": ["0"],
    "train_parameters.max_seq_len": ["0"],
    "train_parameters.logging_steps": ["0"],
    "train_parameters.seed": ["4294967296", "-1"],
    "train_parameters.cpu_offload": ["1", "'True'"],
    "train_parameters.output_dir": ["''"],
    "train_parameters.sharding_strategy": ["zzz"],
    "train_parameters.max_grad_norm": ["0", "true", ".nan"],
    "train_parameters.warmup_ratio": ["1.5", "-0.1"],
    "train_parameters.save_frequency": ["0", "1.5", "-2"],
    "train_parameters.optimizer": ["adam"],
    "train_parameters.optimizer.lr": ["-1", ".inf", "'1e-5'"],
    "train_parameters.optimizer.betas": ["0.9", "[0.9]", "[0.9, x]"],
    "evaluation.prompts": ["[]", "5", "[a, 5]", "[a, '']"],
    "engine.gpu_memory_utilization": ["35"],
    "engine.dtype": ["float23"],
    "engine.receiver": ["pack"],
    "engine.transport": ["pul"],
    "engine.timeout_s": ["0", ".inf"],
    "evaluation.every": ["0"],
    "train_parameters.lora_peft_config": ["8"],
    "evaluation.sampling_params": ["[n, 4]"],
    "dataset.train_bs": ["0"],
    "dataset.ignore_index": ["x"],
    "dataset_preprocess.packing_type": ["partially"],
    "dataset_preprocess.overlap": ["-1"],
    "wandb_config": ["x"],
    "model": ["null"],
}


@pytest.mark.parametrize(
    ("path", "written"), [(path, written) for path, cases in REFUSED.items() for written in cases]
)
def test_a_wrong_value_is_refused_with_its_key_and_place(write_config, path, written):
    override = f"{path}={written}"
    text = refusal(write_config(FULL), override)
    assert text.startswith(path)
    assert text.endswith(f" (--set {override})") or "..." in text


def test_an_empty_file_misses_everything_required(write_config):
    text = refusal(write_config("# nothing\n"))
    assert "'model'" in text
    assert "'train_parameters'" in text


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (b"model: [a\n", "my.yaml:2"),
        (b"a: 1\n---\nb: 2\n", "my.yaml:2"),
        (b"model: !!python/name:os.system x\n", "my.yaml:1"),
        (b"model: !!timestamp 2024-13-01\n", "my.yaml:1"),
        (b"? [a, b]\n: 1\n", "my.yaml:1"),
        (b"wandb_config:\n  <<: 5\n", "my.yaml:2"),
        (b"wandb_config: &a {b: *a}\n", "my.yaml:1"),
        (b"wandb_config: {name: a, name: b}\n", "'name' (my.yaml:1)"),
        (b"- model\n", "my.yaml"),
        (b"model: \xff\n", "my.yaml:1"),
        (MINIMAL.encode() + b"7: x\n", "'7' (my.yaml:13)"),
        (b"lora_peft_config: {r: 8}\ntrain_parameters: {lora_peft_config: {r: 4}}\n", "(my.yaml:2)"),
        (b"dataset_preprocess: {seperator: a, separator: b}\n", "dataset_preprocess.separator"),
        (None, "my.yaml"),
    ],
)
def test_a_file_that_is_no_mapping_or_sets_a_thing_twice_is_refused_with_the_place(write_config, text, place):
    path = Path(write_config())
    path.unlink() if text is None else path.write_bytes(text)
    assert place in refusal(str(path))


def test_a_config_is_frozen_and_travels_to_other_processes(write_config):
    config = load_config(write_config(FULL))
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(AttributeError):
        config.train_parameters.loop.epochs = 3


def test_a_config_knows_where_its_settings_were_written(write_config):
    config = load_config(write_config(FULL), ["train_parameters.epochs=3"])
    assert config.origins["train_parameters.seed"] == "my.yaml:11"
    assert config.origins["train_parameters.epochs"] == "--set train_parameters.epochs=3"


def test_anchors_within_anchors_are_refused_before_they_fill_the_memory(write_config):
    levels = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
    path = write_config("a0: &a0 [x, x]\n" + levels)
    assert "20000" in refusal(path)


@pytest.mark.parametrize("setting", ["train_parameters.optimizer.lr", "rl.critic.lr"])
def test_a_wrong_learning_rate_is_answered_with_one_that_trains(write_config, setting):
    rl = "rl={max_steps: 1, prompts: [a], prompts_per_step: 1, rewards: {countdown: 1}}"
    assert "1.0e-5" in refusal(write_config(), rl, f"{setting}=-1")
