"""What the home remembers of its newest backup. Imports no Django."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec

NAME = "last-backup.json"


class Last(msgspec.Struct, frozen=True):
    """When the newest backup was finished (Unix seconds), and where it was written."""

    at: float
    file: str


def note(home: Path, file: Path) -> None:
    """Remember a backup that was made; a home that cannot be written must not make it fail."""
    part = home / f".{NAME}.{os.getpid()}"
    with suppress(OSError):
        part.write_bytes(msgspec.json.encode(Last(time.time(), str(file))))
        os.replace(part, home / NAME)


def read(home: Path) -> Last | None:
    """Return the newest backup; None where none was made, or its note is no note."""
    try:
        return msgspec.json.decode((home / NAME).read_bytes(), type=Last)
    except (OSError, msgspec.MsgspecError):
        return None
