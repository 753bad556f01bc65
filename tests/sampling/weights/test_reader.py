"""The reader of many tensors, by torch's operations and by the Triton kernel in Triton's interpreter.

The tests of the kernel need `VECTORLM_TRITON`, a folder with Triton's ordinary wheel.
"""

import os
import subprocess
import sys

import pytest
import torch

from vectorlm.sampling.weights.inspection import Reading, checksum
from vectorlm.sampling.weights.reader import Reader

BF16 = torch.bfloat16
KERNEL = """
import numpy as np, torch, triton.runtime.interpreter as interpreter

convert = interpreter._convert_float

def rounded(data, held, sent, mode):
    # The interpreter truncates where hardware rounds to the nearest even number.
    if (str(held), str(sent)) != ("fp32", "bf16"):
        return convert(data, held, sent, mode)
    numbers = torch.from_numpy(np.ascontiguousarray(data).view(np.float32).copy())
    return numbers.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(data.shape)

interpreter._convert_float = rounded
from vectorlm.sampling.weights.reader import kernel_differs
assert kernel_differs(torch.device("cpu")) == "", kernel_differs(torch.device("cpu"))
import test_reader, vectorlm.sampling.weights.reader as reader
reader.is_trusted = lambda *_: True
test_reader.test_sums_are_the_checksums_of_every_tensor()
test_reader.test_numbers_that_are_not_finite_in_either_dtype_are_found()
kinds = {type(part).__name__ for _, part in reader.Reader(test_reader.readings())._parts}
assert kinds == {"KernelReader", "_TorchReader"}, kinds
print("the kernel agrees")
"""


def readings():
    torch.manual_seed(0)
    table = torch.randn(6, 8)
    return [
        Reading(torch.randn(5, 6), 3, 0, BF16),
        Reading(torch.randn(5, 8), 3, 4, BF16, 4),
        Reading(torch.randn(7, 8, dtype=BF16), 0),
        Reading(torch.randn(9), 4),
        Reading(torch.randn(3, 4, 5).double(), 1),
        Reading(table.t(), 1, 4),
        Reading(table[:, 2:6], 1, 4),
        Reading(table[:, 1:4], 1, 4, BF16),
        Reading(torch.zeros(0, 4), 2),
        Reading(torch.arange(6), 0),
        Reading(torch.tensor(3.0), 0),
        Reading(torch.randn(3, 70001, dtype=BF16), 11, 2),
    ]


def test_sums_are_the_checksums_of_every_tensor():
    asked = readings()
    found = Reader(asked, check_finite=True).read()
    for reading, total, sent_total in zip(asked, found.sums, found.sent_sums, strict=True):
        assert total == checksum(reading.rows, reading.first_row, reading.word_bytes)
        sent = 0 if reading.sent is None else reading.rows.to(reading.sent)
        assert sent_total == (
            sent if reading.sent is None else checksum(sent, reading.first_row, reading.sent_word_bytes)
        )
    assert found.is_finite == [True] * len(asked)


def test_numbers_that_are_not_finite_in_either_dtype_are_found():
    largest = torch.finfo(torch.float32).max
    of_bf16 = torch.finfo(BF16).max
    cases = [
        (torch.full((2, 3), float("nan")), None, False),
        (torch.full((2, 3), -float("inf")).half(), None, False),
        (torch.full((2, 3), largest), None, True),
        (torch.full((2, 3), largest), BF16, False),
        (torch.full((2, 3), -largest), BF16, False),
        (torch.full((2, 3), of_bf16), BF16, True),
        (torch.full((4,), 65504.0), torch.float16, True),
        (torch.full((4,), 65520.0), torch.float16, False),
        (torch.tensor([float("inf"), -float("inf"), 1.0]), None, False),
        (torch.ones(2).long(), None, True),
        (torch.empty(0), None, True),
        (torch.full((300, 300), 6e4).half(), None, True),
    ]
    asked = [Reading(rows, 0, 0, sent) for rows, sent, _ in cases]
    assert Reader(asked, check_finite=True).read().is_finite == [is_finite for *_, is_finite in cases]
    assert all(Reader(asked).read().is_finite)


def test_it_reads_the_tensors_as_they_are_now():
    rows, turned = torch.ones(2, 4), torch.ones(4, 2)
    reader = Reader([Reading(rows, 0), Reading(turned.t(), 0, 4)])
    before = reader.read()
    rows[1, 2] = 2.0
    turned[3, 0] = 2.0
    after = reader.read()
    assert all(old != new for old, new in zip(before.sums, after.sums, strict=True))


@pytest.mark.slow
@pytest.mark.skipif("VECTORLM_TRITON" not in os.environ, reason="VECTORLM_TRITON names no folder with Triton")
def test_the_kernel_finds_the_same():
    paths = [os.path.dirname(__file__), *sys.path, os.environ["VECTORLM_TRITON"]]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run([sys.executable, "-c", KERNEL], env=environment, capture_output=True, text=True)
    assert "the kernel agrees" in done.stdout, done.stderr[-2000:]
