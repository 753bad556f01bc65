"""The metrics that docs/metrics.md describes."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
METRICS = set(re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE))
