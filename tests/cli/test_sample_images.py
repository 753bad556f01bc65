"""``vectorlm sample --image``, and ``vectorlm evaluate`` on questions with images."""

import json

import pytest
import torch
from datasets import Dataset, load_from_disk
from kit.vision_models import picture, save_vlm

from vectorlm.cli import main
from vectorlm.data.images import picture_of
from vectorlm.data.preprocess import preprocess
from vectorlm.data.settings import PreprocessSettings
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


@pytest.mark.slow
def test_pairs_of_embedded_images_can_be_preprocessed(folder, tmp_path, monkeypatch):
    data = (folder / "r.png").read_bytes()
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    rows = [{"prompt": chat, "images": [{"bytes": data, "path": None}], "id": place} for place in range(2)]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rewards.py").write_text("def size(completion):\n    return float(len(completion))\n")
    monkeypatch.chdir(tmp_path)
    # Each answer ends at some letter, because training needs whole answers.
    stop = json.dumps(list("abcdefghijklmnopqrstuvwxyz<"))
    arguments = ["--n", "8", "--seed", "1", "--max_tokens", "24", "--param", f"stop={stop}"]
    files = ["--pairs", "pairs.jsonl", "--output", "found.json"]
    given = ["--model", str(folder / "model"), "--prompts", "rows.parquet", "--reward", "rewards.py:size"]
    assert main(["evaluate", *given, *arguments, *files]) == 0
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    settings = PreprocessSettings(load_path="../pairs.jsonl", save_path="pairs", examples="pairs")
    preprocess(settings, load_tokenizer(folder / "model"), 512)
    made = load_from_disk("pairs")
    assert len(made) > 0
    assert {picture_of(image).data for row in made for image in row["images"]} == {data}
    (shown, _), *_ = [
        answer["prompt"][0]["content"]
        for answer in json.loads((tmp_path / "found.json").read_text())["answers"]
    ]
    assert picture_of(shown["image"]).data == data
