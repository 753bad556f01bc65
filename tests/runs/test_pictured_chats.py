"""Fine-tuning on chats with images: tokens, transformers' loss, pairs, two ranks, and resumption."""

import json
import shutil

import pytest
import torch
from datasets import load_from_disk
from kit.rank_processes import on_ranks
from kit.sft_runs import are_equal, lines, make_config, train, weights_of
from kit.vision_models import COLOURS, KINDS, picture, save_vlm
from PIL import Image

from vectorlm.data.images import image_tokens_of
from vectorlm.data.loader import Collator
from vectorlm.data.preprocess import preprocess
from vectorlm.data.settings import PreprocessSettings
from vectorlm.data.summary import Summary
from vectorlm.errors import ConfigError, DatasetError, EngineError
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.load import load_model, load_tokenizer
from vectorlm.train.objective import NextTokens, apart, known_rows


def question(*images):
    parts = [{"type": "image", "image": str(image)} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}


def answer(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    """Return a folder with a model, images, and chats with one image, two images, a column `images`, and none."""
    path = tmp_path_factory.mktemp("pictured")
    save_vlm(request.param, path / "model")
    for colour in COLOURS:
        picture(colour).save(path / f"{colour}.png")
    picture("g", (112, 56)).save(path / "wide.png")
    r, b, wide = (path / f"{name}.png" for name in ("r", "b", "wide"))
    bare = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}
    chats = [
        {"messages": [question(r), answer("r")]},
        {"messages": [question(wide, b), answer("gb")]},
        {"messages": [bare, answer("b")], "images": [str(b)]},
        {"messages": [{"role": "user", "content": "say r"}, answer("r")]},
    ]
    write(path / "chats.jsonl", chats)
    pair = {"prompt": [question(r)], "chosen": [answer("r")], "rejected": [answer("gg")]}
    write(path / "pairs.jsonl", [pair, {**pair, "prompt": [{"role": "user", "content": "say r"}]}] * 4)
    write(path / "many.jsonl", chats * 4)
    return path


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder / "model")


def made_of(folder, tokenizer, name="chats", max_seq_len=64, **settings):
    save_path = folder / f"rows-{name}"
    given = {"assistant_only_loss": True} | settings
    preprocess(
        PreprocessSettings(load_path=str(folder / f"{name}.jsonl"), save_path=str(save_path), **given),
        tokenizer,
        max_seq_len,
    )
    return load_from_disk(str(save_path))


def test_rows_hold_the_tokens_of_their_pictures_and_only_answers_count(folder, tokenizer):
    rows = made_of(folder, tokenizer)
    image = image_tokens_of(tokenizer).image_token
    assert [row["images"] for row in rows] == [
        [f"{folder}/r.png"],
        [f"{folder}/wide.png", f"{folder}/b.png"],
        [f"{folder}/b.png"],
        [],
    ]
    for row, num_images in zip(rows, (1, 2, 1, 0), strict=True):
        starts = row["image_starts"]
        assert len(starts) == num_images
        assert all(row["input_ids"][start] == image != row["input_ids"][start - 1] for start in starts)
        counted = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label >= 0]
        assert image not in counted
        assert tokenizer.decode(counted).removesuffix("<|im_end|>") in ("r", "gb", "b")
    assert rows[1]["input_ids"].count(image) > rows[0]["input_ids"].count(image)


def batch_of(rows):
    return Collator(0, -100, 64).collate([{**row, "id": index} for index, row in enumerate(rows)], len(rows))


