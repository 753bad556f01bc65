"""Two workers of one engine, each holding its slices, in this process."""

from itertools import pairwise

import pytest
import torch
from receivers_here import receivers_of

from vectorlm.errors import ChecksumMismatch, WeightMismatch
from vectorlm.weights.arena import Arena
from vectorlm.weights.checksum import checksum
from vectorlm.weights.plan import TensorSpec

HIDDEN, COLUMNS = 4, 6
MANIFEST = [
    TensorSpec("up", (8, HIDDEN)),
    TensorSpec("gate", (8, HIDDEN)),
    TensorSpec("down", (5, COLUMNS)),
    TensorSpec("key", (2, HIDDEN)),
    TensorSpec("norm", (HIDDEN,)),
    TensorSpec("table", (6, HIDDEN)),
]


class Half(torch.nn.Module):
    """What one of two workers holds: gate and up by rows, fused; down by columns; the rest as its name says."""

    def __init__(self, worker):
        super().__init__()
        self.worker = worker
        shapes = {
            "gate_up": (8, HIDDEN),
            "down": (5, COLUMNS // 2),  # three columns of fp32: no whole number of 64-bit words
            "key": (2, HIDDEN),  # one head for two workers, so both hold it
            "norm": (HIDDEN,),
            "table": (3, HIDDEN),
        }
        for name, shape in shapes.items():
            setattr(self, name, torch.nn.Parameter(torch.randn(shape), requires_grad=False))

    def load_weights(self, weights):
        for name, tensor in weights:
            if name in ("gate", "up"):
                start = 0 if name == "gate" else 4
                self.gate_up.data[start : start + 4].copy_(tensor.narrow(0, 4 * self.worker, 4))
            elif name == "down":
                self.down.data.copy_(tensor.narrow(1, 3 * self.worker, 3))
            elif name == "table":
                self.table.data.copy_(tensor.narrow(0, 3 * self.worker, 3))
            else:
                getattr(self, name).data.copy_(tensor)


@pytest.fixture
def halves():
    return [Half(worker) for worker in range(2)]


@pytest.fixture
def receivers(halves):
    return receivers_of(*halves)


def send(layout):
    """Fill the arena as the ranks would; return what was sent, and the checksums as the ranks count them."""
    arena = Arena.open(layout.path, layout.num_bytes)
    sent = {slot.name: torch.randn(slot.shape) for slot in layout.slots}
    for slot in layout.slots:
        arena.view(slot).copy_(sent[slot.name])
    return sent, [checksum(sent[slot.name], word_bytes=slot.word_bytes) for slot in layout.slots]


def test_every_worker_gets_its_slices_and_the_proof_holds(receivers, halves):
    layout = receivers.connect(MANIFEST, None, "base")
    for version in range(3):
        sent, sums = send(layout)
        receivers.load(version, sums, ["base"])
        for worker, half in enumerate(halves):
            rows = slice(4 * worker, 4 * worker + 4)
            assert torch.equal(half.gate_up, torch.cat([sent["gate"][rows], sent["up"][rows]]))
            assert torch.equal(half.down, sent["down"][:, 3 * worker : 3 * worker + 3])
            assert torch.equal(half.table, sent["table"][3 * worker : 3 * worker + 3])
            assert torch.equal(half.key, sent["key"])
            assert torch.equal(half.norm, sent["norm"])


def test_connecting_changes_no_weight(receivers, halves):
    before = [{name: each.clone() for name, each in half.named_parameters()} for half in halves]
    # Both hold the same norms and heads, as an engine's workers do; else the arena can keep one of them only.
    for name in ("key", "norm"):
        before[0][name].copy_(before[1][name])
        getattr(halves[0], name).data.copy_(before[1][name])
    receivers.connect(MANIFEST, None, "base")
    for half, old in zip(halves, before, strict=True):
        assert all(torch.equal(each, old[name]) for name, each in half.named_parameters())


def test_slices_that_lie_in_the_arena_as_in_the_parameter_are_views_of_it(receivers, halves):
    layout = receivers.connect(MANIFEST, None, "base")
    arena = Arena.open(layout.path, layout.num_bytes)
    table = next(slot for slot in layout.slots if slot.name == "table")
    arena.view(table).copy_(torch.arange(6.0)[:, None].expand(6, HIDDEN))
    assert halves[1].table[:, 0].tolist() == [3, 4, 5], "before any load"
    arena.bytes.zero_()
    assert not halves[0].table.any()
    assert halves[0].gate_up.all(), "two slices of two tensors are no view"


def test_slots_do_not_overlap(receivers):
    layout = receivers.connect(MANIFEST, None, "base")
    ends = sorted((slot.offset_bytes, slot.offset_bytes + slot.num_bytes) for slot in layout.slots)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("name", ["gate_up", "down", "key", "norm", "table"])
def test_one_changed_bit_on_one_worker_is_caught(receivers, halves, worker, name):
    layout = receivers.connect(MANIFEST, None, "base")
    _, sums = send(layout)
    receivers.load(0, sums, ["base"])
    load = halves[worker].named_parameters

    # A view of the arena shares its bytes with the other worker; this one must go wrong alone.
    def spoilt():
        for key, parameter in load():
            if key == name:
                parameter = torch.nn.Parameter(parameter.clone(), requires_grad=False)
                parameter.view(torch.int32).flatten()[-1] ^= 1
            yield key, parameter

    halves[worker].named_parameters = spoilt
    tensor = {"gate_up": "up"}.get(name, name)
    with pytest.raises(ChecksumMismatch, match=rf"1 of 6 tensors .*: \['{tensor}'\]"):
        receivers.load(1, sums, ["base"])


def test_a_piece_that_no_worker_takes_is_refused(halves):
    alone = receivers_of(halves[0])
    with pytest.raises(WeightMismatch, match=r"leaves 4 of them unused, whole or in part: up \(8, 4\), gate"):
        alone.connect(MANIFEST, None, "base")


def test_the_first_error_of_any_worker_is_raised(receivers, halves):
    halves[1].extra = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    with pytest.raises(WeightMismatch, match=r"leave 1 of them unfilled, whole or in part: \['extra'\]"):
        receivers.connect(MANIFEST, None, "base")
