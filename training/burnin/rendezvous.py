"""Exchange texts between nodes through files in the run directory: which cycle comes next, and where a partner is.

Nodes list folders instead of opening a file that is not there yet: NFS caches that a name does not exist for up to a
minute, but a listing sees new names within seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

POLL_S, SLOWEST_POLL_S = 0.1, 1.0


class FileRendezvous:
    """Files in one folder, each made by one process and read by others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def publish(self, name: str, text: str) -> None:
        """Make a file atomically: a reader finds it whole."""
        temporary = self.folder / f".{name}.{os.getpid()}"
        for is_last_try in (False, False, True):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_text(text, encoding="utf-8")
                temporary.replace(self.folder / name)
                return
            except FileNotFoundError:  # the last node to leave removed the folder in between
                if is_last_try:
                    raise

    def has(self, name: str) -> bool:
        """Return whether a file is there; False if that cannot be found out."""
        with suppress(OSError):
            return name in os.listdir(self.folder)
        return False

    def withdraw(self, *names: str) -> None:
        """Remove files that this node made; the last node to do so removes the folder."""
        for name in names:
            with suppress(OSError):
                (self.folder / name).unlink()
        with suppress(OSError):
            self.folder.rmdir()

    def wait(self, name: str, *, until: float, should_give_up: Callable[[], bool] = lambda: False) -> str | None:
        """Return another process's text, or None if there is none by `until` (monotonic), or the wait is given up."""
        began = time.monotonic()
        while True:
            with suppress(OSError):  # the folder or the file may be removed meanwhile, and a server may be away
                if name in os.listdir(self.folder):
                    return (self.folder / name).read_text(encoding="utf-8")
            now = time.monotonic()
            if now > until or should_give_up():
                return None
            time.sleep(min(max(POLL_S, (now - began) / 10), SLOWEST_POLL_S))

    def exchange(
        self, other: str, *, me: str, text: str, until: float, should_give_up: Callable[[], bool] = lambda: False
    ) -> str | None:
        """Publish this node's text and return the other node's, or None if that one does not arrive; see `wait`.

        Either both succeed, or neither does: a node that stops waiting removes its file, so that the other one, should
        it still arrive, finds nothing. If that one arrived just before the removal, it was in time.
        """
        self.publish(me, text)
        found = self.wait(other, until=until, should_give_up=should_give_up)
        if found is None:
            self.withdraw(me)
            found = self.wait(other, until=0)
            if found is not None:
                self.publish(me, text)
        return found
