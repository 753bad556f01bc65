"""What the facts about a machine mean for a run: one verdict a line, each with its fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from packaging.requirements import Requirement

from vectorlm.cli.machine import Facts, Probe
from vectorlm.preflight.memory_plan import GIB

MIN_SHM_BYTES, MIN_MEMORY_BYTES, MIN_DISK_BYTES = GIB, 4 * GIB, 2 * GIB
"""What `make run` has room in. Docker's /dev/shm of 64 MiB is below the first."""
MIN_DESCRIPTORS = 1024
PYTHONS = ("3.11", "3.12")
OK, WARN, STOP = "ok", "warn", "STOP"


class Verdict(NamedTuple):
    """One line of ``vectorlm doctor``."""

    level: str
    """``ok``, ``warn``: some runs fail or are slow, or ``STOP``: no run starts."""
    name: str
    text: str
    fix: str = ""
    """What to do about it; empty where the level is ``ok``."""


def judge(facts: Facts) -> list[Verdict]:
    """Return a verdict on each fact; the same facts give the same verdicts."""
    return [
        *_python(facts),
        *_packages(facts),
        *_torch(facts),
        *_vllm(facts),
        *_memory(facts),
        *_processes(facts),
        *_files(facts),
    ]


def report(verdicts: Sequence[Verdict]) -> str:
    """Return a line for each verdict, its fix below it, and what they come to."""
    width = max(len(verdict.name) for verdict in verdicts)
    lines = []
    for level, name, text, fix in verdicts:
        lines.append(f"{level:4}  {name:{width}}  {text}")
        if level != OK:
            lines.append(f"{'':{width + 8}}{fix}")
    stops, warnings = (sum(verdict.level == level for verdict in verdicts) for level in (STOP, WARN))
    if stops:
        lines.append(f"\nA run would not start here: {stops} STOP, {warnings} warn.")
    elif warnings:
        lines.append(f"\nA run starts here, but look at the {warnings} warning{'s' * (warnings > 1)}.")
    else:
        lines.append("\nA run starts here.")
    return "\n".join(lines)


def _python(facts: Facts) -> Iterator[Verdict]:
    fits = facts.python.rsplit(".", 1)[0] in PYTHONS
    fix = f"Make the environment with Python {' or '.join(PYTHONS)}: make install PYTHON=…"
    yield _either(fits, STOP, "python", f"{facts.python} on {facts.system}", fix)
    if facts.packages:
        yield Verdict(OK, "vectorlm", facts.vectorlm)
    else:
        text = f"{facts.vectorlm}, not installed, so what it needs was not compared"
        yield Verdict(WARN, "vectorlm", text, "Install it: make install, or pip install -e .")


def _packages(facts: Facts) -> Iterator[Verdict]:
    here: list[str] = []
    missing: dict[str, list[str]] = {}
    for package in facts.packages:
        asked = Requirement(package.requirement)
        name, rule = asked.name, asked.specifier
        if package.extra is not None and package.version is None:
            missing.setdefault(package.extra, []).append(name)
        elif package.extra is not None:
            here.append(f"{name} {package.version}")
        elif package.version is None:
            fix = f"Install it: pip install '{package.requirement}'"
            yield Verdict(STOP, name, "not installed", fix)
        elif not rule.contains(package.version, prereleases=True):
            fix = f"Install the pinned versions: make install, or pip install '{package.requirement}'"
            yield Verdict(STOP, name, f"{package.version}, but vectorlm needs {rule}", fix)
        else:
            yield Verdict(OK, name, package.version)
    parts = [", ".join(dict.fromkeys(here))] if here else []
    if missing:
        lacks = (f"{', '.join(names)} (extra {extra})" for extra, names in missing.items())
        parts.append(f"not installed: {', '.join(lacks)}")
    if parts:
        yield Verdict(OK, "optional", "; ".join(parts))


