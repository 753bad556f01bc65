import pytest
from rank_processes import on_ranks

from vectorlm.checkpoint import folder
from vectorlm.errors import CheckpointError


def see(topology, paths):
    folder.PATIENCE_S = 0.3
    try:
        folder.require_shared(paths[topology.node], topology)
    except CheckpointError as error:
        return str(error)


def test_a_folder_that_all_nodes_see_is_made_and_left_empty(tmp_path):
    path = tmp_path / "runs" / "one"
    assert on_ranks(2, see, [path, path], num_nodes=2) == [None, None]
    assert list(path.iterdir()) == []


def test_folders_that_only_look_alike_are_an_error_on_every_rank(tmp_path):
    paths = [tmp_path / "disk-0", tmp_path / "disk-1"]
    paths[1].mkdir()
    texts = on_ranks(2, see, paths, num_nodes=2)
    assert texts[0].startswith(f"node 1 does not see the output_dir {paths[0]} of node 0: ")
    assert texts[1].startswith("node 1 does not see the output_dir")
    assert [list(path.iterdir()) for path in paths] == [[], []]


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_node_asks_nobody(tmp_path, world_size):
    assert on_ranks(world_size, see, [tmp_path / "not made"]) == [None] * world_size
    assert not (tmp_path / "not made").exists()
