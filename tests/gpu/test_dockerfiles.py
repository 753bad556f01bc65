"""Static checks of the Dockerfiles: the files and commands that they use exist. No test builds them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def lines_of(path):
    """Return the instructions, each on one line."""
    return [line for line in path.read_text().replace("\\\n", " ").splitlines() if line and line[0] != "#"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_installation_finds_all_that_it_reads_in_its_layer(path, tmp_path):
    lines = lines_of(path)
    installs = next(index for index, line in enumerate(lines) if line.startswith("RUN make install"))
    for line in lines[:installs]:
        if line.startswith("COPY"):
            *sources, _ = line.split()[1:]
            for source in sources:
                assert (ROOT / source).exists(), source
                if (ROOT / source).is_file():
                    shutil.copy(ROOT / source, tmp_path)
                else:
                    (tmp_path / source).symlink_to(ROOT / source)
    device = path.name.removesuffix(".Dockerfile")
    assert f"ENV VECTORLM_DEVICE={device} " in path.read_text()
    words = ["make", "-n", "install", f"VECTORLM_DEVICE={device}"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert "bash .ci/setup" in done.stdout, done.stderr
    for name in re.findall(r"requirements/\S+\.txt", (ROOT / ".ci/setup").read_text()):
        assert (tmp_path / name).exists(), name
    for name in re.findall(r'HERE / "(.+?)"', (ROOT / "setup.py").read_text()):
        assert (tmp_path / name).exists(), name


def test_a_device_on_the_command_line_changes_the_installation(tmp_path):
    for name in (".ci", "requirements", "setup.py", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").mkdir()
    for there, wanted in (("cpu", "cuda"), ("cuda", "cpu"), ("cpu", "cpu")):
        (tmp_path / ".venv/.installed").write_text(there)
        words = ["make", "-n", "install", f"VECTORLM_DEVICE={wanted}"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert ("bash .ci/setup" in done.stdout) == (there != wanted), done.stdout + done.stderr


def test_ranks_on_the_command_line_do_not_look_like_torchrun(tmp_path):
    (tmp_path / "Makefile").write_text(f"include {ROOT / 'Makefile'}\nshow:\n\t@env\n")
    done = subprocess.run(["make", "show", "WORLD_SIZE=2"], cwd=tmp_path, capture_output=True, text=True)
    assert "PATH=" in done.stdout, done.stderr
    assert "\nWORLD_SIZE=" not in done.stdout


DRIVER_TOO_OLD = """#!/bin/bash
case "$*" in *init*) echo "RuntimeError: The NVIDIA driver on your system is too old" >&2; exit 1 ;; esac
echo 2.13.0 for CUDA 13.0
"""


def test_a_gpu_that_torch_cannot_use_is_an_error_that_names_the_driver(tmp_path):
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    for name, text in {
        ".venv/bin/python": DRIVER_TOO_OLD,
        "bin/nvidia-smi": "#!/bin/bash\necho 550.54.15\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", ".ci/setup", "--driver"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert (
        "torch 2.13.0 for CUDA 13.0 cannot use the GPU of this machine, whose driver is 550.54.15"
        in done.stderr
    )
    assert "The NVIDIA driver on your system is too old" in done.stderr
