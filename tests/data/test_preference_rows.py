"""Preference data: rows of two texts for pairs and labelled completions, rows of steps for solutions."""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from kit.letters import letter_tokenizer, make, spell
from test_chat import PLAIN, say

from vectorlm.data.loader import Collator, load_dataset
from vectorlm.data.summary import Summary
from vectorlm.errors import ConfigError, DatasetError


def rows_of(rows, examples="pairs", max_seq_len=64, **options):
    """Preprocess rows; return the two texts, their labels and the value of each row."""
    Path("raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = letter_tokenizer(template=PLAIN)
    dataset, summary = make(max_seq_len, tokenizer, load_path="raw.jsonl", examples=examples, **options)
    found = []
    for row in dataset:
        first = row["seq_lengths"][0]
        assert sum(row["seq_lengths"]) == len(row["input_ids"])
        texts = [
            spell(row[name][part])
            for name in ("input_ids", "labels")
            for part in (slice(first), slice(first, None))
        ]
        found.append((*texts, row["pair_margin" if examples == "pairs" else "is_good"]))
    return found, summary


CHAT = ("u:x$\na:yz$\n", "u:x$\na:w$\n", ".......yz$.", ".......w$.", 0.0)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "ab", "chosen": "cd", "rejected": "ce"}, ("^abcd$", "^abce$", "...cd$", "...ce$", 0.0)),
        # The tokens that both texts begin with are the prompt.
        ({"chosen": "abcd", "rejected": "abe"}, ("^abcd$", "^abe$", "...cd$", "...e$", 0.0)),
        (
            {"prompt": "ab", "chosen": "c", "rejected": "d", "margin": 1.5},
            ("^abc$", "^abd$", "...c$", "...d$", 1.5),
        ),
        ({"prompt": say("ux"), "chosen": say("ayz"), "rejected": say("aw")}, CHAT),
        ({"chosen": say("ux", "ayz"), "rejected": say("ux", "aw")}, CHAT),
        # ultrafeedback_binarized repeats the prompt in both conversations, as text or as a chat.
        ({"prompt": "x", "chosen": say("ux", "ayz"), "rejected": say("ux", "aw")}, CHAT),
        ({"prompt": say("ux"), "chosen": say("ux", "ayz"), "rejected": say("ux", "aw")}, CHAT),
        (
            {"chosen": say("ux", "ay", "uv", "aw"), "rejected": say("ux", "ay", "uq", "aw")},
            (
                "u:x$\na:y$\nu:v$\na:w$\n",
                "u:x$\na:y$\nu:q$\na:w$\n",
                "..........u:v$\na:w$.",
                "..........u:q$\na:w$.",
                0.0,
            ),
        ),
    ],
)
def test_a_pair_is_a_row_of_two_texts_whose_prompt_does_not_count(row, expected):
    assert rows_of([row])[0] == [expected]


def test_tables_are_read_as_lines_are(tmp_path):
    pair = {"prompt": "ab", "chosen": "cd", "rejected": "ce", "score_chosen": 7.0}
    Dataset.from_list([pair]).save_to_disk("raw")
    Dataset.from_list([pair]).to_parquet("raw.parquet")
    lines, summary = rows_of([pair])
    assert summary.unread == ["score_chosen"]
    for path in ("raw", "raw.parquet"):
        dataset, found = make(load_path=path, examples="pairs", tokenizer=letter_tokenizer())
        assert spell(dataset[0]["input_ids"]) == lines[0][0] + lines[0][1]
        assert (found.unread, found.tokens, found.texts) == (summary.unread, summary.tokens, summary.texts)


def test_a_completion_stands_beside_the_next_one_of_another_prompt():
    rows = [
        {"prompt": "ab", "completion": "c", "label": True},
        {"prompt": "ab", "completion": "d", "label": False},
        {"prompt": "x", "completion": "yz", "label": True},
    ]
    assert rows_of(rows, "labels")[0] == [
        ("^abc$", "^abyz$", "...c$", "...yz$", 1.0),
        ("^abd$", "^abyz$", "...d$", "...yz$", 0.0),
        ("^xyz$", "^xc$", "..yz$", "..c$", 1.0),
    ]
    chats = [
        {**row, "prompt": say("u" + row["prompt"]), "completion": say("a" + row["completion"])}
        for row in rows
    ]
    assert rows_of(chats, "labels")[0][2] == (
        "u:x$\na:yz$\n",
        "u:x$\na:c$\n",
        ".......yz$.",
        ".......c$.",
        1.0,
    )
    assert rows_of(rows, "labels")[1].loss_tokens == 2 + 2 + 3
    short = Summary.of(load_dataset("rows"), 3, -100)
    assert (short.loss_tokens, short.cut_loss_tokens, short.idle_rows) == (1, 6, 2)
    alike, _ = rows_of(rows, "labels", max_seq_len=6)
    assert [item[1] for item in alike] == ["^abyz$", "^abyz$", "^xc$"]
    with pytest.raises(DatasetError, match="no row with another prompt"):
        rows_of(rows[:2], "labels")
    alone, _ = rows_of([*rows, {"prompt": "ef", "completion": "", "label": True}], "labels")
    assert len(alone) == 3
    chats = [{"prompt": say(f"u{text}"), "completion": say("ay"), "label": True} for text in "ab"]
    repeated = {**chats[0], "completion": chats[0]["prompt"]}
    told, summary = rows_of([*chats, repeated], "labels")
    assert len(told) == 2
    assert summary.skipped == {"an empty completion": (1, "raw.jsonl:3")}


