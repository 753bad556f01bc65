"""Images in every form that datasets and chats use, and their tokens."""

import base64
import hashlib
import io
import itertools
import json
import pickle
import re

import PIL.Image
import pytest
from datasets import Dataset, Image, List
from kit.letters import letter_tokenizer
from kit.vision_models import KINDS, picture, save_vlm
from transformers import LlamaConfig

from vectorlm.data.encoding import encode
from vectorlm.data.images import (
    ImageError,
    Picture,
    PicturedIds,
    image_tokens_of,
    images_of,
    picture_of,
    takes_images,
    with_content,
    with_images,
    with_paths,
)
from vectorlm.data.prompts import check_lengths, fit_prompts, longest_prompt, read_prompts
from vectorlm.errors import ConfigError, DatasetError, EngineError
from vectorlm.train.load import load_tokenizer
from vectorlm.types import PromptRecord


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    return load_tokenizer(save_vlm(request.param, tmp_path_factory.mktemp("vlm") / "model"))


def png(colour="r"):
    buffer = io.BytesIO()
    picture(colour).save(buffer, format="PNG")
    return buffer.getvalue()


def image(value):
    return {"type": "image", "image": value}


def text(content):
    return {"type": "text", "text": content}


def user(*parts):
    return {"role": "user", "content": list(parts)}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a red one.png"
    path.write_bytes(png())
    return path


def data_url(data):
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def test_a_file_is_named_by_its_path_in_every_form(file):
    url = file.as_uri()
    assert "%20" in url
    for value in (str(file), file, url, {"path": str(file), "bytes": None}, {"url": url}):
        found = picture_of(value)
        assert found == str(file), value
        assert found.open().getpixel((3, 3)) == (220, 30, 30)
        assert picture_of(found.as_text()) == found


def test_content_without_a_file_is_named_by_its_hash(file):
    column = Dataset.from_dict({"image": [{"bytes": png(), "path": None}]}).cast_column("image", Image())
    pixels = column[0]["image"]
    forms = (png(), bytearray(png()), {"bytes": png(), "path": None}, data_url(png()), picture("r"), pixels)
    for value in forms:
        found = picture_of(value)
        assert re.fullmatch("sha256:[0-9a-f]{64}", found), value
        assert found.open().getpixel((3, 3)) == (220, 30, 30)
        again = picture_of(found.as_text())
        assert (again, again.data) == (found, found.data)
    assert len({picture_of(png("r")), picture_of(png("r")), picture_of(png("b"))}) == 2
    assert picture_of("data:image/png,%89PNG").data == b"\x89PNG"


def test_a_picture_takes_its_content_to_another_process(file):
    found = pickle.loads(pickle.dumps(picture_of(file).with_data()))
    file.unlink()
    assert (found, found.data) == (str(file), png())
    with pytest.raises(ValueError, match="a red one"):
        _ = picture_of(file).data


def test_pictures_are_turned_as_their_file_says(tmp_path):
    wide, exif = picture("g", (40, 20)), picture("g").getexif()
    exif[0x0112] = 6
    wide.save(tmp_path / "wide.jpg", exif=exif)
    opened = PIL.Image.open(tmp_path / "wide.jpg")
    for value in (tmp_path / "wide.jpg", opened):
        assert picture_of(value).open().size == (20, 40)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "CMYK", "F", "I;16"])
def test_an_image_of_any_mode_is_a_picture(mode):
    assert picture_of(PIL.Image.new(mode, (4, 4))).open().mode == "RGB"


@pytest.mark.parametrize("value", [None, 3, {"bytes": None, "path": None}, "https://example.org/a.png"])
def test_other_values_are_no_pictures(value):
    with pytest.raises(ValueError, match=r"is not an image|on the network"):
        picture_of(value)


@pytest.mark.parametrize("data", [b"", b"text", png()[:60]])
def test_what_cannot_be_decoded_is_named(tmp_path, data):
    (tmp_path / "broken.png").write_bytes(data)
    with pytest.raises(ValueError, match=r"broken\.png.*decoded"):
        picture_of(tmp_path / "broken.png").open()


@pytest.mark.parametrize("kind", ["PNG", "GIF", "TIFF"])
def test_a_damaged_file_is_named_whatever_is_damaged(kind):
    buffer, found = io.BytesIO(), 0
    picture("r", (8, 8)).save(buffer, format=kind)
    data = buffer.getvalue()
    # PIL raises SyntaxError, ValueError and TypeError too.
    for place, value in itertools.product(range(min(len(data), 100)), (0, 5)):
        try:
            picture_of(data[:place] + bytes([value]) + data[place + 1 :]).open()
        except ImageError:
            found += 1
    assert found > 10


def test_a_damaged_pil_image_is_named(tmp_path):
    (tmp_path / "broken.png").write_bytes(png()[:60])
    with pytest.raises(ImageError, match="decoded"):
        picture_of(PIL.Image.open(tmp_path / "broken.png"))


