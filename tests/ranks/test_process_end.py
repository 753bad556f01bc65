"""Which of several ranks' errors is the first."""

import pytest

from vectorlm.ranks.process_end import first_fault, write_fault


def leave(folder, rank, error):
    (folder / str(rank)).mkdir()
    write_fault(folder / str(rank) / "error.json", rank, error)


@pytest.mark.parametrize("words", ["Connection reset by peer", "Connection closed by peer [127.0.0.1]:22660"])
def test_a_lost_connection_is_not_the_first_error_where_there_is_another(tmp_path, words):
    """A rank without memory lost its connections, and the rank at the other end was named, which wrote first."""
    leave(tmp_path, 1, RuntimeError(f"Read error: {words}"))
    assert first_fault(tmp_path)[:2] == (1, f"RuntimeError: Read error: {words}")
    leave(tmp_path, 0, MemoryError("no memory"))
    leave(tmp_path, 2, ValueError("later"))
    assert first_fault(tmp_path)[:2] == (0, "MemoryError: no memory")
