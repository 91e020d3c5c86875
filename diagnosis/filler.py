"""Generate the repetitive lines of a test log, such as a thousand steps of progress, from a table of its `case.toml`.

    [[filler]]
    file = "slurm-671.out"
    line = 2        # the number of the first generated line in the complete log, from 1
    count = 50      # how often the text is repeated
    text = "[⟦2026-06-01 00:00:34,816..2026-06-01 00:25:20,636⟧] step=⟦100..149⟧ loss=⟦2.2012..2.1099 ±0.05⟧"

A field ⟦first..last⟧ runs evenly from its first to its last value; "±0.05" adds a deterministic variation of at most so
much to the values in between. Numbers have the decimals and the width of the first value. A field ⟦3|0|7⟧ takes its
values one after the other. The same table always gives the same bytes, so a log in the regression set is as long and as
noisy as a real one without being stored.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Self

FIELD = re.compile(
    r"⟦(?:(?P<values>[^⟦⟧|]+(?:\|[^⟦⟧|]+)+)|(?P<first>[^⟦⟧]+?)\.\.(?P<last>[^⟦⟧]+?)(?: ±(?P<variation>[\d.e-]+))?)⟧"
)
TIME = re.compile(
    r"(?:(?P<date>\d{4}-\d\d-\d\d)(?P<separator>[ T]))?(?P<clock>\d\d:\d\d:\d\d)(?:(?P<point>[.,])(?P<rest>\d+))?"
)


@dataclass(frozen=True, slots=True)
class Filler:
    """A text of one or more lines that is repeated at a place of a log."""

    file: str
    line: int
    count: int
    text: str

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> Self:
        """Return the filler of a `[[filler]]` table. Raises KeyError, TypeError or ValueError if it is not one."""
        filler = cls(str(table["file"]), int(table["line"]), int(table["count"]), str(table["text"]))
        if filler.line < 1 or filler.count < 2:
            raise ValueError("line is at least 1, count at least 2")
        lists = [match["values"] for match in FIELD.finditer(filler.text) if match["values"]]
        if any(len(values.split("|")) != filler.count for values in lists):
            raise ValueError("a list of values has as many as the count")
        return filler

    def lines(self) -> list[bytes]:
        """Return the generated lines, without their line breaks."""
        return [line.encode() for i in range(self.count) for line in self._repetition(i).split("\n")]

    def _repetition(self, i: int) -> str:
        share = i / (self.count - 1)

        def value(match: re.Match[str]) -> str:
            if match["values"]:
                return match["values"].split("|")[i]
            first, last = match["first"], match["last"]
            if TIME.fullmatch(first):
                return _time_between(first, last, share)
            variation = float(match["variation"] or 0) * _noise(f"{match[0]}:{i}")
            return _number_between(first, last, share, variation if 0 < share < 1 else 0.0)

        return FIELD.sub(value, self.text)


def complete_log(stored: bytes, fillers: Iterable[Filler]) -> bytes:
    """Return a log with the generated lines of its fillers put in."""
    lines = stored.split(b"\n")
    for filler in sorted(fillers, key=lambda filler: filler.line):
        lines[filler.line - 1 : filler.line - 1] = filler.lines()
    return b"\n".join(lines)


def _noise(seed: str) -> float:
    """Return a number between -1 and 1 that follows from the seed."""
    return zlib.crc32(seed.encode()) / 2**31 - 1


def _number_between(first: str, last: str, share: float, variation: float) -> str:
    low, high = float(first), float(last)
    number = max(low + (high - low) * share + variation, min(low, high, 0.0))
    mantissa, exponent, _ = first.strip().lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    text = f"{number:.{decimals}{'e' if exponent else 'f'}}"
    if first.startswith("0") and not exponent and "." not in first:
        return text.zfill(len(first))
    return text.rjust(len(first)) if first.startswith(" ") else text


def _time_between(first: str, last: str, share: float) -> str:
    begin, end = _moment(first), _moment(last)
    at = begin + (end - begin) * share
    match = TIME.fullmatch(first)
    assert match
    digits = len(match["rest"] or "")
    if not digits:
        at += timedelta(microseconds=500_000)
    date = f"{at:%Y-%m-%d}{match['separator']}" if match["date"] else ""
    rest = f"{match['point']}{f'{at.microsecond:06}'[:digits].ljust(digits, '0')}" if digits else ""
    return f"{date}{at:%H:%M:%S}{rest}"


def _moment(text: str) -> datetime:
    match = TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a time")
    microseconds = int((match["rest"] or "0").ljust(6, "0")[:6])
    begin = datetime.fromisoformat(f"{match['date'] or '2000-01-01'}T{match['clock']}")
    return begin + timedelta(microseconds=microseconds)
