import dataclasses

import pytest

from vectorlm import Topology


def test_a_lone_process_is_rank_0_of_1():
    topology = Topology.from_environment({})
    assert (topology.rank, topology.world_size, topology.local_rank, topology.local_world_size) == (
        0,
        1,
        0,
        1,
    )
    assert topology.is_main
    assert topology.error_file is None


def test_the_launchers_variables_are_read():
    topology = Topology.from_environment(
        {
            "RANK": "5",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "8",
            "LOCAL_WORLD_SIZE": "4",
            "TORCHELASTIC_ERROR_FILE": "e",
        }
    )
    assert (topology.rank, topology.local_rank, topology.node) == (5, 1, 1)
    assert not topology.is_main
    assert topology.error_file == "e"


def test_a_rank_outside_the_world_is_an_error():
    with pytest.raises(ValueError, match="RANK=2 lies outside WORLD_SIZE=2: it must be 0 to 1"):
        Topology.from_environment({"RANK": "2", "WORLD_SIZE": "2"})


def test_a_topology_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Topology().rank = 1
