"""A map of many nodes as a script paints it: a few characters a GPU, so that a thousand nodes are a small page."""

from __future__ import annotations

from typing import Any

from portal.pages.rack_map import HIGH_C, LOW_C, WORDS, Cell, Column, RackMap, Row

LETTERS = {"busy": "b", "wasted": "w", "idle": "i", "drained": "d", "lost": "l", "hot": "h", "stray": "s"}
MOST_OWNERS = 255
NOTHING = "--"


def packed(drawn: RackMap) -> dict[str, Any]:
    """Columns of nodes, each `[name, limit, states, uses, temperatures, owners, trouble, indices, CPUs used, CPUs]`.

    Of a GPU: a letter of its state, and two hex digits each of what it does, how hot it is and who of `owners` holds
    it. Indices are null where they count from 0.
    """
    owners = drawn.owners[:MOST_OWNERS]
    places = {user: i for i, (_, user, _, _) in enumerate(owners)}
    return {
        "heat": [LOW_C, HIGH_C],
        "words": {letter: WORDS[state] for state, letter in LETTERS.items()},
        "owners": [[letters, user, colour] for letters, user, colour, _ in owners],
        "columns": [_column(column, places) for column in drawn.columns],
    }


def _column(column: Column, places: dict[str, int]) -> dict[str, Any]:
    return {
        "name": column.name,
        "part": column.part,
        "off": f"▲ {column.off_c:.1f}" if column.is_warm else "",
        "nodes": [_node(row, places) for row in column.rows],
    }


def _node(row: Row, places: dict[str, int]) -> list[Any]:
    cells = row.cells
    states = "".join(LETTERS[cell.state] for cell in cells)
    uses = "".join(_hex(cell.device.percent) for cell in cells)
    heats = "".join(_hex(cell.device.temperature_c) for cell in cells)
    owners = "".join(_owner(cell, places) for cell in cells)
    indices = [cell.device.index for cell in cells]
    counted = indices == list(range(len(cells)))
    told: list[Any] = [row.name, row.limit_c, states, uses, heats, owners, row.trouble, None if counted else indices]
    return told if cells else [*told, row.machine.cpus_used, row.machine.cpus]


def _owner(cell: Cell, places: dict[str, int]) -> str:
    holder = cell.device.holder
    return _hex(places.get(holder.user)) if holder else NOTHING


def _hex(value: int | None) -> str:
    return NOTHING if value is None else f"{max(0, min(255, value)):02x}"
