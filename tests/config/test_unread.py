"""No setting is accepted that has no effect: each one is read by the run, or refused."""

import dataclasses
import types
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from datasets import Dataset
from rank_processes import save_tiny_llama
from tiny_runs import rows

import vectorlm.preflight.resume
import vectorlm.reinforce
import vectorlm.run
from vectorlm import FakeEngine
from vectorlm.algorithms import algorithm_names, get_algorithm
from vectorlm.algorithms.hyperparameters import Hyperparameters
from vectorlm.config import Config, load_config
from vectorlm.errors import ConfigError, DatasetError
from vectorlm.finetune import finetune
from vectorlm.preflight.rl import check_prompt_lengths, check_rl
from vectorlm.preflight.settings import check_consistency
from vectorlm.reinforce import reinforce
from vectorlm.rl.settings import Correction

CONFIG = """
model: model
train_parameters:
  output_dir: runs/{algorithm}-{mode}
  max_seq_len: 64
  optimizer: {{lr: 1.0e-3}}
  lr_scheduler_type: {schedule}
  checkpointing_enabled: True
  sampler: {{sample_frequency: 1, prompts: [abc], reward: "rewards.py:letters", sampling_params: {{max_tokens: 4}}}}
rl:
  algorithm: {algorithm}
  max_steps: 2
  prompts: [abc, bcd, cde, def]
  prompts_per_step: 2
  group_size: 3
  sampling_params: {{max_tokens: 8}}
  rewards: {{"rewards.py:letters": 1.0}}
"""
REWARDS = """
class Asker:
    def __init__(self, **columns):
        pass
    def respond(self, text):
        return "a"

def letters(completion, prompt):
    letters.count += 1
    return 1.0 if prompt == "abc" else float(letters.count % 3)

letters.count = 0
"""
MODES = {
    "plain": (),
    "several steps": (
        "rl.num_mini_batches=2",
        "rl.kl_coef=0.1",
        "rl.kl_target=6.0",
        "rl.overlong_buffer_tokens=4",
    ),
    "turns": (
        "rl.environment=rewards.py:Asker",
        "rl.dynamic_sampling=True",
        "rl.async={max_staleness: 1}",
        "rl.kl_coef=0.1",
    ),
    "corrected": (
        "rl.correction.preset=seq_mask_tis",
        "rl.correction.gate_low=0.0",
        "rl.correction.gate_high=1.0e9",
        "rl.kl_coef=0.1",
        "rl.kl_in=reward",
    ),
    "taught": ("rl.teacher={model: model, kind: full}",),
}
NOT_OF_THE_LOOP = (
    # Read by `open_engine`, which a given engine makes unnecessary.
    *(
        f"train_parameters.sampler.{name}"
        for name in ("receiver", "transport", "verify_updates", "engine", "sampling_params")
    ),
    *(
        f"train_parameters.sampler.{name}"
        for name in ("gpu_memory_utilization", "vllm_dtype", "inference", "lora_mode")
    ),
    # Of a script, of trackers, of another way to train, or of preprocessing.
    *(
        "enable_wandb_logging",
        "wandb_config",
        "train_parameters.lora_peft_config",
        "dataset",
        "dataset_preprocess",
        "train_parameters.batch_size",
    ),
    # For its warning, `RolloutLogger` is told the number alone; where nothing is corrected there is none to warn of.
    *("rl.correction.min_ess", "rl.correction.band_low", "rl.correction.band_high"),
)


