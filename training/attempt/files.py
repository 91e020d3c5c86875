"""Read and write the small files through which launcher, ranks and portal communicate.

Files are replaced as a whole, and read without trusting their content.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a disk without space, in general or within our quota."""


def write_json(path: Path, content: Mapping[str, object], *, durable: bool = False) -> None:
    """Replace a small JSON file atomically. `durable`: also flush it to disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        file.write(json.dumps(content))
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path, limit: int = 1 << 20) -> dict[str, object] | None:
    """Return a small JSON object, or None if there is none (yet)."""
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(limit))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
