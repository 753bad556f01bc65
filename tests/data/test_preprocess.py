"""Preprocessing of texts into rows."""

from itertools import product
from pathlib import Path

import pytest
from datasets import Dataset
from kit.letters import BOS, EOS, IGNORE, letter_tokenizer, made_of, spell

from vectorlm.data.loader import Collator, StepLoader, load_dataset
from vectorlm.data.pack import best_fit
from vectorlm.data.summary import Summary
from vectorlm.errors import ConfigError, DatasetError
from vectorlm.ranks.topology import Topology

TEXTS = ["abc", "defgh", "", "ijklmnopq", "r"]


def rows_of(texts, max_seq_len=6, **options):
    """Preprocess and write each row as letters: ``^`` BOS, ``$`` EOS, ``.`` a label outside the loss."""
    dataset, _ = made_of(texts, max_seq_len, **options)
    names = {BOS: "^", EOS: "$", options.get("ignore_index", IGNORE): "."}
    assert dataset["id"][:] == list(range(len(dataset)))
    for row in dataset:
        assert row["attention_mask"] == [1] * len(row["input_ids"])
    return [(spell(row["input_ids"], names), spell(row["labels"], names)) for row in dataset]


def test_without_packing_each_text_is_a_row():
    assert rows_of(TEXTS[:3]) == [("^abc$", ".abc$"), ("^defgh$", ".defgh$")]
    assert rows_of(TEXTS[:3], add_bos_eos_tokens=False) == [("abc", "abc"), ("defgh", "defgh")]


def test_truncation_cuts_tokens_and_labels_alike_and_ends_the_row_in_an_eos_that_does_not_count():
    assert rows_of(["abc", "defghij"], truncate=True) == [("^abc$", ".abc$"), ("^defg$", ".defg.")]
    assert rows_of(["a:bcdefgh"], truncate=True, seperator=":") == [("^a:bc$", "...bc.")]


def test_partial_packing_cuts_each_text_by_itself():
    assert rows_of(TEXTS, packing_type="partial") == [
        ("^abc$", ".abc$"),
        ("^defg$", ".defg."),
        ("^h$", ".h$"),
        ("^ijkl$", ".ijkl."),
        ("^mnop$", ".mnop."),
        ("^q$", ".q$"),
        ("^r$", ".r$"),
    ]


def test_a_text_that_just_fits_is_one_chunk_with_its_end():
    for packing_type in ("partial", "full"):
        assert rows_of(["abcd"], packing_type=packing_type) == [("^abcd$", ".abcd$")]
        assert rows_of(["abcd", "e"], packing_type=packing_type) == [("^abcd$", ".abcd$"), ("^e$", ".e$")]


def test_full_packing_joins_texts_and_leaves_no_room_but_at_the_very_end():
    assert rows_of(TEXTS, packing_type="full", add_bos_eos_tokens=False) == [
        ("abcdef", "abcdef"),
        ("ghijkl", "ghijkl"),
        ("mnopqr", "mnopqr"),
    ]
    assert rows_of(TEXTS, packing_type="full", max_seq_len=8) == [
        ("^abc$de$", ".abc$de."),
        ("^fgh$ij$", ".fgh$ij."),
        ("^klmnop$", ".klmnop."),
        ("^q$r$", ".q$r$"),
    ]


def test_a_row_says_how_long_each_of_its_texts_is():
    def lengths(texts, **options):
        return made_of(texts, 8, **options)[0]["seq_lengths"][:]

    assert lengths(TEXTS, packing_type="full") == [[5, 3], [5, 3], [8], [3, 2]]
    assert lengths(TEXTS, packing_type="full", add_bos_eos_tokens=False) == [[3, 5], [8], [1, 1]]
    assert lengths(["abcdefg", "hij"], packing_type="full", overlap=2) == [[8], [5, 3], [5]]
    assert lengths(TEXTS, packing_type="partial") == [[5], [7], [8], [5], [3]]
    assert lengths(TEXTS[:2]) == [[5], [7]]


def test_an_overlap_is_shown_again_but_counts_once():
    assert rows_of(["abcdefgh", "xy"], packing_type="partial", overlap=2) == [
        ("^abcd$", ".abcd."),
        ("^cdef$", "...ef."),
        ("^efgh$", "...gh$"),
        ("^xy$", ".xy$"),
    ]
    assert rows_of(["abcdefgh", "xy"], packing_type="full", overlap=2, add_bos_eos_tokens=False) == [
        ("abcdef", "abcdef"),
        ("efghxy", "..ghxy"),
    ]


