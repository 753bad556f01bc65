"""An engine in 8 bits: an update makes it equal to an engine with these weights, and spoiled bytes are noticed."""

import pytest
from kit.families import FAMILIES, save_family
from kit.rank_processes import forked
from quantised_cases import num_bytes, swap


def run(name, world_size, quantization, marks, **options):
    return pytest.param(name, world_size, quantization, options, marks=marks)


@pytest.mark.parametrize(
    ("family", "world_size", "quantization", "options"),
    [
        run("Llama", 1, "fp8_per_channel", ()),
        run("Llama", 1, "fp8_per_channel", (), transport="bucketed"),
        run("Gemma 3", 2, "fp8_per_channel", pytest.mark.slow),
        run("Qwen2", 2, "int8", pytest.mark.slow, transport="bucketed"),
        run("Phi-3", 1, "int8", pytest.mark.long, receiver="packed"),
        run("Llama", 2, "int8", pytest.mark.long, tensor_parallel_size=2),
        run("Qwen2", 2, "fp8_per_channel", pytest.mark.long, tensor_parallel_size=2),
        run("OPT", 1, "fp8_per_channel", pytest.mark.long, dtype="float16"),
        run("Gemma 3", 1, "int8", pytest.mark.long),
    ],
)
def test_a_swapped_engine_is_a_fresh_one_and_a_spoiled_row_or_scale_is_named(
    family, world_size, quantization, options, tmp_path
):
    folder = str(save_family(FAMILIES[family], tmp_path / "model"))
    if world_size == 1:
        outcomes = [swap(folder, quantization, options)]
    else:
        outcomes = forked(swap, folder, quantization, options, world_size=world_size)
    for first, swapped, recovered, fresh, spoiled, report in outcomes:
        assert swapped == fresh, "the engine is not the one that starts from these weights"
        assert first != swapped, "the updates changed nothing, so equality proves nothing"
        assert recovered == swapped
        assert report.num_bytes == num_bytes(folder)
        for name, errors in spoiled:
            assert len(errors) == 2, "a spoiled update was not noticed, or the engine sampled after it"
            assert repr(name) in errors[0]
