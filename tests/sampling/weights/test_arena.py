import gc
import os
from pathlib import Path

import pytest
import torch
from kit.forks import fork, kill

from vectorlm.sampling.weights.arena import Arena, MappedArenas
from vectorlm.sampling.weights.plan import Layout, Slot
from vectorlm.train.handover import _host_block


def test_what_one_process_writes_the_other_reads():
    arena = Arena.create(256)
    slot = Slot("w", (3, 4), "float32", 64)
    child, _ = fork(lambda: Arena.open(arena.path, 256).view(slot).fill_(2.5).sum().item())
    kill(child)
    assert torch.equal(arena.view(slot), torch.full((3, 4), 2.5))
    assert not arena.bytes[:64].any()


def test_an_open_file_of_the_user_is_no_arena(tmp_path):
    path = tmp_path / "thesis"
    path.write_bytes(b"x" * 256)
    with path.open("r+b") as file, pytest.raises(ValueError, match="path="):
        Arena.open(f"/proc/{os.getpid()}/fd/{file.fileno()}", 256)
    assert path.read_bytes() == b"x" * 256


def test_the_arena_has_no_name_that_a_crash_could_leave_behind():
    before = set(os.listdir("/dev/shm"))
    arena = Arena.create(1 << 20)
    assert set(os.listdir("/dev/shm")) == before
    assert "memfd" in os.readlink(arena.path)


def test_an_arena_that_is_too_small_is_refused():
    arena = Arena.create(128)
    with pytest.raises(ValueError, match="path="):
        Arena.open(arena.path, 256)


def test_a_closed_arena_is_gone():
    arena = Arena.create(128)
    arena.close()
    with pytest.raises(FileNotFoundError):
        Path(arena.path).stat()


def descriptors_of(arena):
    paths = map(str, Path("/proc/self/fd").iterdir())
    return sum(os.path.exists(path) and arena.is_at(path) for path in paths)


def test_an_arena_gives_its_file_back_once(tmp_path):
    arena, slot = Arena.create(128), Slot("w", (4,), "float32", 0)
    before = descriptors_of(arena)
    Arena.open(arena.path, 128).view(slot).fill_(2.0)
    gc.collect()
    assert descriptors_of(arena) == before
    assert arena.view(slot).tolist() == [2.0] * 4
    arena.close()
    # The descriptor's number now belongs to another file.
    number, other = int(Path(arena.path).name), os.open(tmp_path, os.O_RDONLY)
    os.dup2(other, number)
    del arena
    gc.collect()
    for descriptor in {number, other}:
        os.close(descriptor)


def test_an_arena_is_mapped_once_unless_another_takes_its_path():
    first, mapped = Arena.create(128), MappedArenas()
    layout = Layout(first.path, 128, (Slot("w", (4,), "float32", 0),))
    place = mapped.slots_of(layout)["w"]
    assert mapped.slots_of(layout)["w"] is place
    first.close()
    second = Arena.create(128)
    assert second.path == layout.path, "the descriptor was not used again, so this test would prove nothing"
    mapped.slots_of(layout)["w"].fill_(1.0)
    assert second.view(layout.slots[0]).all()
    assert not place.any()
    mapped.close()


class Cudart:
    """A stand-in for CUDA's runtime that keeps registered host memory by address."""

    def __init__(self):
        self.registered = {}

    def cudaHostRegister(self, address, num_bytes, flags):
        assert address not in self.registered
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return 0


def test_host_memory_is_registered_with_cuda_once_and_for_as_long_as_it_lives(monkeypatch):
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    arena = Arena.create(256)
    same = Arena.open(arena.path, 256)
    block = _host_block(100, is_pinned=True)
    assert sorted(cudart.registered.values()) == [100, 256, 256]
    arena.close()
    assert sorted(cudart.registered.values()) == [100, 256]
    # An error would drop the receiver without closing it.
    del same, block
    gc.collect()
    assert cudart.registered == {}
