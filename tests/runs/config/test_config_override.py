import pytest
from kit.config_texts import FULL, MINIMAL, RL, refusal

from vectorlm.runs.config.load import load_config
from vectorlm.train.settings import EvaluationSettings


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
    config = load_config(write_config(), overrides)
    train, evaluation = config.train_parameters, config.evaluation
    assert (train.optimizer.lr, train.optimizer.betas, train.model.use_mp) == (1e-5, (0.8, 0.9), True)
    assert (evaluation.every, evaluation.prompts) == (2, ("a = b",))


def test_an_override_may_supply_a_setting_or_open_a_section(write_config):
    assert load_config(write_config(MINIMAL, ("model: models/tiny\n", "")), ["model=m"]).model == "m"
    overrides = ["evaluation.every=2", "evaluation.prompts=p.jsonl"]
    evaluation = load_config(write_config(), overrides).evaluation
    assert (evaluation.every, evaluation.prompts) == (2, "p.jsonl")
    commented_out = write_config("wandb_config:\n" + MINIMAL)
    assert load_config(commented_out, ["wandb_config.name=x"]).wandb_config == {"name": "x"}


@pytest.mark.parametrize("section", ["evaluation", "train_parameters.sampler"])
def test_null_turns_evaluations_off(write_config, section):
    config = load_config(write_config(FULL), [f"{section}=null"])
    assert config.evaluation == EvaluationSettings()
    assert not config.has_engine


def test_an_override_may_write_the_settings_of_an_algorithm(write_config):
    changed = load_config(write_config(RL), ["rl.algorithm.clip_high=0.28"]).rl.algorithm
    assert (changed.name, changed.settings.clip_high) == ("grpo", 0.28)
    replaced = load_config(
        write_config(RL), ["rl.algorithm.clip_high=0.28", "rl.algorithm=gspo"]
    ).rl.algorithm
    assert (replaced.name, replaced.settings.clip_high) == ("gspo", 4e-4)
    whole = load_config(write_config(RL), ["rl.algorithm={name: dapo, clip_high: 0.5}"]).rl.algorithm
    assert (whole.name, whole.settings.clip_high) == ("dapo", 0.5)


@pytest.mark.parametrize(
    ("overrides", "weights"),
    [
        (["reward=a"], {"a": 1.0}),
        (["reward=a", "further_rewards=[b, c]"], {"a": 1.0, "b": 0.0, "c": 0.0}),
    ],
)
def test_rewards_of_vectorlm_become_weights(write_config, overrides, weights):
    given = [f"train_parameters.sampler.{override}" for override in overrides]
    assert load_config(write_config(), given).evaluation.rewards == weights
    written = "".join(f"    {override.replace('=', ': ')}\n" for override in reversed(overrides))
    both = ["evaluation.rewards=null", "train_parameters.sampler.further_rewards=[b]"]
    assert load_config(write_config(), both).evaluation.rewards == {"b": 1.0}
    both = ["evaluation.rewards=[a]", "train_parameters.sampler.further_rewards=[b]"]
    assert load_config(write_config(), both).evaluation.rewards == {"a": 1.0, "b": 0.0}
    path = write_config(MINIMAL.replace("dataset:", f"  sampler:\n{written}dataset:", 1))
    assert load_config(path).evaluation.rewards == weights


def test_two_places_of_one_setting_are_refused(write_config):
    text = MINIMAL.replace(
        "dataset:", "  sampler: {vllm_dtype: float32}\nengine: {dtype: float32}\ndataset:", 1
    )
    assert "'engine.dtype'" in refusal(write_config(text))


def test_an_override_reaches_into_a_free_mapping(write_config):
    overrides = ["evaluation.sampling_params.n=9", "wandb_config.a.b=1"]
    config = load_config(write_config(FULL), overrides)
    assert config.evaluation.sampling_params["n"] == 9
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
        # The error is in the file.
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
