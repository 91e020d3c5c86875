"""Write CSV for spreadsheets. All CSV goes through here, so that no cell is taken for a formula.

A name may begin with "=", and a spreadsheet then computes it: it could fetch an address with the table's contents.
Such text gets an apostrophe before it, as OWASP recommends against CSV injection; numbers are left as they are.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

_FORMULA = ("=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠")  # noqa: RUF001 (full-width ones count, too)


def write(rows: Iterable[Iterable[object]]) -> str:
    """Return the rows as CSV, each with a line feed. None becomes an empty cell."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([cell(value) for value in row] for row in rows)
    return out.getvalue()


def cell(value: object) -> object:
    """Return the value; text that a spreadsheet would compute gets an apostrophe before it."""
    if not isinstance(value, str):
        return value
    text = value.replace("\r", "\n")  # the csv module quotes a line feed and leaves a lone carriage return bare
    return f"'{text}" if _is_formula(text) else text


def read_cell(text: str) -> str:
    """Return the text that `cell` was given."""
    return text[1:] if text.startswith("'") and _is_formula(text) else text


def _is_formula(text: str) -> bool:
    """Return whether a spreadsheet would compute the text, with or without apostrophes before it.

    A formula that was escaped already is escaped once more, so that `read_cell` restores the original.
    """
    return text.lstrip("'").startswith(_FORMULA)