@pytest.mark.parametrize(
    ("packing_type", "overlap", "with_special_tokens", "max_seq_len"),
    list(product(["partial", "full", "best_fit"], [0, 1, 3], [True, False], [6, 7, 11, 50])),
)
def test_packing_neither_loses_nor_repeats_a_token_in_the_loss(
    packing_type, overlap, with_special_tokens, max_seq_len
):
    texts = ["p:" + "abcdefghijklmnopqrstuvwxyz"[:length] for length in [1, 9, 4, 0, 26, 5, 3]]
    options = {"packing_type": packing_type, "overlap": overlap, "add_bos_eos_tokens": with_special_tokens}
    rows = rows_of(texts, seperator=":", max_seq_len=max_seq_len, **options)
    end = "$" if with_special_tokens else ""
    counted = "".join(label for _, labels in rows for label in labels if label != ".")
    expected = "".join(text[2:] + end for text in texts)
    # Best-fit changes the order of the texts.
    put = sorted if packing_type == "best_fit" else list
    assert put(counted) == put(expected)
    assert max(len(tokens) for tokens, _ in rows) <= max_seq_len
    for tokens, labels in rows:
        assert all(label in (token, ".") for token, label in zip(tokens, labels, strict=True))
        assert not with_special_tokens or (tokens[0] == "^" and tokens[-1] == "$")


def test_the_prompt_up_to_the_first_separator_is_left_out_of_the_loss():
    assert rows_of(["ab:c:d"], seperator=":", max_seq_len=20) == [("^ab:c:d$", "....c:d$")]
    assert rows_of(["cd"], seperator=":", pre_pend="ab:", max_seq_len=20) == [("^ab:cd$", "....cd$")]


def test_the_prompt_is_left_out_across_chunks_too():
    assert rows_of(["abcdef:gh"], seperator=":", packing_type="partial") == [
        ("^abcd$", "......"),
        ("^ef:g$", "....g."),
        ("^h$", ".h$"),
    ]


def test_a_text_without_the_separator_is_skipped_and_counted():
    dataset, summary = made_of(["a:b", "cd", "", "ef"], seperator=":")
    assert len(dataset) == 1
    assert summary.skipped == {"no separator ':'": (2, "row 1"), "an empty text": (1, "row 2")}
    assert "3: 2 with no separator ':' (first: row 1), 1 with an empty text (first: row 2)" in str(summary)


def test_a_row_without_text_is_refused():
    with pytest.raises(DatasetError, match=r"row 1 .*'text'"):
        rows_of(["a", None])


def test_a_missing_column_is_refused_with_those_there_are():
    with pytest.raises(DatasetError, match=r"'txet'.*data_field .* text"):
        rows_of(["a"], data_field="txet")


def test_a_dataset_of_nothing_but_empty_texts_is_refused():
    with pytest.raises(DatasetError, match="skipped 2: 2 with an empty"):
        rows_of(["", ""])
    # Truncation cuts these texts before their first counted token.
    with pytest.raises(DatasetError, match="max_seq_len=6"):
        made_of(["abcdefg:h", "bcdefghi:j"], truncate=True, seperator=":")
    assert not Path("rows").exists()


def test_special_tokens_that_the_tokenizer_lacks_are_refused_unless_not_asked_for():
    tokenizer = letter_tokenizer(with_special_tokens=False)
    with pytest.raises(ConfigError, match="add_bos_eos_tokens"):
        made_of(["ab"], tokenizer=tokenizer)
    rows, _ = made_of(["ab"], tokenizer=tokenizer, add_bos_eos_tokens=False)
    assert rows[0]["input_ids"] == [ord("a"), ord("b")]


@pytest.mark.parametrize("overlap", [4, 5, -1])
def test_an_overlap_that_leaves_no_room_is_refused(overlap):
    with pytest.raises(ConfigError, match=f"overlap={overlap} .*between 0 and 3"):
        rows_of(["abc"], packing_type="full", overlap=overlap)


@pytest.mark.parametrize("options", [{}, {"truncate": True}, {"packing_type": "best_fit", "truncate": True}])
def test_an_overlap_of_texts_that_are_not_cut_into_chunks_is_refused(options):
    with pytest.raises(ConfigError, match="overlap=2"):
        rows_of(["abc"], overlap=2, **options)


