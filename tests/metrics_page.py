"""The metrics that docs/metrics.md describes."""

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
METRICS = set(re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE))
