"""Arguments of AdamW, from the config to the step."""

import inspect
import json
import shutil
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from kit.rank_processes import save_tiny_llama
from kit.tiny_runs import rows

from vectorlm.errors import CheckpointError
from vectorlm.ranks.topology import Topology
from vectorlm.runs.config.load import load_config
from vectorlm.runs.fine_tuning import finetune
from vectorlm.runs.preflight.resume import find_resumption
from vectorlm.runs.start import Run
from vectorlm.train.optimizers import state_bytes
from vectorlm.train.settings import OptimizerSettings

TEXT = """\
model: model
train_parameters:
  output_dir: run
  max_seq_len: 16
  optimizer: {lr: 0.01}
  logging_steps: 100
  checkpointing_enabled: true
dataset: {train_bs: 4, eval_bs: 4, train_ds: data, eval_ds: data}
"""
OPTIMIZER = "train_parameters.optimizer"


@pytest.fixture(scope="module")
def plain(here):
    """Train two steps with torch's defaults; return the run's folder."""
    finetune(load_config("my.yaml", ["train_parameters.output_dir=plain"]))
    return "plain"


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        save_tiny_llama(folder / "model")
        Dataset.from_list(rows(8)).save_to_disk("data")
        (folder / "my.yaml").write_text(TEXT)
        yield folder


def optimizer_of(settings, device="cpu"):
    train = SimpleNamespace(optimizer=settings)
    run = SimpleNamespace(config=SimpleNamespace(train_parameters=train), topology=Topology(device=device))
    return Run.make_optimizer(run, torch.nn.Linear(2, 2))


def test_every_argument_of_adamw_is_a_setting():
    arguments = set(inspect.signature(torch.optim.AdamW).parameters) - {"params"}
    assert {field.name for field in fields(OptimizerSettings)} == arguments | {"name", "arguments"}


def test_the_defaults_are_torch_s_in_one_kernel():
    settings = OptimizerSettings(lr=1e-3)
    mine = optimizer_of(settings).defaults
    theirs = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters(), lr=1e-3).defaults
    assert mine == theirs | {"fused": True}
    assert optimizer_of(OptimizerSettings(lr=1e-3, amsgrad=True)).defaults["amsgrad"]
    # AMSGrad keeps a third number for each weight.
    assert state_bytes(OptimizerSettings(lr=1e-3, amsgrad=True), 4, 0.0) == 12


@pytest.mark.parametrize(
    ("given", "device", "fused"),
    [
        ({}, "cuda:0", True),
        ({}, "cpu", True),
        ({"foreach": True}, "cuda:0", None),
        ({"fused": False}, "cuda:0", False),
        ({"fused": True}, "cpu", True),
    ],
)
def test_one_kernel_steps_unless_something_else_is_asked_for(given, device, fused):
    assert optimizer_of(OptimizerSettings(lr=1e-3, **given), device).defaults["fused"] is fused


@pytest.mark.parametrize("name", ["maximize", "foreach", "fused"])
def test_each_argument_reaches_the_optimizer(name):
    config = load_config("my.yaml", [f"{OPTIMIZER}.{name}=true"])
    assert optimizer_of(config.train_parameters.optimizer).defaults[name] is True


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_number_of_averages_alone():
    amsgrad, output = f"{OPTIMIZER}.amsgrad=true", "train_parameters.output_dir=resumed"
    finetune(load_config("my.yaml", [output, amsgrad]))
    finetune(load_config("my.yaml", [output, amsgrad, "train_parameters.epochs=2"]))
    assert '"step": 4' in Path("resumed/metrics.jsonl").read_text()
    with pytest.raises(CheckpointError, match=f"{OPTIMIZER}.amsgrad"):
        finetune(load_config("my.yaml", [output, "train_parameters.epochs=3"]))


@pytest.mark.slow
def test_a_checkpoint_from_before_an_argument_was_known_goes_on(plain):
    shutil.copytree(plain, "older")
    config = load_config("my.yaml", ["train_parameters.output_dir=older"])
    (identity,) = Path("older/checkpoints").glob("*2/identity.json")
    noted = json.loads(identity.read_text())
    assert noted["settings"].pop(f"{OPTIMIZER}.amsgrad") is False
    identity.write_text(json.dumps(noted))
    found = find_resumption(config, 1)
    assert (found.step, found.changes) == (2, ())
