"""At an attempt's end, let the portal into folders that a program closed to others than itself.

Where portal and job are two Unix users, an access control list gives the portal every folder under job/. One made with
`mkdir -m 700`, by tempfile or out of an archive that says so takes that back; `cp -a` brings folders without a list.
Only their owner can give it again: the portal could never remove them.
"""

import os
import time
from pathlib import Path

_ACCESS, _DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
_MASK = 0o070  # with a list the mode's group bits are what persons get at most


def open_up(job_dir: Path, *, seconds: float = 3.0) -> None:
    """Do so for our own folders below; for no longer than that, as we may have been told to end. The next attempt goes
    on. Nothing to do where job/ has no list: then it is our own portal's."""
    deadline = time.monotonic() + seconds
    try:
        listed = os.getxattr(job_dir, _DEFAULT)
    except OSError:
        return
    for folder, names, _ in os.walk(job_dir):
        for name in names:
            path = os.path.join(folder, name)
            try:
                if not os.path.islink(path) and _is_closed(path):
                    os.setxattr(path, _DEFAULT, listed, follow_symlinks=False)
                    os.setxattr(path, _ACCESS, listed, follow_symlinks=False)
            except OSError:
                continue
        if time.monotonic() > deadline:
            return


def _is_closed(path: str) -> bool:
    about = os.lstat(path)
    if about.st_uid != os.getuid():
        return False
    return about.st_mode & _MASK != _MASK or _ACCESS not in os.listxattr(path, follow_symlinks=False)
