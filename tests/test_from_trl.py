"""docs/from_trl.md: its tables name what exists, its defaults are those of both sides, and what it moves over runs."""

import ast
import json
import re
import subprocess
import sys
from dataclasses import MISSING
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from rank_processes import save_tiny_llama
from rl_runs import lines

from vectorlm.config import load_config
from vectorlm.config.foreign import FOREIGN
from vectorlm.config.setting import all_settings

PAGE = (Path(__file__).parent.parent / "docs/from_trl.md").read_text()
REWARDS, SCRIPT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(CONFIG,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| `")
]
needs_trl = pytest.mark.skipif(
    find_spec("trl") is None, reason="TRL is not installed (requirements/bench.txt)"
)
TINY = [
    "train_parameters.max_seq_len=64",
    "rl.max_steps=2",
    "rl.prompts_per_step=2",
    "rl.group_size=4",
    "rl.sampling_params.max_tokens=6",
    "train_parameters.sampler.vllm_dtype=float32",
    "train_parameters.sampler.engine.kv_cache_memory_bytes=16777216",
]


def names(text):
    return re.findall(r"`([a-z_0-9.]+)(?:: [^`]*)?`", text)


def fields_with_defaults(package, path, name):
    """Return the fields of a dataclass in a package's source, without importing it."""
    folder = Path(find_spec(package).submodule_search_locations[0])
    classes = [each for each in ast.parse((folder / path).read_text()).body if isinstance(each, ast.ClassDef)]
    body = next(each.body for each in classes if each.name == name)
    found = {}
    for each in body:
        if isinstance(each, ast.AnnAssign):
            value = each.value
            if isinstance(value, ast.Call):
                value = next((word.value for word in value.keywords if word.arg == "default"), None)
            found[each.target.id] = ast.literal_eval(value) if isinstance(value, ast.Constant) else MISSING
    return found


def grpo_fields():
    return fields_with_defaults("trl", "trainer/grpo_config.py", "GRPOConfig")


def all_fields():
    shared = fields_with_defaults("trl", "trainer/base_config.py", "_BaseConfig")
    return (
        fields_with_defaults("transformers", "training_args.py", "TrainingArguments") | shared | grpo_fields()
    )


def given():
    """Return the keyword arguments of the script's GRPOConfig."""
    calls = [each for each in ast.walk(ast.parse(SCRIPT)) if isinstance(each, ast.Call)]
    (call,) = (each for each in calls if getattr(each.func, "id", "") == "GRPOConfig")
    return {word.arg: ast.literal_eval(word.value) for word in call.keywords}


@needs_trl
def test_every_argument_of_grpo_config_is_on_the_page():
    assert sorted(grpo_fields().keys() - set(names(PAGE))) == []


@needs_trl
def test_the_script_uses_arguments_that_exist():
    assert given().keys() <= all_fields().keys()


@needs_trl
def test_the_defaults_of_the_page_are_those_of_both_sides():
    rows = [row for row in ROWS if len(row) == 4 and row[0] != "`GRPOConfig`"]
    fields, settings = all_fields(), all_settings()
    assert len(rows) > 10
    for theirs, default, mine, here in rows:
        assert ast.literal_eval(default.strip("`")) == fields[theirs.strip("`")], theirs
        setting = settings[mine.strip("`")]
        assert (
            setting.is_required
            if here == "required"
            else ast.literal_eval(here.strip("`")) == setting.default
        )
    assert "Completions have up to 512 tokens in TRL" in PAGE
    assert fields["max_completion_length"] == 512
    assert fields["save_steps"] == 500
    assert fields["disable_dropout"] is fields["use_vllm"] is False
    assert fields["vllm_importance_sampling_correction"] is True
    assert (fields["loss_type"], fields["vllm_importance_sampling_mode"]) == ("dapo", "sequence_mask")


def test_the_page_and_the_answers_to_unknown_settings_agree():
    """Where a row has a name that `vectorlm check` answers, it says the same place."""
    checked = 0
    for row in ROWS:
        told = [place for each in names(row[0]) if each in FOREIGN for place in FOREIGN[each].places]
        here = names(" ".join(row[1:]))
        if told:
            ends = [place.removeprefix("rl.") for place in told]
            assert any(place.endswith(each) or each.endswith(place) for place in ends for each in here), row
            checked += 1
    assert checked > 30


def test_every_setting_that_the_page_names_with_its_section_exists():
    settings = all_settings()
    heads = ("train_parameters.", "dataset.", "dataset_preprocess.", "sampler.", "correction.", "rl.")
    for name in names(PAGE):
        if not name.startswith(heads) or name.rpartition(".")[0].endswith(("sampling_params", "engine")):
            continue
        full = {"sampler": "train_parameters.", "correction": "rl."}.get(name.partition(".")[0], "") + name
        assert full in settings, name


def test_the_config_says_what_the_script_says(tmp_path):
    """Number by number."""
    (tmp_path / "gsm8k.yaml").write_text(CONFIG)
    config, theirs = load_config(tmp_path / "gsm8k.yaml"), given()
    rl, train = config.rl, config.train_parameters
    rows = theirs["per_device_train_batch_size"] * theirs["gradient_accumulation_steps"] * 2
    assert rl.collect.prompts_per_step * rl.collect.group_size == rows
    assert rl.collect.group_size == theirs["num_generations"]
    assert rl.collect.sampling == {
        "temperature": theirs["temperature"],
        "max_tokens": theirs["max_completion_length"],
    }
    assert (rl.max_steps, rl.save_every) == (theirs["max_steps"], theirs["save_steps"])
    assert rl.kl.kl_coef == theirs["beta"]
    assert rl.hyperparameters.get("clip_low", 0.2) == theirs["epsilon"]
    assert rl.hyperparameters["clip_high"] == theirs["epsilon_high"]
    assert rl.update.drop_truncated == theirs["mask_truncated_completions"]
    assert list(rl.reward.rewards.values()) == theirs["reward_weights"]
    assert train.optimizer.lr == theirs["learning_rate"]
    assert train.schedule.lr_scheduler_type == theirs["lr_scheduler_type"]
    assert train.schedule.warmup_ratio * rl.max_steps == theirs["warmup_steps"]
    assert train.sampler.engine.gpu_memory_utilization == theirs["vllm_gpu_memory_utilization"]
    assert train.output_dir == theirs["output_dir"]


@pytest.mark.slow
def test_what_was_moved_over_runs(tmp_path):
    """With the rewards and the config as they are written, but for sizes: questions of messages in a saved dataset."""
    settings = yaml.safe_load(CONFIG)
    save_tiny_llama(tmp_path / settings["model"], hidden_size=64)
    questions = [
        {"prompt": [{"role": "user", "content": letter * 3}], "answer": None if letter == "d" else letter}
        for letter in "abcd"
    ]
    Dataset.from_list(questions).save_to_disk(tmp_path / settings["rl"]["prompts"])
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "gsm8k.yaml").write_text(CONFIG)
    options = [word for each in TINY for word in ("--set", each)]
    command = [sys.executable, "-m", "vectorlm", "run", "gsm8k.yaml", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    output = tmp_path / settings["train_parameters"]["output_dir"]
    assert (output / "final-model/config.json").is_file()
    rollouts = lines(output / "rollouts.jsonl")
    assert len(rollouts) == 2 * 2 * 4
    for row in rollouts:
        letter = json.dumps(row["prompt"])[-5]
        text, wanted = row["completion"].strip(), None if letter == "d" else letter
        assert row["rewards"]["right"] == (None if wanted is None else float(text.endswith(wanted)))
        assert -6 / 256 <= row["rewards"]["brief"] <= -1 / 256
        total = (row["rewards"]["right"] or 0.0) + 0.1 * row["rewards"]["brief"]
        assert row["reward"] == pytest.approx(total, abs=1e-6)
    assert any(row["rewards"]["right"] is None for row in rollouts), (
        "no question without an answer was sampled"
    )
