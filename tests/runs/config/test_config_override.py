import pytest
from kit.config_texts import FULL, MINIMAL, refusal

from vectorlm.runs.config.load import load_config


def test_an_override_wins_over_the_file_and_over_those_before_it(write_config):
    overrides = ["train_parameters.epochs=5", "model=other", "train_parameters.epochs=6"]
    config = load_config(write_config(), overrides)
    assert (config.train_parameters.loop.epochs, config.model) == (6, "other")


def test_an_override_is_read_as_yaml(write_config):
    overrides = [
        "train_parameters.optimizer.lr=1e-5",
        "train_parameters.optimizer.betas=[0.8, 0.9]",
        "train_parameters.use_mp=true",
        "train_parameters.sampler={sample_frequency: 2, prompts: ['a = b']}",
    ]
    train = load_config(write_config(), overrides).train_parameters
    assert (train.optimizer.lr, train.optimizer.betas, train.model.use_mp) == (1e-5, (0.8, 0.9), True)
    assert (train.sampler.evaluation.sample_frequency, train.sampler.evaluation.prompts) == (2, ("a = b",))


def test_an_override_may_supply_a_setting_or_open_a_section(write_config):
    assert load_config(write_config(MINIMAL, ("model: models/tiny\n", "")), ["model=m"]).model == "m"
    overrides = ["train_parameters.sampler.sample_frequency=2", "train_parameters.sampler.prompts=p.jsonl"]
    sampler = load_config(write_config(), overrides).train_parameters.sampler
    assert (sampler.evaluation.sample_frequency, sampler.evaluation.prompts) == (2, "p.jsonl")
    commented_out = write_config("wandb_config:\n" + MINIMAL)
    assert load_config(commented_out, ["wandb_config.name=x"]).wandb_config == {"name": "x"}


def test_null_takes_a_section_out(write_config):
    assert load_config(write_config(FULL), ["train_parameters.sampler=null"]).train_parameters.sampler is None


def test_an_override_reaches_into_a_free_mapping(write_config):
    overrides = ["train_parameters.sampler.sampling_params.n=9", "wandb_config.a.b=1"]
    config = load_config(write_config(FULL), overrides)
    assert config.train_parameters.sampler.engine.sampling_params["n"] == 9
    assert config.wandb_config["a"] == {"b": 1}


def test_an_override_replaces_the_setting_that_its_alias_names(write_config):
    overrides = ["dataset_preprocess.separator=x", "lora_peft_config.r=4"]
    config = load_config(write_config(FULL), overrides)
    assert config.dataset_preprocess.seperator == "x"
    assert config.train_parameters.lora_peft_config == {"task_type": "CAUSAL_LM", "r": 4, "lora_dropout": 0.1}


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("train_parameters.epoch=3", "'train_parameters.epochs'"),
        ("epochs=3", "'train_parameters.epochs'"),
        ("train_parameter.epochs=3", "'train_parameters'"),
        # The file is to blame.
        ("model.name=x", "(my.yaml:2)"),
        ("wandb_config.a.b=1", "wandb_config.a=5"),
        ("model", "'--set model'"),
        ("=x", "'--set =x'"),
        ("model=[a", "(--set model=[a)"),
        ("model=", "model=null"),
    ],
)
def test_a_wrong_override_names_itself_and_what_was_meant(write_config, override, named):
    assert named in refusal(write_config("wandb_config: {a: 5}\n" + MINIMAL), override)


@pytest.mark.parametrize("preset", ["off", "'off'", "false"])
def test_an_off_without_quotes_is_no_false(write_config, preset):
    overrides = [
        "rl={algorithm: grpo, max_steps: 1, prompts: ['a'], prompts_per_step: 1, rewards: {countdown: 1.0}}",
        f"rl.correction.preset={preset}",
        "dataset=null",
        "train_parameters.sampler={sample_frequency: 2, prompts: ['a']}",
    ]
    config = load_config(write_config(), overrides)
    assert config.rl.correction.preset == "off"
    stale = "rl.async={max_staleness: 1, update: false}"
    assert "update=false" in refusal(write_config(), *overrides, stale)
