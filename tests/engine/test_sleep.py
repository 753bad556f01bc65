"""A real engine that sleeps while two ranks train; the contract suite holds one to the order of the calls."""

import pytest
from rank_processes import forked
from turn_cases import train_and_hand_over

TINY_LLAMA = {"tied": True, "hidden_size": 64, "max_length": 256}


@pytest.mark.slow
def test_two_ranks_train_hand_over_and_train_on(folder):
    results = forked(train_and_hand_over, str(folder))
    for seen in results:
        for equal, gap, refusal in seen:
            assert equal
            # AdamW divides by the root of tiny second moments, which magnifies what the order of a sum rounds off.
            assert gap < 1e-2
            assert "the engine sleeps (weights and kv_cache)" in refusal
