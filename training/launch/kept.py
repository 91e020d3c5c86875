"""Small files in the attempt's folder that are to be there even where the disk is full by then.

Room for each is taken as the attempt begins. Where a file can't be written for lack of room, that is what it is
written into: as much of it as is of use.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from training.attempt.files import FULL

ROOM = 8192


class Kept:
    """`reserve` with each incarnation, `write` once in it, `release` in the end; a failure is nobody's trouble."""

    def __init__(self, folder: Path, reserve: str) -> None:
        """`reserve`: the file's name, below the attempt's folder, as is what is written."""
        self._folder, self._reserve = folder, folder / reserve

    def reserve(self) -> None:
        with suppress(OSError):
            self._reserve.parent.mkdir(exist_ok=True)
            if not self._reserve.exists():
                self._reserve.write_bytes(b" " * ROOM)

    def release(self) -> None:
        with suppress(OSError):
            self._reserve.unlink(missing_ok=True)

    def write(self, name: Path, text: str, short: str = "") -> bool:
        """Make a file appear whole; where there is no room, `short` instead of the text, in the room that is kept."""
        path = self._folder / name
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            return error.errno in FULL and self._write_into(path, (short or text).encode())
        return True

    def _write_into(self, path: Path, data: bytes) -> bool:
        if len(data) > ROOM:
            return False
        with suppress(OSError), open(self._reserve, "r+b") as file:
            file.write(data.ljust(ROOM))  # room that were given back would be somebody else's at once
            file.flush()
            os.replace(self._reserve, path)
            return True
        return False
