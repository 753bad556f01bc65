"""Training on a device with memory that the host cannot access: same results as on the CPU, without mixing devices."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sim_device

REASON = sim_device.why_not()
# The tests take 40 s, and 15 s more to compile the device.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=REASON or "")]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Return the results of the runs, by name and device."""
    script = Path(__file__).with_name("sim_runs.py")
    words = [sys.executable, script, tmp_path_factory.mktemp("sim")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "MAX_JOBS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    return {(name, device): found for name, device, found in rows}


def test_the_device_refuses_what_cuda_refuses(said):
    assert said["refuses", "sim:0"] == ["Expected all tensors to be on the same device", signal.SIGSEGV]


@pytest.mark.parametrize(
    ("name", "metrics", "tolerance"),
    [
        ("fine-tuning", ["loss"], 1e-6),
        # bfloat16 has eight bits, and the attention operator computes in float64.
        ("GRPO in 16 bits", ["reward/mean", "policy/loss", "policy/grad_norm", "policy/entropy"], 2e-2),
        ("PPO of adapters", ["reward/mean", "policy/loss", "critic/loss", "policy/grad_norm"], 1e-4),
    ],
)
def test_a_run_says_the_same_as_on_the_cpu(said, name, metrics, tolerance):
    found, expected = said[name, "sim:0"], said[name, "cpu"]
    compared = 0
    for mine, theirs in zip(found, expected, strict=True):
        for metric in set(metrics) & set(theirs):
            assert mine[metric] == pytest.approx(theirs[metric], rel=tolerance), metric
            compared += 1
    assert compared >= len(metrics)


def test_rows_of_16_bits_attended_by_the_operator_for_cuda(said):
    assert said["calls of the flash kernel", "sim:0"] > 0


def test_no_pass_waits_for_the_device(said):
    num_passes, *waits = said["passes and waits", "sim:0"]
    assert num_passes > 20
    assert waits == []
