import pytest
import torch

from vectorlm.sampling.weights.inspection import checksum, checksums, row_sums, widest_word


def test_a_hand_worked_sum():
    # Two int32 values make one 64-bit word, with the second in its upper half; the rows have the weights 1 and 3.
    rows = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    assert checksum(rows) == (1 + 2 * 2**32) * 1 + (3 + 4 * 2**32) * 3
    # A row of odd length is read in int32 words.
    assert (
        checksum(torch.tensor([[1, 2, 4], [3, 4, 5]], dtype=torch.int32)) == (1 + 2 + 4) * 1 + (3 + 4 + 5) * 3
    )


def test_the_sums_of_shards_add_up_to_the_sum_of_the_whole():
    whole = torch.randn(7, 5)
    parts = [checksum(whole[:3]), checksum(whole[3:4], 3), checksum(whole[4:], 4), checksum(whole[:0], 7)]
    assert sum(parts) % 2**64 == checksum(whole)


def test_the_sums_of_columns_add_up_if_no_word_is_cut():
    whole = torch.randn(7, 6)
    columns = [whole[:, :3], whole[:, 3:5], whole[:, 5:]]
    assert sum(checksum(part, word_bytes=4) for part in columns) % 2**64 == checksum(whole, word_bytes=4)
    assert checksum(whole, word_bytes=4) != checksum(whole), "these have words of 8 bytes"


def test_the_widest_word_divides_every_length():
    assert [widest_word(*lengths) for lengths in [(16, 24), (16, 12), (6,), (3, 8), (0,)]] == [8, 4, 2, 1, 8]


@pytest.mark.parametrize("row", [0, 1, 3, 255])
def test_every_single_bit_of_a_word_counts(row):
    whole = torch.randn(256, 4)
    for bit in range(64):
        changed = whole.clone()
        changed.view(torch.int64)[row, 1] ^= -(2**63) if bit == 63 else 1 << bit
        assert checksum(changed) != checksum(whole), bit


def test_exchanged_rows_change_the_sum():
    whole = torch.arange(8.0).view(2, 4)
    assert checksum(whole.flip(0)) != checksum(whole)


def test_scalars_and_strided_pieces_count_by_value():
    whole = torch.randn(4, 6)
    assert checksum(whole[:, 2:4]) == checksum(whole[:, 2:4].clone())
    assert checksum(torch.tensor(1.5)) == checksum(torch.tensor([1.5]))


def test_checksums_of_many_tensors_are_those_of_each():
    parts = [(torch.randn(7, 5), 0), (torch.randn(3), 4), (torch.randn(0, 2), 9), (torch.randn(2, 3, 4), 1)]
    nothing = torch.randn(0, 2), 2
    found = checksums([(row_sums(rows), first_row) for rows, first_row in parts])
    assert checksums([(row_sums(rows), first_row) for rows, first_row in (nothing, *parts)]) == [0, *found]
    assert found == [checksum(rows, first_row) for rows, first_row in parts]
    assert (
        found[1]
        == sum(
            (2 * place + 1) * word
            for place, word in enumerate(parts[1][0].view(torch.int32).tolist(), start=4)
        )
        % 2**64
    )
    assert found[2] == 0
    assert checksums([]) == []
