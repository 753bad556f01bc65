from pathlib import Path

from vectorlm.config.reference import render_reference

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_what_the_schema_renders():
    assert PAGE.read_text(encoding="utf-8") == render_reference(), (
        "run: python -m vectorlm.config.reference > docs/config.md"
    )
