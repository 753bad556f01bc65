import subprocess
import sys

import pytest

import vectorlm
from vectorlm import Topology
from vectorlm.errors import LaunchError
from vectorlm.ranks.topology import is_rank


def test_the_launchers_variables_are_read_and_without_them_a_process_is_rank_0_of_1():
    lone = Topology.from_environment({})
    assert lone == Topology(0, 0, 1, 1, lone.device, None)
    assert lone.is_main
    variables = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    topology = Topology.from_environment(variables | {"TORCHELASTIC_ERROR_FILE": "e"})
    assert topology == Topology(5, 1, 8, 4, topology.device, "e")
    assert (topology.node, topology.num_nodes, topology.is_main) == (1, 2, False)
    with pytest.raises(LaunchError, match="RANK=2"):
        Topology.from_environment({"RANK": "2", "WORLD_SIZE": "2"})


def test_a_rank_without_a_device_of_its_own_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert Topology.from_environment({"RANK": "1", "WORLD_SIZE": "2"}).device == "cuda:1"
    with pytest.raises(LaunchError, match="rank 2"):
        Topology.from_environment({"RANK": "2", "WORLD_SIZE": "3"})
    with pytest.raises(LaunchError, match="rank 2"):
        vectorlm.launch(print, world_size=3)


@pytest.mark.parametrize(
    ("rank", "local_rank", "local_world_size", "more"),
    [(3, 0, 2, {}), (3, 1, 3, {}), (0, 0, 1, {"GROUP_WORLD_SIZE": "2"})],
)
def test_nodes_that_are_not_alike_are_an_error_on_each(rank, local_rank, local_world_size, more):
    numbers = zip(
        ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), (rank, local_rank, local_world_size), strict=True
    )
    variables = {name: str(number) for name, number in numbers}
    with pytest.raises(LaunchError, match="LOCAL_RANK"):
        Topology.from_environment(variables | {"WORLD_SIZE": "4"} | more)


def test_a_rank_is_known_by_its_variables():
    variables = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "0")
    assert is_rank(variables)
    # Schedulers set some of them for their own jobs.
    assert not is_rank({"RANK": "0", "WORLD_SIZE": "1"})
    assert not is_rank({})


def test_a_process_of_torchs_own_variables_is_a_rank_alone_on_its_node():
    pod = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0", "MASTER_PORT": "29500"}
    topology = Topology.from_environment(pod)
    assert (topology.rank, topology.local_rank, topology.local_world_size, topology.num_nodes) == (1, 0, 1, 2)
    assert is_rank(pod)
    assert is_rank({**pod, "LOCAL_RANK": ""})


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_one_of_several_ranks_that_cannot_meet_the_others_is_refused(missing):
    pod = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0", "MASTER_PORT": "29500"}
    for variables in ({**pod, missing: ""}, {name: value for name, value in pod.items() if name != missing}):
        with pytest.raises(LaunchError, match=missing):
            is_rank(variables)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
def test_a_variable_without_a_number_is_named_and_an_empty_one_is_none(name):
    with pytest.raises(LaunchError, match=f"{name}='two'"):
        Topology.from_environment({name: "two"})
    assert Topology.from_environment({name: ""}).world_size == 1


def test_torch_is_not_loaded_to_learn_that_there_is_no_driver():
    lines = [
        "import sys",
        "from vectorlm.ranks import topology",
        "topology.DRIVER_FILES = ('no_driver*',)",
        "assert topology.Topology.from_environment().device == 'cpu'",
        "assert 'torch' not in sys.modules",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
