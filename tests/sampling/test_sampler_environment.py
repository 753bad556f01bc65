"""Devices, cores and threads of a sampler process."""

import os

import pytest

from vectorlm.ranks.topology import Topology
from vectorlm.sampling.backends.server.serve import server_environment
from vectorlm.sampling.process_channel import CORES_VARIABLE, sampler_environment

TWO_RANKS = Topology(0, 0, 2, 2)
SECOND_ON_CUDA = Topology(1, 1, 4, 4, "cuda:1")


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


@pytest.mark.parametrize(
    ("arguments", "num_threads"),
    [
        ({}, 8),
        ({"ranks_per_engine": 1}, 4),
        ({"num_workers": 4}, 2),
        ({"devices": [5, 6, 7]}, 3),
        ({"devices": [5, 6, 7], "num_workers": 3}, 1),
        ({"ranks_per_engine": 1, "devices": [7]}, 1),
    ],
)
def test_engines_and_workers_share_the_cores_that_there_are(arguments, num_threads):
    environment = sampler_environment({}, "scratch", TWO_RANKS, **arguments)
    assert environment["OMP_NUM_THREADS"] == str(num_threads)
    assert environment.get(CORES_VARIABLE) == (
        ",".join(map(str, arguments["devices"])) if "devices" in arguments else None
    )


@pytest.mark.parametrize(
    ("visible", "arguments", "expected"),
    [
        (None, {}, "1,2,3,4,0"),
        (None, {"ranks_per_engine": 2}, "1,2,0,3"),
        (None, {"devices": [4, 5]}, "4,5,0,1,2,3"),
        ("7,6,5,4,3,2", {"devices": [4, 5]}, "3,2,7,6,5,4"),
        ("7,6,5,4,3,2", {"ranks_per_engine": 1}, "6,7,5,4"),
    ],
)
def test_on_cuda_an_engine_sees_its_own_devices_first_and_then_the_other_ranks(visible, arguments, expected):
    given = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    environment = sampler_environment(given, "scratch", SECOND_ON_CUDA, **arguments)
    assert environment["CUDA_VISIBLE_DEVICES"] == expected
    assert CORES_VARIABLE not in environment


def test_the_user_s_number_of_threads_wins_but_not_a_launcher_s():
    assert sampler_environment({"OMP_NUM_THREADS": "3"}, "scratch", TWO_RANKS)["OMP_NUM_THREADS"] == "3"
    launched = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x", "RANK": "0"}
    environment = sampler_environment(launched, "scratch", TWO_RANKS)
    assert environment["OMP_NUM_THREADS"] == "8"
    # torchrun sets one thread only if a node has several ranks.
    for given in (launched | {"OMP_NUM_THREADS": "2"}, launched):
        topology = TWO_RANKS if given["OMP_NUM_THREADS"] == "2" else Topology()
        assert sampler_environment(given, "scratch", topology)["OMP_NUM_THREADS"] == given["OMP_NUM_THREADS"]
    assert not {"RANK", "TORCHELASTIC_RUN_ID"} & environment.keys()


def test_threads_wait_in_short_loops_unless_the_user_says_otherwise():
    def spins(**given):
        environment = sampler_environment(given, "scratch", TWO_RANKS)
        return environment.get("GOMP_SPINCOUNT"), environment.get("OMP_WAIT_POLICY")

    assert spins() == ("10000", None)
    assert spins(GOMP_SPINCOUNT="7") == ("7", None)
    assert spins(OMP_WAIT_POLICY="ACTIVE") == (None, "ACTIVE")


@pytest.mark.parametrize(
    "of_process", [lambda given: sampler_environment(given, "scratch", TWO_RANKS), server_environment]
)
def test_vllm_keeps_its_ports_on_this_machine_unless_the_user_names_an_interface(of_process):
    """vLLM's store and gloo listen on the address of the host name, without authentication."""
    assert {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}.items() <= of_process({}).items()
    own = {"GLOO_SOCKET_IFNAME": "eth0", "VLLM_HOST_IP": "10.0.0.1"}
    assert own.items() <= of_process(own).items()


def test_on_cuda_vllm_compiles_no_sampler_and_multiplies_float32_in_float32_unless_the_user_says_otherwise():
    names = ("VLLM_USE_FLASHINFER_SAMPLER", "TRITON_F32_DEFAULT")

    def found(given, topology=SECOND_ON_CUDA, **arguments):
        environment = sampler_environment(given, "scratch", topology, **arguments)
        return tuple(environment.get(name) for name in names)

    assert found({}, dtype="float32") == ("0", "ieee")
    assert found({}, dtype="bfloat16") == found({}) == ("0", None)
    assert found(dict(zip(names, ("1", "tf32"), strict=True)), dtype="float32") == ("1", "tf32")
    assert found({}, TWO_RANKS, dtype="float32") == (None, None)