@pytest.mark.parametrize("packs", [True, False])
def test_loss_and_gradient_are_those_of_transformers_row_by_row(folder, tokenizer, packs):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    rows = made_of(folder, tokenizer)
    model = load_model(folder / "model").eval()
    language_model = LanguageModel(model, packs=packs, image_tokens=image_tokens_of(tokenizer))
    assert language_model.packs == packs
    objective = NextTokens(language_model, -100)
    (batch,) = objective.prepare([batch_of(rows)])
    loss, _ = objective.sum_loss(batch)
    loss.backward()
    reference = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float64)
    processor = AutoProcessor.from_pretrained(folder / "model")
    expected = 0
    chats = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").read_text().splitlines()]
    for chat, row in zip(chats, rows, strict=True):
        text = processor.apply_chat_template(chat, tokenize=False)
        pictures = {"images": [list(map(Image.open, row["images"]))]} if row["images"] else {}
        inputs = processor(text=[text], return_tensors="pt", **pictures)
        assert inputs["input_ids"][0].tolist() == row["input_ids"]
        inputs = {
            name: value.double() if value.is_floating_point() else value for name, value in inputs.items()
        }
        logprobs = reference(**inputs).logits.log_softmax(-1)[0, :-1]
        labels = torch.tensor(row["labels"][1:])
        expected = expected - logprobs[labels >= 0].gather(1, labels[labels >= 0, None]).sum()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        wanted = gradients[name].grad
        assert (parameter.grad is None) == (wanted is None), name
        if wanted is not None:
            torch.testing.assert_close(parameter.grad.double(), wanted, rtol=1e-4, atol=1e-5, msg=name)


def test_both_texts_of_a_pair_have_the_picture_and_it_is_computed_once(folder, tokenizer):
    rows = made_of(folder, tokenizer, "pairs", examples="pairs", assistant_only_loss=False)
    texts = apart(batch_of([rows[0], rows[1]]), -100)
    assert [[str(one.picture) for one in placed] for placed in texts.images] == [[f"{folder}/r.png"]] * 2 + [
        []
    ] * 2
    image = image_tokens_of(tokenizer).image_token
    assert all(
        int(row[placed.start]) == image != int(row[placed.start - 1])
        for row, images in zip(texts.input_ids, texts.images, strict=True)
        for placed in images
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packing_type": "full"}, "has images, which a cut"),
        ({"truncate": True}, "has images, which a cut"),
    ],
)
def test_rows_with_images_are_not_cut(folder, tokenizer, settings, message):
    with pytest.raises(DatasetError, match=message):
        made_of(folder, tokenizer, **settings)
    rows = made_of(folder, tokenizer)
    with pytest.raises(DatasetError, match="row 0 of the dataset has images"):
        Collator(0, -100, 20).collate([{**row, "id": index} for index, row in enumerate(rows)], 4)


def test_wrong_pictures_are_named_with_their_row(folder, tokenizer, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "model")
    picture("r").save(tmp_path / "r.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    cases = {
        "missing.png.*cannot be read": question(tmp_path / "missing.png"),
        "broken.png.*cannot be decoded": question(tmp_path / "broken.png"),
        "on the network": question("https://example.org/r.png"),
        "no column 'images'|more image parts": {"role": "user", "content": [{"type": "image"}]},
    }
    for message, asked in cases.items():
        write(
            tmp_path / "chats.jsonl",
            [{"messages": [question(tmp_path / "r.png"), answer("r")]}, {"messages": [asked, answer("r")]}],
        )
        with pytest.raises(DatasetError, match=rf"chats.jsonl:2.*({message})"):
            made_of(tmp_path, tokenizer)


@pytest.mark.parametrize("examples", ["texts", "labels"])
def test_a_completion_may_repeat_a_prompt_with_the_pictures_of_the_column(
    folder, tokenizer, tmp_path, examples
):
    shutil.copytree(folder / "model", tmp_path / "model")
    for form in ([{"type": "image"}, {"type": "text", "text": "?"}], "<image>?", "?"):
        asked = {"role": "user", "content": form}
        row = {"prompt": [asked], "images": [str(folder / "r.png")], "label": True}
        other = {**row, "images": [str(folder / "b.png")]}
        alone, repeated = [answer("r")], [asked, answer("r")]
        rows = []
        for completion in (alone, repeated):
            write(
                tmp_path / "chats.jsonl", [{**row, "completion": completion}, {**other, "completion": alone}]
            )
            made = made_of(tmp_path, tokenizer, examples=examples, assistant_only_loss=False)
            rows.append([one["input_ids"] for one in made])
        assert rows[0] == rows[1]


