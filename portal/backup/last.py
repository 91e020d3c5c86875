"""Record the newest backup in VIGIL_HOME. Imports no Django."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec

NAME = "last-backup.json"


class LastBackup(msgspec.Struct, frozen=True):
    """The newest backup: the time it was finished (Unix seconds) and its file."""

    at: float
    file: str


def note(home: Path, file: Path) -> None:
    """Record a finished backup. If the home cannot be written, the backup still succeeds."""
    part = home / f".{NAME}.{os.getpid()}"
    with suppress(OSError):
        part.write_bytes(msgspec.json.encode(LastBackup(time.time(), str(file))))
        os.replace(part, home / NAME)


def read(home: Path) -> LastBackup | None:
    """Return the newest backup; None if none was made, or its record cannot be read."""
    try:
        return msgspec.json.decode((home / NAME).read_bytes(), type=LastBackup)
    except (OSError, msgspec.MsgspecError):
        return None
