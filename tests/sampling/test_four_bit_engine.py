"""An engine with a base in 4 bits: it computes with the trainer's numbers, and updates send only adapters."""

import pytest
import torch
from kit.families import FAMILIES, save_family
from kit.four_bit import save_four_bit
from kit.rank_processes import forked
from kit.tiny_engine import TINY_ENGINE
from lora_cases import WITH_LORA, move, with_adapters
from quantised_cases import answers_of
from swap_cases import GREEDY, PROMPTS, compare, publishing

from vectorlm import SamplingEngine
from vectorlm.errors import ChecksumMismatch, ConfigError, EngineError
from vectorlm.train.load import load_model

OPTIONS = {**TINY_ENGINE, **WITH_LORA, "dtype": "bfloat16"}


def model_of(folder):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model = with_adapters(load_model(folder))
    if dist.is_initialized():
        for block in model.base_model.model.model.layers:
            fully_shard(block)
        fully_shard(model)
    return model


def swap(folder, plain, options):
    """Update twice on every rank, spoil an update; return its and a fresh engine's answers, gaps and sent bytes."""
    model = model_of(folder)
    references = [with_adapters(load_model(path)) for path in (folder, plain)]
    options = {**OPTIONS, **options}
    with SamplingEngine(folder, **options) as engine:
        for step in range(2):
            move([model, *references], seed=step)
            report = engine.update(model, step)
        gaps = [compare(engine, reference)[1] for reference in references]
        swapped = answers_of(engine)
        with publishing(spoiled), pytest.raises(ChecksumMismatch, match="lora_A"):
            engine.update(model, 2)
        with pytest.raises((ChecksumMismatch, EngineError)):
            engine.sample(PROMPTS, GREEDY)
        engine.update(model, 3)
        recovered = answers_of(engine)
    with SamplingEngine(folder, **options) as fresh:
        first = answers_of(fresh)
        fresh.update(model, 3)
        return first, swapped, recovered, answers_of(fresh), gaps, report.num_bytes


def spoiled(sums, layout, tensors):
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_rank() == 0:
        next(iter(tensors.values())).view(torch.uint8).view(-1)[0] ^= 1
    return sums


@pytest.mark.parametrize(
    ("family", "method", "world_size", "options"),
    [
        ("Llama", "awq", 1, {}),
        pytest.param("Qwen2", "gptq", 2, {}, marks=pytest.mark.slow),
        pytest.param("Gemma 3", "awq", 1, {"receiver": "packed"}, marks=pytest.mark.long),
        pytest.param("Llama", "gptq", 1, {"dtype": "float16"}, marks=pytest.mark.long),
    ],
)
def test_a_swapped_engine_is_a_fresh_one_on_the_trainers_base(family, method, world_size, options, tmp_path):
    plain = save_family(FAMILIES[family], tmp_path / "plain")
    folder = str(save_four_bit(plain, tmp_path / "model", method))
    arguments = folder, str(plain), options
    outcomes = [swap(*arguments)] if world_size == 1 else forked(swap, *arguments, world_size=world_size)
    adapted = with_adapters(load_model(folder))
    factors = [factor for name, factor in adapted.named_parameters() if "lora_" in name]
    for first, swapped, recovered, fresh, gaps, num_bytes in outcomes:
        assert swapped == recovered == fresh, "the engine is not the one that starts with these adapters"
        assert first != swapped, "the updates changed nothing, so equality proves nothing"
        assert 2 * gaps[0] < gaps[1], f"the engine's base is not the trainer's: {gaps}"
        assert num_bytes == sum(2 * factor.numel() for factor in factors)


def test_the_engine_reads_a_base_in_4_bits_as_the_trainer_does(tmp_path):
    plain = save_family(FAMILIES["Llama"], tmp_path / "plain")
    folder = save_four_bit(plain, tmp_path / "model", "gptq")
    with SamplingEngine(folder, **TINY_ENGINE | {"dtype": "bfloat16"}) as engine:
        gaps = [compare(engine, load_model(path).eval())[1] for path in (folder, plain)]
        assert 2 * gaps[0] < gaps[1], gaps
        for wrong in (load_model(folder), with_adapters(load_model(folder))):
            with pytest.raises(ConfigError, match="enable_lora"):
                engine.update(wrong, 0)
        with pytest.raises(EngineError, match="4 bits"):
            engine.sleep()
        engine.sleep(weights=False)
        engine.wake_up(weights=False)
        assert engine.sample(PROMPTS, GREEDY)


def test_a_trained_base_is_refused_and_nothing_changes(tmp_path):
    folder = save_four_bit(save_family(FAMILIES["Llama"], tmp_path / "plain"), tmp_path / "model", "awq")
    model = with_adapters(load_model(folder))
    with SamplingEngine(folder, **OPTIONS) as engine:
        fresh = answers_of(engine)
        move([model], seed=0)
        engine.update(model, 0)
        before = answers_of(engine)
        assert before != fresh
        with model.disable_adapter():
            engine.update(model, 1)
        assert answers_of(engine) == fresh, "without adapters the engine samples with its base"
        engine.update(model, 2)
        assert answers_of(engine) == before
        with pytest.raises(ConfigError, match="share_base"):
            engine.share_base(model)
        model.get_input_embeddings().weight.requires_grad_(True)
        with pytest.raises(ConfigError, match="base is frozen"):
            engine.update(model, 3)
        assert answers_of(engine) == before
        assert engine.version == 2
