"""Config files written by each test, so that line numbers in errors are visible beside the text."""

from collections.abc import Callable
from pathlib import Path

import pytest
from config_texts import MINIMAL


@pytest.fixture
def write_config(tmp_path, monkeypatch) -> Callable[..., str]:
    """Write a config as ``my.yaml`` in an empty working directory; each pair is (old text, new text)."""
    monkeypatch.chdir(tmp_path)

    def write(text: str = MINIMAL, *changes: tuple[str, str]) -> str:
        for old, new in changes:
            assert text.count(old) == 1, f"{old!r} must occur exactly once"
            text = text.replace(old, new)
        Path("my.yaml").write_text(text, encoding="utf-8")
        return "my.yaml"

    return write
