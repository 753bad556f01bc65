"""The device of device.cpp as torch.device("sim"); this machine's compiler builds it at the first use."""

import contextlib
import shutil
import types
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import _create_fake_pg
from torch.utils.cpp_extension import load

HERE = Path(__file__).parent
BUILT = HERE.parents[1] / "build" / "simdevice"


def why_not():
    """Return the tools that are missing to build the device; None if none is."""
    lacking = [name for name in ("g++", "ninja") if shutil.which(name) is None]
    return f"no {' and no '.join(lacking)}" if lacking else None


class Nothing:
    """A stream or event of a device that does all work immediately."""

    def __init__(self, *arguments, **named):
        pass

    def __getattr__(self, name):
        return lambda *arguments, **named: self


def build():
    """Compile device.cpp, unless it is already built."""
    BUILT.mkdir(parents=True, exist_ok=True)
    load("simdevice", [str(HERE / "device.cpp")], ["-O1"], build_directory=str(BUILT), is_python_module=False)


def install():
    """Add the device to this process, with a process group of one rank whose collectives copy."""
    build()
    torch.utils.rename_privateuse1_backend("sim")
    device = types.ModuleType("torch.sim")
    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "manual_seed",
        "manual_seed_all",
        "set_rng_state",
    ):
        setattr(device, name, lambda *arguments: None)
    device.Stream = device.Event = device.device = Nothing
    device.current_stream = device.default_stream = Nothing
    device.stream = lambda stream: contextlib.nullcontext()
    device.is_available = device.is_initialized = lambda: True
    device._is_in_bad_fork = lambda: False
    device.device_count, device.current_device = lambda: 1, lambda: 0
    device.get_amp_supported_dtype = lambda: [torch.bfloat16]
    device.get_rng_state = lambda *arguments: torch.get_rng_state()
    torch._register_device_module("sim", device)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("copies", _create_fake_pg, extended_api=True, devices=["sim"])
    dist.init_process_group("cpu:gloo,sim:copies", store=dist.HashStore(), rank=0, world_size=1)
