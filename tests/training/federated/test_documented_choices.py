"""Test that docs/reference/federated.md describes every choice."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.config import choices
from training.federation.config import FOLDERS, markdown_list

TEXT = (Path(__file__).parents[3] / "docs" / "reference" / "federated.md").read_text()


@pytest.mark.parametrize("field", ["algorithm", "pace"])
def test_tables_are_those_of_the_code(field: str) -> None:
    assert [line for line in markdown_list(field) if line not in TEXT] == []


@pytest.mark.parametrize("field", [field for field in FOLDERS if field not in ("recipe", "transport")])
def test_every_choice_is_described(field: str) -> None:
    assert [name for name in choices.names(FOLDERS[field]) if name not in TEXT] == []
