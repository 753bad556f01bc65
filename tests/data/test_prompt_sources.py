"""Reading prompts from every source."""

import asyncio
import json
import pickle
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from datasets import Dataset, DatasetDict
from kit.letters import letter_tokenizer, make, spell

from vectorlm.cli import evaluate
from vectorlm.data import prompts
from vectorlm.data.encoding import asked, encode, encode_all
from vectorlm.data.prompts import as_list, read_prompts
from vectorlm.data.settings import PromptSettings
from vectorlm.errors import DatasetError
from vectorlm.rl.evaluation import evaluator as evaluation
from vectorlm.rl.evaluation.evaluator import Evaluator
from vectorlm.rl.rollouts.sampler import GroupSampler, Task
from vectorlm.rl.settings import CollectSettings
from vectorlm.runs.preflight.resume import _digest, content_of
from vectorlm.types import Completion, PromptRecord

CHAT = [{"role": "user", "content": "2 + 2?"}]
ROWS = [{"prompt": CHAT, "answer": 4}, {"prompt": [{"role": "user", "content": "3 + 3?"}], "answer": 6}]
RECORDS = [PromptRecord(row["prompt"], {"answer": row["answer"]}) for row in ROWS]


def write(folder, name, rows):
    """Write rows in the format of the suffix of `name`; without a suffix, as the datasets library saves them."""
    path = folder / name
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        Dataset.from_list(rows).save_to_disk(path)
    return str(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "saved"])
def test_messages_with_columns_are_the_same_from_every_source(tmp_path, name):
    assert read_prompts(write(tmp_path, name, ROWS)) == RECORDS


@pytest.mark.parametrize("name", ["rows.parquet", "saved"])
def test_a_row_without_a_prompt_is_named_with_the_columns_that_it_has(tmp_path, name):
    path = write(tmp_path, name, [{"prompt": "a", "answer": 1}, {"prompt": None, "answer": 2}])
    with pytest.raises(DatasetError, match="row 1 of"):
        read_prompts(path)
    path = write(tmp_path, f"other_{name}", [{"question": "a", "answer": 1}])
    with pytest.raises(DatasetError, match="row 0 of"):
        read_prompts(path)


def test_what_cannot_be_read_is_a_dataset_error(tmp_path):
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    rows = Dataset.from_list(ROWS)
    DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "several")
    (tmp_path / "empty").mkdir()
    for name in ("torn.parquet", "several", "empty", "absent.parquet", "absent.jsonl"):
        with pytest.raises(DatasetError, match=f"rl.prompts='{tmp_path}/{name}'"):
            read_prompts(tmp_path / name, "rl.prompts")


def test_a_split_is_taken_of_a_saved_dataset(tmp_path):
    rows = Dataset.from_list(ROWS)
    DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "several")
    path = str(tmp_path / "several")
    assert read_prompts(PromptSettings(path=path, split="test")) == RECORDS[1:]
    assert read_prompts(PromptSettings(path=path, split="train[:1]")) == RECORDS[:1]
    with pytest.raises(DatasetError, match=r"path: \S+, split: NAME\}.* train, test"):
        read_prompts(path, "rl.prompts")
    with pytest.raises(DatasetError, match="split='dev'"):
        read_prompts(PromptSettings(path=path, split="dev"), "rl.prompts")
    lines = write(tmp_path, "rows.jsonl", ROWS)
    with pytest.raises(DatasetError, match=r"rl\.prompts\.split"):
        read_prompts(PromptSettings(path=lines, split="train"), "rl.prompts")


@pytest.mark.parametrize("limit", [2**28, 1])
def test_a_split_is_taken_of_a_parquet_file(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(prompts, "MAX_BYTES_IN_MEMORY", limit)
    path = write(tmp_path, "rows.parquet", ROWS)
    for split, expected in (("train[:1]", RECORDS[:1]), ("train[1:]", RECORDS[1:]), (None, RECORDS)):
        assert list(read_prompts(PromptSettings(path=path, split=split))) == expected
    with pytest.raises(DatasetError, match="split='dev'"):
        read_prompts(PromptSettings(path=path, split="dev"), "rl.prompts")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "folder"])
