"""Random configs: a check refuses each with a reason, or every later step of a run accepts it.

For more configs: pytest tests/fuzz --hypothesis-profile campaign
"""

import contextlib
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from kit.rank_processes import save_tiny_llama
from kit.tiny_runs import rows

import vectorlm.runs.start
from vectorlm import FakeEngine
from vectorlm.errors import VectorLMError
from vectorlm.report.metrics import JsonlSink
from vectorlm.runs.config.load import load_config
from vectorlm.runs.config.setting import all_settings
from vectorlm.runs.fine_tuning import finetune
from vectorlm.runs.preflight.checked import preflight
from vectorlm.runs.preflight.memory import memory_report
from vectorlm.runs.reinforcement import reinforce

ON_TEXT = """
model: model
train_parameters:
  output_dir: run
  max_seq_len: 64
  optimizer: {lr: 1.0e-3}
  checkpointing_enabled: True
  sampler:
    sample_frequency: 1
    prompts: [abc]
    sampling_params: {max_tokens: 4, temperature: 0.5}
    engine: {max_model_len: 64}
dataset: {train_bs: 2, eval_bs: 2, train_ds: train, eval_ds: train}
"""
ON_REWARDS = """
model: model
train_parameters:
  output_dir: run
  max_seq_len: 64
  optimizer: {lr: 1.0e-3}
  sampler: {sample_frequency: 1, prompts: [abc], sampling_params: {max_tokens: 4}}
rl:
  algorithm: grpo
  max_steps: 2
  prompts: prompts.jsonl
  prompts_per_step: 2
  group_size: 3
  sampling_params: {max_tokens: 8}
  rewards: {"rewards.py:letters": 1.0}
"""
REWARDS = "def letters(completion, **columns): return completion.count('a') + len(completion) % 3"
# Other seeds find other faults. CI excludes this test, because CI shows whether a change broke something.
pytestmark = pytest.mark.long
SETTINGS = all_settings()
# No name or path may point outside the folder of the tests.
TEXTS = st.text("ab./-_ 1é\n:'#&*", max_size=6).filter(
    lambda text: ".." not in text and not text.startswith("/")
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5),
    st.sampled_from([16, 64, 1000, 10**6, 2**31, 2**64, 10**30]),
    st.floats(-2.0, 2.0),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e-300, 1e300]),
    TEXTS,
)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.one_of(TEXTS, st.integers(0, 2)), SCALARS, max_size=2),
)


class EnoughError(Exception):
    """The error that ends a run after its first step."""


def choices_of(path):
    """Return a strategy for valid and invalid values of a setting."""
    names = [name for name in str(SETTINGS[path].hint).split("'") if name.isidentifier()]
    return st.one_of(VALUES, st.sampled_from(names)) if names else VALUES


@st.composite
def changes(draw):
    """Draw a change of a config: set or override a value, drop a key, or use an unknown key."""
    path = draw(st.sampled_from(sorted(SETTINGS)))
    match draw(st.sampled_from(["set", "set", "set", "drop", "misspell", "override"])):
        case "drop":
            return "drop", path, None
        case "misspell":
            return "set", path + draw(st.sampled_from(["s", "_", ".a"])), draw(VALUES)
        case what:
            return what, path, draw(choices_of(path))


def changed(text, steps):
    """Return the config after the changes, and the overrides of the command line."""
    tree, overrides = yaml.safe_load(text), []
    for what, path, value in steps:
        if what == "override":
            written = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n")
            overrides.append(f"{path}={written}")
            continue
        *parents, last = path.split(".")
        section = tree
        for name in parents:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        if what == "drop":
            section.pop(last, None)
        else:
            section[last] = value
    return yaml.safe_dump(tree), overrides


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("fuzz"))
        save_tiny_llama(Path("model"), hidden_size=64, vocab_size=128)
        Dataset.from_list(rows(4)).save_to_disk("train")
        Path("prompts.jsonl").write_text('{"prompt": "abc"}\n' * 4)
        Path("rewards.py").write_text(REWARDS)
        patch.setattr(vectorlm.runs.start, "open_engine", open_scripted)
        patch.setattr(JsonlSink, "write", stop_after_a_step)
        yield


def open_scripted(config, topology, stack, placement=None, **more):
    if not config.has_engine:
        return None
    params = dict(config.evaluation.sampling_params)
    return stack.enter_context(FakeEngine(lambda prompt, version: "abc", sampling_params=params))


def stop_after_a_step(self, step, values):
    if step >= 1:
        raise EnoughError


def accepted(text, overrides, world_size):
    """Return the config if all checks accept it."""
    Path("my.yaml").write_text(text)
    try:
        config = load_config("my.yaml", overrides)
        preflight(config, world_size)
        memory_report(config, world_size, ranks_per_node=world_size)
    except VectorLMError:
        return None
    return config


def run(config):
    """Make the first step of a run."""
    with contextlib.suppress(EnoughError):
        (finetune if config.rl is None else reinforce)(config)


@pytest.mark.parametrize("text", [ON_TEXT, ON_REWARDS], ids=["text", "rewards"])
def test_the_config_itself_is_accepted(text):
    run(accepted(text, [], 1))


@pytest.mark.parametrize("text", [ON_TEXT, ON_REWARDS], ids=["text", "rewards"])
@given(steps=st.lists(changes(), min_size=1, max_size=3), world_size=st.integers(1, 4))
def test_a_changed_config_is_refused_with_a_reason_or_trains(text, steps, world_size):
    config = accepted(*changed(text, steps), world_size)
    if config is not None and world_size == 1:
        run(config)
