"""The first runs of the fault campaign; all of it takes an hour: python benchmarks/faults.py"""

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
def test_the_first_faults_break_nothing():
    if not can_mount():
        pytest.skip("this machine allows no mounts, even in a namespace of one's own")
    words = [sys.executable, str(CAMPAIGN), "--minutes", "0.3", "--seed", "15"]
    campaign = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert campaign.returncode == 0, campaign.stdout[-8000:] + campaign.stderr[-4000:]
    happened = [json.loads(line) for line in campaign.stdout.splitlines() if line.startswith("{")]
    assert len(happened) >= 2
    assert {record["outcome"] for record in happened} <= {"ended", "went on"}
