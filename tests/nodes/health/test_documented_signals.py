"""Test that docs/reference/health-rules.md lists the signals and fields of the code."""

from __future__ import annotations

from pathlib import Path

from nodes.health.rules.signal import SIGNALS, markdown_list

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "health-rules.md"


def test_the_list_is_that_of_the_code() -> None:
    """After a change of signal.py, put the lines of `markdown_list` there."""
    section = PAGE.read_text().partition("## Signals\n")[2].partition("\n## ")[0]
    assert [line for line in section.splitlines()[2:] if line] == list(markdown_list())
    assert all(f"**`{name}`**" in section for name in SIGNALS)
