"""An engine of two workers: same results and checks, and a single error if a worker dies."""

import os
import shutil
import signal
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from child_processes import sampler_pid, worker_pids
from kit.watched_run import GONE_WITHIN_S, shared_memory_of_nobody
from swap_cases import compare, perturb, publishing, require_the_trainers_answers
from transformers import AutoModelForCausalLM

from vectorlm import SamplingEngine, Topology
from vectorlm.errors import ChecksumMismatch, EngineDied, EngineError
from vectorlm.sampling.arguments import parallel_sizes, share_of_engine
from vectorlm.sampling.weights.model_size import read_model_size

EIGHT_HEADS = SimpleNamespace(num_heads=8, num_parameters=0)


# Both workers hold the only key-value head. The vocabulary has 48 rows, which vLLM pads to two times 32.
TINY_LLAMA = {"hidden_size": 64}
pytestmark = pytest.mark.filterwarnings("ignore:another engine of this process is open")
ENGINE_ARGS = {"receiver": "live", "tensor_parallel_size": 2}


@pytest.fixture
def models(folder):
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2)]


@pytest.mark.slow
def test_after_each_update_two_workers_are_the_trainer(engine, models):
    seen = []
    for step in range(3):
        perturb(*models, seed=step)
        engine.update(models[0], step)
        seen.append(compare(engine, models[1]))
    require_the_trainers_answers(seen)
    assert len(worker_pids(sampler_pid())) == 2


@pytest.mark.slow
def test_a_change_in_one_workers_columns_is_caught(engine, models):
    step = engine.version + 1

    def spoil(sums, layout, tensors):
        # The second worker has the last columns.
        tensors["model.layers.1.mlp.down_proj.weight"].view(torch.int32)[3, -1] ^= 1
        return sums

    message = r"1 of 30 tensors .*: \['model.layers.1.mlp.down_proj.weight'\]"
    with publishing(spoil), pytest.raises(ChecksumMismatch, match=message):
        engine.update(models[0], step)
    engine.update(models[0], step)
    assert all(compare(engine, models[0])[0])


# This must be the last test with the shared engine, which does not survive it.
@pytest.mark.slow
def test_a_killed_worker_ends_the_engine_with_its_name_and_nothing_is_left(engine):
    engine.wait_until_ready()
    others = shared_memory_of_nobody()
    first, second = worker_pids(sampler_pid())
    os.kill(second, signal.SIGKILL)
    start = time.monotonic()
    how = rf"(?s)exit code 1.*worker 1 of 2 of the engine \(pid {second}\) was ended by SIGKILL"
    with pytest.raises(EngineDied, match=how):
        engine.sample([[2, 3]])
    assert time.monotonic() - start < GONE_WITHIN_S
    assert not os.path.exists(f"/proc/{first}")
    engine.close()
    assert shared_memory_of_nobody() <= others


@pytest.mark.parametrize(
    ("engine_args", "expected"),
    [({}, (1, 8)), ({"dtype": "float32"}, (2, 4)), ({"tensor_parallel_size": 4}, (4, 2))],
)
def test_on_cuda_all_devices_sample_and_the_weights_say_how_many_make_an_engine(
    folder, monkeypatch, engine_args, expected
):
    num_parameters = read_model_size(folder).num_parameters
    device = SimpleNamespace(total_memory=4.5 * num_parameters / 0.35)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device_name: device)
    monkeypatch.setattr("vectorlm.sampling.arguments.read_model_size", lambda model: EIGHT_HEADS)
    topology = Topology(world_size=8, local_world_size=8, device="cuda:0")
    monkeypatch.setattr(EIGHT_HEADS, "num_parameters", num_parameters)
    assert tuple(parallel_sizes(engine_args, topology, folder).values()) == expected
    assert parallel_sizes(engine_args, Topology(), folder) == {}


def test_devices_that_sample_nothing_are_named():
    topology = Topology(world_size=8, local_world_size=8, device="cuda:0")
    with pytest.warns(UserWarning, match="tensor_parallel_size=2"):
        share_of_engine(None, 2, {"tensor_parallel_size": 2}, topology)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert share_of_engine(None, 1, {}, topology, "server") is None


def test_more_workers_than_devices_are_refused(folder):
    two_devices = Topology(world_size=2, local_world_size=2, device="cuda:0")
    with pytest.raises(ValueError, match="tensor_parallel_size=4"):
        SamplingEngine(str(folder), topology=two_devices, tensor_parallel_size=4)
    with pytest.raises(ValueError, match="tensor_parallel_size=0"):
        SamplingEngine(str(folder), tensor_parallel_size=0)


@pytest.mark.long
def test_a_worker_that_cannot_load_says_why(folder, tmp_path):
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    with (
        SamplingEngine(str(tmp_path), tensor_parallel_size=2, max_model_len=64) as broken,
        pytest.raises(EngineError, match=r"(?s)initialization failed.*Cannot find any model weights"),
    ):
        broken.sample([[2]])
