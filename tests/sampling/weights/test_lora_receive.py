"""The adapters' receiver with simple stand-in layers; tests/sampling/test_lora_engine.py covers vLLM's layers."""

from types import SimpleNamespace

import pytest
import torch
from receivers_here import send

from vectorlm.errors import ChecksumMismatch, WeightMismatch
from vectorlm.sampling.backends.vllm.extension import WeightExtension
from vectorlm.sampling.weights.lora_receive import POLICY_ID
from vectorlm.sampling.weights.plan import TensorSpec
from vectorlm.sampling.weights.receive import EngineReceiver

MAX_RANK, WIDTH, HEIGHT = 4, 6, 10


class Layer:
    """A LoRA layer of two fused parts."""

    def __init__(self):
        self.n_slices = 2
        self.lora_a_stacked = tuple(torch.zeros(1, 1, MAX_RANK, WIDTH) for _ in range(2))
        self.lora_b_stacked = tuple(torch.zeros(1, 1, HEIGHT, MAX_RANK) for _ in range(2))


class Manager:
    """A stand-in for the part of vLLM's manager that the receiver uses."""

    def __init__(self):
        self.modules = {"mlp.gate_up_proj": Layer()}
        self.packed_modules = {"mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"]}
        self.lora_index_to_id = [POLICY_ID]
        self.ignores_new_ones = self.keeps_old_numbers = False

    def remove_adapter(self, number): ...

    def activate_adapter(self, number): ...

    def add_adapter(self, adapter):
        if self.ignores_new_ones:
            return
        layer = self.modules["mlp.gate_up_proj"]
        for index, part in enumerate(self.packed_modules["mlp.gate_up_proj"]):
            a, b = layer.lora_a_stacked[index][0, 0], layer.lora_b_stacked[index][0, 0]
            if not self.keeps_old_numbers:
                a.zero_(), b.zero_()
            if part in adapter.loras:
                a[: len(adapter.loras[part].lora_a)] = adapter.loras[part].lora_a
                b[:, : len(adapter.loras[part].lora_a)] = adapter.loras[part].lora_b


@pytest.fixture
def manager():
    return Manager()


@pytest.fixture
def receivers(manager):
    worker_manager = SimpleNamespace(_adapter_manager=manager, add_dummy_lora=lambda request, rank: True)
    worker = WeightExtension()
    worker.model_runner = SimpleNamespace(get_model=torch.nn.Module, lora_manager=worker_manager)
    return EngineReceiver(lambda method, args=(): [getattr(worker, method)(*args)], "live")


def specs(part="mlp.up_proj", rank=2, height=HEIGHT):
    return [TensorSpec(f"{part}.lora_A", (rank, WIDTH)), TensorSpec(f"{part}.lora_B", (height, rank))]


def load(receivers, manifest):
    """Connect, send random numbers and load them."""
    _, sums = send(receivers.connect(manifest, None, "adapter"))
    receivers.load(0, sums, ["adapter"])


def test_an_adapter_that_arrives_passes_and_lies_in_its_own_part(receivers, manager):
    load(receivers, specs())
    first, second = manager.modules["mlp.gate_up_proj"].lora_a_stacked
    assert not first.any()
    assert second[0, 0, :2].all()
    assert not second[0, 0, 2:].any()


def test_an_adapter_that_the_layers_did_not_take_is_caught(receivers, manager):
    load(receivers, specs())
    manager.ignores_new_ones = True
    with pytest.raises(
        ChecksumMismatch, match=r"2 of 2 tensors .*\['mlp.up_proj.lora_A', 'mlp.up_proj.lora_B'\]"
    ):
        load(receivers, specs())


def test_vllm_writes_the_rows_of_the_next_batch_anew_after_an_update(receivers, manager):
    manager._last_mapping = "rows that sleep has dropped"
    load(receivers, specs())
    assert manager._last_mapping is None


def test_numbers_of_an_earlier_adapter_that_stay_are_caught(receivers, manager):
    load(receivers, specs(rank=3))
    manager.keeps_old_numbers = True
    for narrower in (specs(rank=2), specs("mlp.gate_proj", rank=3)):
        with pytest.raises(ChecksumMismatch):
            load(receivers, narrower)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (specs("mlp.down_proj"), r"no LoRA layer.*\['mlp.down_proj.lora_A', .*Use lora_mode='merged'"),
        (specs(rank=5), r"no room for 2 .*mlp.up_proj.lora_A has rank 5, max_lora_rank is 4"),
        (specs(height=9), r"no room for 1 .*mlp.up_proj.lora_B \(9, 2\) for \(10, 4\)"),
    ],
)
def test_an_adapter_without_a_place_is_refused(receivers, manifest, message):
    with pytest.raises(WeightMismatch, match=message):
        receivers.connect(manifest, None, "adapter")
