"""Read which rack each node is in, from CSV or JSON, and store it. Every mistake is reported with its line."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from django.db import transaction

from nodes.models import RackPlace
from portal import bulk
from portal.access import note
from portal.audit import Change
from portal.models import User
from vigil_core import csv_text

MOST = 10_000  # lines of input
MAX_BYTES = 1_000_000
MAX_REPORTED_MISTAKES = 20  # listed in one response
COLUMNS = ("node", "rack", "slot", "order")
NODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,253}[A-Za-z0-9])?")
_WHOLE = re.compile(r"-?[0-9]{1,5}")
_UNITS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class RackPosition:
    """A node's position as entered."""

    node: str
    rack: str
    slot: int = 0
    order: int = 0


@dataclass(frozen=True)
class Mistake:
    """An error in the input, with its line (from 1)."""

    line: int
    message: str


class WrongPlaces(ValueError):
    """Raised for invalid rack positions; has the reason for each line."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        self.mistakes = list(mistakes)
        super().__init__("\n".join(f"Line {mistake.line}: {mistake.message}" for mistake in self.mistakes))


@dataclass
class _RackReader:
    """Converts lines to positions, collecting mistakes, so that all of them are reported together."""

    mistakes: list[Mistake] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    orders: dict[str, tuple[int, int]] = field(default_factory=dict)  # by rack: its order, and the line that sets it

    def take(self, line: int, cells: Sequence[str]) -> RackPosition | None:
        """Return a line's position, or None after recording the mistake."""
        given = dict(zip(COLUMNS, [*(cell.strip() for cell in cells), "", "", "", ""], strict=False))
        message = self._problem(given, len(cells))
        if not message:
            place = RackPosition(given["node"], given["rack"], int(given["slot"] or 0), int(given["order"] or 0))
            message = self._clash(line, place, is_ordered=bool(given["order"]))
        if message:
            self.mistakes.append(Mistake(line, message))
            return None
        return place

    def _problem(self, given: dict[str, str], cells: int) -> str:
        if cells > len(COLUMNS):
            return f"it has {cells} columns. Write node, rack, slot, order; the last two may be left out."
        if not NODE.fullmatch(given["node"]):
            return f"{_shown(given['node'])} is not a valid node name." if given["node"] else "the node is missing."
        if not 0 < len(given["rack"]) <= 64 or not given["rack"].isprintable():
            return "the rack is missing." if not given["rack"] else "a rack's name has at most 64 printable characters."
        for name in ("slot", "order"):
            if given[name] and not _WHOLE.fullmatch(given[name]):
                return f"{_shown(given[name])} is not a valid {name}. Write a whole number from -99999 to 99999."
        return ""

    def _clash(self, line: int, place: RackPosition, *, is_ordered: bool) -> str:
        if before := self.lines.get(place.node):
            return f"{place.node} is also on line {before}. List each node once."
        self.lines[place.node] = line
        if not is_ordered:
            return ""
        order, first = self.orders.setdefault(place.rack, (place.order, line))
        if order != place.order:
            return f"{place.rack} has order {order} on line {first}. All lines of a rack must have the same order."
        return ""


def parse_csv(text: str) -> list[RackPosition]:
    """Parse the positions in a CSV text: node, rack, optional slot and order; a header line is optional.

    Separated by commas, semicolons or tabs, as its first line is. Raises WrongPlaces.
    """
    if "\0" in text:
        raise WrongPlaces(
            [
                Mistake(
                    text[: text.index("\0")].count("\n") + 1, "it contains a NUL character, so this is not a text file."
                )
            ]
        )
    text = text.removeprefix("\ufeff")
    return _parse_lines(_split(text))


def parse_cells(rows: Iterable[Sequence[str]]) -> list[RackPosition]:
    """Parse positions given as rows of cells, the first of which is line 1. Raises WrongPlaces."""
    return _parse_lines(enumerate(rows, 1))


def as_csv(places: Iterable[RackPosition | RackPlace]) -> str:
    """Return the positions as CSV that `parse_csv` reads."""
    return csv_text.write(
        [COLUMNS, *((place_row.node, place_row.rack, place_row.slot, place_row.order) for place_row in places)]
    )


