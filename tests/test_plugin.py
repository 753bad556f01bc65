"""Objects that a config names by file or module."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from vectorlm.algorithms.registry import get_algorithm
from vectorlm.algorithms.settings import Reduction
from vectorlm.errors import ConfigError, EngineError
from vectorlm.plugin import load_plugin
from vectorlm.report.plots import metric_panel
from vectorlm.report.runs import RunFolder
from vectorlm.sampling.sampler.scheduler import backend_class
from vectorlm.settings import require_choice


def test_a_file_is_run_once(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("first = object()\nsecond = first\n")
    assert load_plugin(f"{path}:first") is load_plugin(f"{path}:second")


def test_functions_of_a_file_run_in_a_process_pool(tmp_path):
    path = tmp_path / "a.file of-mine.py"
    path.write_text("def double(number):\n    return 2 * number\n")
    double = load_plugin(f"{path}:double")
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        assert pool.submit(double, 21).result(timeout=60) == 42


@pytest.mark.parametrize("name", ["nowhere.py:x", "no_such_module_here:x", "math:no_such_function"])
def test_what_does_not_exist_is_named(name):
    with pytest.raises(ConfigError, match=name.partition(":")[0]):
        load_plugin(name)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("\n1 / 0\n", "broken.py:2"),
        ("def x(\n", "broken.py, line 1"),
        ("import sys\nsys.exit(0)\n", "broken.py:2"),
        ("import json\njson.loads('')\n", "broken.py:2"),
        ("import own_helper\n", "own_helper.py:3"),
        ("import no_such_package_at_all\n", "ModuleNotFoundError"),
    ],
)
def test_an_error_of_the_users_files_is_placed_and_may_be_mended(tmp_path, monkeypatch, text, place):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_helper.py").write_text("import json\n\njson.loads('')\n")
    path = tmp_path / "broken.py"
    path.write_text(text)
    names = [f"{path}:x"] + ["broken:x"] * ("line" not in place)
    for name in names:
        with pytest.raises(ConfigError) as caught:
            load_plugin(name)
        assert place in str(caught.value)
    path.write_text("x = 7\n")
    assert load_plugin(f"{path}:x") == 7


def write_neighbours(folder, direct, between, late):
    """Write mine.py, which imports `direct` and, when called, `late`; `direct` imports `between`."""
    folder.mkdir()
    (folder / f"{direct}.py").write_text(f"from {between} import ANSWER\n")
    (folder / f"{between}.py").write_text(f"ANSWER = {len(folder.name)}\n")
    (folder / f"{late}.py").write_text("LATE = 3\n")
    (folder / "mine.py").write_text(
        f"from {direct} import ANSWER\n\ndef score():\n    from {late} import LATE\n    return ANSWER + LATE\n"
    )


@pytest.mark.parametrize("shared", ["direct", "between", "late"])
def test_a_file_finds_its_own_neighbours_also_when_it_is_called(tmp_path, shared):
    """Python keeps one module per name: if another folder's module has the name, the file is refused."""
    names = {neighbour: f"{shared}_{neighbour}" for neighbour in ("direct", "between", "late")}
    write_neighbours(tmp_path / "one", **names)
    assert load_plugin(f"{tmp_path}/one/mine.py:score")() == 6
    others = {neighbour: f"other_{name}" for neighbour, name in names.items()}
    write_neighbours(tmp_path / "other", **others)
    assert load_plugin(f"{tmp_path}/other/mine.py:score")() == 8
    write_neighbours(
        tmp_path / "third",
        **{neighbour: f"third_{name}" for neighbour, name in names.items()} | {shared: names[shared]},
    )
    with pytest.raises(ConfigError, match=names[shared]):
        load_plugin(f"{tmp_path}/third/mine.py:score")


def test_what_is_installed_goes_before_a_neighbour(tmp_path):
    (tmp_path / "time.py").write_text("")
    (tmp_path / "numpy.py").write_text("")
    (tmp_path / "mine.py").write_text(
        "import numpy, time\n\ndef now():\n    return numpy.float64(time.time())\n"
    )
    assert load_plugin(f"{tmp_path}/mine.py:now")() > 0


def slips(name):
    """Return the versions of a name with two different neighbouring letters exchanged."""
    pairs = range(len(name) - 1)
    return {name[:at] + name[at + 1] + name[at] + name[at + 2 :] for at in pairs} - {name}


def test_a_name_with_exchanged_letters_is_asked_back(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def score(text):\n    return 1.0\n\ndef Length(text):\n    return 0.0\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "train/loss": 1.0}\n')
    run = RunFolder(tmp_path)
    found = {
        "score": lambda name: load_plugin(f"{path}:{name}"),
        "Length": lambda name: load_plugin(f"{path}:{name.lower()}"),
        "grpo": get_algorithm,
        "transformers": backend_class,
        "train/loss": lambda name: metric_panel(name, [run]),
        "token_mean": lambda name: require_choice("reduction", name, Reduction),
    }
    for name, look_up in found.items():
        for slip in slips(name):
            with pytest.raises((ConfigError, EngineError, ValueError)) as caught:
                look_up(slip)
            assert f"Did you mean {name!r}?" in str(caught.value), slip
    with pytest.raises(ConfigError) as caught:
        load_plugin(f"{path}:zzz")
    assert "mean" not in str(caught.value)
