"""Names of the metrics that docs/metrics.md describes."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
_FIRST_CELLS = re.findall(r"^\| (`[^|]+) \|", PAGE.read_text(), re.MULTILINE)
METRICS = {name for cell in _FIRST_CELLS for name in re.findall(r"`([^`]+)`", cell)}
