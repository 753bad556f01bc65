"""Sources of rows: files of every form, folders, globs, splits and the hub."""

import gzip
import hashlib
import json
import re
from pathlib import Path

import pyarrow
import pytest
from datasets import Dataset, DatasetDict
from kit.letters import letter_tokenizer, make
from pyarrow import parquet

from vectorlm.data.prompts import read_prompts
from vectorlm.data.settings import PreprocessSettings
from vectorlm.data.source import open_source, write_rows
from vectorlm.errors import ConfigError, DatasetError


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def texts_of(load_path, **options):
    """Return the texts that are read, as letters."""
    dataset, _ = make(load_path=load_path, add_bos_eos_tokens=False, **options)
    return ["".join(map(chr, row)) for row in dataset["input_ids"]]


ROWS = [{"text": "ab"}, {"text": "cd"}]


def write_every_form():
    Dataset.from_list(ROWS).save_to_disk("saved")
    Dataset.from_list(ROWS).to_parquet("rows.parquet")
    Path("rows.jsonl").write_text(jsonl(ROWS))
    Path("lines.json").write_text(jsonl(ROWS))
    Path("array.json").write_text(json.dumps(ROWS, indent=1))
    Path("rows.csv").write_text("text\nab\ncd\n")
    Path("rows.txt").write_text("ab\ncd\n")
    with gzip.open("rows.jsonl.gz", "wb") as file:
        file.write(jsonl(ROWS).encode())


def test_what_is_there_decides_how_it_is_read_whatever_from_disk_says():
    write_every_form()
    files = ("parquet", "jsonl", "csv", "txt", "jsonl.gz")
    for name in ("saved", "lines.json", "array.json", *(f"rows.{ending}" for ending in files)):
        for from_disk in (True, False):
            assert texts_of(name, from_disk=from_disk) == ["ab", "cd"], name


def test_a_folder_and_a_glob_of_files_are_read_in_the_order_of_their_names():
    Path("more").mkdir()
    Path("more/b.jsonl").write_text(jsonl(ROWS))
    Path("more/a.jsonl").write_text(jsonl([{"text": "zz"}]))
    Path("more/README.md").write_text("not data")
    assert texts_of("more") == texts_of("more/*.jsonl") == ["zz", "ab", "cd"]


def test_names_of_files_in_a_folder_say_which_split_they_are():
    Path("parts").mkdir()
    Path("parts/train.jsonl").write_text(jsonl(ROWS))
    Path("parts/test.jsonl").write_text(jsonl([{"text": "zz"}]))
    assert texts_of("parts", split="test") == ["zz"]
    assert texts_of("parts", split="test+train") == ["zz", "ab", "cd"]
    with pytest.raises(DatasetError, match=r"`split` .* train, test"):
        texts_of("parts")


@pytest.mark.parametrize("form", ["saved", "splits", "rows.jsonl", "rows.txt", "rows.parquet"])
def test_a_split_may_be_an_expression_for_every_source(form):
    rows = [{"text": 2 * chr(97 + index)} for index in range(20)]
    Dataset.from_list(rows).save_to_disk("saved")
    DatasetDict({"train": Dataset.from_list(rows), "test": Dataset.from_list(rows[:2])}).save_to_disk(
        "splits"
    )
    Dataset.from_list(rows).to_parquet("rows.parquet")
    Path("rows.jsonl").write_text(jsonl(rows))
    Path("rows.txt").write_text("".join(row["text"] + "\n" for row in rows))
    assert texts_of(form, split="train[:3]") == ["aa", "bb", "cc"]
    assert texts_of(form, split="train[:10%]+train[-1:]") == ["aa", "bb", "tt"]
    for wrong in ("nowhere", "train[", "train[:a]"):
        with pytest.raises(DatasetError, match=r"split=.*load_path.*train"):
            texts_of(form, split=wrong)


def test_rows_of_json_lines_need_not_have_the_same_keys():
    Path("rows.jsonl").write_text(jsonl([{"text": "ab", "a": 1}, {"b": {"c": "x"}, "text": "cd"}]))
    assert texts_of("rows.jsonl") == ["ab", "cd"]


@pytest.mark.parametrize("line", ['{"text": ', '["ab"]', '{"texts": "ab"}', '{"text": 5}'])
@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_bad_line_is_named_by_its_file_and_number(line, num_proc):
    Path("rows.jsonl").write_text('{"text": "ab"}\n\n' + line + "\n" + '{"text": "cd"}\n' * 4)
    with pytest.raises(DatasetError, match=r"rows\.jsonl:3"):
        texts_of("rows.jsonl", num_proc=num_proc)
    assert not Path("rows").exists()
    assert sorted(path.name for path in Path().iterdir()) == ["rows.jsonl"]