def test_what_is_saved_can_be_trained_on():
    dataset, _ = made_of(TEXTS, packing_type="full")
    loader = StepLoader(
        load_dataset("rows"),
        Collator(pad_token_id=0, ignore_index=IGNORE, max_seq_len=6),
        Topology(),
        micro_batch_size=4,
        seed=0,
        shuffle=False,
    )
    (batch,) = next(loader.steps(0))
    for row, input_ids, labels in zip(dataset, batch.input_ids.tolist(), batch.labels.tolist(), strict=False):
        length = len(row["input_ids"])
        assert (input_ids[:length], labels[:length]) == (row["input_ids"], row["labels"])
    assert batch.ids.tolist() == [0, 1, 2, 3]
    lengths = [
        ids[mask.bool()].bincount().tolist()
        for ids, mask in zip(batch.text_ids, batch.attention_mask, strict=True)
    ]
    assert lengths == dataset["seq_lengths"][:4]


def test_best_fit_takes_the_row_with_the_least_room_that_suffices():
    # 6 opens a row with 4 left, and 5 opens one with 5 left. 4 fills the first; 3 and both ones fill the second.
    assert best_fit([3, 6, 5, 4, 1, 1], 10) == [[1, 3], [2, 0, 4, 5]]
    # 5 and 6 have 5 and 4 tokens left: 4 goes into the fuller row, not into the first.
    assert best_fit([5, 6, 4], 10) == [[1, 2], [0]]


def test_best_fit_cuts_only_texts_longer_than_a_row():
    texts = ["abc", "d", "ef", "ghijklm", "n", "opq"]
    assert rows_of(texts, 5, packing_type="best_fit", add_bos_eos_tokens=False) == [
        ("ghijk", "ghijk"),
        ("abclm", "abclm"),
        ("opqef", "opqef"),
        ("dn", "dn"),
    ]
    dataset, summary = made_of(texts, 7, packing_type="best_fit")
    assert [spell(row) for row in dataset["input_ids"]] == ["^ghijk$", "^abc$", "^opq$", "^ef$^n$", "^lm$^d$"]
    assert dataset["seq_lengths"][:] == [[7], [5], [5], [4, 3], [4, 3]]
    assert summary.efficiency == 31 / 35


@pytest.mark.parametrize("num_proc", [2, 5])
def test_several_processes_make_the_same_dataset(num_proc):
    texts = ["ab"[: 1 + index % 2] + "c" * (index % 7) for index in range(50)]
    one, _ = made_of(texts, packing_type="full")
    several, _ = made_of(texts, packing_type="full", num_proc=num_proc, save_path="several")
    assert one[:] == several[:]


def test_the_summary_counts_what_is_there():
    dataset, summary = made_of(["abc:de", "fg:", "", "none", "h:i"], 5, seperator=":", save_path="first")
    assert (summary.rows_in, summary.rows_out, summary.longest) == (5, 3, 8)
    # The rows are ^abc:de$, ^fg:$ and ^h:i$; "$" and "i$" count, and "de$" is cut off.
    assert (summary.tokens, summary.loss_tokens) == (8 + 5 + 5, 0 + 1 + 2)
    assert summary.tokens == sum(map(len, dataset["input_ids"]))
    assert (summary.long_rows, summary.cut_tokens) == (1, 3)
    assert summary.efficiency == 15 / 15
    assert (
        "note: rows longer than max_seq_len=5: 1. Training will cut 3 tokens off them, 3 of which count in the loss."
        in str(summary)
    )
    assert "note: 1 of 3 rows have no counted token within 5." in str(summary)
    _, packed = made_of(["ab", "cd"], 4, packing_type="full", add_bos_eos_tokens=False)
    # No token predicts the first token of a text.
    assert (packed.rows_out, packed.tokens, packed.loss_tokens) == (1, 4, 2)
    assert [note for note in packed.notes() if "no end of text" not in note] == []


def test_a_dataset_is_replaced_when_the_new_one_is_complete_and_not_before():
    first, _ = made_of(["ab", "cd"])
    kept = first[:]
    with pytest.raises(DatasetError):
        made_of(["ef", None])
    assert load_dataset("rows")[:] == kept
    assert sorted(path.name for path in Path().iterdir()) == ["raw", "rows"]
    made_of(["ef"])
    assert len(load_dataset("rows")) == 1
    assert sorted(path.name for path in Path().iterdir()) == ["raw", "rows"]


