"""Parse times and durations that people type: 22:00, 2026-12-01 22:00, +4h, 90m. No Django."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import click

from vigil_core import duration

EXAMPLES = "22:00, '2026-12-01 22:00', 2026-12-01T22:00+01:00 or +4h"


class Duration(click.ParamType[int]):
    """A duration such as 90s, 10m, 48h or 2d, in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return duration.parse(value)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)


class MomentParam(click.ParamType[datetime]):
    """A time of this machine's zone; `+4h` counts from now.

    22:00 is the next one: from now, or from the parameter `after` if that is later. That one has to be eager.
    """

    name = "time"

    def __init__(self, after: str = "") -> None:
        self.after = after

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            after = ctx.params.get(self.after) if ctx is not None else None
            return parse_moment(value, datetime.now(UTC), after)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a time. Write {EXAMPLES}.", param, ctx)


UNTIL = MomentParam(after="starts_at")
"""The end of what begins at the option `starts_at`."""


def parse_moment(text: str, now: datetime, after: datetime | None = None) -> datetime:
    """Return the time with its zone; 22:00 is the next one from now, or from `after` if that is later.

    Raises ValueError or OverflowError.

    >>> parse_moment("+2h", datetime(2026, 12, 1, 20, tzinfo=UTC)).isoformat()
    '2026-12-01T22:00:00+00:00'
    """
    text = text.strip()
    if text == "now":
        return now
    if text.startswith("+"):
        return now + timedelta(seconds=duration.parse(text[1:]))
    if len(text) == len("22:00"):
        hour, minute = datetime.strptime(text, "%H:%M").timetuple()[3:5]
        after = max(now, after or now)
        same_day = after.astimezone().replace(tzinfo=None, hour=hour, minute=minute, second=0, microsecond=0)
        return (same_day if same_day.astimezone() > after else same_day + timedelta(days=1)).astimezone()
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.astimezone()
