"""The experts of a layer, one parameter in the trainer and many tensors in the checkpoint, over one worker or two."""

import time

import pytest
import torch
from receivers_here import receivers_of, send

from vectorlm.errors import ChecksumMismatch
from vectorlm.sampling.weights.plan import Piece, TensorSpec

EXPERTS, COLUMNS, HIDDEN = 3, 4, 6
UP, DOWN = (EXPERTS, 2 * COLUMNS, HIDDEN), (EXPERTS, HIDDEN, COLUMNS)
HALF, WHOLE = COLUMNS * HIDDEN, 2 * COLUMNS * HIDDEN


def manifest():
    matrix = ((COLUMNS, HIDDEN), (HIDDEN, 1))
    gates = [Piece(f"{expert}.gate", *matrix, expert * WHOLE) for expert in range(EXPERTS)]
    ups = [Piece(f"{expert}.up", *matrix, expert * WHOLE + HALF) for expert in range(EXPERTS)]
    downs = [
        Piece(f"{expert}.down", (HIDDEN, COLUMNS), (COLUMNS, 1), expert * HALF) for expert in range(EXPERTS)
    ]
    return [TensorSpec("up", UP, (*gates, *ups)), TensorSpec("down", DOWN, tuple(downs))]


class Experts(torch.nn.Module):
    """One of `count` workers: rows of gate and up, columns of down, of every expert."""

    def __init__(self, worker, count):
        super().__init__()
        self.width, self.start = COLUMNS // count, worker * COLUMNS // count
        self.w13 = torch.nn.Parameter(torch.randn(EXPERTS, 2 * self.width, HIDDEN), requires_grad=False)
        self.w2 = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, self.width), requires_grad=False)

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
        gate, up = sent["up"][:, :COLUMNS][:, part], sent["up"][:, COLUMNS:][:, part]
        assert torch.equal(worker.w13, torch.cat([gate, up], dim=1))
        assert torch.equal(worker.w2, sent["down"][:, :, part])
    with pytest.raises(ChecksumMismatch, match=r"1 of 2 tensors .*: \['down'\]"):
        receivers.load(1, [sums[0], sums[1] + 1], ["base"])