def test_parts_of_a_chat_are_read_in_order(file):
    parts = (
        image(str(file)),
        {"type": "image_url", "image_url": {"url": data_url(png("b"))}},
        {"type": "image_url", "image_url": file.as_uri()},
        {"type": "image", "base64": base64.b64encode(png("g")).decode()},
        text("?"),
    )
    chat = [{"role": "system", "content": "a"}, user(*parts)]
    found = images_of(chat)
    assert found == [str(file), picture_of(png("b")), str(file), picture_of(png("g"))]
    assert images_of("text") == images_of([1, 2]) == []
    with pytest.raises(ValueError, match="images"):
        images_of([user({"type": "image"})])


def test_a_column_fills_empty_parts_in_order(file):
    chat = [user({"type": "image"}, text("or")), user(image(png("b")), {"type": "image"})]
    filled = with_images(chat, [file, png("g")])
    assert images_of(filled) == [str(file), picture_of(png("b")), picture_of(png("g"))]
    assert chat[0]["content"][0] == {"type": "image"}, "the row itself stays"


@pytest.mark.parametrize("content", ["what?", [text("what?")]])
def test_without_parts_the_column_comes_before_the_text_of_the_first_user_message(content):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    system, asked = with_images(chat, [png("r"), png("b")])
    assert system == chat[0]
    assert asked["content"] == [image(picture_of(png("r"))), image(picture_of(png("b"))), text("what?")]
    assert with_images(chat, []) == chat


@pytest.mark.parametrize(("parts", "pictures"), [(2, 1), (1, 2)])
def test_as_many_pictures_as_parts(parts, pictures):
    with pytest.raises(ValueError, match="column 'images'"):
        with_images([user(*[{"type": "image"}] * parts)], [png()] * pictures)


def test_ids_of_a_chat_hold_one_placeholder_for_each_picture(tokenizer):
    tokens = image_tokens_of(tokenizer)
    chat = [user(image(png("r")), text("or"), image(picture("b", (112, 84))), text("?"))]
    ids = encode(chat, lambda: tokenizer)
    assert isinstance(ids, PicturedIds)
    assert ids.count(tokens.placeholder) == 2
    assert ids.pictures == tuple(images_of(chat))
    assert encode(ids, lambda: tokenizer) is ids
    without = encode([user(text("?"))], lambda: tokenizer)
    assert not isinstance(without, PicturedIds)


def test_the_text_of_ids_shows_what_their_pictures_contain(tmp_path):
    path = tmp_path / "a.png"
    texts = []
    for colour in "rbr":
        path.write_bytes(png(colour))
        texts.append(
            [repr(PicturedIds.of([3, 4], [one])) for one in (Picture(path), Picture.of_bytes(png(colour)))]
        )
    assert texts[0] == texts[2] != texts[1]
    assert all(of_path == of_bytes for of_path, of_bytes in texts)
    assert texts[0][0] == f"PicturedIds([3, 4], pictures=[sha256:{hashlib.sha256(png('r')).hexdigest()}])"


def test_expanded_ids_are_those_of_the_processor(tokenizer):
    from transformers import AutoProcessor

    tokens, processor = image_tokens_of(tokenizer), AutoProcessor.from_pretrained(tokenizer.name_or_path)
    drawn = [picture("r"), picture("b", (112, 84)), picture("g", (40, 130))]
    chat = [user(image(drawn[0]), text("a"), image(drawn[1])), user(image(drawn[2]), text("b"))]
    ids = encode(chat, lambda: tokenizer)
    written = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    expected = processor(text=[written], images=[drawn])["input_ids"][0]
    expanded, placed = tokens.expand(ids, ids.pictures)
    assert expanded == list(expected)
    assert len(expanded) > len(ids)
    firsts = [n for n, token in enumerate(expanded) if token == tokens.image_token]
    assert [one.start for one in placed] == [n for n in firsts if n - 1 not in firsts]
    for pictures in (ids.pictures[:1], ids.pictures * 2):
        with pytest.raises(ValueError, match="placeholders"):
            tokens.expand(ids, pictures)


def test_a_text_with_a_placeholder_is_refused_beside_an_image(tokenizer):
    with pytest.raises(EngineError, match="1 images, but the chat template writes 2 placeholders"):
        encode([user(text("<|image_pad|>"), image(picture("r")))], lambda: tokenizer)


def test_messages_keep_the_content_of_their_images(file):
    (message, other) = with_content([user(image(file), text("?")), {"role": "tool", "content": {"a": 1}}])
    file.unlink()
    assert message == user(image(picture_of(png())), text("?"))
    assert message["content"][0]["image"].data == png()
    assert other == {"role": "tool", "content": {"a": 1}}
    with pytest.raises(ImageError, match="a red one"):
        with_content([user(image(file))])


def test_pictures_without_a_path_are_written_once(tmp_path):
    value = {"prompt": [user(image(picture_of(png())), text("?"))], "other": (1, picture_of("a.png"))}
    folder = tmp_path / "pictures"
    found = [with_paths(value, folder) for _ in range(2)]
    (written,) = folder.iterdir()
    assert written.read_bytes() == png()
    assert found[0] == found[1] == {"prompt": [user(image(str(written)), text("?"))], "other": [1, "a.png"]}
    assert json.loads(json.dumps(found[0])) == found[0]


