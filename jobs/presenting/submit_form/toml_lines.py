"""Find the line of each key and table in a TOML text, so that an error can be shown at its line."""

from __future__ import annotations

import re

_TABLE = re.compile(r"\s*\[\[?\s*([^\[\]#]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(
    r"""\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=\s*(.*)$"""
)
_AT_LINE = re.compile(r"Line (\d+): ")


def locate(text: str) -> dict[str, int]:
    """Return 1-based lines by path: {"run.steps": 14, "run": 12}.

    Best effort, as the text may not be valid TOML yet.
    """
    line_numbers: dict[str, int] = {}
    table, inside = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        if inside:  # a string of several lines
            inside = "" if inside in line else inside
            continue
        if match := _TABLE.match(line):
            table = _path(match[1])
            line_numbers.setdefault(table, number)
        elif match := _KEY.match(line):
            key = _path(match[1])
            line_numbers.setdefault(f"{table}.{key}" if table else key, number)
            inside = next((quotes for quotes in ('"""', "'''") if match[2].count(quotes) == 1), "")
    return line_numbers


def line_of(places: dict[str, int], field: str, message: str = "") -> int | None:
    """Return the line of a field, or of the table that lacks it, or the line that the message names."""
    if match := _AT_LINE.match(message):
        return int(match[1])
    path = re.sub(r"\[\d+\].*$", "", field)
    while path:
        if path in places:
            return places[path]
        path = path.rpartition(".")[0]
    return None


def _path(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in re.split(r"\s*\.\s*", key.strip()))
