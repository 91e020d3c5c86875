"""Write entries as TOML, in the format of the catalogue's own files."""

from __future__ import annotations

from collections.abc import Iterable

import tomlkit

from diagnosis.signatures.entry import FIELDS, PATTERNS, Entry

_LITERAL = (*PATTERNS, "example", "look_alike")  # backslashes mean themselves


def to_toml(entries: Iterable[Entry]) -> str:
    """Return entries as TOML that `entry.read_entries` reads back."""
    document = tomlkit.document()
    tables = tomlkit.aot()
    for entry in entries:
        table = tomlkit.table()
        for name in FIELDS:
            value = getattr(entry, name)
            if value and (name, value) != ("scope", "program"):
                table.add(name, _toml_value(name, value))
        tables.append(table)
    document.add("entry", tables)
    return tomlkit.dumps(document)


def _toml_value(name: str, value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    if name in _LITERAL and isinstance(value, str) and "'" not in value and value.isprintable():
        return tomlkit.string(value, literal=True)
    return value