PAIR = {"prompt": "ab", "chosen": "cd", "rejected": "ce"}
STEPS = {"prompt": "ab", "completions": ["cd", "e"], "labels": [True, False]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**PAIR, "rejected": "cd"}, "chosen and rejected the same"),
        ({**PAIR, "chosen": "c" * 9}, "a text longer than max_seq_len=8"),
        ({**PAIR, "rejected": ""}, "an empty completion"),
        ({"chosen": say("ux"), "rejected": say("ux", "ay")}, "no messages"),
    ],
)
def test_pairs_that_teach_nothing_are_left_out_counted_and_named(row, reason):
    kept = PAIR if isinstance(row["chosen"], str) else {"chosen": say("u", "ay"), "rejected": say("u", "az")}
    rows, summary = rows_of([kept, row, row], max_seq_len=8 if isinstance(row["chosen"], str) else 64)
    assert len(rows) == 1
    assert summary.skipped == {reason: (2, "raw.jsonl:2")}
    assert (summary.rows_in, summary.rows_out, summary.texts) == (3, 1, 2)


@pytest.mark.parametrize("examples", ["pairs", "labels"])
def test_the_beginning_of_a_long_prompt_is_cut_off_or_the_row_refused(examples):
    long = {"prompt": "abcdef", "chosen": "gh", "rejected": "i"}
    if examples == "labels":
        long = {"prompt": "abcdef", "completion": "gh", "label": True}
    other = {**long, "prompt": "x"}
    whole, _ = rows_of([long, other], examples, max_seq_len=10, overlong_prompts="error")
    assert [row[0] for row in whole] == ["^abcdefgh$", "^xgh$"]
    cut, summary = rows_of([long, other], examples, max_seq_len=7, overlong_prompts="truncate_left")
    assert (cut[0][0], cut[0][2]) == ("^defgh$", "....gh$")
    assert cut[0][1].startswith("^def")
    assert cut[1] == whole[1]
    assert (summary.truncated, summary.lost_tokens) == (2, 6)
    with pytest.raises(DatasetError, match=r"raw\.jsonl:1 .* 10 tokens"):
        rows_of([long, other], examples, max_seq_len=7, overlong_prompts="error")
    # Truncation would remove the whole prompt.
    longer = {**long, "chosen": "ghij"} if examples == "pairs" else {**long, "completion": "ghij"}
    _, summary = rows_of([longer, other], examples, max_seq_len=5, overlong_prompts="truncate_left")
    assert summary.skipped == {"a text longer than max_seq_len=5": (1, "raw.jsonl:1")}


@pytest.mark.parametrize(
    ("examples", "row", "column"),
    [
        ("pairs", {"prompt": "ab", "chosen": "cd"}, "rejected"),
        ("pairs", {**PAIR, "margin": "big"}, "margin"),
        ("pairs", {**PAIR, "chosen": 3}, "completion"),
        ("labels", {"prompt": "a", "completion": "b", "label": 1}, "label"),
        ("labels", {"prompt": "a", "completion": "b"}, "label"),
        ("steps", {**STEPS, "labels": [True]}, "labels"),
        ("steps", {**STEPS, "labels": [True, 1]}, "labels"),
        ("steps", {**STEPS, "completions": [], "labels": []}, "labels"),
        ("steps", {"prompt": "a", "labels": [True]}, "labels"),
        ("steps", {**STEPS, "completions": ["c", 3]}, "completions"),
        ("steps", {**STEPS, "prompt": say("ux")}, "prompt"),
    ],
)
def test_a_broken_row_stops_with_its_file_and_line(examples, row, column):
    label = {"prompt": "a", "completion": "b", "label": True}
    whole = {"pairs": PAIR, "labels": label, "steps": STEPS}[examples]
    with pytest.raises(DatasetError, match=rf"raw\.jsonl:2 .*'{column}'"):
        rows_of([whole, row], examples)