def test_rows_with_an_image_token_and_no_image_are_skipped_and_refused_in_other_datasets(
    folder, tokenizer, tmp_path
):
    token = image_tokens_of(tokenizer).image_token
    written = f"say {tokenizer.convert_ids_to_tokens(token)}"
    shutil.copytree(folder / "model", tmp_path / "model")
    chats = [{"messages": [{"role": "user", "content": text}, answer("r")]} for text in ("say r", written)]
    pairs = [
        {"prompt": row["messages"][:1], "chosen": [answer("r")], "rejected": [answer("g")]} for row in chats
    ]
    texts = [{"text": text} for text in ("say r", written)]
    forms = {
        "chats": (chats, {}),
        "pairs": (pairs, {"examples": "pairs", "assistant_only_loss": False}),
        "texts": (texts, {"assistant_only_loss": False}),
    }
    for name, (rows, settings) in forms.items():
        write(tmp_path / f"{name}.jsonl", rows)
        made = made_of(tmp_path, tokenizer, name, **settings)
        assert len(made) == 1, name
        ((num, first),) = Summary.read(made).skipped.values()
        assert (num, first.endswith(f"{name}.jsonl:2")) == (1, True), name
    batch = batch_of([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 2)
    batch.input_ids[1, 1] = token
    with pytest.raises(DatasetError, match=f"row 1 .*image token {token}"):
        known_rows(batch, load_model(folder / "model"), -100)


def test_rows_of_text_need_no_processor(folder, tmp_path):
    plain = load_tokenizer(folder / "model")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/preprocessor_config.json").write_text("{}")
    plain.name_or_path = str(tmp_path / "model")
    write(tmp_path / "texts.jsonl", [{"text": "say r"}])
    assert len(made_of(tmp_path, plain, "texts", assistant_only_loss=False)) == 1


def test_a_text_model_takes_no_pictures(folder, tmp_path, tokenizer):
    plain = load_tokenizer(folder / "model")
    (tmp_path / "model").mkdir()
    plain.name_or_path = str(tmp_path / "model")
    with pytest.raises((ConfigError, DatasetError, EngineError), match="takes only text"):
        made_of(folder, plain)


CONFIG = """
model: {inputs}/model
train_parameters:
  output_dir: {output}
  max_seq_len: 64
  epochs: 2
  seed: 3
  optimizer: {{lr: 0.01}}
  checkpointing_enabled: True
  save_frequency: 2
  logging_steps: 1
dataset: {{train_bs: 2, eval_bs: 2, train_ds: {inputs}/rows-many, eval_ds: {inputs}/rows-many}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "freeze"), [*((kind, []) for kind in KINDS), (KINDS[0], ["vision"])], indirect=["folder"]
)
def test_two_ranks_train_as_one_whichever_has_the_pictures_and_resume_bit_for_bit(
    folder, tokenizer, tmp_path, freeze
):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    made_of(folder, tokenizer, "many")
    alone = make_config(
        folder, tmp_path / "alone", CONFIG.replace("train_bs: 2", "train_bs: 4"), freeze=freeze
    )
    on_ranks(1, train, alone)
    both = make_config(folder, tmp_path / "both", CONFIG, freeze=freeze)
    on_ranks(2, train, both)
    losses = [
        [line["train/loss"] for line in lines(tmp_path / name / "metrics.jsonl")[1:4]]
        for name in ("alone", "both")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    before, after = weights_of(folder / "model"), weights_of(tmp_path / "both")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("vis" in name for name in moved) == (not freeze)
    assert any("vis" not in name for name in moved)
    shutil.rmtree(sorted((tmp_path / "both/checkpoints").iterdir())[-1])
    shutil.rmtree(tmp_path / "both/final-model")
    on_ranks(2, train, both)
    assert are_equal(weights_of(tmp_path / "both"), after)
    AutoModelForImageTextToText.from_pretrained(tmp_path / "both/final-model")
    AutoProcessor.from_pretrained(tmp_path / "both/final-model")
