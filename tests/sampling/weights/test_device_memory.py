"""Handles of device memory, with a driver simulated in this process's memory; no test uses a device."""

import ctypes
import gc
import os
from dataclasses import replace
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from hypothesis import strategies
from swaps_here import TRANSPORTS, Model, move, swap_of
from torch._subclasses.fake_tensor import FakeTensorMode

from vectorlm.errors import HandleRefused, WeightMismatch
from vectorlm.ranks.topology import Topology
from vectorlm.sampling import transport as transports
from vectorlm.sampling.weights import exports
from vectorlm.sampling.weights import exports as device_memory
from vectorlm.sampling.weights.copy_list import CopyList
from vectorlm.sampling.weights.exports import DeviceHandle, Export, FileHandle, Lent
from vectorlm.sampling.weights.plan import Layout, Slot, TensorSpec
from vectorlm.sampling.weights.record import LoadPlan
from vectorlm.sampling.weights.shared_base import SharedBase, lent_to, views_of

INVALID_VALUE, MAP_FAILED = 1, 205


class Driver:
    """CUDA's driver for handles, whose allocations are tensors that are mapped at their own address."""

    def __init__(self, *allocations):
        self.starts = {allocation.data_ptr(): allocation.nbytes for allocation in allocations}
        self.mapped, self.num_opened, self.refuses = [], 0, False

    def cuMemGetAddressRange_v2(self, start, size, pointer):
        assert size is None
        for first, num_bytes in self.starts.items():
            if first <= pointer.value < first + num_bytes:
                start._obj.value = first
                return 0
        return INVALID_VALUE

    def cuIpcGetMemHandle(self, handle, start):
        assert start.value in self.starts, "only the start of an allocation has a handle"
        ctypes.memmove(handle, bytes(start) + bytes(56), 64)
        return 0

    def cuIpcOpenMemHandle_v2(self, pointer, handle, flags):
        assert flags.value == 1, "memory of another device is mapped for this one"
        if self.refuses:
            return MAP_FAILED
        pointer._obj.value = int.from_bytes(bytes(handle)[:8], "little")
        self.mapped.append(pointer._obj.value)
        self.num_opened += 1
        return 0

    def cuIpcCloseMemHandle(self, pointer):
        self.mapped.remove(pointer.value)
        return 0

    def cuGetErrorString(self, code, text):
        text._obj.value = b"mapping of buffer object failed"
        return 0


@pytest.fixture
def install(monkeypatch):
    """Return a function that installs a driver with these allocations; its only device is the host."""

    def install(*allocations):
        driver = Driver(*allocations)
        monkeypatch.setattr(device_memory, "driver", lambda: driver)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(exports, "_uuid", lambda device: "GPU-a")
        tensor_at = exports.tensor_at
        monkeypatch.setattr(exports, "tensor_at", lambda *place: tensor_at(*place[:-1], torch.device("cpu")))
        return driver

    return install


def test_a_handle_leads_to_a_tensor_in_the_midst_of_an_allocation(install):
    whole = torch.arange(24.0).reshape(6, 4)
    driver = install(whole)
    for rows in (whole[2:5], whole[5], whole.view(torch.bfloat16)[1:]):
        handle = DeviceHandle.of(rows)
        seen = handle.open()
        assert seen.data_ptr() == rows.data_ptr()
        assert torch.equal(seen, rows)
        handle.close(seen)
    assert (driver.mapped, driver.num_opened) == ([], 3)


def test_what_the_driver_says_is_part_of_the_error(install):
    whole = torch.zeros(4)
    driver = install(whole)
    driver.refuses = True
    with pytest.raises(
        HandleRefused, match=r"OpenMemHandle_v2: mapping of buffer object failed \(error 205\)"
    ):
        DeviceHandle.of(whole).open()
    with pytest.raises(HandleRefused, match="GetAddressRange"):
        DeviceHandle.of(torch.zeros(4))
    handle = DeviceHandle("GPU-b", bytes(64), 0, (4,), (1,), "float32")
    with pytest.raises(HandleRefused, match="GPU-b"):
        handle.open()


MANIFEST = [TensorSpec("w", (8, 4)), TensorSpec("v", (8, 4))]
PLAN = LoadPlan.whole(MANIFEST, lambda _: "bfloat16")
LAYOUT = Layout("", 128, (Slot("w", (8, 4), "bfloat16", 0), Slot("v", (8, 4), "bfloat16", 64)))
ENDS = ("close", "again", "missing rows", "refused")


