"""Pages of README and docs/, and their code blocks."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / ".agents").rglob("*.md"))
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))


def text_of(page):
    return (ROOT / page).read_text()


def blocks(page, language):
    """Return the code blocks of a page, without indentation."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", text_of(page), re.DOTALL | re.M)
    return [re.sub(rf"^{indent}", "", block, flags=re.M) for indent, block in found]


def commands(page, start=""):
    """Return the lines of a page's shell blocks that begin with `start`."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and line.strip().startswith(start)]


def run(folder, *words, **more):
    """Run Python with `words` as arguments; return its output, errors first."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=folder, capture_output=True, text=True, timeout=500, **more
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stderr + done.stdout
