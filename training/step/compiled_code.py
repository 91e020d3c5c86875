"""Set where torch.compile stores compiled code."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def use_private_cache() -> None:
    """Store compiled code in a folder that nobody else can write to.

    torch would use one with a predictable name in /tmp and run the code there: whoever created it first could choose
    the code.
    """
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        folder = Path(tempfile.gettempdir()) / f"vigil-compiled-{os.geteuid()}"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(
            folder if _is_private(folder) else tempfile.mkdtemp(prefix="compiled-")
        )


def _is_private(folder: Path) -> bool:
    """Return whether we have created the folder, now or earlier, and others have no access."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:  # another user's file or dangling link
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