def test_only_a_dataset_is_replaced():
    Dataset.from_dict({"text": ["ab"]}).save_to_disk("raw")
    with pytest.raises(ConfigError, match="save_path"):
        made_of(["ab"], save_path="./raw")
    made_of(["ab"], save_path="data/rows")
    for path in ("data", "data/rows/state.json"):
        with pytest.raises(ConfigError, match="save_path"):
            made_of(["ab"], save_path=path)
    assert len(load_dataset("data/rows")) == 1


def test_a_cut_says_what_it_took_and_which_rows_have_nothing_left():
    _, summary = made_of(["abcdef:g", "a:bcdefgh", "a:b"], truncate=True, seperator=":")
    # The cuts are ^abcd| ef:g$ and ^a:bc| defgh$.
    assert (summary.truncated, summary.lost_tokens, summary.lost_loss_tokens) == (2, 5 + 6, 2 + 6)
    assert (summary.loss_tokens, summary.idle_rows) == (2 + 2, 1)
    assert "2 texts, which lost 11 tokens, 8 of them counted in the loss" in str(summary)
    assert "1 of 3 rows have no counted token within 6" in str(summary)


@pytest.mark.parametrize("options", [{}, {"packing_type": "full"}, {"packing_type": "best_fit"}])
def test_the_summary_of_a_run_is_that_of_preprocessing_or_counted_for_its_own_length(options):
    texts = ["abc:defgh", "x:y", "abcdefghijkl:mn"]
    dataset, made = made_of(texts, 16, seperator=":", **options)
    assert str(Summary.of(dataset, 16, IGNORE)) == str(made)
    assert Summary.of(dataset, 100, IGNORE).cut_tokens == 0
    at_6 = Summary.of(dataset, 6, IGNORE)
    rows = [[(t, item) for t, item in enumerate(row) if item != IGNORE] for row in dataset["labels"]]
    assert at_6.loss_tokens == sum(t < 6 for row in rows for t, _ in row)
    assert at_6.cut_loss_tokens == sum(t >= 6 for row in rows for t, _ in row)
    assert at_6.idle_rows == sum(all(t >= 6 for t, _ in row) for row in rows)
    assert (at_6.tokens, at_6.longest) == (made.tokens, made.longest)
    assert Summary.of(load_dataset("rows").select([0]), 16, IGNORE).rows_out == 1


@pytest.mark.parametrize("text", ["<s>ab</s>", "<s>ab", "ab</s>", "ab"])
def test_a_bos_or_eos_of_the_text_is_not_doubled(text):
    dataset, summary = made_of([text], 16)
    assert (spell(dataset[0]["input_ids"]), spell(dataset[0]["labels"])) == ("^ab$", ".ab$")
    told = [remark for remark in summary.remarks if "add_bos_eos_tokens" in remark]
    assert len(told) == (text != "ab")
    # The tokenizer of letters has a BOS token but puts none before a prompt.
    assert any("none before a prompt" in remark for remark in summary.remarks)


def test_the_ignore_index_is_the_one_asked_for():
    dataset, _ = made_of(["a:b"], 9, seperator=":", ignore_index=-1)
    assert dataset[0]["labels"] == [-1, -1, -1, ord("b"), EOS]


def test_an_interrupt_leaves_no_half_dataset(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("vectorlm.data.preprocess.Summary.count", interrupt)
    with pytest.raises(KeyboardInterrupt):
        made_of(["ab", "cd"])
    assert [path.name for path in Path().iterdir()] == ["raw"]


def test_rows_of_ones_own_are_counted_as_training_takes_them():
    rows = {"input_ids": [[1, 2, 3, 4]], "labels": [[IGNORE, 2, 3, 4]], "attention_mask": [[0, 1, 1, 1]]}
    found = Summary.of(Dataset.from_dict(rows), 2, IGNORE)
    # Token 1 is dropped, no token predicts 2, and 4 is cut off.
    assert (found.tokens, found.loss_tokens, found.cut_loss_tokens, found.long_rows) == (3, 1, 1, 1)


def test_the_one_token_that_a_tokenizer_has_is_put_there():
    tokenizer = letter_tokenizer()
    tokenizer.bos_token = None
    dataset, _ = made_of(["ab"], tokenizer=tokenizer)
    assert spell(dataset[0]["input_ids"]) == "ab$"
    _, summary = made_of(["ab"], tokenizer=tokenizer, add_bos_eos_tokens=False)
    assert "1 row: no end of text counts in the loss" in str(summary)