def _torch(facts: Facts) -> Iterator[Verdict]:
    torch, driver = facts.torch, facts.gpu_driver
    if torch.error is not None:
        yield _broken("torch", torch)
        return
    build, error = torch.found["cuda_build"], torch.found["cuda_error"]
    if driver is None:
        yield Verdict(OK, "device", "CPU: there is no NVIDIA device")
    elif build is None:
        text = f"CPU: this torch is built for the CPU, but there is a GPU with driver {driver}"
        yield Verdict(WARN, "device", text, "Install the CUDA stack: VECTORLM_DEVICE=cuda make install")
    elif error is not None:
        text = f"torch for CUDA {build} cannot use the GPU, whose driver is {driver}: {error}"
        fix = (
            "Install a newer driver (CUDA 13 needs 580), or run on the CPU: VECTORLM_DEVICE=cpu make install"
        )
        yield Verdict(STOP, "device", text, fix)
    for index, (name, total, free) in enumerate(torch.found["devices"]):
        text = f"cuda:{index}, {name}, {_size(free)} of {_size(total)} free"
        fix = "See who uses it: nvidia-smi. Or choose other devices: CUDA_VISIBLE_DEVICES."
        yield _either(free >= total // 2, WARN, "device", text, fix)
    store = torch.found["store_error"] or facts.loopback_error
    fix = "Ranks meet on 127.0.0.1: bring the loopback interface up (ip link set lo up), and allow its ports."
    yield _either(not store, STOP, "loopback", store or "a store opens on 127.0.0.1", fix)
    if facts.torchvision is not None and facts.torchvision.error is not None:
        text = f"does not import beside this torch: {facts.torchvision.error}"
        fix = "vectorlm does not need it, but transformers imports it where it is: pip uninstall torchvision"
        yield Verdict(STOP, "torchvision", text, fix)


def _vllm(facts: Facts) -> Iterator[Verdict]:
    if facts.vllm is None:
        text = "not installed: only `inference: transformers`, a server elsewhere, and runs without a sampler work"
        yield Verdict(WARN, "vllm", text, "pip install 'vectorlm[cpu]', or 'vectorlm[cuda]' on a GPU machine")
    elif facts.vllm.error is not None:
        yield _broken(f"{facts.vllm_version}", facts.vllm)
    else:
        device = facts.vllm.found["device"]
        has_devices = bool(facts.torch.found.get("devices"))
        if device == ("cuda" if has_devices else "cpu"):
            yield Verdict(OK, "vllm", f"{facts.vllm_version} imports and samples on {device}")
        else:
            other = "cuda" if has_devices else "cpu"
            text = f"{facts.vllm_version} samples on {device or 'no device'}, but torch trains on {other}"
            fix = f"Engine and ranks share a device: VECTORLM_DEVICE={other} make install"
            yield Verdict(STOP, "vllm", text, fix)


def _either(is_fine: bool, otherwise: str, name: str, text: str, fix: str) -> Verdict:
    """Return ``ok`` without the fix, or the level `otherwise` with it."""
    return Verdict(OK, name, text) if is_fine else Verdict(otherwise, name, text, fix)


def _broken(name: str, probe: Probe) -> Verdict:
    fix = "Install the pinned versions together: delete .venv, then make install."
    return Verdict(STOP, name, f"does not import: {probe.error}", fix)


def _memory(facts: Facts) -> Iterator[Verdict]:
    limit = facts.limits.memory_bytes
    total = min(facts.memory_bytes, limit or facts.memory_bytes)
    free = min(facts.available_bytes, total)
    text = f"{_size(free)} of {_size(total)} free"
    if total < facts.memory_bytes:
        text += f" (the container's limit; the machine has {_size(facts.memory_bytes)})"
    fix = "End other processes, or raise the limit; `vectorlm check` prints what a run needs."
    yield _either(free >= MIN_MEMORY_BYTES, WARN, "memory", text, fix)
    fix = "Docker: --shm-size 2g. Else: mount -o remount,size=2g /dev/shm"
    needs = "tensor-parallel engines, NCCL and data loaders with workers need it"
    if facts.shm_bytes is None or facts.shm_free_bytes is None:
        yield Verdict(WARN, "/dev/shm", f"is not there: {needs}", fix)
    else:
        has_room = facts.shm_free_bytes >= MIN_SHM_BYTES
        text = f"{_size(facts.shm_free_bytes)} of {_size(facts.shm_bytes)} free"
        yield _either(has_room, WARN, "/dev/shm", text if has_room else f"{text}: {needs}", fix)
    error = facts.memfd_error
    text = f"cannot be shared between processes: {error}" if error else "can be shared through /proc"
    fix = "Weights reach the engine through it: mount /proc, and allow memfd_create in the sandbox."
    yield _either(error is None, STOP, "unnamed memory", text, fix)


def _processes(facts: Facts) -> Iterator[Verdict]:
    count, limit = len(facts.cores), facts.limits.cores
    text = f"{count} ({', '.join(map(str, facts.cores))})" if count <= 8 else f"{count}"
    if limit is not None and limit < count:
        # Threads are counted by cores; those above the limit wait for each other.
        text += f", but the container may use {limit:g} of them at a time"
        some = ",".join(map(str, facts.cores[: max(1, int(limit))]))
        fix = f"Keep to as many cores: taskset -c {some} vectorlm run …"
        yield Verdict(WARN, "cores", text, fix)
    elif facts.busy_cores:
        text += f", of which others keep {', '.join(map(str, facts.busy_cores))} busy"
        yield Verdict(WARN, "cores", text, "Steps take longer than they would alone. See who it is: top")
    else:
        yield Verdict(OK, "cores", text)
    are_enough = facts.max_descriptors >= MIN_DESCRIPTORS
    fix = "ulimit -n 65536 (the transport `pull` keeps one for each parameter)"
    yield _either(are_enough, WARN, "open files", f"at most {facts.max_descriptors} a process", fix)
    text = facts.compiler or "no C++ compiler, which torch.compile needs"
    yield _either(facts.compiler is not None, WARN, "compiler", text, "Debian, Ubuntu: apt install g++")


def _files(facts: Facts) -> Iterator[Verdict]:
    if facts.temporary_error:
        fix = "Set TMPDIR to a folder that can be written."
        yield Verdict(STOP, "temporary files", facts.temporary_error, fix)
    text = f"{_size(facts.disk_free_bytes)} free in this folder"
    fix = "Checkpoints hold weights and optimizer state: set output_dir to a folder with room."
    yield _either(facts.disk_free_bytes >= MIN_DISK_BYTES, WARN, "disk", text, fix)
    offline = f"; the hub is not asked ({', '.join(facts.offline)})" if facts.offline else ""
    what = "cache in {}" if facts.hf_home_is_writable else "the cache {} cannot be written"
    text, fix = what.format(facts.hf_home) + offline, "Set HF_HOME to a folder that can be written."
    yield _either(facts.hf_home_is_writable, WARN, "Hugging Face", text, fix)


def _size(num_bytes: int) -> str:
    """Return a number of bytes as people read it."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / (1 << 20):.0f} MiB"
