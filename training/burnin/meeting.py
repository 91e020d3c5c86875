"""Let nodes meet through files in the run directory: which cycle comes next, and where two nodes find each other.

Nodes list folders instead of opening a file that is not there yet: NFS caches that a name does not exist for up to a
minute, but a listing sees new names within seconds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

POLL_S = 0.1


class Meeting:
    """Files in one folder, each made by one process and read by others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def publish(self, name: str, text: str) -> None:
        """Make a file atomically: a reader finds it whole."""
        temporary = self.folder / f".{name}.{os.getpid()}"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.folder / name)

    def wait(self, name: str, *, until: float) -> str | None:
        """Return another process's text, or None if it has not come by `until` (monotonic)."""
        while True:
            if name in os.listdir(self.folder):
                return (self.folder / name).read_text(encoding="utf-8")
            if time.monotonic() > until:
                return None
            time.sleep(POLL_S)
