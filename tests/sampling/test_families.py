"""A hot swap works for every family in the table, and a model that vLLM cannot run says so before training."""

import pytest
import transformers
from kit.families import FAMILIES, REFUSED, Family, save_family
from kit.family_runs import ALWAYS, PAGE, RUNS, Result, page, read_results, record
from kit.rank_processes import forked
from kit.tiny_engine import TINY_ENGINE
from swap_cases import FP32_GAP, GREEDY, PROMPTS, SAMPLED, compare, perturb, publishing

from vectorlm import SamplingEngine
from vectorlm.errors import ChecksumMismatch, EngineError, WeightMismatch
from vectorlm.sampling.testing import EngineUnderTest
from vectorlm.train.load import load_model
from vectorlm.train.shard import transformer_blocks

NUM_UPDATES = 2


def swap(folder, receiver):
    """Update an engine twice, compare it with a fresh one, and send it a spoiled tensor.

    Returns:
        What was seen after each update, the answers of both engines, and what `spoil` returns.
    """
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model, reference = load_model(folder), load_model(folder).eval()
    if dist.is_initialized():
        for block in transformer_blocks(model):
            fully_shard(block)
        fully_shard(model)
    seen = []
    with SamplingEngine(folder, receiver=receiver, **TINY_ENGINE) as engine:
        for step in range(NUM_UPDATES):
            perturb(model, reference, seed=step)
            engine.update(model, step)
            equal, gap, tokens = compare(engine, reference)
            seen.append((all(equal), gap, tokens))
        answers = answers_of(engine)
        copied, caught = spoil(engine, model)
        assert engine.receiver == receiver
    with (
        EngineUnderTest(engine, folder).saved(reference) as path,
        SamplingEngine(path, receiver=receiver, **TINY_ENGINE) as fresh,
    ):
        return seen, (answers, answers_of(fresh)), copied, caught


def answers_of(engine):
    """Return tokens and log-probabilities of greedy and of sampled completions."""
    return [
        (completion.token_ids, completion.sampler_logprobs)
        for parameters in (GREEDY, SAMPLED)
        for completions in engine.sample(PROMPTS, parameters)
        for completion in completions
    ]


def spoil(engine, model):
    """Change one word of the largest matrix between publishing and proving.

    Returns:
        The share of the weights that an update copies; the matrix and the error's text.
    """
    seen = {}

    def change(sums, layout, tensors):
        name = max(tensors, key=lambda each: (tensors[each].ndim, tensors[each].numel()))
        tensors[name].view(-1)[-1] += 1e-3
        seen.update(name=name, copied=layout.num_copied_bytes / sum(slot.num_bytes for slot in layout.slots))
        return sums

    text = "nothing was noticed"
    with publishing(change):
        try:
            engine.update(model, NUM_UPDATES)
        except ChecksumMismatch as error:
            text = str(error)
    return seen["copied"], (seen["name"], text)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, marks=pytest.mark.slow if run in ALWAYS else pytest.mark.long, id=str(run))
        for run in RUNS
    ],
)
def test_after_each_update_the_engine_is_the_trainer_and_a_spoiled_tensor_is_named(run, tmp_path, request):
    folder = str(save_family(FAMILIES[run.family], tmp_path / "model", tied=run.tied))
    if run.world_size == 1:
        outcomes = [swap(folder, run.receiver)]
    else:
        outcomes = forked(swap, folder, run.receiver, world_size=run.world_size)
    for seen, (swapped, fresh), _, (spoiled, text) in outcomes:
        assert swapped == fresh, "the engine is not the one that starts from these weights"
        assert all(equal for equal, _, _ in seen), "greedy completions differ"
        assert max(gap for _, gap, _ in seen) < FP32_GAP
        assert seen[0][2] != seen[1][2], "the updates changed nothing, so equality proves nothing"
        assert repr(spoiled) in text
    if request.config.getoption("--record-families"):
        import vllm

        gap = max(gap for seen, *_ in outcomes for _, gap, _ in seen)
        copied = outcomes[0][2]
        record(Result(run, True, gap, copied, vllm.__version__, transformers.__version__, True))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "Mamba-2" else pytest.mark.long)
        for name in REFUSED
    ],
)
def test_a_family_whose_loader_computes_is_refused_and_its_engine_stays_as_it_was(name, tmp_path):
    folder = str(save_family(REFUSED[name], tmp_path / "model"))
    with SamplingEngine(folder, **TINY_ENGINE) as engine:
        before = answers_of(engine)
        with pytest.raises(WeightMismatch, match="A_log"):
            engine.update(load_model(folder), 0)
        assert answers_of(engine) == before


def test_the_table_is_made_of_the_recorded_results_and_holds_every_family():
    results = read_results()
    assert {result.run for result in results} == set(RUNS)
    assert PAGE.read_text() == page(results), "run: python tests/kit/family_runs.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (Family("LlamaConfig", "", {"head_dim": 16}), r"cannot run LlamaForCausalLM .*head_dim=16"),
        (FAMILIES["Gemma 2"], r"cannot run Gemma2ForCausalLM .*'lm_head'"),
    ],
    ids=["no-kernel", "no-head"],
)
def test_a_model_that_vllm_cannot_run_says_so_at_start(family, reason, tmp_path):
    folder = save_family(family, tmp_path / "model")
    lengths = []
    with SamplingEngine(str(folder), **TINY_ENGINE) as engine:
        for _ in range(3):
            with pytest.raises(
                EngineError, match=rf"(?s)vLLM 0\.\d+\.\d+\S* {reason}.*In the sampler process"
            ) as caught:
                engine.wait_until_ready()
            lengths.append(len(caught.traceback))
    # Cells of a notebook that raise it again add nothing to it.
    assert lengths[1] == lengths[2] <= lengths[0]
