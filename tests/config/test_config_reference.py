from pathlib import Path

from vectorlm.config.reference import render_reference
from vectorlm.config.setting import all_settings

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_what_the_schema_renders():
    assert PAGE.read_text(encoding="utf-8") == render_reference(), (
        "run: python -m vectorlm.config.reference > docs/config.md"
    )


def test_every_setting_has_a_row():
    rows = [line.split("`")[1] for line in render_reference().splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(path.rpartition(".")[2] for path in all_settings())
