"""The notebooks run from top to bottom, and a notebook's habits (interrupt, run again) do no harm."""

import os
import queue
import shutil
import threading
import time
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from kit.rank_processes import save_tiny_llama
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))
TIMEOUT_S = 600
SHORTER = {
    "hot_swap.ipynb": {"range(6)": "range(1)", '"4096"': '"512"'},
    # A random model in place of SmolLM2 gets no answer right.
    "own_reward.ipynb": {
        "max_steps=8": "max_steps=2",
        "return float(found is not None and found.group() == answer)": "return len(set(completion)) / 16",
    },
}


@pytest.fixture
def examples(tmp_path):
    """A copy, so that no run changes what is committed."""
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
        (cell,) = (each for each in notebook.cells if old in each.source)
        cell.source = cell.source.replace(old, new)
    NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": str(folder)}}).execute()
    committed = nbformat.read(EXAMPLES / "notebooks" / name, as_version=4)
    assert kinds_of(notebook) == kinds_of(committed)


def kinds_of(notebook):
    """Return the kinds of what each cell shows; how a printed text is cut into messages is chance."""
    return [
        [sorted(output.data) for output in cell.get("outputs", ()) if "data" in output]
        for cell in notebook.cells
    ]


class Kernel:
    """A notebook's kernel, driven by hand."""

    def __init__(self):
        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def run(self, code, interrupt_after_s=None):
        """Run a cell; return what it printed and the name of the error that it raised."""
        if interrupt_after_s is not None:
            threading.Timer(interrupt_after_s, self.manager.interrupt_kernel).start()
        request = self.client.execute(code)
        text, error, deadline = "", None, time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            match message["msg_type"]:
                # The other one says that the engine takes its time to start.
                case "stream" if content["name"] == "stdout":
                    text += content["text"]
                case "error":
                    error = content["ename"]
                case "status" if content["execution_state"] == "idle":
                    return text, error
        raise TimeoutError(code)

    def samplers(self):
        """Return the pids of the sampler processes under the kernel."""
        kernel = self.manager.provisioner.pid
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                    if (
                        parent == kernel
                        and b"vectorlm.sampling.sampler.process" in (folder / "cmdline").read_bytes()
                    ):
                        found.append(int(folder.name))
                except OSError:
                    continue
        return found


@pytest.fixture
def kernel():
    kernel = Kernel()
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


def wait_until(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def cells(tmp_path):
    """Return a cell that makes an engine, and one that uses it."""
    folder = save_tiny_llama(tmp_path / "model", hidden_size=64, max_length=256)
    construct = f"""
import vectorlm
engine = vectorlm.SamplingEngine({str(folder)!r}, dtype="float32", max_model_len=256, kv_cache_memory_bytes=16 << 20)
"""
    short = "print(len(engine.sample([[2, 3]], {'max_tokens': 5, 'ignore_eos': True})[0][0].token_ids))"
    return construct, short


@pytest.mark.slow
def test_interrupted_cells_keep_the_engine_a_cell_run_again_replaces_it_and_the_kernel_takes_the_last_along(
    kernel, tmp_path
):
    construct, short = cells(tmp_path)
    long = "engine.sample([[2, 3]] * 64, {'max_tokens': 250, 'ignore_eos': True, 'n': 8})"
    assert kernel.run(construct) == ("", None)
    for _ in range(2):
        assert kernel.run(short) == ("5\n", None)
        assert kernel.run(long, interrupt_after_s=0.5) == ("", "KeyboardInterrupt")
    (first,) = kernel.samplers()
    assert kernel.run(construct) == ("", None)
    assert wait_until(lambda: first not in kernel.samplers()), "the engine of the first run is still there"
    assert kernel.run(short) == ("5\n", None)
    (second,) = kernel.samplers()
    kernel.manager.shutdown_kernel(now=True)
    assert wait_until(lambda: not os.path.exists(f"/proc/{second}")), "the engine outlived its kernel"
