"""At an attempt's end, let the portal into folders that a program closed to others than itself.

Where portal and job are two Unix users, an access control list gives the portal every folder under job/. One made with
`mkdir -m 700`, by tempfile or out of an archive that says so takes that back, and only its owner can give it again: the
portal could never remove it.
"""

import os
import time
from pathlib import Path

_LIST = "system.posix_acl_default"
_GROUP = 0o070  # with a list these are what persons get at most; the group itself gets nothing


def open_up(job_dir: Path, *, seconds: float = 3.0) -> None:
    """Do so for our own folders below; for no longer than that, as we may have been told to end. The next attempt goes
    on. Nothing to do where job/ has no list: then it is our own portal's."""
    deadline = time.monotonic() + seconds
    try:
        if _LIST not in os.listxattr(job_dir):
            return
    except OSError:
        return
    for folder, names, _ in os.walk(job_dir):
        for name in names:
            path = os.path.join(folder, name)
            try:
                found = os.lstat(path)
                if found.st_uid == os.getuid() and found.st_mode & _GROUP != _GROUP and not os.path.islink(path):
                    os.chmod(path, found.st_mode & 0o7777 | 0o700 | _GROUP)
            except OSError:
                continue
        if time.monotonic() > deadline:
            return