def test_a_configuration_of_the_hub_is_refused_for_rows_on_this_machine(tmp_path, name):
    source = PromptSettings(path=write(tmp_path, name, ROWS), hub_config="main")
    with pytest.raises(DatasetError, match=r"rl\.prompts\.hub_config"):
        read_prompts(source, "rl.prompts")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "saved"])
def test_a_source_that_is_too_large_to_hold_stays_on_the_disk(tmp_path, monkeypatch, name):
    monkeypatch.setattr(prompts, "MAX_BYTES_IN_MEMORY", 0)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path, name, ROWS * 20)
    if name == "rows.jsonl":
        Path(path).write_text(Path(path).read_text().replace("\n", "\n\n"))
    found = read_prompts(path)
    assert isinstance(found, prompts.LazyPrompts)
    assert list(found) == RECORDS * 20
    assert found[3:5] == [RECORDS[1], RECORDS[0]]
    sent = pickle.loads(pickle.dumps(found))
    assert (len(sent), sent[-1], sent[38]) == (40, RECORDS[1], RECORDS[0])
    with pytest.raises(IndexError):
        found[40]
    bad = write(tmp_path, f"bad-{name}", [{"prompt": "a"}, {"prompt": None}])
    with pytest.raises(DatasetError, match=r"bad-rows.jsonl:2 is|row 1 of"):
        read_prompts(bad)


def test_a_file_that_begins_with_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8-sig")
    assert [item.prompt for item in read_prompts(str(tmp_path / "p.jsonl"))] == ["a"]


def test_a_source_without_rows_is_refused(tmp_path):
    Dataset.from_list(ROWS).select([]).to_parquet(tmp_path / "none.parquet")
    with pytest.raises(DatasetError, match=r"none\.parquet"):
        read_prompts(tmp_path / "none.parquet")
    Dataset.from_list(ROWS).select([]).save_to_disk(tmp_path / "none")
    with pytest.raises(DatasetError, match="none"):
        read_prompts(tmp_path / "none")


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {item: {"type": "string"}}}}}
    for name, item in (("add", "x"), ("find", "y"))
]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% for p in t.function.parameters.properties %} {{ p }}{% endfor %}"
    ";{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("tools", ["", None, "null", []])
def test_a_row_may_have_no_tools_in_any_form(tools):
    """In a table of texts, a row without tools has an empty text."""
    assert asked(PromptRecord(CHAT, {"tools": tools})) == CHAT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "saved"])
@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["objects", "json"])
def test_tools_reach_the_template_in_every_prompt_as_in_fine_tuning(tmp_path, monkeypatch, name, tools):
    monkeypatch.chdir(tmp_path)
    tokenizer = letter_tokenizer(template=TEMPLATE)
    path = write(tmp_path, name, [{"prompt": CHAT, "tools": tools}])
    (record,) = read_prompts(path)
    dataset, _ = make(load_path=path, data_field="prompt", tokenizer=tokenizer)
    expected = "add x;find y;2 + 2?"
    assert spell(encode(asked(record), lambda: tokenizer)) == spell(dataset[0]["input_ids"]) == expected
    sampler = GroupSampler(
        settings=CollectSettings(prompts="p", prompts_per_step=1), seed=0, max_model_len=9, needs_greedy=True
    )
    given, answers = [], [[Completion((1,), (2,), (0.0,), (0,), "a", "stop")]]

    async def ask(prompt, params):
        assert [spell(ids) for ids in encode_all(as_list([prompt]), lambda: tokenizer)] == [expected]
        return answers[0]

    assert asyncio.run(sampler.sample(Task(0, record), ask)).greedy is not None
    monkeypatch.setattr(
        evaluation, "sample_with_progress", lambda _, asked, params, **how: given.append(asked) or answers
    )
    Evaluator(MagicMock(), [record], samples_path=None).evaluate(1)
    monkeypatch.setattr(evaluate, "open_engine", lambda *arguments: nullcontext(MagicMock()))
    monkeypatch.setattr(evaluate, "require_model", lambda args: ("model", None))
    Path("mine.py").write_text("def one(completion):\n    return 1.0\n")
    exam = evaluate.Exam(prompt_records=[record], rewards={"mine.py:one": 1.0})
    monkeypatch.setattr(evaluate, "read_exam", lambda args: exam)
    evaluate._answer_questions(MagicMock())
    assert given == [[asked(record)]] * 2


