"""pytest collects every test file: it looks into no folder called `dist` or `build`, and says nothing."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_test_file_is_collected():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider"]
    printed = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True).stdout
    collected = {line.split("::")[0] for line in printed.splitlines() if "::" in line}
    files = {str(path.relative_to(TESTS.parent)) for path in TESTS.rglob("test_*.py")}
    assert files == collected
