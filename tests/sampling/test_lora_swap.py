"""After each update of a PEFT model the engine's log-probs are that model's, by adapters or by merged weights."""

from itertools import pairwise

import pytest
from kit.rank_processes import forked, save_tiny_llama
from lora_cases import WITH_LORA, swap_and_compare
from swap_cases import FP32_GAP

CASES = [
    (2, False, "packed", WITH_LORA),
    (2, True, "live", {}),
    (2, True, "live", WITH_LORA | {"transport": "pull"}),
    (1, False, "live", WITH_LORA | {"tensor_parallel_size": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "tied", "receiver", "engine_args"),
    CASES,
    ids=["adapter, packed", "merged", "adapter, pulled", "adapter, two workers"],
)
def test_after_each_update_the_engine_is_the_peft_model(tmp_path, world_size, tied, receiver, engine_args):
    folder = save_tiny_llama(tmp_path / "model", tied=tied, hidden_size=64)
    args = {"receiver": receiver, **engine_args}
    for seen in forked(swap_and_compare, str(folder), args, world_size=world_size):
        assert all(gap < FP32_GAP for gap, _, _ in seen)
        assert all(before[1] != after[1] for before, after in pairwise(seen)), "the updates changed nothing"
        whole, *later = [num_bytes for _, _, num_bytes in seen]
        if engine_args:
            assert set(later) == {later[0]}
            assert later[0] < whole / 5, "more than the adapters moved"
        else:
            assert set(later) == {whole}
