"""The example on two nodes, with an engine on each: two launchers, or two torchruns, on loopback."""

import os
import socket
import subprocess
import sys

import pytest
from test_finetune import ROOT, inputs, lines, make_config  # noqa: F401 (`inputs` is a fixture)

SCRIPT = "examples/llama_example_mp.py"
SAMPLER = (
    'train_parameters.sampler={sample_frequency: 4, prompts: ["abc", "xyzk"], vllm_dtype: float32, '
    "sampling_params: {temperature: 0, max_tokens: 6, ignore_eos: true}, "
    "engine: {max_model_len: 32, kv_cache_memory_bytes: 16777216}}"
)


def own_flags(rank, endpoint):
    nodes = ["--nnodes", "2", "--node_rank", str(rank), "--rdzv_endpoint", endpoint]
    return [SCRIPT, "--world_size", "2", *nodes]


def torchrun(rank, endpoint):
    nodes = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv_id", "run", "--rdzv_backend", "c10d"]
    return ["-m", "torch.distributed.run", *nodes, "--rdzv_endpoint", endpoint, SCRIPT]


@pytest.mark.parametrize(
    "command",
    [pytest.param(own_flags, marks=pytest.mark.slow), pytest.param(torchrun, marks=pytest.mark.long)],
)
def test_one_script_runs_on_two_nodes_under_its_own_launcher_and_under_torchrun(command, inputs, tmp_path):  # noqa: F811
    output = tmp_path / "run"
    make_config(inputs, output)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    arguments = ["--yaml_path", str(tmp_path / "run.yaml"), "--set", SAMPLER]
    arguments += ["--set", "train_parameters.sharding_strategy=HYBRID_SHARD"]
    arguments += ["--set", "train_parameters.checkpointing_enabled=True"]
    nodes = [
        subprocess.Popen(
            [sys.executable, *command(rank, endpoint), *arguments],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [node.communicate(timeout=580)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(texts)
    # One rank writes, whichever node it is on.
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
