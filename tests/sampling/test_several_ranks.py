"""Two engines that share the work of two ranks."""

import pytest
import torch
from kit.rank_processes import forked, save_tiny_llama
from kit.tiny_engine import TINY_ENGINE
from swap_cases import GREEDY, compare, counting_chunks, perturb
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from vectorlm import SamplingEngine
from vectorlm.errors import EngineError
from vectorlm.train.handover import DeviceTurn

BATCH = [[2 + index % 20, 3 + index % 7] for index in range(41)]


def tokens(answers):
    return [[completion.token_ids for completion in completions] for completions in answers]


def two_engines(folder, receiver):
    """Swap into two engines and sample on both; return comparisons, equalities and this engine's number of chunks."""
    from torch.distributed.fsdp import fully_shard

    model, reference = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    fully_shard(model)
    seen = []
    with SamplingEngine(
        folder, data_parallel_size=2, receiver=receiver, transport="pull", max_num_seqs=8, **TINY_ENGINE
    ) as engine:
        # Each engine gets one prompt, without a seed and before any other draw.
        drawn = engine.sample([[2, 3]] * 2, {"temperature": 1.0, "max_tokens": 32, "ignore_eos": True})
        for step in range(2):
            perturb(model, reference, seed=step)
            engine.update(model, step)
            equal, gap, _ = compare(engine, reference)
            seen.append((all(equal), gap, engine.version))
        with counting_chunks() as taken:
            answers = engine.submit(BATCH, GREEDY).result()
        alone = [engine.sample([prompt], GREEDY)[0] for prompt in BATCH[::8]]
        try:
            engine.sample([*BATCH, []], GREEDY)
        except EngineError:
            seen.append("refused")
        again = tokens(engine.sample(BATCH, GREEDY)) == tokens(answers)
    first, second = tokens(drawn)
    return seen, tokens(answers[::8]) == tokens(alone), sum(taken), again, first != second


@pytest.mark.slow
def test_two_engines_share_a_batch_and_both_hold_the_new_weights(tmp_path):
    folder = save_tiny_llama(tmp_path / "model", tied=True, hidden_size=64)
    results = forked(two_engines, str(folder), "packed")
    for seen, in_order, taken, again, drawn_apart in results:
        *swaps, refused = seen
        assert refused == "refused"
        assert drawn_apart, "two engines draw the same random numbers"
        for step, (equal, gap, version) in enumerate(swaps):
            assert equal
            assert gap < 1e-4
            assert version == step
        assert in_order
        assert again
        assert taken > 0, "one engine did all the work"
    assert sum(taken for _, _, taken, *_ in results) == len(BATCH)


def test_engines_must_divide_the_ranks_of_a_node():
    with pytest.raises(ValueError, match="data_parallel_size=2"):
        SamplingEngine("model", data_parallel_size=2)


TINY_LLAMA = {"tied": True, "hidden_size": 64, "max_length": 256}


def train_and_hand_over(folder, num_steps=3):
    """Return, by step, whether greedy tokens agree, the largest log-prob gap, and the error after the hand-over."""
    model, reference = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.05) for module in (model, reference)]
    tokens = torch.tensor([[2, 3, 4, 5, 6, 7, 8, 9]])
    seen = []
    with SamplingEngine(folder, **TINY_ENGINE, enable_sleep_mode=True) as engine:
        turn = DeviceTurn(engine, model=model, optimizer=optimizers[0], sleep="all", offload_optimizer=True)
        for step in range(num_steps):
            for module, optimizer in zip((model, reference), optimizers, strict=True):
                module(tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            with turn.sampling(step):
                equal, gap, _ = compare(engine, reference)
            try:
                engine.sample([[2]])
                refusal = ""
            except EngineError as error:
                refusal = str(error)
            seen.append((all(equal), gap, refusal))
    return seen


@pytest.mark.slow
def test_two_ranks_train_hand_over_and_train_on(folder):
    results = forked(train_and_hand_over, str(folder))
    for seen in results:
        for equal, gap, refusal in seen:
            assert equal
            # AdamW divides by the root of tiny second moments, which magnifies the rounding of sums.
            assert gap < 1e-2
            assert "the engine is asleep (weights and kv_cache)" in refusal
