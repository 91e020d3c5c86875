"""Restore the portal's access, at an attempt's end, to folders that a program closed to all other users.

Where portal and job are two Unix users, an access control list gives the portal every folder under job/. A folder made
with `mkdir -m 700`, by tempfile or by unpacking an archive loses that access; `cp -a` copies folders without a list.
Only the folder's owner can restore it: without that the portal could never remove such a folder.
"""

import os
import time
from pathlib import Path

_ACCESS, _DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
_MASK = 0o070  # with a list, the mode's group bits limit what named users get


def restore_access(job_dir: Path, *, seconds: float = 3.0) -> None:
    """Copy job/'s default access control list to the folders below it that belong to this user and lack it.

    Stops after `seconds`, as the launcher may be ending under a time limit; the next attempt continues. Does nothing
    where job/ has no list: the portal runs as the same user.
    """
    deadline = time.monotonic() + seconds
    try:
        default_list = os.getxattr(job_dir, _DEFAULT)
    except OSError:
        return
    for folder, names, _ in os.walk(job_dir):
        for name in names:
            path = os.path.join(folder, name)
            try:
                if not os.path.islink(path) and _lacks_access(path):
                    os.setxattr(path, _DEFAULT, default_list, follow_symlinks=False)
                    os.setxattr(path, _ACCESS, default_list, follow_symlinks=False)
            except OSError:
                continue
        if time.monotonic() > deadline:
            return


def _lacks_access(path: str) -> bool:
    status = os.lstat(path)
    if status.st_uid != os.getuid():
        return False
    return status.st_mode & _MASK != _MASK or _ACCESS not in os.listxattr(path, follow_symlinks=False)
