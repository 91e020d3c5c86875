"""Where torch.compile keeps the code that it made."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def keep_apart() -> None:
    """Keeps compiled code in a folder that nobody else can write to.

    torch would take one of a guessable name in /tmp, and run what lies there: whoever made it first chose the code.
    """
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        place = Path(tempfile.gettempdir()) / f"vigil-compiled-{os.geteuid()}"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place if _is_ours(place) else tempfile.mkdtemp(prefix="compiled-"))


def _is_ours(place: Path) -> bool:
    """Whether it was made by us, now or before, and is closed to others."""
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        about = place.lstat()
    except OSError:  # somebody's file or link to nowhere
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077
