"""Limit how many rows one machine may add: one that keeps reporting new things must not fill the database."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from django.db.models import QuerySet
from django.utils import timezone


class DailyRowLimit:
    """Counts a machine's stored rows once, and each that it adds: within the last day, and from days before."""

    def __init__(self, rows: QuerySet[Any], time_field: str, *, per_day: int, older: int) -> None:
        self._rows = rows
        self._time_field = time_field
        self._most = {True: per_day, False: older}
        self._day_ago = timezone.now() - timedelta(days=1)

    def take(self, at: datetime) -> bool:
        """Return whether a row of this time may be added, and count it."""
        is_new = at > self._day_ago
        if self._room[is_new] <= 0:
            return False
        self._room[is_new] -= 1
        return True

    @cached_property
    def _room(self) -> dict[bool, int]:
        """Return how many rows there may yet be, of the last day (True) and of days before."""
        new = self._rows.filter(**{f"{self._time_field}__gt": self._day_ago}).count()
        old = self._rows.filter(**{f"{self._time_field}__lte": self._day_ago}).count()
        return {True: self._most[True] - new, False: self._most[False] - old}
