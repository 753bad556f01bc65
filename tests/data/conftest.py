import pytest


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    """Read and write beside nothing else, and without the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
