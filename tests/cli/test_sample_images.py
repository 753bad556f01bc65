"""``vectorlm sample --image``."""

import pytest
import torch
from kit.vision_models import picture, save_vlm

from vectorlm.cli import main
from vectorlm.train.checkpoint.export import export_model
from vectorlm.train.load import load_model, load_tokenizer
from vectorlm.train.lora import add_lora


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sample")
    save_vlm("qwen2.5-vl", path / "model")
    for colour in "rb":
        picture(colour).save(path / f"{colour}.png")
    (path / "broken.png").write_bytes(b"no picture")
    return path


def sample(folder, *words):
    asked = [
        "--model",
        str(folder / "model"),
        "--prompt",
        "which?",
        "--temperature",
        "0",
        "--max_tokens",
        "6",
    ]
    return main(["sample", *asked, *words])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--image", "{folder}/r.png"], "--chat"),
        (["--image", "{folder}/r.png", "--chat", "--engine", "hf"], "vllm"),
        (["--image", "{folder}/missing.png", "--chat"], "missing.png"),
        (["--image", "{folder}/r.png", "--image", "{folder}/broken.png", "--chat"], "broken.png"),
    ],
)
def test_what_cannot_be_shown_is_refused_before_the_engine_starts(folder, capsys, words, problem):
    assert sample(folder, *(word.format(folder=folder) for word in words)) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.slow
def test_answers_are_about_the_images(folder, capsys):
    answers = []
    for names in ("r", "b", "rb", "r"):
        images = [word for name in names for word in ("--image", f"{folder}/{name}.png")]
        assert sample(folder, "--chat", *images) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[3]
    assert answers[0].startswith("> which?\n")


@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def test_adapters_of_a_vision_language_model_are_sampled_from_on_their_base(folder, tmp_path, capsys, engine):
    model = add_lora(load_model(folder / "model"), {"r": 2, "target_modules": ["q_proj", "up_proj"]})
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    export_model(model, load_tokenizer(folder / "model"), tmp_path / "adapters")
    merged = str(tmp_path / "merged")
    assert main(["export", str(tmp_path / "adapters"), "--merge", "--output", merged]) == 0
    printed = []
    for path in (tmp_path / "adapters", merged, folder / "model"):
        capsys.readouterr()
        assert sample(folder, "--engine", engine, "--model", str(path)) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]
    card = (tmp_path / "merged/README.md").read_text()
    assert "AutoModelForImageTextToText" in card
