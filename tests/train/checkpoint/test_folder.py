"""Checkpoint folders: complete under their final names after any kill, locked by one run, and visible to all nodes."""

import errno
import os
import resource
import signal
from types import SimpleNamespace

import pytest
import torch
from kit.forks import fork, kill
from kit.rank_processes import on_ranks
from torch.distributed import DistStoreError
from torch.distributed.checkpoint import CheckpointException

from vectorlm.errors import CheckpointError, ConfigError
from vectorlm.train.checkpoint import folder
from vectorlm.train.checkpoint.folder import begin, finish, locked, naming, naming_the_full_disk


class Killed(BaseException):
    """An exception that simulates the end of the process."""


def write(path, text):
    (begin(path) / "weights").write_text(text)
    finish(path)


def text_of(path):
    return (path / "weights").read_text() if path.exists() else None


@pytest.mark.parametrize("num_renames", [0, 1, 2])
def test_a_kill_between_two_renames_loses_neither_copy_of_a_model(tmp_path, monkeypatch, num_renames):
    path, left = tmp_path / "final-model", iter(range(num_renames))
    write(path, "old")
    replace = os.replace

    def replace_or_die(*names):
        if next(left, None) is None:
            raise Killed
        replace(*names)

    def die(*args, **more):
        raise Killed

    (begin(path) / "weights").write_text("new")
    with monkeypatch.context() as patch:
        patch.setattr(folder.os, "replace", replace_or_die)
        patch.setattr(folder.shutil, "rmtree", die)
        with pytest.raises(Killed):
            finish(path)
    begin(path)
    folder.unfinished(path).rmdir()
    assert text_of(path) == ("new" if num_renames == 2 else "old")
    assert not list(tmp_path.glob(".final-model.*"))


def test_a_checkpoint_of_a_newer_version_is_refused(tmp_path):
    path = tmp_path / "step-00000001"
    path.mkdir()
    (path / "identity.json").write_text('{"format": 99}')
    with pytest.raises(CheckpointError, match="format 99"):
        folder.newest(tmp_path)


def test_a_rank_that_does_not_come_says_nothing_about_the_checkpoint(tmp_path):
    with pytest.raises(RuntimeError, match="Timed out waiting"), naming(tmp_path, "read"):
        raise RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 15000ms")
    with pytest.raises(DistStoreError), naming(tmp_path, "read"):
        raise DistStoreError("wait timeout after 12000ms")
    with pytest.raises(CheckpointError, match="PytorchStreamReader"), naming(tmp_path, "read"):
        raise RuntimeError("PytorchStreamReader failed")


def test_a_checkpoint_that_cannot_be_written_is_named_with_the_first_cause(tmp_path, monkeypatch):
    failures = {1: (OSError(28, "second"), None), 0: (OSError(28, "No space left on device"), None)}
    with (
        pytest.raises(CheckpointError, match=r"step-00000004 .*\(OSError: \[Errno 28\] No space") as raised,
        naming(tmp_path / "checkpoints" / "step-00000004", "write"),
    ):
        raise CheckpointException("ranks", failures)
    assert raised.value.rank == 0
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    wanted = "No space left on device: RuntimeError: PytorchStreamWriter failed"
    with pytest.raises(CheckpointError, match=wanted), naming(tmp_path / "step-00000004", "write"):
        raise RuntimeError("PytorchStreamWriter failed writing file")


def test_a_disk_that_is_full_is_named():
    with (
        pytest.raises(OSError, match="No space left on device: 'runs/mine'"),
        naming_the_full_disk("runs/mine"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space left on device: 'other'"), naming_the_full_disk("runs/mine"):
        raise OSError(errno.ENOSPC, "No space left on device", "other")


def test_a_folder_that_another_process_holds_is_refused_until_that_one_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "LOCK_PATIENCE_S", 0.3)
    process, _ = fork(locked(tmp_path / "run").__enter__)
    with pytest.raises(ConfigError, match="run' is in use by another run"), locked(tmp_path / "run"):
        pass
    kill(process)
    with locked(tmp_path / "run"):
        assert os.listdir(tmp_path / "run") == []


def test_a_fork_that_outlives_its_run_does_not_hold_the_folder(tmp_path):
    with locked(tmp_path):
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        with locked(tmp_path, patience_s=1.0):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_fork_that_leaves_the_block_does_not_let_go_for_its_parent(tmp_path):
    holding = locked(tmp_path)
    holding.__enter__()
    child = os.fork()
    if child == 0:
        holding.__exit__(None, None, None)
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(ConfigError, match="is in use"), locked(tmp_path, patience_s=0.1):
        pass
    holding.__exit__(None, None, None)
    with locked(tmp_path, patience_s=0.1):
        pass


def test_a_checkpoint_that_was_moved_away_and_linked_is_retired_by_its_link(tmp_path):
    moved, link = tmp_path / "moved", tmp_path / "step-00000004"
    moved.mkdir()
    (moved / "file").touch()
    link.symlink_to(moved)
    folder.retire(link)
    assert not link.is_symlink()
    assert (moved / "file").exists()


def test_a_checkpoint_that_cannot_be_deleted_does_not_end_the_run(tmp_path, monkeypatch):
    def refuse(path):
        raise OSError("busy")

    (tmp_path / "step-00000004").mkdir()
    monkeypatch.setattr(folder.shutil, "rmtree", refuse)
    with pytest.warns(UserWarning, match="cannot be deleted"):
        folder.retire(tmp_path / "step-00000004")
    assert folder.steps_in(tmp_path) == []


def test_a_folder_whose_number_is_no_number_is_no_checkpoint(tmp_path):
    (tmp_path / "step-²").mkdir()
    assert folder.steps_in(tmp_path) == []


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
    assert all(text.startswith("node 1 ") for text in texts)
    assert str(paths[0]) in texts[0]
    assert [list(path.iterdir()) for path in paths] == [[], []]


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_node_asks_nobody(tmp_path, world_size):
    assert on_ranks(world_size, see, [tmp_path / "not made"]) == [None] * world_size
    assert not (tmp_path / "not made").exists()


def test_a_limit_of_the_size_of_files_is_named(tmp_path):
    def write_much():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            with naming(tmp_path / "step-1", "write"):
                torch.save(torch.zeros(9999), begin(tmp_path / "step-1") / "file.pt")
        except CheckpointError as error:
            return str(error)

    process, text = fork(write_much)
    kill(process)
    assert "File too large: this process may write files of 4,096 bytes" in text


def test_what_cannot_be_removed_says_why(tmp_path, monkeypatch):
    """Before, the error on a read-only file system was that a killed run's folder exists."""
    path = tmp_path / "step-4"
    begin(path)

    def refuse(folder, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))

    monkeypatch.setattr(folder.shutil, "rmtree", refuse)
    with pytest.raises(OSError, match="Read-only file system"):
        begin(path)