@hypothesis.given(strategies.lists(strategies.sampled_from(ENDS), max_size=6))
def test_all_that_was_opened_is_closed_in_every_order_of_ends(install, ends):
    """A receiver opens exported rows repeatedly, and cannot open some of them."""
    whole = torch.randn(16, 4)
    driver = install(whole)
    halves = [Export(name, (row, 0), DeviceHandle.of(whole[first : first + 4])) for name, row, first in [
        ("w", 0, 0), ("w", 4, 4), ("v", 0, 8), ("v", 4, 12)]]  # fmt: skip
    targets = {name: torch.zeros(8, 4, dtype=torch.bfloat16) for name in "wv"}
    copies = None
    for end in ends:
        driver.refuses = end == "refused"
        if end == "close" and copies is not None:
            copies.close()
            copies = None
        elif end == "again":
            earlier, copies = copies, CopyList(LAYOUT, halves, PLAN, targets, may_alias=True)
            if earlier is not None:
                earlier.close()
            copies.copy_round()
            assert torch.equal(torch.cat([targets["w"], targets["v"]]), whole.to(torch.bfloat16))
        elif end in ("missing rows", "refused"):
            error = HandleRefused if end == "refused" else WeightMismatch
            with pytest.raises(error):
                CopyList(LAYOUT, halves[:3], PLAN, targets, may_alias=True)
        assert len(driver.mapped) == (0 if copies is None else len(halves))
    if copies is not None:
        copies.close()
    assert driver.mapped == []


def test_no_copy_of_a_pull_crosses_devices(install, monkeypatch):
    """torch copies between devices on the source's device, which cannot write to vLLM's sleep-mode memory."""
    whole = torch.zeros(8, 4)
    install(whole)
    own = 0
    visible = ["GPU-b", "GPU-a"]  # An engine of rank 1 sees its own device first.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: own)
    monkeypatch.setattr(exports, "_uuid", lambda index: visible[index])
    with FakeTensorMode():
        monkeypatch.setattr(
            exports, "tensor_at", lambda *place: torch.empty(place[2], dtype=place[4], device=place[5])
        )
        of_ranks = [
            Export("w", (4 * rank, 0), DeviceHandle(uuid, bytes(64), 0, (4, 4), (4, 1), "float32"))
            for rank, uuid in enumerate(("GPU-a", "GPU-b"))
        ]
        monkeypatch.setattr(exports, "map_memory", lambda allocation: 0)
        plan = LoadPlan.whole(MANIFEST[:1], lambda _: "bfloat16")
        target = torch.empty(8, 4, dtype=torch.bfloat16, device=f"cuda:{own}")
        copies = CopyList(Layout("", 64, LAYOUT.slots[:1]), of_ranks, plan, {"w": target}, may_alias=False)
        ((targets, sources),) = copies._batches[0]
        assert len(targets) == len(sources) == 2
        assert {tensor.device for tensor in (*targets, *sources)} == {target.device}


def test_auto_pushes_where_a_handle_is_refused_and_the_run_goes_on(monkeypatch):
    """The topology is CUDA's and the memory the host's; the refused handle is a file's."""
    monkeypatch.setattr(transports, "pull_obstacle", lambda *about: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    refused = SimpleNamespace(by=HandleRefused("CUDA's driver refused cuIpcOpenMemHandle_v2"))
    opened = FileHandle.open

    def open_or_refuse(handle):
        if refused.by:
            raise refused.by
        return opened(handle)

    monkeypatch.setattr(FileHandle, "open", open_or_refuse)
    model, reference = Model(), Model()
    swap, engine = swap_of(Topology(device="cuda:0"), "auto")
    with pytest.warns(UserWarning, match="bucketed"):
        swap.update(model, 0, "refuse", TRANSPORTS)
    for step in (1, 2):
        move(model, reference, seed=step)
        assert swap.update(model, step, "refuse", TRANSPORTS).transport == "bucketed"
        assert engine.differs_from(reference) == []
    pulled, _ = swap_of(Topology(), "pull")
    with pytest.raises(HandleRefused):
        pulled.update(model, 0, "refuse", TRANSPORTS)


def test_a_shared_base_is_unmapped_with_its_model_and_stays_on_its_device(install):
    class Frozen(Model):
        def get_input_embeddings(self):
            return self.table

    block, model = torch.arange(64.0), Frozen().requires_grad_(False)
    driver = install(block)
    fused = block[8:56].view(12, 4)
    exports = [
        Export(f"{name}.weight", (0, 0), DeviceHandle.of(part))
        for name, part in (("up", fused[:6]), ("gate", fused[6:]))
    ]
    lent = Lent(os.getpid(), exports, frozenset())
    shared = SharedBase(
        model, views_of(model, lent_to([lent], SimpleNamespace(is_cuda=True, device="cuda:0"))), lent
    )
    assert torch.equal(model.gate.weight, fused[6:])
    assert len(driver.mapped) == len(shared.parameters) == 2
    del model
    gc.collect()
    assert shared.is_over
    assert driver.mapped == []
    elsewhere = Lent(1, [replace(exports[0], handle=replace(exports[0].handle, device="GPU-b"))], frozenset())
    with pytest.raises(HandleRefused, match="no engine runs on cuda:0"):
        lent_to([elsewhere], SimpleNamespace(is_cuda=True, device="cuda:0"))
