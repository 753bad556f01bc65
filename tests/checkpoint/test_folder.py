"""Folders that are complete under their names, whatever was killed meanwhile, and that one run holds."""

import multiprocessing
import os

import pytest

from vectorlm.checkpoint import folder
from vectorlm.checkpoint.folder import begin, finish, held
from vectorlm.errors import ConfigError


class Killed(BaseException):
    """Stands for the end of the process."""


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
    begin(tmp_path / "another")
    assert text_of(path) == ("new" if num_renames == 2 else "old")
    assert not list(tmp_path.glob(".final-model.*"))


def hold(path, entered, leave):
    with held(path):
        entered.set()
        leave.wait(60)


def test_a_folder_that_another_process_holds_is_refused_until_that_one_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "HELD_PATIENCE_S", 0.3)
    context = multiprocessing.get_context("spawn")
    entered, leave = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path / "run", entered, leave))
    process.start()
    assert entered.wait(60)
    with pytest.raises(ConfigError, match="another run writes to"), held(tmp_path / "run"):
        pass
    process.kill()
    process.join()
    with held(tmp_path / "run"):
        assert os.listdir(tmp_path / "run") == []
