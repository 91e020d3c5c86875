"""Format responses for people: lines of plain text, in columns that fit their content."""

from __future__ import annotations

from datetime import datetime
from typing import Any

TableRow = list[str]


def table(head: TableRow, rows: list[TableRow], empty: str) -> list[str]:
    """Return left-aligned columns; a heading that ends in ">" aligns its column right."""
    if not rows:
        return [empty]
    right = [name.endswith(">") for name in head]
    names = [name.rstrip(">") for name in head]
    widths = [max(len(row[i]) for row in [names, *rows]) for i in range(len(head))]
    lines = []
    for row in [names, *rows]:
        cells = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def current(values: dict[str, Any], name: str, former: str) -> Any:
    """Return a field of an answer; portals of Vigil 0.1 send it under its former name."""
    return values[name] if name in values else values[former]


def local(time: str | None) -> str:
    return datetime.fromisoformat(time).astimezone().strftime("%Y-%m-%d %H:%M:%S") if time else ""
