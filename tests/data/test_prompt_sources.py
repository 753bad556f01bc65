"""Prompts from every source."""

import asyncio
import json
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from datasets import Dataset, DatasetDict
from letters import letter_tokenizer, make, spell

from vectorlm.cli import evaluate
from vectorlm.encoding import as_list, asked, encode, encode_all
from vectorlm.preflight.resume import _digest
from vectorlm.rewards import evaluation
from vectorlm.rewards.evaluation import Evaluator
from vectorlm.rl.settings import CollectSettings
from vectorlm.rollouts.sampler import GroupSampler, Task
from vectorlm.data.prompts import read_prompts
from vectorlm.errors import DatasetError
from vectorlm.types import Completion, PromptRecord

CHAT = [{"role": "user", "content": "2 + 2?"}]
ROWS = [{"prompt": CHAT, "answer": 4}, {"prompt": [{"role": "user", "content": "3 + 3?"}], "answer": 6}]
RECORDS = [PromptRecord(row["prompt"], {"answer": row["answer"]}) for row in ROWS]


def write(folder, name, rows):
    """Write rows as the ending of `name` says; without one, as the datasets library saves them."""
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
    with pytest.raises(
        DatasetError, match=r"row 1 of .* has the columns prompt, answer, but every row must have"
    ):
        read_prompts(path)
    path = write(tmp_path, f"other_{name}", [{"question": "a", "answer": 1}])
    with pytest.raises(DatasetError, match=r"row 0 of .* has the columns question, answer, but"):
        read_prompts(path)


def test_what_cannot_be_read_is_a_dataset_error(tmp_path):
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "several")
    (tmp_path / "empty").mkdir()
    for name in ("torn.parquet", "several", "empty"):
        with pytest.raises(
            DatasetError, match=f"rl.prompts='{tmp_path}/{name}' cannot be read: it must be a Parquet"
        ):
            read_prompts(tmp_path / name, "rl.prompts")
    for name in ("absent", "absent.parquet"):
        with pytest.raises(DatasetError, match=f"rl.prompts='{tmp_path}/{name}' does not exist"):
            read_prompts(tmp_path / name, "rl.prompts")


def test_a_file_that_begins_with_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8-sig")
    assert [each.prompt for each in read_prompts(str(tmp_path / "p.jsonl"))] == ["a"]


def test_a_source_without_rows_is_refused(tmp_path):
    Dataset.from_list(ROWS).select([]).to_parquet(tmp_path / "none.parquet")
    with pytest.raises(DatasetError, match="is empty: it must hold at least one prompt"):
        read_prompts(tmp_path / "none.parquet")
    Dataset.from_list(ROWS).select([]).save_to_disk(tmp_path / "none")
    with pytest.raises(DatasetError, match="cannot be read"):
        read_prompts(tmp_path / "none")


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {each: {"type": "string"}}}}}
    for name, each in (("add", "x"), ("find", "y"))
]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% for p in t.function.parameters.properties %} {{ p }}{% endfor %};"
    "{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
)


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
    sampler = GroupSampler(settings=CollectSettings(prompts="p", prompts_per_step=1), seed=0, max_model_len=9, encode=list, needs_greedy=True)
    given, answers = [], [[Completion((1,), (2,), (0.0,), (0,), "a", "stop")]]

    async def ask(prompt, params):
        assert [spell(ids) for ids in encode_all(as_list([prompt]), lambda: tokenizer)] == [expected]
        return answers[0]

    assert asyncio.run(sampler.sample(Task(0, record), ask)).greedy is not None
    monkeypatch.setattr(evaluation, "sample_with_progress", lambda _, asked, **how: given.append(asked) or answers)
    Evaluator(MagicMock(), [record], samples_path=None).evaluate(1)
    monkeypatch.setattr(evaluate, "ask", lambda *arguments: given.append(arguments[3]) or answers)
    monkeypatch.setattr(evaluate, "require_model", lambda args: ("model", None))
    Path("mine.py").write_text("def one(completion):\n    return 1.0\n")
    monkeypatch.setattr(evaluate, "read_exam", lambda args: evaluate.Exam([record], {"mine.py:one": 1.0}))
    evaluate._answer_questions(MagicMock())
    assert given == [[asked(record)]] * 2


def test_a_run_notices_that_a_saved_dataset_is_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path(), "saved", ROWS)
    before = _digest("saved")
    assert _digest("saved") == before
    write(Path(), "other", ROWS[:1])
    Path("saved").rename("old")
    Path("other").rename("saved")
    assert _digest("saved") != before
