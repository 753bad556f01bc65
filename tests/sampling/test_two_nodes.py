"""An engine on each of two nodes; the nodes are two launchers on loopback."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rank_processes import save_tiny_llama
from swap_cases import GREEDY, perturb, reference_greedy, reference_logprobs
from transformers import AutoModelForCausalLM

import vectorlm
from vectorlm import SamplingEngine, Topology
from vectorlm.errors import WeightMismatch
from vectorlm.model.shard import shard_model

# Two fp32 paths through three layers differ by a few 1e-6; a stale tensor shows as 1e-2 and more.
FP32_GAP = 1e-4
BATCH = [[2 + index % 20, 3 + index % 7] for index in range(41)]


def swap_on_nodes(folder):
    """Swap into both engines and sample on both; return what this rank saw."""
    topology = Topology.from_environment()
    load = {"pretrained_model_name_or_path": folder, "dtype": torch.float32}
    model, spread, reference = (AutoModelForCausalLM.from_pretrained(**load) for _ in range(3))
    shard_model(model, topology, strategy="HYBRID_SHARD")
    shard_model(spread, topology, strategy="FULL_SHARD")
    arguments = {
        "dtype": "float32",
        "max_model_len": 64,
        "kv_cache_memory_bytes": 16 << 20,
        "max_num_seqs": 8,
    }
    swaps, refusal = [], ""
    with SamplingEngine(folder, timeout_s=240, **arguments) as engine:
        try:
            engine.update(spread, 7)
        except WeightMismatch as error:
            refusal = str(error)
        for step in range(2):
            perturb(model, reference, seed=step)
            report = engine.update(model, step)
            batch = engine.submit(BATCH, GREEDY)
            completions = [answers[0] for answers in batch.result()]
            equal = [
                list(each.token_ids) == reference_greedy(reference, each.prompt_token_ids)
                for each in completions
            ]
            gap = max(
                (
                    torch.tensor(each.sampler_logprobs, dtype=torch.float64)
                    - reference_logprobs(reference, each)
                )
                .abs()
                .max()
                .item()
                for each in completions
            )
            taken = len(batch._share.answers)
            swaps.append((report.version, all(equal), gap, taken, [each.token_ids for each in completions]))
    return topology.node, refusal, swaps


def on_two_nodes(fn, *args):
    """Return what ``fn(*args)`` returned on the one rank of each of two nodes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"

    def launch(rank):
        return vectorlm.launch(fn, *args, world_size=2, nnodes=2, node_rank=rank, rdzv_endpoint=endpoint)[0]

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(launch, range(2)))


@pytest.mark.slow
def test_the_engines_of_both_nodes_hold_the_trainers_weights_after_each_update(tmp_path):
    folder = save_tiny_llama(tmp_path / "model", tied=True, hidden_size=64)
    results = on_two_nodes(swap_on_nodes, str(folder))
    for rank, (node, refusal, swaps) in enumerate(results):
        assert node == rank
        assert "holds 1 of the 2 shards of a parameter" in refusal
        assert "HYBRID_SHARD" in refusal
        for step, (version, equal, gap, taken, _) in enumerate(swaps):
            assert version == step
            assert equal, "greedy completions differ from transformers'"
            assert gap < FP32_GAP
            assert taken > 0, "the other node's engine did all the work"
        assert swaps[0][-1] != swaps[1][-1], "the update changed nothing, so equality proves nothing"
    assert [swap[-1] for swap in results[0][2]] == [swap[-1] for swap in results[1][2]]
    assert [sum(swap[3] for swap in step) for step in zip(results[0][2], results[1][2], strict=True)] == [
        41,
        41,
    ]
