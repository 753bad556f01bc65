"""``vectorlm sample --image``."""

import pytest
from kit.vision_models import picture, save_vlm

from vectorlm.cli import main


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
