"""Rank of a process, from the variables of torchrun, SLURM or torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit.fake_slurm import put_on_path

import vectorlm
from vectorlm import Topology
from vectorlm.errors import LaunchError
from vectorlm.ranks.topology import first_host, is_rank, srun_variables


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


SCRIPT = Path(__file__).with_name("node_script.py")
TASK = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}


def test_a_task_of_srun_is_a_rank():
    topology = Topology.from_environment(TASK | {"SLURM_LOCALID": "1"})
    assert (topology.rank, topology.local_rank, topology.world_size) == (5, 1, 8)
    assert (topology.node, topology.num_nodes) == (1, 2)
    assert is_rank(TASK)
    found = srun_variables(TASK)
    assert found["MASTER_ADDR"] == "gpu03"
    # Another task of the step has the same port; another step of the job has a different one.
    port = found["MASTER_PORT"]
    assert srun_variables(TASK | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})["MASTER_PORT"] == port
    assert srun_variables(TASK | {"SLURM_STEP_ID": "3"})["MASTER_PORT"] != port


def test_who_names_the_store_is_heard():
    named = srun_variables(TASK | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"})
    assert (named["MASTER_ADDR"], named["MASTER_PORT"]) == ("10.0.0.1", "29400")
    assert srun_variables(TASK | {"SLURM_STEP_NUM_NODES": "1"})["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    "variables",
    [
        # The scripts of sbatch and of an srun with one task start ranks themselves.
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"},
        TASK | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"},
    ],
)
def test_a_process_that_is_no_task_of_several_is_no_rank(variables):
    assert srun_variables(variables) == {}
    assert not is_rank(variables)


def test_a_torchrun_that_srun_started_numbers_its_ranks_itself():
    torchrun = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    torchrun |= {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert Topology.from_environment(TASK | torchrun).rank == 1


@pytest.mark.parametrize(
    ("variables", "message"),
    [({"SLURM_STEP_NUM_TASKS": "7"}, "7 tasks"), ({"SLURM_LOCALID": "0"}, "LOCAL_RANK")],
)
def test_tasks_that_do_not_make_a_run_are_refused(variables, message):
    with pytest.raises(LaunchError, match=message):
        Topology.from_environment(TASK | variables)
    with pytest.raises(LaunchError, match="SLURM_PROCID"):
        Topology.from_environment({"SLURM_STEP_NUM_TASKS": "2"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu03", "gpu03"), ("gpu[03-05,9],login", "gpu03"), ("a,b", "a"), ("rack2-n[7,9]-ib", "rack2-n7-ib")],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize("arguments", [["--ntasks-per-node=2"], pytest.param([], marks=pytest.mark.slow)])
def test_ranks_that_srun_starts_meet(tmp_path, arguments):
    num_nodes = 1 if arguments else 2
    environment = put_on_path(
        tmp_path / "bin", SLURM_NNODES=str(num_nodes), SLURM_JOB_NODELIST="localhost,localhost", NODE="0"
    )
    command = ["srun", *arguments, sys.executable, SCRIPT, "exchange"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # Both ranks write to one pipe, and the line of one may begin before the other's line has ended.
    results = [json.loads(text) for text in re.findall(r"\{[^}]*\}", done.stdout)]
    assert [sorted(result["rank"] for result in results), results[0]["total"]] == [[0, 1], 3]
    assert {result["num_nodes"] for result in results} == {num_nodes}


def test_ranks_of_srun_may_make_the_process_group_alone(tmp_path):
    script = (
        "import torch, torch.distributed as dist\n"
        "from vectorlm.ranks.launcher import process_group\n"
        "from vectorlm.ranks.topology import Topology\n"
        "with process_group(Topology.from_environment()):\n"
        "    found = torch.ones(1)\n"
        "    dist.all_reduce(found)\n"
        "    print(f'total {found.item():g}.')\n"
    )
    (tmp_path / "script.py").write_text(script)
    environment = put_on_path(tmp_path / "bin", SLURM_NNODES="1", SLURM_JOB_NODELIST="localhost")
    command = ["srun", "--ntasks-per-node=2", sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("total 2.") == 2, done.stderr


def test_a_rank_is_known_by_its_variables():
    variables = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "0")
    assert is_rank(variables)
    # Schedulers set some of the variables for their own jobs.
    assert not is_rank({"RANK": "0", "WORLD_SIZE": "1"})
    assert not is_rank({})