NEVER = [
    *((name, "corrected") for name in ("best_of_k", "copg", "online_dpo", "proximal_rloo", "gmpo", "gdpo")),
    # Its penalty changes the sum of rewards, and this algorithm reads each alone.
    ("gdpo", "several steps"),
    # Its mode has dynamic sampling.
    ("on_policy_distillation", "turns"),
    ("gdpo", "turns"),
    # It learns from no reward, so that a penalty in the reward would change nothing.
    ("on_policy_distillation", "corrected"),
]
MORE = {"pass_at_k": ("rl.pass_k=2",)}
WIDE = {"covariance_share": 1.0, "covariance_low": 0.0, "covariance_high": 1e9}
"""So that of the four tokens of the example some are chosen."""
FAST = ("grpo", "ppo", "online_dpo", "on_policy_distillation")


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unread")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        save_tiny_llama(folder / "model", vocab_size=128)
        Path("rewards.py").write_text(REWARDS)
        yield folder


def config_of(algorithm, mode, *more, schedule="constant_with_warmup"):
    Path("my.yaml").write_text(
        CONFIG.format(algorithm=algorithm, mode=mode.replace(" ", "-"), schedule=schedule)
    )
    taught = ["rl.teacher={model: model}"] if needs_teacher(algorithm) and mode != "taught" else []
    config = load_config("my.yaml", [*taught, *MODES[mode], *more])
    check_consistency(config)
    return config


def needs_teacher(algorithm):
    return get_algorithm(algorithm).needs_teacher


def fields_of(section, prefix=""):
    """Yield path, class, field and type of every setting, as the dataclasses nest them."""
    hints = get_type_hints(section)
    for each in dataclasses.fields(section):
        inner = each.metadata.get("partial") or hints[each.name]
        kinds = [kind for kind in (inner, *get_args(inner)) if dataclasses.is_dataclass(kind)]
        key = each.metadata.get("key", each.name)
        if "inline" in each.metadata or "partial" in each.metadata:
            yield from fields_of(inner, prefix)
        elif kinds:
            yield from fields_of(kinds[0], f"{prefix}{key}.")
        elif each.metadata.get("is_setting", True):
            yield prefix + key, section, each, hints[each.name]


SETTINGS = {path: rest for path, *rest in fields_of(Config)}


def another_value(field, hint):
    """Return a valid value other than the default, as YAML; None where that would need files."""
    if field.default is dataclasses.MISSING:
        return None
    kinds = get_args(hint) if get_origin(hint) is types.UnionType else (hint,)
    if get_origin(kinds[0]) is Literal:
        return next(choice for choice in get_args(kinds[0]) if choice != field.default)
    if bool in kinds:
        return not field.default
    if int in kinds:
        return field.default + 1 if isinstance(field.default, int) else 2
    if float in kinds:
        return field.default / 2 if isinstance(field.default, float) and field.default else 0.25
    return None


@contextmanager
def noting_reads(patch):
    """Collect the class and name of each setting that is read, but for what only saves or shows the config."""
    seen, silent = set(), []
    for cls in {cls for cls, *_ in SETTINGS.values()}:

        def note(self, name, cls=cls):
            if not silent:
                seen.add((cls, name))
            return object.__getattribute__(self, name)

        patch.setattr(cls, "__getattribute__", note, raising=False)
    for module, name in (
        (vectorlm.run, "save_config"),
        (vectorlm.run, "memory_report"),
        (vectorlm.preflight.resume, "to_plain"),
        (vectorlm.reinforce, "check_rl"),
    ):
        patch.setattr(module, name, silently(getattr(module, name), silent))
    yield seen


def silently(work, silent):
    def wrapped(*args, **more):
        silent.append(True)
        try:
            return work(*args, **more)
        finally:
            silent.pop()

    return wrapped


def is_accepted(algorithm, mode, path, value):
    try:
        check_rl(config_of(algorithm, mode, f"{path}={value}"))
    except ConfigError:
        return False
    return True


def answer(prompt, version):
    return "abcd"


