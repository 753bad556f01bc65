"""The loader: rows by optimizer step, rank and micro-batch."""

import re

import pytest
import torch
from datasets import Dataset, DatasetDict
from kit.letters import letter_tokenizer, make

from vectorlm.data.loader import Collator, StepLoader, load_dataset
from vectorlm.errors import DatasetError
from vectorlm.ranks.topology import Topology

IGNORE = -100
PAD = 0


def make_dataset(num_rows):
    """Return rows of 1 to 5 tokens; the tokens identify the row, and the loader does not read the column `id`."""
    rows = [
        {"input_ids": [10 + i] * (1 + i % 5), "labels": [10 + i] * (1 + i % 5), "id": f"row {i}"}
        for i in range(num_rows)
    ]
    return Dataset.from_list(rows)


def make_loader(
    dataset, *, rank=0, world_size=1, micro_batch_size=4, num_micro_batches=1, seed=7, shuffle=True, **other
):
    return StepLoader(
        dataset,
        Collator(**{"pad_token_id": PAD, "ignore_index": IGNORE, "max_seq_len": 16} | other),
        Topology(rank, rank, world_size, world_size),
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        seed=seed,
        shuffle=shuffle,
    )


@pytest.mark.parametrize("labels", [[IGNORE] * 20, [IGNORE] * 16 + [5] * 4, [5] + [IGNORE] * 19])
def test_a_dataset_without_a_label_that_counts_is_refused(labels):
    rows = [{"input_ids": [1] * 20, "labels": labels}] * 3
    with pytest.raises(DatasetError, match="label"):
        make_loader(Dataset.from_list(rows))
    make_loader(Dataset.from_list([*rows, {"input_ids": [1] * 20, "labels": [5] * 20}]))


def ids_per_step(dataset, epoch, world_size, micro_batch_size, num_micro_batches):
    """Return the set of ids that all ranks together see at each step, without fillers."""
    ranks = [
        make_loader(
            dataset,
            rank=rank,
            world_size=world_size,
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
        ).steps(epoch)
        for rank in range(world_size)
    ]
    seen = []
    for batches_of_ranks in zip(*ranks, strict=True):
        ids = [i for batches in batches_of_ranks for batch in batches for i in batch.ids.tolist() if i != -1]
        assert len(ids) == len(set(ids))
        seen.append(set(ids))
    return seen


@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "num_micro_batches"), [(2, 4, 1), (1, 2, 4), (2, 1, 4), (4, 2, 1)]
)
def test_a_step_holds_the_same_rows_however_the_global_batch_is_split(
    world_size, micro_batch_size, num_micro_batches
):
    dataset = make_dataset(37)
    expected = ids_per_step(dataset, 3, 1, 8, 1)
    assert ids_per_step(dataset, 3, world_size, micro_batch_size, num_micro_batches) == expected


def test_every_row_is_seen_once_per_epoch_in_another_order():
    dataset = make_dataset(37)
    first, second = (ids_per_step(dataset, epoch, 2, 2, 2) for epoch in (0, 1))
    assert set.union(*first) == set.union(*second) == set(range(37))
    assert sum(map(len, first)) == sum(map(len, second)) == 37
    assert first != second


def test_seed_and_epoch_do_not_stand_in_for_each_other():
    dataset = make_dataset(37)
    orders = [
        tuple(i for batch in make_loader(dataset, seed=seed).steps(epoch) for i in batch[0].ids.tolist())
        for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]
    ]
    assert len(set(orders)) == 4


def test_a_step_can_be_started_from_without_any_state():
    dataset = make_dataset(37)
    loader = make_loader(dataset, rank=1, world_size=2, micro_batch_size=2, num_micro_batches=2)
    assert len(loader) == 5
    whole = list(loader.steps(2))
    rest = list(loader.steps(2, start_step=3))
    assert len(whole) == 5
    for batches, again in zip(whole[3:], rest, strict=True):
        for batch, same in zip(batches, again, strict=True):
            assert torch.equal(batch.input_ids, same.input_ids)
            assert torch.equal(batch.ids, same.ids)


def test_the_last_short_step_is_filled_with_rows_that_count_nowhere():
    loaders = [
        make_loader(make_dataset(9), rank=rank, world_size=2, micro_batch_size=2, num_micro_batches=2)
        for rank in (0, 1)
    ]
    for loader in loaders:
        *_, last = loader.steps(0)
        assert [batch.ids.shape for batch in last] == [(2,), (2,)]
        for batch in last:
            for row in range(2):
                if batch.ids[row] == -1:
                    assert (batch.labels[row] == IGNORE).all()
                    assert (batch.input_ids[row] == PAD).all()
                    assert batch.attention_mask[row].sum() == 1
    fillers = [
        sum((batch.ids == -1).sum().item() for batch in list(loader.steps(0))[-1]) for loader in loaders
    ]
    assert fillers == [3, 4]


