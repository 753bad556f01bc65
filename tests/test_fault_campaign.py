"""One run of the fault campaign; all of it takes an hour: python benchmarks/faults.py"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[1] / "benchmarks" / "faults.py"


def can_mount():
    rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    words = ["unshare", "--mount", *rights, "mount", "-t", "tmpfs", "none", "/dev/shm"]
    return shutil.which("unshare") is not None and subprocess.run(words, capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_run_whose_engine_is_killed_goes_on_from_its_checkpoint_and_a_second_run_beside_it_is_refused():
    """With completions in flight. The run ends by name, leaves nothing, and says from where it goes on."""
    if not can_mount():
        pytest.skip("this machine allows no mounts, even in a namespace of one's own")
    faults = "^asynchronous RL, 2 ranks: (SIGKILL sampler|second run output)$"
    words = [sys.executable, str(CAMPAIGN), "--only", faults]
    campaign = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert campaign.returncode == 0, campaign.stdout[-8000:] + campaign.stderr[-4000:]
    killed, second = (json.loads(line) for line in campaign.stdout.splitlines() if line.startswith("{"))
    assert killed["moment"].startswith("step")
    assert (killed["outcome"], second["outcome"]) == ("ended", "went on")
