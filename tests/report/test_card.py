"""The README.md of an exported model."""

import json

import pytest
import yaml

import vectorlm
from vectorlm.report.card import card_of, noted_of
from vectorlm.train.lora import hub_name, lasting_name


def save_run(path, config):
    path.mkdir()
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [
        {"step": 0, "eval/loss": 4.0},
        {"step": 2, "train/loss": 3.0, "eval/loss": 2.5},
        {"step": 3, "train/loss": 2.0},
        {"step": 4, "train/loss": 1.0, "eval/loss": None},
    ]
    (path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "tr'
    )
    return path


def head_of(card):
    return yaml.safe_load(card.split("---\n")[1])


def test_a_card_says_what_the_model_is_and_how_to_use_it(tmp_path):
    config = {"model": "example/llama", "train_parameters": {"lora_peft_config": None}, "dataset": {}}
    run = save_run(tmp_path / "my-run", config)
    card = card_of(run, 3, is_adapter=False)
    without_run = card_of(tmp_path, None, is_adapter=False)
    assert not any(part in without_run for part in ("Results", "<details>", "step"))
    assert head_of(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["vectorlm"],
        "base_model": "example/llama",
        "step": 3,
    }
    assert "# my-run\n" in card
    assert "supervised fine-tuning, all weights, step 3." in card
    assert "| `train/loss` | 2 | 3 |\n| `eval/loss` | 2.5 | 2 |\n" in card
    assert f"vectorlm {vectorlm.__version__}, torch " in card
    (run / "run.json").write_text(
        '{"versions": {"world_size": 2, "vectorlm": "0.0.1", "torch": "2.11+cu130"}}'
    )
    assert "\n\nvectorlm 0.0.1, torch 2.11+cu130\n" in card_of(run, 3, is_adapter=False)
    fold = card[card.index("<details>") :]
    assert yaml.safe_load(fold.split("````yaml\n")[1].split("````")[0]) == config


@pytest.mark.parametrize("is_adapter", [False, True])
def test_the_card_of_a_vision_language_model_names_classes_that_read_it(tmp_path, is_adapter):
    run = save_run(tmp_path / "run", {"model": "example/seer"})
    card = card_of(run, 3, is_adapter=is_adapter, auto="AutoModelForImageTextToText")
    assert head_of(card)["pipeline_tag"] == "image-text-to-text"
    code = card.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    assert "AutoModelForImageTextToText" in code
    assert "processor = AutoProcessor" in code
    assert "CausalLM" not in code
    assert ('"example/seer"' in code) == is_adapter


@pytest.mark.parametrize("algorithm", ["grpo", "mine.py:grpo", {"name": "grpo", "kl_coef": 0.1}])
def test_a_card_names_the_algorithm(tmp_path, algorithm):
    run = save_run(tmp_path / "run", {"model": "llama", "rl": {"algorithm": algorithm}})
    assert "grpo)" in card_of(run, 3, is_adapter=False)


@pytest.mark.parametrize(
    ("card", "step"),
    [
        ("---\nstep: 12\n---\n# a\n", 12),
        ("# a\n", None),
        ("---\n[\n---\n", None),
        ("---\nstep: x\n---\n", None),
    ],
)
def test_a_card_tells_the_step(tmp_path, card, step):
    (tmp_path / "README.md").write_text(card)
    assert noted_of(tmp_path, "step", int) == step
    assert noted_of(tmp_path / "nowhere", "step", int) is None


@pytest.mark.parametrize(("quantization", "is_adapter"), [("nf4", True), ("nf4", False), (None, True)])
def test_a_card_of_adapters_alone_tells_the_quantization_of_their_base(tmp_path, quantization, is_adapter):
    config = {
        "model": "llama",
        "train_parameters": {"lora_peft_config": {"r": 2}, "quantization": quantization},
    }
    (tmp_path / "README.md").write_text(card_of(save_run(tmp_path / "run", config), 4, is_adapter=is_adapter))
    assert noted_of(tmp_path, "quantization", str) == (quantization if is_adapter else None)


def test_a_model_is_named_as_the_hub_knows_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cached = tmp_path / "models--example--llama" / "snapshots" / "0a1b"
    cached.mkdir(parents=True)
    (tmp_path / "data").mkdir()
    assert hub_name(str(cached)) == "example/llama"
    assert hub_name("example/llama") == "example/llama"
    assert [hub_name(name) for name in ("data", "./gone", "/gone/x", "a/b/c")] == [None] * 4
    assert lasting_name("data") == (str(tmp_path / "data"), None)
    assert lasting_name(str(cached)) == ("example/llama", cached.name)
