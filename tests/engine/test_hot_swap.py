import pytest
from families import WITH_BUFFERS, save_family
from rank_processes import forked, save_tiny_llama
from swap_cases import consecutive_samples_differ, swap_and_compare

# Two fp32 paths through three layers differ by a few 1e-6; a stale tensor shows as 1e-2 and more.
FP32_GAP = 1e-4
# bf16 keeps 8 bits: with logits of a few units, 0.1 is round-off, and a stale tensor shows as 1 and more.
BF16_GAP = 0.15


# Other receivers, heads and transports: test_families.py, test_engine.py and test_transport_engines.py.
def test_after_each_update_the_engine_is_the_trainer(tmp_path):
    folder = save_tiny_llama(tmp_path / "model", hidden_size=64)
    for rank, seen, versions in forked(swap_and_compare, str(folder), "packed"):
        assert versions == [0, 1, 2]
        for equal, gap, _ in seen:
            assert all(equal), f"rank {rank}: greedy completions differ"
            assert gap < FP32_GAP, f"rank {rank}"
        assert consecutive_samples_differ(seen), "the updates changed nothing, so equality proves nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "world_size", "limit"),
    [
        ("GLM-4-MoE", 2, FP32_GAP),
        # vLLM keeps the numbers of its activation in bf16; stale ones show as 0.3.
        ("Apertus", 1, BF16_GAP),
        # A router's buffer as GLM-4-MoE has.
        pytest.param("dots.llm1", 2, FP32_GAP, marks=pytest.mark.long),
    ],
)
def test_buffers_that_the_model_computes_with_are_sent_as_parameters_are(tmp_path, family, world_size, limit):
    folder = str(save_family(WITH_BUFFERS[family], tmp_path / "model"))
    for rank, seen, _ in forked(swap_and_compare, folder, "live", 2, world_size=world_size):
        assert max(gap for _, gap, _ in seen) < limit, f"rank {rank}"
        assert consecutive_samples_differ(seen)


@pytest.mark.slow
def test_a_bf16_engine_follows_an_fp32_trainer(tmp_path):
    folder = save_tiny_llama(tmp_path / "model", tied=True, hidden_size=64)
    for _, seen, _ in forked(swap_and_compare, str(folder), "packed", 2, "bfloat16"):
        assert all(gap < BF16_GAP for _, gap, _ in seen)
        assert consecutive_samples_differ(seen)
