"""The notebooks: they run from top to bottom, and running a cell again does no harm."""

import ast
import importlib
import os
import re
import shutil
import sys
import time
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path

import nbformat
import psutil
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from kit.pages import run
from kit.rank_processes import save_tiny_llama
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))
TIMEOUT_S = 600
SHORTER = {
    "hot_swap.ipynb": {"range(6)": "range(1)", '"4096"': '"512"'},
    # A random model replaces SmolLM2 and gives no right answer.
    "own_reward.ipynb": {
        "max_steps=8": "max_steps=2",
        "return float(found is not None and found.group() == answer)": "return len(set(completion)) / 16",
    },
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_every_name_that_a_notebook_imports_from_vectorlm_exists(path):
    """The tests that run notebooks are slow or long."""
    imports = [
        node
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "code"
        for node in ast.walk(ast.parse(re.sub(r"(?m)^( *)[!%].*$", r"\1pass", cell.source)))
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "vectorlm"
    ]
    names = [(node.module, alias.name) for node in imports for alias in node.names]
    assert [(module, name) for module, name in names if not hasattr(import_module(module), name)] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_first_cell_of_a_notebook_can_run_again_in_a_restarted_kernel(path, tmp_path, monkeypatch):
    """Outside a clone, as in Colab: a kernel starts in the folder that gets the clone."""
    cell = next(cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
    source = TransformerManager().transform_cell(cell.source)
    clone, calls = tmp_path / "vectorlm/examples/notebooks", []

    class Shell:
        def system(self, command):
            calls.append(command.split()[:2])
            clone.mkdir(parents=True)

        def run_line_magic(self, name, arguments):
            if name == "cd":
                os.chdir(arguments.split()[-1])
            else:
                calls.append([name, *arguments.split()[:1]])
                (tmp_path / "site/vectorlm").mkdir(parents=True)
                (tmp_path / "site/vectorlm/__init__.py").touch()

    def run_cell():
        importlib.invalidate_caches()
        exec(source, {"get_ipython": Shell})

    monkeypatch.delitem(sys.modules, "vectorlm", raising=False)
    # Like a kernel of Colab, whose path begins with the folder in which it starts.
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "site")])
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    monkeypatch.chdir(tmp_path)
    run_cell()
    assert (calls, Path.cwd()) == ([["git", "clone"], ["pip", "install"]], clone)
    run_cell()
    monkeypatch.chdir(tmp_path)
    run_cell()
    assert (len(calls), Path.cwd()) == (2, clone)
    # The installation was interrupted.
    shutil.rmtree(tmp_path / "site/vectorlm")
    monkeypatch.chdir(tmp_path)
    run_cell()
    assert (calls[2:], Path.cwd()) == ([["pip", "install"]], clone)


@pytest.fixture
def examples(tmp_path):
    """Return a copy of the examples, because runs must not change committed files."""
    return Path(shutil.copytree(EXAMPLES, tmp_path / "examples"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.name, marks=pytest.mark.slow if path.stem == "own_reward" else pytest.mark.long)
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs_and_says_what_its_committed_outputs_say(examples, name):
    folder = examples / "notebooks"
    save_tiny_llama(examples.parent / "data/smollm2", hidden_size=64, max_length=96)
    notebook = nbformat.read(folder / name, as_version=4)
    for old, new in SHORTER.get(name, {}).items():
        (cell,) = (cell for cell in notebook.cells if old in cell.source)
        cell.source = cell.source.replace(old, new)
    NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": str(folder)}}).execute()
    committed = nbformat.read(EXAMPLES / "notebooks" / name, as_version=4)
    assert kinds_of(notebook) == kinds_of(committed)


def kinds_of(notebook):
    """Return the kinds of output of each cell; how printed text is split into messages is random."""
    return [
        [sorted(output.data) for output in cell.get("outputs", ()) if "data" in output]
        for cell in notebook.cells
    ]


CELLS = """
import sys, time
import psutil
import vectorlm

def make():
    return vectorlm.SamplingEngine(sys.argv[1], dtype="float32", max_model_len=256, kv_cache_memory_bytes=16 << 20)

def samplers():
    return {child.pid for child in psutil.Process().children(True) if "sampler.process" in " ".join(child.cmdline())}

engine = make()
first = samplers()
engine = make()
deadline = time.monotonic() + 30
while first & samplers() and time.monotonic() < deadline:
    time.sleep(0.1)
print(len(first), len(samplers() - first), len(first & samplers()), *samplers())
"""


@pytest.mark.slow
def test_a_cell_run_again_replaces_its_engine_and_the_last_one_ends_with_the_kernel(tmp_path):
    """test_engine.py covers interrupted cells."""
    folder = save_tiny_llama(tmp_path / "model", hidden_size=64, max_length=256)
    (tmp_path / "cells.py").write_text(CELLS)
    printed = run(tmp_path, tmp_path / "cells.py", folder).splitlines()[-1].split()
    assert printed[:3] == ["1", "1", "0"]
    deadline = time.monotonic() + 30
    while (
        is_there := any(psutil.pid_exists(int(pid)) for pid in printed[3:])
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_there