def run(config):
    """Train with an engine that needs no model, and return what was read."""
    with pytest.MonkeyPatch.context() as patch, noting_reads(patch) as seen:
        with FakeEngine(
            answer, sampling_params=dict(config.train_parameters.sampler.engine.sampling_params)
        ) as engine:
            reinforce(config, engine=engine)
        return set(seen)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(name, marks=[] if name in FAST else [pytest.mark.long]) for name in algorithm_names()],
)
def test_every_setting_that_is_accepted_is_read(algorithm, mode):
    config = config_of(algorithm, mode, *MORE.get(algorithm, ()))
    try:
        check_rl(config)
    except ConfigError:
        assert (algorithm, mode) in NEVER
        return
    seen, unread = run(config), []
    read = get_algorithm(algorithm).settings_read(Hyperparameters())
    for path, (cls, field, hint) in SETTINGS.items():
        value = another_value(field, hint)
        if value is None or path.startswith(NOT_OF_THE_LOOP):
            continue
        is_read = (cls, field.name) in seen if cls is not Hyperparameters else field.name in read
        if not is_read and is_accepted(algorithm, mode, path, value):
            unread.append(path)
    assert unread == []
    assert len(seen) > 40


TEXT = """
model: model
train_parameters:
  output_dir: runs/text
  max_seq_len: 64
  optimizer: {lr: 1.0e-3}
  checkpointing_enabled: True
  sampler:
    sample_frequency: 1
    prompts: [abc]
    inference: vectorlm.backends.scripted:Scripted
    engine: {answers: [abcd, abcd, abcd]}
dataset: {train_bs: 2, eval_bs: 2, train_ds: train, eval_ds: train}
"""
NOT_OF_TEXT = (
    "enable_wandb_logging",
    "wandb_config",
    "train_parameters.lora_peft_config",
    "dataset_preprocess",
    # Accepted so that existing files load.
    "train_parameters.batch_size",
    "rl.",
)


def test_every_setting_of_fine_tuning_that_is_accepted_is_read():
    Dataset.from_list(rows(4)).save_to_disk("train")
    Path("text.yaml").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch, noting_reads(patch) as seen:
        finetune(load_config("text.yaml"))
    unread = []
    for path, (cls, field, hint) in SETTINGS.items():
        value = another_value(field, hint)
        if value is None or path.startswith(NOT_OF_TEXT) or (cls, field.name) in seen:
            continue
        try:
            check_consistency(load_config("text.yaml", [f"{path}={value}"]))
            unread.append(path)
        except ConfigError:
            continue
    assert unread == []
    assert len(seen) > 30


@pytest.mark.parametrize("name", algorithm_names())
def test_a_hyperparameter_that_counts_as_read_changes_a_number_and_no_other_does(name):
    """On the example itself, with other numbers in it."""
    import torch

    spec = get_algorithm(name)
    batch, inputs = spec._example()
    torch.manual_seed(0)
    draw = lambda: torch.randn(inputs.advantages.shape)  # noqa: E731
    rows = {
        "policy_logprobs": draw(),
        "old_logprobs": 3 * draw(),
        "reference_logprobs": draw(),
        "advantages": 3 * draw(),
    }
    inputs = dataclasses.replace(inputs, **rows)
    batch = dataclasses.replace(batch, values=draw(), token_rewards=draw(), old_logprobs=3 * draw())
    read = spec.settings_read(Hyperparameters())
    own = spec.hyperparameters()

    def numbers(**given):
        hparams = spec.hyperparameters(given)
        marked = None if spec.mark is None else spec.mark(batch, inputs.advantages, hparams)
        loss = spec.loss(dataclasses.replace(inputs, marked=marked), hparams)
        return torch.cat([spec.advantages(batch, hparams).flatten(), loss.flatten()])

    others = {
        **{"gamma": 0.5, "lam": 0.5, "clip_low": 0.9, "clip_high": 9.0, "dual_clip": 1.01, "beta": 5.0},
        **{
            "label_smoothing": 0.3,
            "preference": "ipo",
            "temperature_positive": 3.0,
            "temperature_negative": 3.0,
        },
        "scale_rewards": "group" if own.scale_rewards == "none" else "none",
        "importance_sampling_level": "token" if own.importance_sampling_level == "sequence" else "sequence",
        **{"pass_k": 1, "divergence_bound": 1e9, "covariance_share": 1e-6, "covariance_kl_coef": 3.0},
        **{name: 0.5 for name in ("shape_positive", "rate_positive", "shape_negative", "rate_negative")},
        **{"covariance_low": 1e8, "covariance_high": 1e-9},
    }
    for setting, value in others.items():
        base = WIDE if setting.startswith("covariance") else {}
        changes = not torch.equal(numbers(**base), numbers(**{**base, setting: value}))
        assert changes == (setting in read), setting