def test_steps_are_tokenised_one_by_one_and_labelled_where_the_separator_ends():
    rows = [
        {**STEPS, "rating": 3},
        {"prompt": "a", "completions": ["", "c", "d"], "labels": [False, True, False]},
        {**STEPS, "completions": ["c" * 9, "d"]},
    ]
    for options, ended in (({}, "\n"), ({"step_separator": "--"}, "--")):
        Path("raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        dataset, summary = make(12, load_path="raw.jsonl", examples="steps", **options)
        texts = [f"^abcd{ended}e{ended}", f"^a{ended}c{ended}d{ended}"]
        assert [spell(row["input_ids"]) for row in dataset] == texts
        for row, labels in zip(dataset, ([1, 0], [0, 1, 0]), strict=True):
            ends = [len(item) for item in spell(row["input_ids"]).split(ended)[:-1]]
            places = [sum(ends[: place + 1]) + (place + 1) * len(ended) - 1 for place in range(len(ends))]
            marks = dict(zip(places, labels, strict=True))
            assert row["labels"] == [marks.get(place, -100) for place in range(len(row["labels"]))]
        assert dataset["num_steps"][:] == [2.0, 3.0]
        assert summary.skipped == {"a text longer than max_seq_len=12": (1, "raw.jsonl:3")}
        assert (summary.unread, summary.loss_tokens) == (["rating"], 5)


def test_labels_of_steps_are_no_ignore_index():
    with pytest.raises(ConfigError, match="ignore_index=0"):
        rows_of([STEPS], "steps", ignore_index=0)


def test_a_dataset_without_the_columns_and_settings_without_effect_are_refused():
    with pytest.raises(DatasetError, match="'chosen'"):
        rows_of([{"text": "ab"}])
    with pytest.raises(ConfigError, match="packing_type"):
        rows_of([PAIR], packing_type="full")
    for row, examples in ((PAIR, "pairs"), (STEPS, "steps")):
        with pytest.raises(DatasetError, match=f"examples={examples}"):
            rows_of([row], "texts")


def test_a_shorter_max_seq_len_cuts_each_text_of_a_pair():
    rows_of([{"prompt": "ab", "chosen": "cdef", "rejected": "g", "margin": 2.0}])
    dataset = load_dataset("rows")
    batch = Collator(0, -100, 4).collate([{"id": 0, **dataset[0]}], 2)
    assert spell(batch.input_ids[0].tolist()) == "^abc^abg"
    assert batch.text_ids[0].tolist() == [0] * 4 + [1] * 4
    assert batch.values.tolist() == [2.0, 0.0]
    with pytest.raises(DatasetError, match=r"row 0 .*seq_lengths"):
        Collator(0, -100, 4).collate([{"id": 0, **dataset[0], "seq_lengths": [13]}], 2)
    summary = Summary.of(dataset, 4, -100)
    assert (summary.texts, summary.long_rows, summary.longest, summary.cut_tokens) == (2, 2, 8, 5)


def test_pairs_of_chats_may_be_json_text():
    row = {"prompt": say("ux"), "chosen": say("ux", "ayz"), "rejected": say("ux", "aw")}
    written = {column: json.dumps(value) for column, value in row.items()}
    assert rows_of([written])[0] == rows_of([{**written, "prompt": "x"}])[0] == [CHAT]
    label = {"prompt": say("ux"), "completion": json.dumps(say("ayz")), "label": True}
    other = {"prompt": json.dumps(say("uq")), "completion": json.dumps(say("aw")), "label": False}
    assert rows_of([label, other], "labels")[0][0][:2] == ("u:x$\na:yz$\n", "u:x$\na:w$\n")


@pytest.mark.parametrize(
    "prompt", ["in French", say("sb", "ux"), say("uq"), json.dumps(say("uq")), {"role": "user"}, 4]
)
def test_a_prompt_that_the_chats_neither_repeat_nor_continue_is_refused(prompt):
    row = {"chosen": say("ux", "ayz"), "rejected": say("ux", "aw")}
    for said in (row, {column: json.dumps(value) for column, value in row.items()}):
        with pytest.raises(DatasetError, match=r"raw\.jsonl:1"):
            rows_of([{**said, "prompt": prompt}])


@pytest.mark.parametrize("name", ["raw.jsonl", "raw.parquet"])
@pytest.mark.parametrize(
    ("examples", "row"),
    [
        ("texts", {"text": "ab"}),
        ("texts", {"prompt": "a", "completion": "b"}),
        ("pairs", {"chosen": "ab", "rejected": "ac", "margin": 0.5}),
        ("pairs", {"chosen": say("ux", "ay"), "rejected": say("ux", "az")}),
        ("labels", {"prompt": "a", "completion": "b", "label": True}),
        ("steps", {"prompt": "a", "completions": ["b", "c"], "labels": [True, False]}),
    ],
)
def test_a_row_of_any_form_with_a_weight_of_0_is_left_out(name, examples, row):
    rows = [{**row, "weight": weight} for weight in (1, 0, None)]
    if examples == "labels":  # KTO needs rows with other prompts.
        rows[2]["prompt"] = "d"
    if name.endswith("parquet"):
        Dataset.from_list(rows).to_parquet(name)
    else:
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset, summary = make(64, letter_tokenizer(template=PLAIN), load_path=name, examples=examples)
    assert len(dataset) == 2
    assert [num for num, _ in summary.skipped.values()] == [1]
    assert list(summary.skipped) == ["a weight of 0"]
    assert not summary.unread
    Path("wrong.jsonl").write_text(json.dumps({**row, "weight": 0.5}) + "\n")
    with pytest.raises(DatasetError, match=r"wrong\.jsonl:1 has the weight 0\.5"):
        make(64, letter_tokenizer(template=PLAIN), load_path="wrong.jsonl", examples=examples)