def test_rows_are_padded_on_the_right_by_their_true_length_even_when_they_hold_the_pad_token():
    dataset = Dataset.from_list(
        [{"input_ids": [5, PAD], "labels": [IGNORE, PAD]}, {"input_ids": [6, 7, 8], "labels": [6, 7, 8]}]
    )
    ((batch,),) = make_loader(dataset, micro_batch_size=2, shuffle=False).steps(0)
    assert batch.input_ids.tolist() == [[5, PAD, PAD], [6, 7, 8]]
    assert batch.attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.labels.tolist() == [[IGNORE, PAD, IGNORE], [6, 7, 8]]
    integers = [
        entry for entry in vars(batch).values() if entry is not None and not entry.is_floating_point()
    ]
    assert {entry.dtype for entry in integers} == {torch.int64}


def test_tokens_outside_the_datasets_own_attention_mask_are_dropped():
    row = {"input_ids": [5, 6, 7, 8], "labels": [IGNORE, 6, 7, 8], "attention_mask": [0, 1, 1, 0]}
    ((batch,),) = make_loader(Dataset.from_list([row]), micro_batch_size=1).steps(0)
    assert batch.input_ids.tolist() == batch.labels.tolist() == [[6, 7]]
    assert batch.attention_mask.tolist() == [[1, 1]]


def test_long_rows_are_cut_off_at_their_end():
    dataset = Dataset.from_list(
        [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}, {"input_ids": [9], "labels": [9]}]
    )
    loader = make_loader(dataset, micro_batch_size=2, shuffle=False, max_seq_len=3)
    ((batch,),) = loader.steps(0)
    assert batch.input_ids[0].tolist() == batch.labels[0].tolist() == [1, 2, 3]
    assert batch.input_ids.shape == (2, 3)


def test_a_dataset_without_a_needed_column_or_without_rows_is_refused():
    with pytest.raises(ValueError, match="labels"):
        make_loader(Dataset.from_list([{"text": "a", "input_ids": [1]}]))
    with pytest.raises(DatasetError, match="label"):
        make_loader(make_dataset(3).select([]))


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [1, 2], "labels": [1]},
        {"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1]},
        {"input_ids": [], "labels": []},
        {"input_ids": None, "labels": None},
        {"input_ids": [1, None], "labels": [1, 2]},
        {"input_ids": [1, 2], "labels": [1, None]},
        {"input_ids": [1, 2], "labels": None},
    ],
)
@pytest.mark.parametrize("row_id", [41, "a", None, 1.5])
def test_a_row_whose_columns_do_not_belong_together_is_refused_by_its_place(row, row_id):
    good = {"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 1]}
    dataset = Dataset.from_list([{"id": row_id, **entry} for entry in (good, row, row)])
    with pytest.raises(DatasetError, match="row 1 of the dataset"):
        next(make_loader(dataset, shuffle=False).steps(0))


def test_what_is_no_dataset_is_refused(tmp_path):
    Dataset.from_dict({"input_ids": []}).save_to_disk(tmp_path / "empty")
    for folder in (tmp_path, tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(DatasetError, match=re.escape(str(folder))):
            load_dataset(folder)
    DatasetDict({"train": make_dataset(3), "test": make_dataset(2)}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DatasetError, match="splits/train"):
        load_dataset(tmp_path / "splits")


def test_a_dataset_of_another_vocabulary_is_refused_with_both_tokenizers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine, other = letter_tokenizer(), letter_tokenizer()
    other.add_tokens(["more"])
    for name, tokenizer in (("models/mine", mine), ("models/other", other)):
        # transformers looks for a name without a folder on the hub, for 47 s without a network.
        tokenizer.save_pretrained(name)
        tokenizer.name_or_path = name
    Dataset.from_dict({"text": ["ab"]}).save_to_disk("raw")
    make(tokenizer=mine)
    assert len(load_dataset("rows", mine)) == len(load_dataset("rows")) == 1
    with pytest.raises(DatasetError, match=r"'models/mine'.*'models/other'"):
        load_dataset("rows", other)
    Dataset.from_dict({"input_ids": [[1]], "labels": [[1]]}).save_to_disk("elsewhere")
    assert len(load_dataset("elsewhere", other)) == 1
