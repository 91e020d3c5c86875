"""Make sure that small files can be written to the attempt's folder even when the disk is full.

A placeholder of fixed size is written when the attempt begins. If a file cannot be written for lack of space, as much
of it as is useful goes into the placeholder, which then takes the file's name.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from training.attempt.files import DISK_FULL

RESERVE_BYTES = 8192


class DiskReserve:
    """`reserve` with each incarnation, `write` once per incarnation, `release` at the end. Errors are ignored."""

    def __init__(self, folder: Path, reserve: str) -> None:
        """`reserve`: the placeholder's name below the attempt's folder, like the names of the files written."""
        self._folder, self._reserve = folder, folder / reserve

    def reserve(self) -> None:
        with suppress(OSError):
            self._reserve.parent.mkdir(exist_ok=True)
            if not self._reserve.exists():
                self._reserve.write_bytes(b" " * RESERVE_BYTES)

    def release(self) -> None:
        with suppress(OSError):
            self._reserve.unlink(missing_ok=True)

    def write(self, name: Path, text: str, fallback: str = "") -> bool:
        """Write a file atomically. On a full disk, write `fallback` (or the text) into the reserved space instead.

        Returns whether the file was written.
        """
        path = self._folder / name
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            return error.errno in DISK_FULL and self._write_into(path, (fallback or text).encode())
        return True

    def _write_into(self, path: Path, data: bytes) -> bool:
        if len(data) > RESERVE_BYTES:
            return False
        with suppress(OSError), open(self._reserve, "r+b") as file:
            file.write(data.ljust(RESERVE_BYTES))  # space that is released would be taken by another program at once
            file.flush()
            os.replace(self._reserve, path)
            return True
        return False
