"""Check what a spec names in Slurm: words, node lists, feature expressions, licenses, a time to begin.

Each value is checked by its characters, so that it means the same in a request, in an #SBATCH line and to a shell.
"""

from __future__ import annotations

import re
from datetime import MAXYEAR, MINYEAR, datetime, timedelta, tzinfo

from vigil_core import duration, host_expression

MAX_NODES = 1_000  # named in one list
MAX_HOST_CHARACTERS = 65_000  # of one list: 1,000 names of 63 characters
MAX_BEGIN_DELAY = timedelta(days=366)  # how late a job may begin
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\Z")
_CONSTRAINT = re.compile(r"[A-Za-z0-9_\[(][A-Za-z0-9_.\-&|*()\[\]:]{0,199}\Z")
_LICENSE = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.@-]{0,63})(?::[1-9][0-9]{0,5})?\Z")
MAX_LICENSES = 20  # in one list; no known cluster has more
_DELAY = re.compile(r"\+((?:\d{1,5}[dhms]){1,4})\Z")
_PAIRS = {")": "(", "]": "["}


def word(value: str) -> str:
    """Check a partition, a QOS, a reservation, or a type of GPU."""
    if value and not _WORD.match(value):
        raise ValueError(
            f'"{value[:80]}" is not a valid name in Slurm. Use letters, digits, _ . and -, at most 64 characters.'
        )
    return value


def constraint(value: str) -> str:
    if not value:
        return value
    if not _CONSTRAINT.match(value) or not _is_balanced(value):
        raise ValueError(
            f'"{value[:80]}" is not a feature expression. Write it without spaces, like h100&nvlink or [rack1|rack2].'
        )
    return value


def licenses(value: str) -> str:
    """Check a list of licenses with their counts, "matlab:2,abaqus"; each is named once."""
    if not value:
        return value
    matches = [_LICENSE.match(item) for item in value.split(",")]
    if not all(matches) or len(matches) > MAX_LICENSES:
        raise ValueError(
            f'"{value[:80]}" is not a list of licenses. Write it without spaces, like matlab:2,abaqus,'
            f" with {MAX_LICENSES} names at most."
        )
    names = [match[1] for match in matches if match]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ValueError(f'License "{twice}" is named twice. Write it once, with the number of both, like {twice}:2.')
    return value


def _is_balanced(text: str) -> bool:
    opened: list[str] = []
    for letter in text:
        if letter in "([":
            opened.append(letter)
        elif letter in _PAIRS and (not opened or opened.pop() != _PAIRS[letter]):
            return False
    return not opened


def hosts(value: list[str]) -> list[str]:
    """Return names of nodes, with lists such as dgx[01-04,07] expanded."""
    return host_expression.expand_all(value, MAX_NODES, MAX_HOST_CHARACTERS)


def begin(value: str) -> str:
    """Check a moment as it is written: "+2h", or "2026-12-01T02:00" with or without an offset."""
    if not value or _DELAY.match(value):
        return value
    try:
        if not MINYEAR < datetime.fromisoformat(value).year < MAXYEAR:
            raise ValueError  # by its offset it may be before the first of all days, or after the last
    except ValueError:
        value = value if len(value) <= 80 else f"{value[:80]}…"
        raise ValueError(
            f'"{value}" is not a date and time. Write 2026-12-01T02:00, or +2h for two hours from now.'
        ) from None
    if "T" not in value and " " not in value:
        raise ValueError(f"{value} has no time of day. Write {value[:10]}T02:00.")
    return value


def absolute(value: str, *, now: datetime, zone: tzinfo) -> str:
    """Return a moment with its offset, to the second. A time without an offset is the site's."""
    if match := _DELAY.match(value):
        parts = re.findall(r"(\d+)([dhms])", match[1])
        moment = now + timedelta(seconds=sum(int(number) * duration.UNITS[unit] for number, unit in parts))
    else:
        moment = datetime.fromisoformat(value)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=zone)
    return moment.astimezone(zone).isoformat(timespec="seconds")
