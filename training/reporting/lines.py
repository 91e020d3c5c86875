"""One line of a spool as a header or a batch. A job wrote it, so every part of it is checked. Standard library only."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, TypeGuard

SERIES_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,127}")
POINTS_A_BATCH = 20_000
EVENTS_A_BATCH = 100
EVENT_BYTES = 64 * 1024
BATCH_BYTES = 1024 * 1024  # of its events, which the portal stores by one transaction: as much as a line of a spool
DEPTH = 64  # of lists and tables within each other in an event
STEP_LIMIT = 2**53
TIME_LIMIT = 32_503_680_000.0  # the year 3000, in Unix seconds
RANKS = range(-100_000, 1_000_001)
PRINTABLE = re.compile(r"[^\x00-\x1f]*")
FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class Header:
    stream: str
    incarnation: int
    rank: int
    node: str
    boot_id: str
    restart_count: int
    time: float


@dataclass(frozen=True)
class Batch:
    """One line. Values are float64 (NaN and infinities included); steps are not necessarily in order."""

    seq: int
    time: float
    series: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def points(self) -> int:
        return sum(len(column) for column in self.series.values())


def parse_header(line: bytes | None, stream: str, named: tuple[int, int]) -> Header | None:
    found = _object(line)
    if found is None or found.get("version") != 1 or found.get("stream") != stream:
        return None
    said = (found.get("incarnation"), found.get("rank"))
    if said != named or any(type(number) is not int for number in said):
        return None
    node, boot_id, restart_count = found.get("node"), found.get("boot_id"), found.get("restart_count")
    time = _time(found.get("time"))
    if not _is_text(node, 255) or not _is_text(boot_id, 64) or time is None or named[1] not in RANKS:
        return None
    if type(restart_count) is not int or not 0 <= restart_count < 2**31:
        return None
    return Header(stream, *named, node, boot_id, restart_count, time)


def parse(line: bytes | None, seq: int) -> Batch | None:
    """The batch of one line; None for the end line."""
    found = _object(line)
    if found is None or type(found.get("seq")) is not int or found["seq"] != seq:
        return damaged(seq, "not a batch of this place")
    if found.get("end") is True:
        return None
    if (time := _time(found.get("time"))) is None:
        return damaged(seq, "not a batch of this place")
    series, events = _series(found.get("series", {})), _events(found.get("events", []))
    if series is None or events is None:
        return damaged(seq, "malformed series or events", time)
    batch = Batch(seq, time, series, events)
    return batch if batch.points <= POINTS_A_BATCH else damaged(seq, "more points than a batch may have", time)


def damaged(seq: int, problem: str, time: float = 0.0) -> Batch:
    return Batch(seq, time, {}, [{"kind": "report.damaged", "time": time, "seq": seq, "problem": problem}])


def _object(line: bytes | None) -> dict[str, Any] | None:
    if line is None:
        return None
    try:
        found = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _number(value: object) -> float | None:
    """A finite float, from a JSON number that is none of true, false, or beyond float64."""
    if type(value) is int or type(value) is float:
        try:
            number = float(value)
        except OverflowError:
            return None
        return number if math.isfinite(number) else None
    return None


def _time(value: object) -> float | None:
    number = _number(value)
    return number if number is not None and 0 <= number < TIME_LIMIT else None


def _is_text(value: object, longest: int) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) <= longest and PRINTABLE.fullmatch(value) is not None


def _series(found: object) -> dict[str, list[tuple[int, float]]] | None:
    if not isinstance(found, dict):
        return None
    series = {}
    for name, column in found.items():
        if not SERIES_NAME.fullmatch(name) or not isinstance(column, list):
            return None
        points = []
        for point in column:
            if not isinstance(point, list) or len(point) != 2:
                return None
            step, value = point
            number = FINITE.get(value) if isinstance(value, str) else _number(value)
            if number is None or type(step) is not int or not 0 <= step < STEP_LIMIT:
                return None
            points.append((step, number))
        series[name] = points
    return series


def _is_flat(value: object, room: int) -> bool:
    """Whether lists and tables lie at most `room` deep within each other."""
    if not isinstance(value, list | dict):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return room > 0 and all(_is_flat(item, room - 1) for item in inner)


def _events(found: object) -> list[dict[str, Any]] | None:
    if not isinstance(found, list) or len(found) > EVENTS_A_BATCH:
        return None
    size = 0
    for event in found:
        if not isinstance(event, dict) or not event.get("kind") or not _is_text(event["kind"], 64):
            return None
        if _time(event.get("time")) is None or not _is_flat(event, DEPTH):
            return None
        try:
            length = len(json.dumps(event, allow_nan=False, separators=(",", ":")))
        except (ValueError, RecursionError):  # 1e999 is read as infinity
            return None
        size += length
        if length > EVENT_BYTES or size > BATCH_BYTES:
            return None
    return found
