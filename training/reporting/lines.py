"""Parse one line of a spool: a header or a batch. A job wrote it, so everything is validated. Standard library only."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, TypeGuard

SERIES_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,127}")
BATCH_POINTS = 20_000
BATCH_EVENTS = 100
EVENT_BYTES = 64 * 1024
BATCH_BYTES = 1024 * 1024  # of a batch's events, which the portal stores in one transaction: as much as a spool line
DEPTH = 64  # maximum nesting of lists and tables in an event
STEP_LIMIT = 2**53
TIME_LIMIT = 32_503_680_000.0  # the year 3000, in Unix seconds
RANKS = range(-100_000, 1_000_001)
PRINTABLE = re.compile(r"[^\x00-\x1f]*")
FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class StreamHeader:
    stream: str
    incarnation: int
    rank: int
    node: str
    boot_id: str
    restart_count: int
    time: float


@dataclass(frozen=True)
class ReportBatch:
    """One line. Values are float64 (NaN and infinities included); steps are not necessarily in order."""

    seq: int
    time: float
    series: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def points(self) -> int:
        return sum(len(column) for column in self.series.values())


def parse_header(line: bytes | None, stream: str, file_numbers: tuple[int, int]) -> StreamHeader | None:
    content = _object(line)
    if content is None or content.get("version") != 1 or content.get("stream") != stream:
        return None
    header_numbers = (content.get("incarnation"), content.get("rank"))
    if header_numbers != file_numbers or any(type(number) is not int for number in header_numbers):
        return None
    node, boot_id, restart_count = content.get("node"), content.get("boot_id"), content.get("restart_count")
    time = _time(content.get("time"))
    if not _is_text(node, 255) or not _is_text(boot_id, 64) or time is None or file_numbers[1] not in RANKS:
        return None
    if type(restart_count) is not int or not 0 <= restart_count < 2**31:
        return None
    return StreamHeader(stream, *file_numbers, node, boot_id, restart_count, time)


def parse(line: bytes | None, seq: int) -> ReportBatch | None:
    """Return the batch of one line; None for the end line."""
    content = _object(line)
    if content is None or type(content.get("seq")) is not int or content["seq"] != seq:
        return damaged(seq, "not a batch with this seq")
    if content.get("end") is True:
        return None
    if (time := _time(content.get("time"))) is None:
        return damaged(seq, "not a batch with this seq")
    series, events = _series(content.get("series", {})), _events(content.get("events", []))
    if series is None or events is None:
        return damaged(seq, "malformed series or events", time)
    batch = ReportBatch(seq, time, series, events)
    return batch if batch.points <= BATCH_POINTS else damaged(seq, "more points than a batch may have", time)


def damaged(seq: int, problem: str, time: float = 0.0) -> ReportBatch:
    return ReportBatch(seq, time, {}, [{"kind": "report.damaged", "time": time, "seq": seq, "problem": problem}])


def _object(line: bytes | None) -> dict[str, Any] | None:
    if line is None:
        return None
    try:
        content = json.loads(line, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _reject_constant(constant: str) -> None:
    raise ValueError(constant)


def _number(value: object) -> float | None:
    """Return a finite float from a JSON number; None for true, false, and numbers beyond float64."""
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


def _series(columns: object) -> dict[str, list[tuple[int, float]]] | None:
    if not isinstance(columns, dict):
        return None
    series = {}
    for name, column in columns.items():
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


def _is_flat(value: object, levels: int) -> bool:
    """Return whether lists and tables are nested at most `levels` deep."""
    if not isinstance(value, list | dict):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_flat(item, levels - 1) for item in inner)


def _events(events: object) -> list[dict[str, Any]] | None:
    if not isinstance(events, list) or len(events) > BATCH_EVENTS:
        return None
    size = 0
    for event in events:
        if not isinstance(event, dict) or not event.get("kind") or not _is_text(event["kind"], 64):
            return None
        if _time(event.get("time")) is None or not _is_flat(event, DEPTH):
            return None
        try:
            length = len(json.dumps(event, allow_nan=False, separators=(",", ":")))
        except (ValueError, RecursionError):  # 1e999 is parsed as infinity
            return None
        size += length
        if length > EVENT_BYTES or size > BATCH_BYTES:
            return None
    return events
