"""Check that the newest `vigil backup` is recent enough, if VIGIL_BACKUP_HOURS sets a limit."""

from __future__ import annotations

import time
from collections.abc import Iterator

from django.conf import settings

from console.health.finding import Finding
from portal.backup import last
from vigil_core import formatting

MISSING_REMEDY = (
    "Make one now with `vigil backup FILE` on the portal's machine, then run it by cron (docs/how-to/backup.md)."
)
OLD_REMEDY = "Check the cron job that runs `vigil backup FILE` on the portal's machine, and what its last run printed."


def check() -> Iterator[Finding]:
    hours = settings.VIGIL_BACKUP_HOURS
    if not hours:
        return
    made = last.read(settings.VIGIL_HOME)
    if made is None:
        yield Finding("backup", "backup", "warning", "No backup has been made yet.", "", MISSING_REMEDY)
    elif (age := time.time() - made.at) > hours * 3600:
        yield Finding(
            "backup",
            "backup",
            "warning",
            f"The newest backup is {formatting.duration(age)} old.",
            f"It is {made.file}; VIGIL_BACKUP_HOURS is {hours:g}.",
            OLD_REMEDY,
        )
