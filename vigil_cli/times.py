"""Parse times that people type: 22:00, 2026-12-01 22:00, +4h, or with a zone. No Django."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import click

from vigil_cli.node_tests import UNITS

EXAMPLES = "22:00, '2026-12-01 22:00', 2026-12-01T22:00+01:00 or +4h"


class MomentParam(click.ParamType[datetime]):
    """A time of this machine's zone; `+4h` counts from now, and 22:00 is the next one."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            return parse(value, datetime.now(UTC))
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a time. Write {EXAMPLES}.", param, ctx)


def parse(text: str, now: datetime) -> datetime:
    """Return the time with its zone. Raises ValueError or OverflowError.

    >>> parse("+2h", datetime(2026, 12, 1, 20, tzinfo=UTC)).isoformat()
    '2026-12-01T22:00:00+00:00'
    """
    text = text.strip()
    if text == "now":
        return now
    if text.startswith("+"):
        number, unit = text[1:-1], text[-1:]
        if unit not in UNITS or not (number.isascii() and number.isdecimal()) or len(number) > 6:
            raise ValueError(text)
        return now + timedelta(seconds=int(number) * UNITS[unit])
    if len(text) == len("22:00"):
        hour, minute = datetime.strptime(text, "%H:%M").timetuple()[3:5]
        today = now.astimezone().replace(tzinfo=None, hour=hour, minute=minute, second=0, microsecond=0)
        return (today if today.astimezone() > now else today + timedelta(days=1)).astimezone()
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.astimezone()
