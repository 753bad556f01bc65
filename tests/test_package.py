"""The wheel, without the repository."""

import email
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from kit.rank_processes import save_tiny_llama

import vectorlm
from vectorlm.cli import COMMANDS

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
CONFIG = """
model: model
train_parameters: {output_dir: out, max_seq_len: 32, epochs: 1, optimizer: {lr: 1e-4}}
dataset: {eval_bs: 1, train_bs: 1, train_ds: data, eval_ds: data}
"""


def run(command, folder, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy, because setuptools creates a build folder next to setup.py."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "vectorlm", folder / "vectorlm", ignore=shutil.ignore_patterns("__pycache__"))
    run([*PIP, "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", "made"], folder)
    (path,) = (folder / "made").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    run([*PIP, "install", "--no-deps", "--no-compile", "--target", str(folder), str(wheel)], folder)
    return folder


@pytest.mark.slow
def test_the_wheel_says_what_it_is(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        about = email.message_from_string(archive.read(path).decode())
    assert {name.split("/")[0].split("-")[0] for name in names} == {"vectorlm"}
    assert "vectorlm/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") or name.endswith("dist-info/LICENSE") for name in names)
    assert (about["Name"], about["Version"]) == ("vectorlm", vectorlm.__version__)
    assert about["Description-Content-Type"] == "text/markdown"
    assert about.get_payload().lstrip().startswith("# vectorlm")
    assert {"cpu", "cuda", "dev", "plots", "wandb"} <= set(about.get_all("Provides-Extra"))


@pytest.mark.slow
def test_the_installed_package_is_light_and_runs_from_any_folder(installed, tmp_path):
    here = {"PYTHONPATH": str(installed)}
    code = (
        "import sys, vectorlm; print(vectorlm.__file__, vectorlm.__version__); "
        "print(sorted({'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    where, loaded = run([sys.executable, "-c", code], tmp_path, **here).splitlines()
    assert where == f"{installed / 'vectorlm/__init__.py'} {vectorlm.__version__}"
    assert loaded == "[]"
    command = [sys.executable, str(installed / "bin/vectorlm")]
    assert all(f"  {name} " in run([*command, "--help"], tmp_path, **here) for name in COMMANDS)
    save_tiny_llama(tmp_path / "model")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text("{}")
    (tmp_path / "mine.yaml").write_text(CONFIG)
    assert "mine.yaml: ok" in run([*command, "check", "mine.yaml"], tmp_path, **here)


def test_the_files_around_the_package_have_its_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == vectorlm.__version__
    assert f"## {vectorlm.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_public_names_complete_before_their_first_use():
    code = (
        "import sys, vectorlm; assert not set(vectorlm.__all__) - set(dir(vectorlm)); "
        "print({'torch', 'vllm'} & set(sys.modules)); "
        "import vectorlm.algorithms; print(*dir(vectorlm.algorithms))"
    )
    loaded, names = run([sys.executable, "-c", code], ROOT).splitlines()
    assert loaded == "set()"
    assert {"entropy", "kl_estimate", "ppo_policy_loss", "AlgorithmSpec"} <= set(names.split())
