"""Mount small file systems, for tests of full disks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_file_system(folder: Path, size: str, *, inodes: str = "") -> Iterator[Path]:
    """Mount a tmpfs of this size on the folder, created if missing; skip the test where nothing may be mounted."""
    folder.mkdir(exist_ok=True)
    options = f"size={size}" + f",nr_inodes={inodes}" * bool(inodes)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
