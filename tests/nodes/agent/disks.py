"""Fill a disk, for tests without free space."""

from __future__ import annotations

import os
from pathlib import Path


def occupy(disk: Path) -> Path:
    """Occupy all free space."""
    filler = disk / "filler"
    file = os.open(filler, os.O_WRONLY | os.O_CREAT)
    for size in (65_536, 4_096, 256, 1):
        try:
            while True:
                os.write(file, bytes(size))
        except OSError:
            pass
    os.close(file)
    return filler
