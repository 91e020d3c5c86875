"""Compute when a message may be sent: quiet hours and digests, in the channel's time zone. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from zoneinfo import ZoneInfo, available_timezones

MORNING = time(8)  # when a daily digest is sent


@dataclass(frozen=True, slots=True)
class DeliveryHours:
    """A channel's delivery hours. `quiet` is (from, until), across midnight if the first is later."""

    zone: str = "UTC"
    quiet: tuple[time, time] | None = None
    digest: str = ""

    def due(self, at: datetime) -> tuple[datetime, bool]:
        """Return when a message raised at that moment may be sent, and whether it is held until then."""
        wanted = self._digest_after(at)
        until = self.quiet_until(wanted)
        due = until or wanted
        return due, due > at

    def quiet_until(self, at: datetime) -> datetime | None:
        """Return the end of the quiet hours around a moment; None if there are none at that moment."""
        if self.quiet is None or self.quiet[0] == self.quiet[1]:
            return None
        start, end = self.quiet
        local = at.astimezone(zone_of(self.zone))
        now, day = local.time(), local.date()
        if start < end:
            return self._next(day, end, at) if start <= now < end else None
        if now >= start:
            return self._next(day + timedelta(days=1), end, at)
        return self._next(day, end, at) if now < end else None

    def _digest_after(self, at: datetime) -> datetime:
        if self.digest == "hourly":
            return at.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
        if self.digest == "daily":
            day = at.astimezone(zone_of(self.zone)).date()
            today = self._at(day, MORNING)
            return today if today > at else self._at(day + timedelta(days=1), MORNING)
        return at

    def _next(self, day: date, clock: time, after: datetime) -> datetime:
        """Return the next occurrence of that clock time; if clocks go back and it occurs twice, the later one."""
        first = self._at(day, clock)
        return first if first > after else self._at(day, clock, fold=1)

    def _at(self, day: date, clock: time, fold: int = 0) -> datetime:
        """Return that clock time in UTC. A time that clocks skip is counted from midnight."""
        local = datetime.combine(day, clock, zone_of(self.zone)).replace(fold=fold)
        return local.astimezone(UTC)


@cache
def zone_of(name: str) -> ZoneInfo:
    """Return the time zone of this name; UTC if this machine does not know it, or no longer does."""
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, LookupError):
        return ZoneInfo("UTC")


@cache
def zones() -> list[str]:
    """Return the names that people choose from: UTC, and zones named after a place."""
    places = {"Africa", "America", "Antarctica", "Asia", "Atlantic", "Australia", "Europe", "Indian", "Pacific"}
    return ["UTC", *sorted(name for name in available_timezones() if name.partition("/")[0] in places)]
