"""What a batch becomes when tokens are rejected or penalised."""

import torch
from kit.batches import batch_of

REWARDS = torch.tensor([[1.0, 2.0, 3.0]])


def test_a_row_that_loses_all_its_tokens_is_no_longer_valid():
    batch = batch_of([[0, 1, 1], [0, 1, 0], [0, 0, 0]], REWARDS)
    left = batch.without(torch.tensor([[0, 0, 1], [0, 1, 0], [1, 1, 1]]).bool())
    assert left.mask.tolist() == [[False, True, False], [False] * 3, [False] * 3]
    assert left.valid.tolist() == [[True, False, True]], "the last row has lost nothing"
    assert left.token_rewards.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert torch.equal(left.rewards, REWARDS)


def test_a_penalty_counts_at_its_token_and_for_its_completion():
    batch = batch_of([[0, 1, 1], [0, 1, 0], [1, 0, 0]], REWARDS)
    penalty = torch.tensor([[0.0, 0.5, 0.25], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    less = batch.penalised(penalty)
    assert less.rewards.tolist() == [[0.25, 1.0, 3.0]]
    assert less.token_rewards.tolist() == [[0.0, -0.5, 0.75], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]]


def test_lengths_and_first_trained_tokens():
    batch = batch_of([[0, 1, 1], [0, 0, 1], [0, 0, 0]], REWARDS)
    assert batch.first_trained == (1, 2, 3)
    assert batch.num_tokens == (3, 3, 3)
    assert batch.rows_per_group == 3
