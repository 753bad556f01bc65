"""Switch for drawing figures: matplotlib takes two thirds of the time of a tiny run."""

from pathlib import Path

from matplotlib.figure import Figure

DRAWN = True
"""Whether this process draws figures; ranks inherit the value of the process that starts them."""
HEAD = b"\x89PNG\r\n\x1a\n"
_savefig = Figure.savefig


def draw(drawn):
    """Draw figures when they are saved, or write only the first bytes of a PNG file."""
    global DRAWN
    DRAWN = drawn
    Figure.savefig = (
        _savefig if drawn else lambda figure, path, **options: Path(path).write_bytes(HEAD) and None
    )