def replace(user: User, places: Sequence[RackPosition]) -> int:
    """Replace all positions by these; return how many were changed, added or removed."""
    wanted = {place.node: place for place in _agreed(places)}
    after = _shown_places(wanted.values())
    with transaction.atomic():
        there = {row.node: row for row in RackPlace.objects.select_for_update()}
        before = _shown_places(there.values())
        gone = [row.pk for name, row in there.items() if name not in wanted]
        new = [place for name, place in wanted.items() if name not in there]
        moved = [row for name, row in there.items() if name in wanted and _moved(row, wanted[name])]
        for start in range(0, len(gone), 500):
            RackPlace.objects.filter(pk__in=gone[start : start + 500]).delete()
        bulk.update_rows(moved, ("rack", "slot", "order"))
        rows = ((place.node, place.rack, place.slot, place.order) for place in new)
        bulk.insert_rows(RackPlace, ("node", "rack", "slot", "order"), rows)
        changed = len(gone) + len(new) + len(moved)
        if changed:
            summary = f"{len(new)} new, {len(moved)} moved, {len(gone)} gone"
            note(
                user,
                "racks",
                f"{len(wanted)} places",
                summary,
                Change(before=before, after=after),
            )
    return changed


def place_node(user: User, node: str, rack: str, slot: str) -> RackPosition:
    """Set one node's position; its rack keeps its order. Raises WrongPlaces."""
    (place,) = parse_cells([(node, rack, slot)])
    with transaction.atomic():
        rack_order = RackPlace.objects.filter(rack=place.rack).values_list("order", flat=True).first()
        values = {"rack": place.rack, "slot": place.slot, "order": place.order if rack_order is None else rack_order}
        before = _shown_places(RackPlace.objects.filter(node=place.node))
        RackPlace.objects.update_or_create(node=place.node, defaults=values)
        change = Change(before=before, after=_shown_places([place]))
        note(user, "racks", place.node, f"{place.rack}, slot {place.slot}", change)
    return place


def remove_node(user: User, node: str) -> bool:
    """Remove a node from its rack."""
    with transaction.atomic():
        before = _shown_places(RackPlace.objects.filter(node=node))
        gone, _ = RackPlace.objects.filter(node=node).delete()
        if gone:
            note(user, "racks", node, "in no rack", Change(before=before))
    return bool(gone)


@lru_cache(maxsize=16_384)
def natural_sort_key(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key by which rack 2 comes before rack 10."""
    parts = [part for part in _UNITS.split(name.lower()) if part]
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts)


def _agreed(places: Sequence[RackPosition]) -> Iterator[RackPosition]:
    """Return each place with its rack's order, which may be on any line of the rack."""
    orders = {place.rack: place.order for place in places if place.order}
    for place in places:
        yield RackPosition(place.node, place.rack, place.slot, orders.get(place.rack, 0))


def _parse_lines(lines: Iterable[tuple[int, Sequence[str]]]) -> list[RackPosition]:
    reader, places = _RackReader(), []
    for n, (line, cells) in enumerate(lines):
        if n >= MOST:
            reader.mistakes.append(Mistake(line, f"there are more than {MOST:,} lines. Remove some."))
            break
        place = reader.take(line, cells)
        if place:
            places.append(place)
        if len(reader.mistakes) >= MAX_REPORTED_MISTAKES:
            break
    if reader.mistakes:
        raise WrongPlaces(reader.mistakes)
    return places


def _split(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, cells); empty lines and a header are left out."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(first))
    is_first = True
    try:
        for cells in rows:
            if not any(cell.strip() for cell in cells):
                continue
            if not (is_first and cells[0].strip().lower() == "node"):
                yield rows.line_num, [csv_text.read_cell(cell) for cell in cells]
            is_first = False
    except csv.Error as error:
        raise WrongPlaces([Mistake(rows.line_num, f"it cannot be read as CSV: {error}.")]) from None


def _delimiter(line: str) -> str:
    return max(",;\t", key=line.count)


def _shown_places(places: Iterable[RackPosition | RackPlace]) -> dict[str, str]:
    """Return each node's position as text for the audit log."""
    return {place.node: f"{place.rack}, slot {place.slot}" for place in places}


def _moved(row: RackPlace, place: RackPosition) -> bool:
    if (row.rack, row.slot, row.order) == (place.rack, place.slot, place.order):
        return False
    row.rack, row.slot, row.order = place.rack, place.slot, place.order
    return True


def _shown(text: str) -> str:
    return repr(text[:40])
