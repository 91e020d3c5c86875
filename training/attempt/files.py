"""Small files by which launcher, ranks and portal tell each other things: replaced whole, read without trust."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""A disk that has no room just now, or not for us."""


def write_json(path: Path, thing: Mapping[str, object], *, durable: bool = False) -> None:
    """Replace a small file whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        file.write(json.dumps(thing))
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path, limit: int = 1 << 20) -> dict[str, object] | None:
    """A small JSON object, or None where there is none (yet)."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(limit))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
