"""Hot swaps of every family in the table, and start errors of models that vLLM cannot run."""

import tempfile

import pytest
import torch
import transformers
from kit.families import FAMILIES, RECURRENT, REFUSED, Family, save_family
from kit.family_runs import ALWAYS, PAGE, RUNS, Result, page, read_results, record
from kit.letters import letter_tokenizer
from kit.rank_processes import forked
from kit.tiny_engine import TINY_ENGINE
from swap_cases import FP32_GAP, GREEDY, PROMPTS, SAMPLED, compare, perturb, publishing

from vectorlm import SamplingEngine
from vectorlm.errors import ChecksumMismatch, EngineError
from vectorlm.sampling.testing import EngineUnderTest
from vectorlm.train.checkpoint.export import export_model
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.load import load_model
from vectorlm.train.lora import add_lora
from vectorlm.train.packing import Rows
from vectorlm.train.shard import transformer_blocks

NUM_UPDATES = 2


def swap(folder, receiver, dtype="float32"):
    """Update an engine twice, compare it with a fresh one, and send it a spoiled tensor and merged adapters.

    Returns:
        Results after each update, the answers of both engines, the results of `spoil`, and the largest gap with
        merged adapters.
    """
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model, reference = load_model(folder), load_model(folder).eval()
    if dist.is_initialized():
        for block in transformer_blocks(model):
            fully_shard(block)
        fully_shard(model)
    seen = []
    options = {**TINY_ENGINE, "receiver": receiver, "dtype": dtype}
    with SamplingEngine(folder, **options) as engine:
        for step in range(NUM_UPDATES):
            perturb(model, reference, seed=step)
            engine.update(model, step)
            equal, gap, tokens = compare(engine, reference)
            seen.append((all(equal), gap, tokens))
        answers = answers_of(engine)
        copied, caught = spoil(engine, model)
        assert engine.receiver == receiver
        adapted = None if dist.is_initialized() else adapted_gap(engine, folder)
    with (
        EngineUnderTest(engine, folder).saved(reference) as path,
        SamplingEngine(path, **options) as fresh,
    ):
        return seen, (answers, answers_of(fresh)), copied, caught, adapted


def adapted_gap(engine, folder):
    """Update the engine with a model with adapters, merged; return the largest gap to the unmerged model."""
    model = load_model(folder)
    linear = {
        name.rpartition(".")[2] for name, module in model.named_modules() if type(module) is torch.nn.Linear
    }
    # PEFT refuses these in models with Mamba layers, whose kernels read the weights themselves.
    linear -= {"lm_head", "out_proj"}
    options: dict[str, object] = {"r": 2}
    if experts := [
        name for name, weight in model.named_parameters() if "experts." in name and weight.ndim == 3
    ]:
        options["target_parameters"] = sorted(
            {name.rpartition(".layers.")[2].partition(".")[2] for name in experts}
        )
        linear -= {"gate_proj", "up_proj", "down_proj"}  # PEFT applies these names to the fused experts.
    model = add_lora(model, {**options, "target_modules": sorted(linear)}).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    engine.update(model, NUM_UPDATES + 1)
    return compare(engine, model)[1]


def train(folder):
    """Train the model of a folder for a few steps and export it.

    Returns:
        The reason for padding its rows (None if they are packed), whether the loss fell, and whether transformers
        reads the exported model without a difference.
    """
    model = load_model(folder)
    language_model = LanguageModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 48, (4, 12), generator=generator)
    rows = Rows(ids, torch.ones_like(ids), torch.arange(12).expand(4, 12) > 3, (0, 1, 2, 3))
    losses = []
    for _ in range(4):
        loss = -language_model.logprobs(rows).sum() / rows.is_asked.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with tempfile.TemporaryDirectory() as path:
        export_model(model.eval(), letter_tokenizer(), f"{path}/model")
        exported = load_model(f"{path}/model").eval()
    with torch.no_grad():
        found, expected = (module(ids, use_cache=False).logits for module in (exported, model))
    return language_model.why_padded, losses[-1] < losses[0], torch.equal(found, expected)


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
        name = max(tensors, key=lambda tensor_name: (tensors[tensor_name].ndim, tensors[tensor_name].numel()))
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
    dtype = FAMILIES[run.family].dtype
    if run.world_size == 1:
        outcomes = [swap(folder, run.receiver, dtype)]
    else:
        outcomes = forked(swap, folder, run.receiver, dtype, world_size=run.world_size)
    why_padded, learns, is_exported = train(folder)
    assert learns
    assert is_exported, "transformers reads another model from the exported folder"
    for seen, (swapped, fresh), _, (spoiled, text), adapted in outcomes:
        assert swapped == fresh, "the engine is not the one that starts from these weights"
        # In 16 bits, engine and trainer round at different places, and a router may then choose another expert.
        if dtype == "float32":
            assert all(equal for equal, _, _ in seen), "greedy completions differ"
            assert max(gap for _, gap, _ in seen) < FP32_GAP
            assert adapted is None or adapted < FP32_GAP
        assert seen[0][2] != seen[1][2], "the updates changed nothing, so equality proves nothing"
        assert repr(spoiled) in text
    if request.config.getoption("--record-families"):
        import vllm

        gap = max(gap for seen, *_ in outcomes for _, gap, _ in seen)
        equal = all(equal for seen, *_ in outcomes for equal, _, _ in seen)
        copied, adapted = outcomes[0][2], outcomes[0][4]
        versions = vllm.__version__, transformers.__version__
        record(Result(run, equal, gap, copied, *versions, True, why_padded or "", adapted))


@pytest.mark.slow
@pytest.mark.parametrize("receiver", ["live", pytest.param("packed", marks=pytest.mark.long)])
def test_qwen35_is_updated_as_a_fresh_engine_starts(receiver, tmp_path):
    folder = str(save_family(RECURRENT["Qwen3.5"], tmp_path / "model"))
    seen, (swapped, fresh), _, (spoiled, text), _ = swap(folder, receiver, "bfloat16")
    assert swapped == fresh
    assert seen[0][2] != seen[1][2]
    assert repr(spoiled) in text


@pytest.mark.long
@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_vllm_cannot_run_here_is_refused(name, tmp_path):
    family, _ = REFUSED[name]
    folder = save_family(family, tmp_path / "model")
    with (
        SamplingEngine(str(folder), **TINY_ENGINE) as engine,
        pytest.raises(EngineError, match=f"cannot run {family.config.removesuffix('Config')}ForCausalLM"),
    ):
        engine.wait_until_ready()


def test_the_table_is_made_of_the_recorded_results_and_holds_every_family():
    results = read_results()
    assert {result.run for result in results} == set(RUNS)
    assert PAGE.read_text() == page(results), "run: python tests/kit/family_runs.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (Family("LlamaConfig", "", {"head_dim": 16}), r"cannot run LlamaForCausalLM .*head_dim=16"),
        (FAMILIES["Gemma 2"], r"cannot run Gemma2ForCausalLM .*named lm_head"),
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
    # A notebook cell that raises the error again must not lengthen its traceback.
    assert lengths[1] == lengths[2] <= lengths[0]
