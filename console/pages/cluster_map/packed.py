"""Encode a map of many nodes for a script to paint: a few characters per GPU keep a thousand nodes a small page."""

from __future__ import annotations

from typing import Any

from console.pages.cluster_map.layout import HIGH_C, LOW_C, WORDS, MapColumn, MapRow, RackMap

LETTERS = {
    "busy": "b",
    "wasted": "w",
    "idle": "i",
    "drained": "d",
    "lost": "l",
    "broken": "x",
    "hot": "h",
    "stray": "s",
}
MAX_OWNERS = 255
NOTHING = "--"
HEX: dict[int | None, str] = {value: f"{value:02x}" for value in range(256)} | {None: NOTHING}
FULL = HEX[255]  # also for values beyond the scale


def packed(drawn: RackMap) -> dict[str, Any]:
    """Return columns of nodes.

    A node is `[name, limit, states, uses, temperatures, owners, trouble, indices, CPUs used, CPUs]`.
    Per GPU: a letter for its state, and two hex digits each for utilisation, temperature and index into `owners`.
    Indices are null where they count from 0.
    """
    owners = drawn.owners[:MAX_OWNERS]
    places = {user: i for i, (_, user, _, _) in enumerate(owners)}
    return {
        "heat": [LOW_C, HIGH_C],
        "words": {letter: WORDS[state] for state, letter in LETTERS.items()},
        "owners": [[letters, user, colour] for letters, user, colour, _ in owners],
        "columns": [_column(column, places) for column in drawn.columns],
    }


def _column(column: MapColumn, places: dict[str, int]) -> dict[str, Any]:
    return {
        "name": column.name,
        "part": column.part,
        "off": f"▲ {column.off_c:.1f}" if column.is_warm else "",
        "nodes": [_node(row, places) for row in column.rows],
    }


def _node(row: MapRow, places: dict[str, int]) -> list[Any]:
    devices = row.machine.devices
    states = "".join([LETTERS[state] for state in row.states])
    uses = "".join([HEX.get(device.percent, FULL) for device in devices])
    heats = "".join([HEX.get(device.temperature_c, FULL) for device in devices])
    owners = "".join([HEX[places.get(device.holder.user)] if device.holder else NOTHING for device in devices])
    indices = [device.index for device in devices]
    is_sequential = indices == list(range(len(devices)))
    packed_row: list[Any] = [
        row.name,
        row.limit_c,
        states,
        uses,
        heats,
        owners,
        row.trouble,
        None if is_sequential else indices,
    ]
    return packed_row if devices else [*packed_row, row.machine.cpus_used, row.machine.cpus]
