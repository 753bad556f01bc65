"""An engine on each of two nodes; as a script, this file is a rank."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from kit.rank_processes import save_tiny_llama
from kit.tiny_engine import TINY_ENGINE
from kit.two_nodes import TwoNodes
from swap_cases import GREEDY, counting_chunks, largest_gap, perturb, reference_greedy
from transformers import AutoModelForCausalLM

import vectorlm
from vectorlm import SamplingEngine, Topology, exact
from vectorlm.errors import WeightMismatch
from vectorlm.train.settings import ModelSettings
from vectorlm.train.shard import shard_model

BATCH = [[2 + index % 20, 3 + index % 7] for index in range(41)]


def swap_on_nodes(folder):
    """Swap into both engines and sample on both; return this rank's results."""
    topology = Topology.from_environment()
    load = {"pretrained_model_name_or_path": folder, "dtype": torch.float32}
    model, spread, reference = (AutoModelForCausalLM.from_pretrained(**load) for _ in range(3))
    shard_model(model, topology, ModelSettings(sharding_strategy="HYBRID_SHARD"))
    shard_model(spread, topology, ModelSettings(sharding_strategy="FULL_SHARD"))
    exact(reference)
    swaps, refusal = [], ""
    with SamplingEngine(folder, max_num_seqs=8, receiver="live", exact=True, **TINY_ENGINE) as engine:
        try:
            engine.update(spread, 7)
        except WeightMismatch as error:
            refusal = str(error)
        for step in range(2):
            perturb(model, reference, seed=step)
            report = engine.update(model, step)
            with counting_chunks() as taken:
                completions = [answers[0] for answers in engine.submit(BATCH, GREEDY).result()]
            equal = [
                list(completion.token_ids) == reference_greedy(reference, completion.prompt_token_ids)
                for completion in completions
            ]
            gap = largest_gap(completions, reference)
            swaps.append(
                (
                    report.version,
                    all(equal),
                    gap,
                    sum(taken),
                    [completion.token_ids for completion in completions],
                )
            )
    return topology.node, refusal, swaps


@pytest.mark.slow
def test_the_engines_of_both_nodes_hold_the_trainers_weights_after_each_update(tmp_path):
    folder, scratch = save_tiny_llama(tmp_path / "model", tied=True, hidden_size=64), tmp_path / "scratch"
    scratch.mkdir()
    nodes = TwoNodes(
        [__file__, folder, tmp_path], scratch, environment={"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    for code, text in nodes.outcomes(timeout_s=380):
        assert code == 0, text
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, (node, refusal, swaps) in enumerate(results):
        assert node == rank
        assert "holds 1 of the 2 shards of a parameter" in refusal
        assert "HYBRID_SHARD" in refusal
        for step, (version, equal, gap, taken, _) in enumerate(swaps):
            assert version == step
            assert equal, "greedy completions differ from transformers'"
            assert gap == 0.0
            assert taken > 0, "the other node's engine did all the work"
        assert swaps[0][-1] != swaps[1][-1], "the update changed nothing, so equality proves nothing"
    assert [swap[-1] for swap in results[0][2]] == [swap[-1] for swap in results[1][2]]
    assert [sum(swap[3] for swap in step) for step in zip(results[0][2], results[1][2], strict=True)] == [
        41,
        41,
    ]


if __name__ == "__main__":
    [result] = vectorlm.launch(swap_on_nodes, sys.argv[1])
    Path(sys.argv[2], f"{Topology.from_environment().rank}.json").write_text(json.dumps(result))
