"""Two workers of one engine in this process, each with its slices."""

import gc
import os
import time

import pytest
import torch
from receivers_here import receivers_of, send

from vectorlm.errors import ChecksumMismatch, WeightMismatch
from vectorlm.sampling.weights.arena import Arena
from vectorlm.sampling.weights.lora_receive import POLICY_ID
from vectorlm.sampling.weights.plan import Piece, TensorSpec
from vectorlm.sampling.weights.receive import EngineReceiver, PieceMap
from vectorlm.sampling.weights.record import Copy, LoadPlan, View

HIDDEN, COLUMNS = 4, 6
MANIFEST = [
    TensorSpec("up", (8, HIDDEN)),
    TensorSpec("gate", (8, HIDDEN)),
    TensorSpec("down", (5, COLUMNS)),
    TensorSpec("key", (2, HIDDEN)),
    TensorSpec("norm", (HIDDEN,)),
    TensorSpec("table", (6, HIDDEN)),
    TensorSpec("bias", (8,)),
    TensorSpec("scale", ()),
]


class Half(torch.nn.Module):
    """The tensors of one of two workers: gate and up by rows, fused; down by columns; the others whole or by rows."""

    def __init__(self, worker):
        super().__init__()
        self.worker = worker
        shapes = {
            "gate_up": (8, HIDDEN),
            "down": (5, COLUMNS // 2),  # three fp32 columns: no whole number of 64-bit words
            "key": (2, HIDDEN),  # both workers hold the only head
            "norm": (HIDDEN,),
            "table": (3, HIDDEN),
            "bias": (4,),
            "scale": (),
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
            elif name in ("table", "bias"):
                part = getattr(self, name).data
                part.copy_(tensor.narrow(0, len(part) * self.worker, len(part)))
            else:
                getattr(self, name).data.copy_(tensor)


@pytest.fixture
def halves():
    return [Half(worker) for worker in range(2)]


@pytest.fixture
def receivers(halves):
    return receivers_of(*halves)


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
            assert torch.equal(half.bias, sent["bias"][rows])
            assert torch.equal(half.scale, sent["scale"])


def test_connecting_changes_no_weight(receivers, halves):
    before = [{name: parameter.clone() for name, parameter in half.named_parameters()} for half in halves]
    # As in an engine, both workers have equal norms and heads; otherwise the arena could keep only one of them.
    for name in ("key", "norm", "scale"):
        before[0][name].copy_(before[1][name])
        getattr(halves[0], name).data.copy_(before[1][name])
    receivers.connect(MANIFEST, None, "base")
    for half, old in zip(halves, before, strict=True):
        assert all(torch.equal(parameter, old[name]) for name, parameter in half.named_parameters())


def test_slices_that_lie_in_the_arena_as_in_the_parameter_are_views_of_it(receivers, halves):
    layout = receivers.connect(MANIFEST, None, "base")
    arena = Arena.open(layout.path, layout.num_bytes)
    table = next(slot for slot in layout.slots if slot.name == "table")
    arena.view(table).copy_(torch.arange(6.0)[:, None].expand(6, HIDDEN))
    assert halves[1].table[:, 0].tolist() == [3, 4, 5], "before any load"
    arena.bytes.zero_()
    assert not halves[0].table.any()
    assert halves[0].gate_up.all(), "two slices of two tensors are no view"
    assert layout.num_copied_bytes == 2 * 4 * (8 * HIDDEN + 5 * COLUMNS // 2), "of gate_up and down alone"


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("name", ["gate_up", "down", "key", "norm", "table", "bias", "scale"])
def test_one_changed_bit_on_one_worker_is_caught(receivers, halves, worker, name):
    layout = receivers.connect(MANIFEST, None, "base")
    _, sums = send(layout)
    receivers.load(0, sums, ["base"])
    # A view of the arena shares its bytes with the other worker; only this worker's tensor must be wrong.
    spoilt = torch.nn.Parameter(getattr(halves[worker], name).clone(), requires_grad=False)
    spoilt.view(torch.int32).flatten()[-1] ^= 1
    setattr(halves[worker], name, spoilt)
    tensor = {"gate_up": "up"}.get(name, name)
    with pytest.raises(ChecksumMismatch, match=rf"1 of 8 tensors .*: \['{tensor}'\]"):
        receivers.load(1, sums, ["base"])


def test_a_piece_that_no_worker_takes_is_refused(halves):
    alone = receivers_of(halves[0])
    with pytest.raises(WeightMismatch, match=r"up \(8, 4\), gate"):
        alone.connect(MANIFEST, None, "base")


def test_the_first_error_of_any_worker_is_raised(receivers, halves):
    halves[1].extra = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    with pytest.raises(WeightMismatch, match="'extra'"):
        receivers.connect(MANIFEST, None, "base")


def receivers_that_note(calls):
    """Return the receivers of one worker that accepts everything and records its calls."""

    def call(method, args=()):
        calls.append((method, *args))
        plan = LoadPlan.whole(NORM, lambda name: "float32")
        answers = {"vectorlm_prepare": "live", "vectorlm_describe": plan, "vectorlm_attach": 0}
        return [(answers.get(method), None)]

    return EngineReceiver(call, "auto")


NORM = (TensorSpec("norm", (HIDDEN,)),)


def test_a_set_on_top_of_the_base_that_was_not_written_is_cleared():
    calls = []
    receivers = receivers_that_note(calls)
    for weight_set in ("base", "adapter"):
        receivers.connect(NORM, None, weight_set)
    calls.clear()
    receivers.load(4, None, ["base"])
    receivers.load(5, None, ["adapter"])
    assert calls == [
        ("vectorlm_load", "base", 4, False),
        ("vectorlm_clear", POLICY_ID),
        ("vectorlm_load", "adapter", 5, False, POLICY_ID),
    ]


def test_connecting_again_closes_the_arena_from_before():
    receivers = receivers_that_note([])
    receivers.connect(NORM, None, "base")
    gc.collect()  # Files that other tests left open would otherwise close in between.
    before = len(os.listdir("/proc/self/fd"))
    receivers.connect(NORM, None, "base")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "piece",
    [
        View((4, 2, 4), (12, 6, 1), 0),
        View((4, 1, 4), (12, 6, 1), 4),
        View((4, 12), (12, 1), 0),
        View((2, 2, 6), (24, 6, 1), 12),
        View((2, 12), (12, 1), 24),
        View((4, 3), (12, 1), 9),
    ],
)
def test_words_are_the_widest_that_no_piece_cuts(piece):
    """A list of all elements shows whether a piece has all bytes of a word or none."""
    spec, whole = TensorSpec("w", (4, 2, 6)), View((4, 2, 6), (12, 6, 1), 0)
    plans = [LoadPlan((Copy("w", view, "w", view),), {}, {}) for view in (whole, piece)]
    held = set(piece.on(torch.arange(48)).flatten().tolist())
    words = {size: [set(range(start, start + size)) for start in range(0, 48, size)] for size in (1, 2, 4)}
    widest = max(
        size for size, all_of in words.items() if all(held >= word or not held & word for word in all_of)
    )
    assert PieceMap([spec], plans).word_bytes(spec, "bfloat16") == 2 * widest


EXPERTS, EXPERT_COLUMNS, EXPERT_WIDTH = 3, 4, 6
UP, DOWN = (EXPERTS, 2 * EXPERT_COLUMNS, EXPERT_WIDTH), (EXPERTS, EXPERT_WIDTH, EXPERT_COLUMNS)
HALF, WHOLE = EXPERT_COLUMNS * EXPERT_WIDTH, 2 * EXPERT_COLUMNS * EXPERT_WIDTH


def manifest():
    matrix = ((EXPERT_COLUMNS, EXPERT_WIDTH), (EXPERT_WIDTH, 1))
    gates = [Piece(f"{expert}.gate", *matrix, expert * WHOLE) for expert in range(EXPERTS)]
    ups = [Piece(f"{expert}.up", *matrix, expert * WHOLE + HALF) for expert in range(EXPERTS)]
    downs = [
        Piece(f"{expert}.down", (EXPERT_WIDTH, EXPERT_COLUMNS), (EXPERT_COLUMNS, 1), expert * HALF)
        for expert in range(EXPERTS)
    ]
    return [TensorSpec("up", UP, (*gates, *ups)), TensorSpec("down", DOWN, tuple(downs))]


class Experts(torch.nn.Module):
    """One of `count` workers, with rows of gate and up and columns of down, of every expert."""

    def __init__(self, worker, count):
        super().__init__()
        self.width, self.start = EXPERT_COLUMNS // count, worker * EXPERT_COLUMNS // count
        self.w13 = torch.nn.Parameter(torch.randn(EXPERTS, 2 * self.width, EXPERT_WIDTH), requires_grad=False)
        self.w2 = torch.nn.Parameter(torch.randn(EXPERTS, EXPERT_WIDTH, self.width), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            expert, kind = name.split(".")
            if kind == "down":
                self.w2.data[int(expert)].copy_(tensor.narrow(1, self.start, self.width))
            else:
                first = self.width * (kind == "up")
                target = self.w13.data[int(expert)].narrow(0, first, self.width)
                target.copy_(tensor.narrow(0, self.start, self.width))


@pytest.mark.parametrize("count", [1, 2])
def test_every_worker_gets_its_slice_of_every_expert_and_the_proof_holds(count):
    workers = [Experts(worker, count) for worker in range(count)]
    receivers = receivers_of(*workers)
    layout = receivers.connect(manifest(), None, "base")
    assert bool(layout.num_copied_bytes) == (count == 2), "alone, a worker computes with the arena itself"
    sent, sums = send(layout)
    began = time.perf_counter()
    assert 0 < receivers.load(0, sums, ["base"]) < time.perf_counter() - began
    for worker in workers:
        part = slice(worker.start, worker.start + worker.width)
        gate, up = sent["up"][:, :EXPERT_COLUMNS][:, part], sent["up"][:, EXPERT_COLUMNS:][:, part]
        assert torch.equal(worker.w13, torch.cat([gate, up], dim=1))
        assert torch.equal(worker.w2, sent["down"][:, :, part])
    with pytest.raises(ChecksumMismatch, match=r"1 of 2 tensors .*: \['down'\]"):
        receivers.load(1, [sums[0], sums[1] + 1], ["base"])
