"""Models with their own Python files: trained, sampled from and exported with them, and refused without consent."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from kit.rank_processes import forked
from kit.rl_runs import config_of, save_files
from kit.sft_runs import lines
from safetensors.torch import load_file

from vectorlm.cli import main
from vectorlm.runs.reinforcement import reinforce

CONFIG_CODE = """
from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""
FOR_VLLM = """
from transformers import LlamaForCausalLM, LlamaModel

from .configuration_own import OwnConfig


class OwnModel(LlamaModel):
    config_class = OwnConfig


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
MODEL_CODE = """
from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        if found.logits is not None:
            found.logits = found.logits * 0.5  # transformers' own class would not do this
        return found
"""
REFUSED = "trust_remote_code"


@pytest.fixture
def files(tmp_path):
    """Return the files of a tiny run whose model's class exists only in its folder."""
    save_files(tmp_path)
    (tmp_path / "model/configuration_own.py").write_text(CONFIG_CODE)
    (tmp_path / "model/modeling_own.py").write_text(MODEL_CODE)
    path = tmp_path / "model/config.json"
    described = json.loads(path.read_text())
    described |= {
        "model_type": "own_llama",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    path.write_text(json.dumps(described))
    return tmp_path


def test_without_consent_it_is_refused_before_anything_runs(files, capsys):
    (files / "model/modeling_own.py").write_text("raise SystemExit('this ran')")
    config_of(files, files / "run")
    assert main(["check", str(files / "run.yaml")]) == 2
    text = capsys.readouterr().err
    assert REFUSED in text
    assert "configuration_own.py, modeling_own.py" in text
    assert "this ran" not in text


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_it_is_trained_and_the_final_model_has_its_files_and_loads_elsewhere(files, world_size):
    overrides = [
        "trust_remote_code=true",
        "engine={inference: transformers, max_model_len: 64}",
        "rl.max_steps=2",
        "train_parameters.checkpointing_enabled=false",
        "rl.correction.preset=off",
    ]
    forked(reinforce, config_of(files, files / "run", overrides=overrides), world_size=world_size)
    final = files / "run/final-model"
    for name in ("configuration_own.py", "modeling_own.py"):
        assert (final / name).read_text() == (files / "model" / name).read_text()
    # Engine and trainer use the model's own class.
    gaps = [line["sampler/logprob_gap_max"] for line in lines(files / "run/metrics.jsonl")[1:]]
    assert max(gaps) < 1e-4
    start, end = (load_file(folder / "model.safetensors") for folder in (files / "model", final))
    assert any(not torch.equal(start[name], end[name]) for name in start)
    moved = files / "elsewhere"
    shutil.move(final, moved)
    code = (
        "import sys; from transformers import AutoModelForCausalLM as A;"
        "m = A.from_pretrained(sys.argv[1], trust_remote_code=True); print(type(m).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code, moved], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "OwnForCausalLM", done.stderr
    # The command uses the config's consent.
    command = [sys.executable, "-m", "vectorlm", "evaluate", "--model", moved, "--engine", "hf"]
    command += [files / "run.yaml", "--set", "trust_remote_code=true", "--limit", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_vllm_computes_with_its_classes_after_every_swap(files):
    (files / "model/modeling_own.py").write_text(FOR_VLLM)
    path = files / "model/config.json"
    described = json.loads(path.read_text())
    described["auto_map"]["AutoModel"] = "modeling_own.OwnModel"  # vLLM requires this entry.
    path.write_text(json.dumps(described))
    overrides = [
        "trust_remote_code=true",
        "rl.max_steps=2",
        "train_parameters.checkpointing_enabled=false",
    ]
    forked(reinforce, config_of(files, files / "run", overrides=overrides), world_size=1)
    gaps = [line["sampler/logprob_gap_max"] for line in lines(files / "run/metrics.jsonl")[1:]]
    assert max(gaps) < 1e-4
    assert (
        main(["sample", "--model", str(files / "run/final-model"), "--trust_remote_code", "--prompt", "abc"])
        == 0
    )
