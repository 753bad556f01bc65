"""``vectorlm verify`` and TRL's weight syncs: findings in a real vLLM engine, and errors for wrong input."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kit.families import FAMILIES, save_family
from kit.rl_runs import config_of, save_files
from peft import LoraConfig, get_peft_model

from vectorlm import HFEngine
from vectorlm.cli import main
from vectorlm.errors import ConfigError, WeightMismatch
from vectorlm.sampling import verify
from vectorlm.sampling.verify import verify_updates

OTHERS = "the engine does not have these weights: no tensor fills these parameters: "
FOUND = {
    "sync": "nothing",
    "sync of adapters": "nothing",
    "server": "nothing",
    "head untied and equal": "nothing",
    "bias not sent": f"ChecksumMismatch: {OTHERS}['model.layers.1.self_attn.qkv_proj.bias'].",
    "stale head": f"ChecksumMismatch: {OTHERS}['lm_head.weight'].",
    "bias not taken": "1 of 26 tensors differ: ['model.layers.1.self_attn.q_proj.bias'].",
    "rounded": "1 of 26 tensors differ: ['model.layers.0.mlp.down_proj.weight'].",
    "checkpoint": "the same weights, proven by the checksums of all 26 tensors, which it holds in float32",
    "another checkpoint": "ChecksumMismatch: at u: the engine does not have these weights: 26 of 26 tensors differ",
    "other shapes": "WeightMismatch: at u: the trainer sends 'model.embed_tokens.weight' with shape (50, 64)",
    "log-probabilities": "probably the same weights, and not proven: the log-probabilities of 248 tokens differ by ",
    "other log-probabilities": "WeightMismatch: at u: the server computes with other weights: the log-probabilities",
    "server that does not answer": "EngineDied: the server at http://127.0.0.1:1 does not answer",
    "server without the extension": "ConfigError: the server at http://127.0.0.1:1 gives no checksums: start it with",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("trl")
    folder = save_family(FAMILIES["Qwen2"], tmp_path_factory.mktemp("verify") / "model", tied=True)
    command = [sys.executable, str(Path(__file__).parents[1] / "kit/held_cases.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


# All cases share one vLLM engine and TRL's sync.
@pytest.mark.slow
@pytest.mark.parametrize("case", FOUND)
def test_what_vllm_holds_after_a_sync_is_told(found, case):
    assert FOUND[case] in found[case]


@pytest.mark.parametrize(
    ("address", "checkpoint", "code", "text"),
    [
        ("127.0.0.1:1", "model", 1, "EngineDied: the server at http://127.0.0.1:1 does not answer"),
        ("127.0.0.1:1", "no/such", 2, "ConfigError: no/such is not a folder"),
        ("127.0.0.1:1", ".", 2, r"ConfigError: . is neither a checkpoint"),
    ],
)
def test_wrong_input_is_told_before_a_model_is_loaded(
    tmp_path, monkeypatch, capsys, address, checkpoint, code, text
):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    assert main(["verify", address, checkpoint]) == code
    assert re.search(text, capsys.readouterr().err)


def test_a_model_with_adapters_is_refused(monkeypatch):
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), LoraConfig(target_modules=["0"]))
    server = SimpleNamespace(max_model_len=lambda: 64, parameter_sums=lambda manifest: [])
    monkeypatch.setattr(verify, "ScoringServer", lambda *args, **more: server)
    with pytest.raises(ConfigError, match=r"return model\.merge_and_unload\(\)"):
        verify.verify_server("u", lambda: model)


@pytest.mark.slow
def test_a_check_proves_that_updates_do_what_a_start_does(tmp_path, capsys):
    save_files(tmp_path)
    config_of(tmp_path, tmp_path / "run")
    assert main(["check", str(tmp_path / "run.yaml"), "--fresh_engine"]) == 0
    assert "the same bits as a fresh engine in 6 answers" in capsys.readouterr().out
    assert (
        main(
            [
                "check",
                str(tmp_path / "run.yaml"),
                "--fresh_engine",
                "--set",
                "engine={inference: transformers}",
            ]
        )
        == 2
    )
    assert "--fresh_engine" in capsys.readouterr().err


def test_an_engine_that_computes_something_else_after_an_update_is_noticed(folder):
    class Stale(HFEngine):
        def update(self, model, step, **options):
            with torch.no_grad():
                model.get_output_embeddings().weight[0] += 1
            return super().update(model, step, **options)

    assert "6 answers" in verify_updates(str(folder), HFEngine)
    with pytest.raises(WeightMismatch, match="differ from the answers of a fresh engine"):
        verify_updates(str(folder), Stale)