def refusal(*overrides, algorithm="grpo", mode="plain", schedule="constant_with_warmup"):
    with pytest.raises(ConfigError) as caught:
        check_rl(config_of(algorithm, mode, *overrides, schedule=schedule))
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("rl.beta=0.04", "rl.beta=0.04 has no effect with grpo. Did you mean rl.kl_coef?"),
        (
            "rl.label_smoothing=0.1",
            "has no effect with grpo. Leave it out: grpo reads clip_high, clip_low, dual_clip, ",
        ),
        (
            "rl.critic.lr=1e-3",
            "rl.critic.lr=0.001 has no effect with grpo, which has no critic. Leave it out.",
        ),
        (
            "rl.overlong_penalty=0.5",
            "has no effect with rl.overlong_buffer_tokens=0. Leave it out, or set rl.overlong_",
        ),
        (
            "rl.max_sampling_rounds=2",
            "rl.max_sampling_rounds=2 has no effect with rl.dynamic_sampling=false.",
        ),
        ("rl.max_kl=0.1", "rl.max_kl=0.1 has no effect with one optimizer step a batch."),
        (
            "rl.correction.gate_high=2.0",
            "rl.correction.gate_high=2.0 has no effect with rl.correction.gate=null.",
        ),
        ("train_parameters.epochs=2", "has no effect with dataset=null. Use rl.max_steps."),
        (
            "train_parameters.gradient_accumulation_steps=4",
            "with dataset=null. Micro-batches follow from rl.max_tokens_",
        ),
        ("train_parameters.save_frequency=0.5", "has no effect with dataset=null. Use rl.save_every."),
    ],
)
def test_what_has_no_effect_is_refused_with_what_to_use(override, text):
    assert text in refusal(override)
    assert override in refusal(override)


def test_a_prompt_that_leaves_no_room_is_refused_before_anything_starts():
    with pytest.raises(
        DatasetError, match=r"prompt 0 of rl.prompts has 3 tokens, more than the 2 that leave"
    ):
        check_prompt_lengths(config_of("grpo", "plain", "train_parameters.max_seq_len=3"))
    unbounded = config_of("grpo", "plain", "train_parameters.sampler.engine.max_model_len=null")
    check_rl(unbounded)
    check_prompt_lengths(unbounded)


def test_a_constant_schedule_warms_nothing_up():
    text = refusal("train_parameters.warmup_ratio=0.1", schedule="constant")
    assert (
        "has no effect with train_parameters.lr_scheduler_type='constant'. Use constant_with_warmup." in text
    )


def test_a_file_may_turn_a_thing_off_and_keep_its_settings():
    check_rl(
        config_of("grpo", "plain", "rl.kl_coef=0", "rl.kl_in=reward", "rl.environment=null", "rl.max_turns=3")
    )
    assert "has no effect with rl.kl_coef=0.0" in refusal("rl.kl_in=reward")
    check_rl(config_of("grpo", "plain", "rl.dynamic_sampling=False", "rl.max_sampling_rounds=2"))
    check_rl(config_of("grpo", "plain", "rl.correction={preset: off, gate_high: 2.0}"))


def test_correction_has_settings():
    assert {field.name for _, field, _ in SETTINGS.values()} >= {
        each.name for each in dataclasses.fields(Correction)
    }
