"""VectorLM's ten config files; the tests replace only paths, the model and step counts."""

import json
import math
from pathlib import Path

import pytest
from datasets import Dataset
from kit.rank_processes import save_tiny_llama
from kit.tiny_runs import rows

from vectorlm.cli import main
from vectorlm.errors import ConfigError
from vectorlm.runs.config.load import load_config
from vectorlm.runs.fine_tuning import finetune

FOLDER = Path(__file__).with_name("vectorlm_configs")
NAMES = sorted(path.name for path in FOLDER.glob("*.yaml"))
SAMPLING = [name for name in NAMES if "sampler:" in (FOLDER / name).read_text()]
ON_RANKS = {"hotswap-config-all-on.yaml": 2, "trice-config_gemma-all-on.yaml": 1}
"""Number of ranks of the files that start an engine; trice-config_gemma.yaml is the second without wandb's tags."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Return a folder with a tiny model for sequences of 4,096 tokens, and rows for two optimizer steps."""
    folder = tmp_path_factory.mktemp("vectorlm")
    save_tiny_llama(folder / "model", max_length=4096, hidden_size=64)
    Dataset.from_list(rows(40)).save_to_disk(folder / "train")
    Dataset.from_list(rows(8, seed=1)).save_to_disk(folder / "eval")
    return folder


@pytest.fixture
def here(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for module in ("files", "summary"):
        monkeypatch.setattr(f"vectorlm.runs.preflight.{module}.has_gpu", lambda: False)
    return workplace


def settings_for(name, output):
    """Return command-line arguments that replace values of a file."""
    text = (FOLDER / name).read_text()
    replaced = {"model": "model", "train_parameters.output_dir": output, "train_parameters.epochs": 1}
    replaced |= {"dataset.train_ds": "train", "dataset.eval_ds": "eval", "train_parameters.logging_steps": 1}
    if "max_seq_len" not in text:
        replaced["train_parameters.max_seq_len"] = 128
    if name in SAMPLING:
        replaced["evaluation.every"] = 1
        replaced["evaluation.output_jsonl_path"] = f"{output}/answers.jsonl"
    return [word for key, value in replaced.items() for word in ("--set", f"{key}={value}")]


@pytest.mark.parametrize("name", NAMES)
def test_each_file_passes_the_check(here, name, capsys):
    assert main(["check", str(FOLDER / name), *settings_for(name, f"checked/{name}")]) == 0
    out = capsys.readouterr().out
    assert "which counted micro-batches, write logging_steps: 1" in out
    assert "once converted, keep them" in out  # The next check cannot see that they were converted.
    assert ("attention is torch's own" in out) == ("use_flash_attention: true" in (FOLDER / name).read_text())


@pytest.mark.parametrize("name", NAMES)
def test_a_file_as_it_is_says_what_has_to_be_filled_in(here, name):
    """The file lacks a path, or a value that VectorLM's command line set."""
    text, path = (FOLDER / name).read_text(), str(FOLDER / name)
    wanted = ["model"] if "\nmodel:" not in text else []
    wanted += ["train_parameters.max_seq_len"] if "max_seq_len" not in text else []
    if not wanted:
        assert load_config(path).model
        return
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert [key for key in wanted if f"--set {key}=VALUE" not in str(caught.value)] == []


def require_trained(name, output, num_steps):
    text = (FOLDER / name).read_text()
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == num_steps
    assert all(map(math.isfinite, losses))
    assert all("eval/loss" in line for line in lines)
    weights = "adapter_model.safetensors" if "lora_peft_config" in text else "model.safetensors"
    assert (output / "final-model" / weights).is_file()
    assert (output / "checkpoints").exists() == ("checkpointing_enabled: true" in text)


@pytest.mark.slow
def test_the_files_without_a_sampler_train(here, capsys):
    for name in NAMES:
        if name in SAMPLING:
            continue
        output = Path("trained") / name
        given = [word for word in settings_for(name, output) if word != "--set"]
        finetune(load_config(FOLDER / name, given))
        require_trained(name, output, num_steps=2)
        has_flash = "use_flash_attention: true" in (FOLDER / name).read_text()
        assert ("attention is torch's own" in capsys.readouterr().err) == has_flash
    assert len(list(Path("wandb").glob("offline-run-*"))) == 7


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world_size"), ON_RANKS.items())
def test_the_files_with_a_sampler_train(here, name, world_size):
    output = Path("trained") / name
    arguments = ["--world_size", str(world_size), *settings_for(name, output)]
    assert main(["run", str(FOLDER / name), *arguments]) == 0
    num_steps = 2 // world_size
    require_trained(name, output, num_steps)
    answers = [json.loads(line) for line in (output / "answers.jsonl").read_text().splitlines()]
    assert [answer["train_step"] for answer in answers] == [
        step for step in range(num_steps + 1) for _ in range(3)
    ]
