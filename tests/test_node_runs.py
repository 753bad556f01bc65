"""The example on two nodes under torchrun, with an engine on each."""

import pytest
from sft_runs import ROOT, SAMPLER, lines, make_config
from two_nodes import TwoNodes


@pytest.mark.slow
def test_the_example_fine_tunes_and_samples_on_two_nodes(inputs, tmp_path):
    output, scratch = tmp_path / "run", tmp_path / "scratch"
    scratch.mkdir()
    make_config(inputs, output)
    command = [ROOT / "examples/llama_example_mp.py", "--yaml_path", tmp_path / "run.yaml", "--set", SAMPLER]
    command += ["--set", "train_parameters.sharding_strategy=HYBRID_SHARD"]
    command += ["--set", "train_parameters.checkpointing_enabled=True"]
    outcomes = TwoNodes(command, scratch).outcomes(timeout_s=380)
    texts = [text for _, text in outcomes]
    assert [code for code, _ in outcomes] == [0, 0], "\n".join(texts)
    # One rank writes, on either node.
    assert sum("step 6: 2 prompts sampled" in text for text in texts) == 1
    samples = lines(output / "samples.jsonl")
    assert [sample["train_step"] for sample in samples] == [0, 0, 4, 4, 6, 6]
    assert [line["step"] for line in lines(output / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5, 6]
    assert (output / "final-model" / "model.safetensors").is_file()
    assert sorted(path.name for path in output.glob("sampler*.log")) == ["sampler.1.log", "sampler.log"]
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000006",
    ]