@pytest.mark.parametrize("has_splits", [False, True])
def test_a_run_notices_that_a_saved_dataset_is_another(tmp_path, monkeypatch, has_splits):
    monkeypatch.chdir(tmp_path)

    def save(name, rows):
        saved = Dataset.from_list(rows)
        (DatasetDict(train=saved, test=saved) if has_splits else saved).save_to_disk(name)

    save("saved", ROWS)
    before, content = _digest("saved"), content_of("saved")
    assert (_digest("saved"), content_of("saved")) == (before, content)
    save("other", ROWS[:1])
    Path("saved").rename("old")
    Path("other").rename("saved")
    assert _digest("saved") != before
    assert content_of("saved") != content


@pytest.mark.parametrize(
    ("given", "environment", "played_by"),
    [
        ("verifiers:words", None, "openai:vectorlm.rl.environments.verifiers:play"),
        (PromptSettings(verifiers="words"), None, "openai:vectorlm.rl.environments.verifiers:play"),
        (PromptSettings(verifiers="words"), "own.py:Game", "own.py:Game"),
        ("reasoning_gym:chain_sum", None, None),
        (("a text",), "own.py:Game", "own.py:Game"),
    ],
    ids=str,
)
def test_verifiers_plays_its_own_tasks(given, environment, played_by):
    settings = CollectSettings(prompts=given, prompts_per_step=1, environment=environment)
    assert settings.environment_of("") == played_by


def test_only_one_kind_of_source_is_read_with_its_own_settings(monkeypatch):
    for settings, text in (
        (PromptSettings(), "`path`, `reasoning_gym`, `verifiers`"),
        (PromptSettings(path="a.jsonl", verifiers="words"), "`path`, `reasoning_gym`, `verifiers`"),
        (PromptSettings(path="a.jsonl", size=3), "size .*path"),
        (PromptSettings(verifiers="words", split="train"), "split .*verifiers"),
        (PromptSettings(reasoning_gym="chain_sum", split="train"), "split .*reasoning_gym"),
    ):
        with pytest.raises(DatasetError, match=text):
            read_prompts(settings)
    monkeypatch.setattr("vectorlm.data.tasks.is_installed", lambda package: False)
    with pytest.raises(DatasetError, match=r"requirements/verifiers\.txt"):
        read_prompts("verifiers:words")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "saved"])
def test_a_prompt_may_be_the_json_text_of_messages(tmp_path, name):
    chat = [{"role": "user", "content": "ab"}]
    source = write(tmp_path, name, [{"prompt": json.dumps(chat)}, {"prompt": '[{"id": 1}]'}])
    assert [item.prompt for item in read_prompts(PromptSettings(path=str(source)))] == [chat, '[{"id": 1}]']


@pytest.mark.parametrize(("name", "is_kept"), [("rows.jsonl", True), ("rows.parquet", False)])
def test_nulls_of_tools_are_left_out_where_a_table_may_have_added_them(tmp_path, name, is_kept):
    tool = {"name": "f", "default": None}
    rows = [{"prompt": [{"role": "user", "content": "a"}], "tools": [tool, {"name": "g", "default": "b"}]}]
    (record,) = read_prompts(PromptSettings(path=str(write(tmp_path, name, rows))))
    assert ("default" in asked(record)["tools"][0]) is is_kept


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "saved"])
def test_prompts_whose_calls_no_template_can_write_are_refused(tmp_path, name):
    call = {"function": {"name": "f", "arguments": "[1]"}}
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call]}]
    with pytest.raises(DatasetError, match="must be a JSON object"):
        read_prompts(PromptSettings(path=str(write(tmp_path, name, [{"prompt": chat}]))))