def test_a_text_model_takes_no_images(tmp_path):
    tokenizer = letter_tokenizer(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer.save_pretrained(tmp_path)
    LlamaConfig().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert not takes_images(tokenizer)
    with pytest.raises(EngineError, match="takes only text"):
        encode([user(image(png()))], lambda: tokenizer)
    with pytest.raises(ConfigError, match="prompt 0 of my prompts"):
        check_lengths([PromptRecord([user(image(png()))])], tokenizer, 64, "my prompts")


def test_length_checks_count_image_tokens(tokenizer):
    small, large = [user(text("?"))], [user(image(picture("r", (224, 224))), text("?"))]
    ids = encode(large, lambda: tokenizer)
    length = len(image_tokens_of(tokenizer).expand(ids, ids.pictures)[0])
    records = [PromptRecord(small), PromptRecord(large)]
    assert longest_prompt(records, tokenizer, "p") == length > len(ids) + 3
    check_lengths(records, tokenizer, length, "p")
    with pytest.raises(DatasetError, match=f"prompt 1 of p has {length} tokens"):
        check_lengths(records, tokenizer, length - 1, "p")
    for overlong in ("drop", "truncate_left"):
        # A cut could split a picture.
        kept, note = fit_prompts(records, tokenizer, length - 1, "p", overlong)
        assert list(kept) == records[:1]
        assert "1 of 2 prompts are dropped" in note
        assert "lose" not in note
    records += [PromptRecord([user(text("?" * (length + more)))]) for more in (0, 1)]
    kept, note = fit_prompts(records, tokenizer, length - 1, "p", "truncate_left")
    assert [record.prompt for record in kept] == [records[place].prompt for place in (0, 2, 3)]
    assert "1 of 4 prompts are dropped" in note
    assert f"2 of 4 prompts lose all but their last {length - 1} tokens" in note


FORMS = {
    "part": lambda path: {"prompt": [user(image(path), text("?"))]},
    "url": lambda path: {
        "prompt": [user({"type": "image_url", "image_url": {"url": f"file://{path}"}}, text("?"))]
    },
    "images": lambda path: {"prompt": [user({"type": "image"}, text("?"))], "images": [path]},
    "trl": lambda path: {"prompt": [{"role": "user", "content": "?"}], "images": [path]},
    "image": lambda path: {"prompt": [{"role": "user", "content": "?"}], "image": path},
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_every_form_have_the_same_prompt(tmp_path, form):
    path = tmp_path / "red.png"
    picture("r").save(path)
    row = {**FORMS[form](str(path)), "answer": "r"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    Dataset.from_list([row]).save_to_disk(tmp_path / "saved")
    for source in ("rows.jsonl", "saved"):
        (record,) = read_prompts(str(tmp_path / source))
        assert record.prompt == [user(image(str(path)), text("?"))]
        assert images_of(record.prompt) == [str(path)]
        assert record.columns == {"answer": "r"}


def test_a_column_of_datasets_images(tmp_path):
    rows = Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": "?"}]], "images": [[{"bytes": png(), "path": None}]]}
    ).cast_column("images", List(Image()))
    rows.save_to_disk(tmp_path / "saved")
    rows.to_parquet(tmp_path / "rows.parquet")
    for source in ("saved", "rows.parquet"):
        (record,) = read_prompts(str(tmp_path / source))
        (found,) = images_of(record.prompt)
        assert found.open().getpixel((3, 3)) == (220, 30, 30)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user({"type": "image"})]},
        {"prompt": [user(text("?"))], "images": [3]},
        {"prompt": [user({"type": "audio", "audio": "a.wav"})]},
    ],
)
def test_a_wrong_row_is_named(tmp_path, row):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DatasetError, match=r"rows\.jsonl:2"):
        read_prompts(str(tmp_path / "rows.jsonl"))


def test_without_parts_a_mark_in_the_users_text_is_the_next_picture_as_in_verl(tmp_path):
    picture("r").save(tmp_path / "red.png")
    picture("b").save(tmp_path / "blue.png")
    paths = [str(tmp_path / name) for name in ("red.png", "blue.png")]
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "<image>is it <image>?"}]
    rows = {"prompt": asked, "images": [{"image": path} for path in paths]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows) + "\n")
    (record,) = read_prompts(str(tmp_path / "rows.jsonl"))
    assert record.prompt == [asked[0], user(image(paths[0]), text("is it "), image(paths[1]), text("?"))]
    assert with_images(asked, []) == asked, "an ordinary text without pictures"
    with pytest.raises(ValueError, match="more image parts than pictures"):
        with_images(asked, paths[:1])


@pytest.mark.parametrize("file", ["rows.jsonl", "saved"])
def test_a_wrong_picture_is_not_called_a_wrong_prompt(tmp_path, file):
    row = {"prompt": [user({"type": "image"}, text("?"))], "img": "red.png"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    Dataset.from_list([row]).save_to_disk(tmp_path / "saved")
    with pytest.raises(DatasetError, match="column 'images' or 'image' is missing") as caught:
        read_prompts(str(tmp_path / file))
    assert "JSON object" not in str(caught.value)
    assert "but needs" not in str(caught.value)
