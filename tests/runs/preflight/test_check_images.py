"""Unreadable images, and settings that do not work with images: errors before any model is loaded."""

import json

import pytest
from kit.rl_runs import config_of, save_files
from kit.vision_models import picture, save_vlm

from vectorlm.data import prompts
from vectorlm.data.images import image_tokens_of
from vectorlm.errors import ConfigError, DatasetError
from vectorlm.runs.preflight.checked import preflight
from vectorlm.train.load import load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("images")
    save_vlm("qwen2.5-vl", path / "vlm")
    return save_files(path)


@pytest.fixture
def files(folder, tmp_path):
    picture("r").save(tmp_path / "small.png")
    picture("r", (224, 224)).save(tmp_path / "large.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    return tmp_path


def check(folder, files, images, *overrides, model="vlm"):
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    rows = [{"prompt": asked, "images": [str(files / name)], "wanted": "a"} for name in images]
    (files / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"model={folder / model}", f"rl.prompts={files / 'prompts.jsonl'}"]
    return preflight(config_of(folder, files / "out", overrides=[*given, *overrides]), 1)


def test_images_that_are_fine_pass(folder, files):
    checked = check(folder, files, ["small.png", "large.png"])
    assert len(checked.prompts[""]) == 2


@pytest.mark.parametrize("in_memory", [2**28, 0])
@pytest.mark.parametrize("name", ["missing.png", "broken.png"])
def test_an_image_that_cannot_be_read_is_named_with_its_row(folder, files, monkeypatch, name, in_memory):
    monkeypatch.setattr(prompts, "MAX_BYTES_IN_MEMORY", in_memory)
    with pytest.raises(DatasetError, match=rf"prompt 2 of rl\.prompts.*{name}"):
        check(folder, files, ["small.png", "large.png", name])
    with pytest.raises(DatasetError, match=rf"prompt 1 of rl\.prompts.*{name}"):
        check(folder, files, ["small.png", name], "rl.overlong_prompts=drop")


def test_image_tokens_count(folder, files):
    tokenizer = load_tokenizer(folder / "vlm")
    tokens = image_tokens_of(tokenizer)
    found = check(folder, files, ["large.png"]).prompts[""][0]
    (image,) = [part["image"] for part in found.prompt[0]["content"] if part["type"] == "image"]
    length = len(tokenizer.apply_chat_template(found.prompt, add_generation_prompt=True)["input_ids"])
    whole = length - 1 + len(tokens.expansion(image)) + 8  # The answer has max_tokens=8.
    limits = [f"train_parameters.max_seq_len={whole - 1}", f"engine.max_model_len={whole - 1}"]
    with pytest.raises(DatasetError, match="prompt 1 of"):
        check(folder, files, ["small.png", "large.png"], *limits)
    assert (
        len(check(folder, files, ["small.png", "large.png"], *limits, "rl.overlong_prompts=drop").prompts[""])
        == 1
    )


def test_a_text_model_takes_no_images(folder, files):
    with pytest.raises(ConfigError, match="takes only text") as caught:
        check(folder, files, ["small.png"], model="model")
    assert "chat_template" not in str(caught.value), "the template is not the cause"


@pytest.mark.parametrize(
    ("setting", "overrides"),
    [
        ("engine.inference", ["engine.inference=transformers"]),
        ("train_parameters.context_parallel", ["train_parameters.context_parallel=2"]),
        ("rl.algorithm.name", ["rl.algorithm.name=ppo"]),
        ("rl.reward_models", ["rl.reward_models={{{folder}/model: 1.0}}"]),
        (
            "rl.teacher.server",
            ["rl.algorithm.name=on_policy_distillation", "rl.teacher={{server: 'http://localhost:1'}}"],
        ),
    ],
)
def test_what_reads_text_alone_is_refused_with_images(folder, files, setting, overrides):
    overrides = [text.format(folder=folder) for text in overrides]
    with pytest.raises(ConfigError, match=f"{setting}.*images, and rl.prompts has some"):
        check(folder, files, ["small.png"], *overrides)


def test_a_column_of_images_beside_texts_is_an_ordinary_column_but_not_for_a_model_that_sees(folder, files):
    rows = [{"prompt": "abc", "image": "small.png", "wanted": "a"}] * 4
    (files / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def checked(model):
        given = [f"model={folder / model}", f"rl.prompts={files / 'prompts.jsonl'}"]
        return preflight(config_of(folder, files / "out", overrides=given), 1)

    assert checked("model").prompts[""][0].columns["image"] == "small.png"
    with pytest.raises(ConfigError, match=rf"rl\.prompts='{str(files)[:20]}.*next to text prompts"):
        checked("vlm")


@pytest.mark.parametrize("column", ["picture", "image", None])
def test_a_mark_without_any_image_is_an_error_for_a_model_that_sees(folder, files, column):
    row = {"prompt": [{"role": "user", "content": "<image>?"}], "wanted": "a"}
    row |= {} if column is None else {column: str(files / "small.png")}
    (files / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(4)))

    def checked(model):
        given = [f"model={folder / model}", f"rl.prompts={files / 'prompts.jsonl'}"]
        return preflight(config_of(folder, files / "out", overrides=given), 1)

    if column == "image":
        assert checked("vlm").prompts[""]
        return
    assert checked("model").prompts[""], "a text model may read the mark"
    with pytest.raises(ConfigError, match=r"rl\.prompts=.*'<image>' in its texts"):
        checked("vlm")


@pytest.mark.parametrize("column", ["picture", "image"])
def test_a_note_names_images_in_a_column_that_the_model_does_not_read(folder, files, column):
    rows = [{"prompt": [{"role": "user", "content": "?"}], column: str(files / "small.png"), "wanted": "a"}]
    (files / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    given = [f"model={folder / 'vlm'}", f"rl.prompts={files / 'prompts.jsonl'}"]
    notes = preflight(config_of(folder, files / "out", overrides=given), 1).config.notes
    assert any("'picture' holds images" in note for note in notes) == (column == "picture")