def test_a_line_that_is_not_utf8_is_named():
    Path("rows.txt").write_bytes(b"ab\nc\xff\n")
    with pytest.raises(DatasetError, match=r"rows\.txt:2"):
        texts_of("rows.txt")


def test_lines_are_cut_at_line_ends_alone_and_a_byte_order_mark_is_no_text():
    Path("rows.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "ab"}\r\n{"text": "c\xe2\x80\xa8d"}')
    dataset = open_source(PreprocessSettings(load_path="rows.jsonl", save_path="x"), Path())
    rows = dataset.rows(dataset.dataset[:], range(2))
    assert [(name, row["text"]) for name, row in rows] == [
        ("rows.jsonl:1", "ab"),
        ("rows.jsonl:2", "c\u2028d"),
    ]


def test_files_of_several_forms_are_refused_by_name():
    Path("mixed").mkdir()
    Path("mixed/a.jsonl").write_text(jsonl(ROWS))
    Path("mixed/b.txt").write_text("ab\n")
    with pytest.raises(DatasetError, match=r"load_path='mixed'.*jsonl, text"):
        texts_of("mixed")
    Path("empty").mkdir()
    for nothing in ("empty", "empty/*.txt"):
        with pytest.raises(DatasetError, match="load_path"):
            texts_of(nothing)


def test_a_file_that_cannot_be_read_is_refused_by_name():
    Path("rows.json").write_text('[{"text": ')
    with pytest.raises(DatasetError, match=r"rows\.json"):
        texts_of("rows.json")
    Path("broken").mkdir()
    Path("broken/state.json").write_text("{}")
    with pytest.raises(DatasetError, match="load_path='broken'"):
        texts_of("broken")


def test_a_path_that_is_not_there_is_said_to_be_missing_without_asking_the_hub(monkeypatch):
    monkeypatch.setattr("vectorlm.data.source.load_hub", lambda *_: pytest.fail("asked the hub"))
    Path("data").mkdir()
    for path in ("data/nowhere", "./nowhere", "/nowhere", "some/deep/folder", "nowhere.jsonl"):
        with pytest.raises(DatasetError, match=f"load_path='{path}'"):
            texts_of(path)


def test_a_name_of_the_hub_is_read_from_the_cache_of_datasets_without_a_connection(monkeypatch):
    """The cache has the layout of the datasets library: owner___name/configuration/version/hash."""
    folder = Path("cache/owner___name/default/0.0.0/0123456789abcdef").resolve()
    folder.mkdir(parents=True)
    rows = Dataset.from_list([*ROWS, {"text": "ef"}])
    write_rows(iter(rows), rows.features, folder / "name-train.arrow")
    info = {"builder_name": "parquet", "dataset_name": "name", "config_name": "default", "version": "0.0.0"}
    split = {"name": "train", "num_bytes": 0, "num_examples": 3, "dataset_name": "name"}
    info |= {"features": {"text": {"dtype": "string", "_type": "Value"}}, "splits": {"train": split}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", Path("cache").resolve())
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert texts_of("owner/name", split="train[:2]", from_disk=False) == ["ab", "cd"]


HALF = "a\ud83d"
SAID, HALVED = ([{"role": "user", "content": text}] for text in ("ab", HALF))
ANSWER, HALF_ANSWER = ([{"role": "assistant", "content": text}] for text in ("ab", HALF))


@pytest.mark.parametrize(
    "row",
    [
        {"text": HALF},
        {"prompt": "ab", "completion": HALF},
        {"prompt": HALF, "completion": "ab"},
        {"messages": HALVED},
        {"messages": json.dumps(HALVED)},
        {"prompt": SAID, "completion": HALF_ANSWER},
        {"prompt": HALVED, "completion": ANSWER},
    ],
)
def test_half_a_character_is_named_with_its_line(row):
    whole = json.loads(re.sub(r"\\+ud83d", "", json.dumps(row)))
    Path("rows.jsonl").write_text(jsonl([whole, whole, row]))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(DatasetError, match=r"rows\.jsonl:3: .*'\\ud83d'"):
        make(load_path="rows.jsonl", tokenizer=letter_tokenizer(template=template))


@pytest.mark.parametrize("prompt", [HALF, HALVED])
def test_half_a_character_in_a_prompt_is_named_with_its_line(prompt):
    Path("rows.jsonl").write_text(jsonl([{"prompt": "ab"}, {"prompt": prompt}]))
    with pytest.raises(DatasetError, match=r"rows\.jsonl:2 .*'\\ud83d'"):
        read_prompts("rows.jsonl")


@pytest.mark.parametrize("name", ["part[1].jsonl", "part[1].csv", "part[1].json", "part[1].parquet"])
@pytest.mark.parametrize("folder", [".", "exp[12]", "a*b", "q?", "c::d"])
def test_a_path_with_letters_of_a_pattern_is_read_and_not_its_neighbours(folder, name):
    for place, text in ((Path(folder), "own"), (Path("exp1"), "other"), (Path("a-x-b"), "other")):
        place.mkdir(exist_ok=True)
        for item in (name, name.replace("[1]", "1")):
            rows = [{"text": text if item == name else "neighbour"}]
            Path(place, item).write_text(
                {".jsonl": jsonl(rows), ".json": json.dumps(rows)}.get(
                    Path(item).suffix, "text\n" + rows[0]["text"]
                )
            )
            if item.endswith(".parquet"):
                parquet.write_table(pyarrow.Table.from_pylist(rows), place / item)
    assert texts_of(f"{folder}/{name}") == ["own"]
    if folder != ".":
        Path(folder, name.replace("[1]", "1")).unlink()
        assert texts_of(folder) == ["own"]


@pytest.mark.parametrize(
    "names",
    [("math.jsonl", "unit_test.jsonl"), ("chat.jsonl", "train-x.jsonl"), ("b/b.jsonl", "train/a.jsonl")],
)
def test_a_folder_of_which_only_some_files_name_a_split_is_refused(names):
    for name in names:
        Path("d", name).parent.mkdir(parents=True, exist_ok=True)
        Path("d", name).write_text(jsonl(ROWS))
    with pytest.raises(DatasetError, match=re.escape(names[0])):
        texts_of("d")


def test_files_that_are_not_read_are_named_and_capitals_are_read():
    Path("d").mkdir()
    Path("d/A.JSONL").write_text(jsonl(ROWS))
    Path("d/b.tsv").write_text("text\nzz")
    dataset, summary = make(load_path="d", add_bos_eos_tokens=False)
    assert len(dataset) == len(ROWS)
    assert summary.unread == ["d/b.tsv"]


def test_a_dataset_that_was_saved_among_the_texts_is_no_text():
    Path("d").mkdir()
    Path("d/part1.jsonl").write_text(jsonl(ROWS))
    Dataset.from_list([{"text": "saved"}]).save_to_disk("d/train")
    assert texts_of("d") == ["ab", "cd"]


@pytest.mark.parametrize("cell", ["42", "02134", "1.50", "True", "None", "NA", "2020-01-01", "1e5"])
def test_cells_of_tables_are_texts_as_they_stand_there(cell):
    Path("rows.csv").write_text(f"text,weight\n{cell},1\n")
    Path("rows.json").write_text(json.dumps([{"text": cell}]))
    assert texts_of("rows.csv") == texts_of("rows.json") == [cell]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.csv", "text\na,b\n"),
        ("rows.json", '{\n"text": ["a", "b"]}'),
        ("rows.json", "[" * 100_000),
        ("rows.csv", b"text\n\xff\n"),
    ],
)
def test_a_table_that_is_none_is_refused_with_its_file(name, text):
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DatasetError, match=re.escape(name)):
        texts_of(name)


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "txt"])
@pytest.mark.parametrize(
    "damage",
    [lambda whole: whole[: len(whole) // 2], lambda whole: b"text", lambda whole: whole[:20] + b"\xff" * 20],
    ids=["cut", "not compressed", "changed"],
)
def test_a_damaged_compressed_file_is_refused_by_name(ending, damage):
    texts = [hashlib.sha256(bytes([number])).hexdigest() for number in range(50)]
    text = {
        "jsonl": jsonl({"text": text} for text in texts),
        "json": json.dumps([{"text": text} for text in texts]),
    }
    path = Path(f"rows.{ending}.gz")
    path.write_bytes(damage(gzip.compress(text.get(ending, "\n".join(["text", *texts])).encode())))
    with pytest.raises(DatasetError, match=rf"rows\.{ending}\.gz"):
        texts_of(str(path))


def test_a_configuration_of_the_hub_is_refused_for_files():
    write_every_form()
    with pytest.raises(ConfigError, match="hub_config"):
        texts_of("rows.jsonl", hub_config="main")
